"""Models and training states on disk. In: a model, folders, and which names this process owns. Out: tensors with
values, and files. A step and what binds it call this room."""
