"""transformers' `Trainer` over the ranks of a pipeline. In: what a `Trainer` takes. Out: the training that it runs.
Scripts import it; nothing of the library does. It needs `pip install 'zbfx[hf]'`."""

from zbfx.hf.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
