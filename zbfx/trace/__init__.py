"""A model, its loss and one example microbatch -> a joint graph, and a guard of what it took from the model.

In: modules, tensors, the user's functions. Out: `Joint`, `Signature`, `Reduction`, `Guard`.
Called by the compiler (`zbfx.pipeline`, `zbfx.variants`, `zbfx.check`); knows nothing of stages or ranks.
"""
