"""Integer programs: whole small problems and windows of large ones, solved in a process of their own.

In: `Instance`, coded orders, a limit per rank. Out: `Window`, `Precedence`, `IntegerProgram`, `Answer`.
Called by the refinement of a search; believes no solver, and knows no names of schedules.
"""
