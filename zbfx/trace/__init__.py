"""A model, its loss and one example microbatch -> a joint graph, and what of the model must stay as it was.

In: modules, tensors, the user's functions. Out: `Joint`, `Signature`, `Reduction`, `Guard`.
Called by the compiler (`zbfx.pipeline`, `zbfx.variants`, `zbfx.check`); knows nothing of stages or ranks.
"""
