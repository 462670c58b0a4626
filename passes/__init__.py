"""fx passes, one a file. Pure functions: a graph in, a new graph or a frozen record out; the input stays untouched."""

if __name__ != "zbfx.passes":
    raise ImportError(
        "import these modules as zbfx.passes: importing the folder as `passes` would make a second copy of every class"
    )
