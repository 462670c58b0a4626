"""A `Compiled` on disk, so that loading neither traces nor plans. In: what `compile` has made, and its model. Out: a
file of data, in which nothing can be executed; and what such a file holds, checked. Called by the compiler alone."""
