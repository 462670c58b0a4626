"""All optimizers, dtypes, numbers of ranks and causes of a verdict, 30 steps each, beside those with a barrier.

    python -m tests.optim.sweep

prints how many agree in bits (exact), and the largest differences relative to the largest entry of a tensor
(arithmetic).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from tests.optim.test_post_validated import CAUSES, clipping, loud
from tests.support.optimizers import INVERTIBLE, OPTIMIZERS, Result, same_bits


def largest_difference(found: Result, expected: Result) -> float:
    pairs = [(found.parameters[name], p) for name, p in expected.parameters.items()]
    pairs += [(found.state[name][key], v) for name, state in expected.state.items() for key, v in state.items()]
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300)) for a, b in pairs
    )


def main() -> None:
    exact, differences = [], dict[torch.dtype, list[float]]()
    rolled_back = repeated = 0
    for (ranks, cause), dtype, name in product(CAUSES, (torch.float32, torch.bfloat16), OPTIMIZERS):
        max_norm, barrier = clipping(ranks, dtype, cause, name)
        found = loud(ranks, dtype, cause, 30, OPTIMIZERS[name], max_norm=max_norm, scheduled=True)
        exact.append(same_bits(found, barrier))
        rolled_back, repeated = rolled_back + found.counts["rolled_back"], repeated + found.counts["repeated"]
        if name in INVERTIBLE:
            options: dict[str, Any] = {"max_norm": max_norm, "scheduled": True, "rollback": "arithmetic"}
            found = loud(ranks, dtype, cause, 30, OPTIMIZERS[name], **options)
            differences.setdefault(dtype, []).append(largest_difference(found, barrier))
    print(f"exact: {sum(exact)} of {len(exact)} equal in bits; {repeated} steps repeated, {rolled_back} rolled back")
    for dtype, found_differences in differences.items():
        print(f"arithmetic, {dtype}: {len(found_differences)} runs, largest difference {max(found_differences):.3g}")


if __name__ == "__main__":
    main()
