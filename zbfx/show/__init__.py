"""A schedule as text, SVG, HTML and Chrome trace: pure functions of a `Schedule`."""
