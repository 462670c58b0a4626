"""fx passes, one a file, each from one type of `zbfx.graphs` to the next. The compiler (`zbfx.pipeline`) calls them.

In: a joint graph, or a record of one. Out: a new graph or a frozen record; what a pass takes stays untouched.
Each file opens with what its pass takes, gives and raises, and with the source of its method.
"""

if __name__ != "zbfx.passes":
    raise ImportError(
        "import these modules as zbfx.passes: importing the folder as `passes` would make a second copy of every class"
    )
