"""What `run_local` and `bind` were called with, checked."""

from __future__ import annotations

from dataclasses import dataclass

from zbfx.arguments import checked_seed, finite_number, kind_of, true_or_false
from zbfx.comm.channels import TRANSPORTS
from zbfx.errors import ZbfxError
from zbfx.runtime.buckets import Buckets
from zbfx.runtime.verdict import CHOICES

NEW_SHAPES = ("refuse", "recompile", "symbolic")


@dataclass(frozen=True)
class StepOptions:
    """`seed` fixes the random numbers; None: torch's own seed. `on_nonfinite`: "keep", "drop" or "raise"
    (`zbfx.runtime.verdict`). `on_new_shape`: "refuse" a batch of other shapes than the example's, "recompile" for it,
    once per shape, or trace "symbolic" sizes once and put in those of every further shape (`zbfx.variants`). `buckets`:
    to which lengths microbatches are padded."""

    seed: int | None = None
    on_nonfinite: str = "keep"
    on_new_shape: str = "refuse"
    buckets: Buckets | None = None

    def check(self) -> None:
        """Raises `ZbfxError` for what no step has. Apart from construction: ranks first compare what they were
        given."""
        if self.seed is not None:
            checked_seed(self.seed)
        if self.on_nonfinite not in CHOICES:
            raise ZbfxError(f"on_nonfinite is one of {CHOICES}; found {self.on_nonfinite!r}")
        if self.on_new_shape not in NEW_SHAPES:
            raise ZbfxError(f"on_new_shape is one of {NEW_SHAPES}; found {self.on_new_shape!r}")
        if self.buckets is not None and not isinstance(self.buckets, Buckets):
            raise ZbfxError(f"buckets is a zbfx.Buckets, or None; found {kind_of(self.buckets)}")
        if self.buckets is not None and self.refuses_shapes:
            raise ZbfxError("buckets are for microbatches of other shapes: pass on_new_shape='symbolic' or 'recompile'")

    @property
    def checks(self) -> bool:
        """Whether every step ends with a look at its losses and gradients, a barrier."""
        return self.on_nonfinite != "keep"

    @property
    def raises(self) -> bool:
        return self.on_nonfinite == "raise"

    @property
    def refuses_shapes(self) -> bool:
        return self.on_new_shape == "refuse"

    @property
    def is_symbolic(self) -> bool:
        return self.on_new_shape == "symbolic"


@dataclass(frozen=True)
class BindOptions(StepOptions):
    """`timeout_s` bounds every wait for another rank; `zero=1` leaves each replica a part of the optimizer's state;
    `transport` says how messages travel (`zbfx.comm.channels`); `independent` names mesh dimensions along which
    pipelines train apart; every `check_batches`th batch is compared; `checksums`: every message has one; `survive`:
    training goes on when processes end. Ranks compare all fields, and whether they got a `mesh`, and the type of the
    `device`, of which each has its own."""

    timeout_s: float = 600.0
    zero: int = 0
    transport: str = "auto"
    independent: tuple[str, ...] = ()
    check_batches: int = 0
    checksums: bool = False
    survive: bool = False
    mesh: bool = False
    device: str = "cpu"

    def check(self) -> None:
        finite_number("timeout_s", self.timeout_s, "how many seconds to wait for another rank", above_zero=True)
        if self.transport not in TRANSPORTS:
            raise ZbfxError(f"transport is one of {', '.join(TRANSPORTS)}; found {self.transport!r}")
        if not TRANSPORTS[self.transport].groups and self.device != "cuda":
            raise ZbfxError(f"transport={self.transport!r} needs CUDA devices; found {self.device}. Use 'auto'")
        if not isinstance(self.check_batches, int) or isinstance(self.check_batches, bool) or self.check_batches < 0:
            raise ZbfxError(
                f"check_batches=N compares the batches of ranks in every Nth step, 0 in none after the first; found "
                f"{self.check_batches!r}"
            )
        if not isinstance(self.independent, tuple) or not all(isinstance(name, str) for name in self.independent):
            raise ZbfxError(f"independent is a tuple of names of mesh dimensions; found {self.independent!r}")
        true_or_false("checksums", self.checksums)
        true_or_false("survive", self.survive)
        super().check()

    def check_replicas(self, replicas: int) -> None:
        if self.zero not in (0, 1) or (self.zero and replicas == 1):
            raise ZbfxError(f"zero is 0, or 1 with several replicas; found {self.zero!r} with {replicas}")
