"""Settings for small models, in the process of the tests and in those of the pool."""

from __future__ import annotations

from functools import partial

import pytest

from zbfx.schedule import plan

SEARCH_S = 0.3


def settle_for_small_models(patch: pytest.MonkeyPatch) -> None:
    """`compile` searches for a schedule until it meets a bound or the time is up: it needs less. Inductor compiles in
    this process: others start in more time than they save."""
    patch.setattr("zbfx.candidate.plan", partial(plan, budget_s=SEARCH_S))
    patch.setattr("torch._inductor.config.compile_threads", 1)
