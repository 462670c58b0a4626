"""Faults on purpose: they strike where they are asked to, and each ends all ranks in time with a message that names it,
or harms nothing. The whole matrix is benchmarks/proofs/fault_matrix.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from benchmarks.proofs import fault_matrix
from tests.support.models import mlp
from tests.support.pool import Launch
from tests.support.reference import compiled
from tests.testing import faulty_worker
from tests.testing.faulty_worker import STANDS_S, TIMEOUT_S
from zbfx.errors import ZbfxError
from zbfx.testing import faults

ENDS = {
    "corrupt": r"rank 0: message B\d\.\d>0 from rank 1 came with other bits than were sent \(values 0 of 1: CRC-32 .*",
    "wrong batch": r".*rank.*batch.*",
    "disk full": r"the checkpoint was not saved: \[Errno 27\] File too large\. Those before are as they were",
    "raise as it saves": r"the checkpoint was not saved: on purpose\. Those before are as they were",
}
GOES_ON = ("slow", "clock jump")
STANDS = ("hang", "stop")


@pytest.mark.slow
def test_faults_of_every_kind(launch: Launch) -> None:
    ranks = launch(2, faulty_worker.one_after_the_other, *faulty_worker.CASES)
    undisturbed = ranks[0]["none"]["losses"]
    assert len(undisturbed) == 4
    for found in ranks.values():
        for case, said in ENDS.items():
            assert re.fullmatch(said, found[case]["text"]), (case, found[case])
            assert found[case]["seconds"] < fault_matrix.SOON_S
        for case in GOES_ON:
            assert found[case]["losses"] == undisturbed
        assert found["unseen"]["losses"] != undisturbed, "a bit was flipped, and nobody was asked to look"
    for case in STANDS:
        other, own = ranks[0][case], ranks[1][case]
        assert other["type"] == own["type"] == "PipelineFault"
        assert re.search("is lost, or slower than the timeout", other["text"])
        assert other["seconds"] < TIMEOUT_S + fault_matrix.SOON_S
        assert own["text"] == other["text"]
        assert own["seconds"] > STANDS_S
    struck = {case: (ranks[0][case]["struck"], ranks[1][case]["struck"]) for case in faulty_worker.CASES}
    assert struck.pop("slow") == (0, 11)  # 3 microbatches, 4 steps, but for the first B
    assert set(struck.values()) == {(0, 1)}


def test_the_matrix_finds_what_is_wrong() -> None:
    row: dict[str, Any] = {"kind": "raise", "rank": 1, "left": 0, "seconds": 20.0}
    said = {"type": "PipelineFault", "text": "rank 1: on purpose", "losses": None}
    assert list(fault_matrix.wrong(row, {0: said, 1: said}, 1.0)) == ["took longer than 15 s"]
    silent = said | {"type": "", "text": ""}
    assert len(list(fault_matrix.wrong(row | {"left": 1, "seconds": 1.0}, {0: silent, 1: said}, 1.0))) == 3
    assert list(fault_matrix.wrong(row, {}, None)) == ["the fault never struck"]
    assert list(fault_matrix.wrong(row, {0: said}, 1.0)) == ["a rank said nothing"]


def test_a_fault_strikes_where_it_is_asked_to_and_the_library_is_as_before() -> None:
    problem = mlp(3)
    step = compiled(problem, 2, 3, check=False).run_local()
    batch = (*problem.inputs, *problem.targets)
    expected = step(*batch).item()
    error = torch.OutOfMemoryError("on purpose")
    with faults.injected(faults.Raise(error), faults.action("B0.2"), after=1) as struck:
        assert step(*batch).item() == expected
        with pytest.raises(ZbfxError, match=r"rank 0, step 2, action B0\.2 \(stage 0, microbatch 2\): OutOfMemory"):
            step(*batch)
    assert (struck.passed, struck.times) == (2, 1)
    with faults.injected(faults.Raise(), faults.action("B0.2"), rank=7):
        assert step(*batch).item() == expected
    assert step(*batch).item() == expected


def test_what_cannot_strike_is_refused() -> None:
    with pytest.raises(ZbfxError, match=r"Corrupt\(byte=0, bit=0\) strikes at send; found F0\.0"):
        faults.injected(faults.Corrupt(), faults.action("F0.0")).__enter__()
    with pytest.raises(ZbfxError, match="an action reads like"):
        faults.action("X")
    with pytest.raises(ZbfxError, match="after is how often the place is passed before, an integer >= 0; found -1"):
        faults.injected(faults.Kill(), faults.SAVE, after=-1).__enter__()


@pytest.mark.slow
def test_a_slow_rank_is_reported_and_planned_for(launch: Launch) -> None:
    ranks = launch(2, faulty_worker.slowed)
    assert "zbfx: rank 1: B of stage 1 takes" in ranks[1]["printed"]
    assert 17 <= ranks[1]["drifts"]["B1"] <= 21  # other work on this machine may be slow before
    assert "B1" not in ranks[0]["drifts"]
    assert ranks[0]["orders"] == ranks[1]["orders"]
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert max(ranks[0]["losses"]) - min(ranks[0]["losses"]) < 1e-6, "nothing is trained"
