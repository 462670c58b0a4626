"""What is proven of programs, in numbers; and mutations of programs, each refused or harmless.

Run: pytest tests/verify/test_proof.py (CPU, one process).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.proofs import mutations
from tests.verify.test_broken_programs import erased, plain, tied, uses
from zbfx.errors import BrokenGraph
from zbfx.program import ops
from zbfx.verify.proof import Proof


def test_a_proof_counts_what_it_is_of() -> None:
    pipe = tied()
    peaks = [memory.peak_bytes for memory in pipe.memory]
    proof = Proof.of(pipe.programs, pipe.schedule, peaks)
    sent = {key for program in pipe.programs for key in program.messages}
    assert (proof.ranks, proof.microbatches, proof.messages) == (3, 4, len(sent))
    assert proof.calls == sum("action" in n.meta for p in pipe.programs for n in p.module.graph.nodes)
    assert (proof.gradients, proof.shared, proof.updates, proof.beside) == (10, 2, 0, 0)
    text = str(replace(proof, limits=(1e9, 1e9, 2e9)))
    assert text.startswith(f"proven of the programs of 3 ranks, {proof.nodes} nodes, 4 microbatches:")
    assert f"memory, rank 2   {peaks[2]:,} bytes at its peak, limit 2,000,000,000" in text
    assert max(map(len, text.splitlines())) <= 116


def test_there_is_no_proof_of_a_broken_program() -> None:
    pipe = plain()
    erased(pipe.programs[1], uses(pipe.programs[1], ops.send)[0])
    with pytest.raises(BrokenGraph):
        Proof.of(pipe.programs, pipe.schedule, [0, 0, 0])


@pytest.mark.slow
def test_mutations_of_programs_are_refused_or_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    """Five of each kind; `benchmarks/proofs/mutations.py` has 5,000."""
    count = 5 * len(mutations.KINDS)
    assert mutations.main(["--count", str(count), "--seed", "7"]) == 0
    assert f"{count} mutations, seed 7" in capsys.readouterr().out
