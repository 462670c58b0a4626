"""A compiled pipeline on live tensors: steps, in one process or over many, launched, compiled or captured. In:
`Compiled`, a model's tensors, channels. Out: `Step`, gradients in `.grad`, timelines. Called by `zbfx.handle` and by
optimizers; compiles nothing (a step for other shapes is handed to it as a function)."""
