"""Integer programs: whole small problems and windows of large ones, in a process of their own."""
