"""Every way a rank can fail, at every place: each rank has printed the first rank's message, and ended its call, within
seconds. tests/gpu has those of devices."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.processes import faults
from tests.processes.faults import PLACES
from tests.support.pool import Launch

SOON_S = 15.0

STEPS = {"first step": 0, "later step": 1, "evaluate": 0}
IN_PHASES = {
    "raise in F": ("F1.0", "InjectedError: on purpose"),
    "raise in B": ("B1.0", "InjectedError: on purpose"),
    "raise in W": ("W1.0", "InjectedError: on purpose"),
    "out of memory": ("F1.0", "OutOfMemoryError: on purpose"),
}


def said(failure: str, place: str) -> str:
    """What rank 1 says of a failure that leaves its process alive."""
    if failure == "Ctrl-C":
        return "rank 1: KeyboardInterrupt"
    if failure == "raise in the optimizer":
        return "rank 1: InjectedError: on purpose"
    action, error = IN_PHASES[failure]
    if place == "bind":
        return f"rank 1: {error}"
    return f"rank 1, step {STEPS[place]}, action {action} (stage 1, microbatch 0): {error}"


def places_of(failure: str) -> tuple[str, ...]:
    if failure == "raise in the optimizer":
        return PLACES[:2]
    return PLACES[:2] if failure in ("raise in B", "raise in W", "between calls") else PLACES


def check_heard(found: dict[str, Any], message: str, kind: str = "PipelineFault") -> None:
    assert found["type"] == kind, found
    assert found["text"] == ("" if kind == "KeyboardInterrupt" else message)
    assert found["printed"].startswith(f"zbfx: {message}\n"), found
    assert found["seconds"] < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("failure", [*IN_PHASES, "Ctrl-C", "raise in the optimizer"])
def test_a_rank_that_raises(launch: Launch, failure: str) -> None:
    ranks = launch(2, faults.fails_everywhere, failure, places_of(failure))
    for place in places_of(failure):
        check_heard(ranks[0][place], said(failure, place))
        check_heard(
            ranks[1][place], said(failure, place), "KeyboardInterrupt" if failure == "Ctrl-C" else "PipelineFault"
        )


def test_a_rank_that_fails_in_compile(launch: Launch) -> None:
    """The others raise its error at the exchange that they wait in, or come to next."""
    ranks = launch(2, faults.in_compile)
    for place in faults.COMPILE[1:]:
        found, own = ranks[0][place], ranks[1][place]
        assert (own["type"], own["text"]) == ("InjectedError", "on purpose")
        assert found["type"] == "ZbfxError"
        assert re.fullmatch(r"rank 1(, compile)?: InjectedError: on purpose", found["text"])
        assert max(found["seconds"], own["seconds"]) < SOON_S
    assert ranks[0]["arguments"]["text"].startswith("rank 1, compile: stages is the number of pipeline ranks")
    assert ranks[0]["right"]["type"] == ranks[1]["right"]["type"] == ""


ENDING = [(failure, place) for failure in ("os._exit", "SIGKILL", "between calls") for place in places_of(failure)]


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "place"), ENDING)
def test_a_rank_that_ends(launch: Launch, failure: str, place: str) -> None:
    found = launch(2, faults.fails, failure, place, ends={1})[0]
    if failure == "between calls":
        check_heard(found, "rank 1, outside of its calls: InjectedError: on purpose")
        return
    check_heard(found, found["text"])
    assert re.match(
        r"rank 0: waiting for (message .* rank 1, which|the other ranks .* one of which) is lost", found["text"]
    )
