"""Optimizer steps without a barrier between the ranks."""

from zbfx.optim.inverse import register_inverse
from zbfx.optim.post_validated import PostValidated

__all__ = ["PostValidated", "register_inverse"]
