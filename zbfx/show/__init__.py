"""A schedule as text, SVG, page and Chrome trace: pure functions of a `Timetable`.

In: a `Timetable`, a width. Out: text; nothing is printed or written.
Called by the methods of `Schedule`, by the command line and by measured timelines; plans nothing.
"""
