"""Hashes of tensors: the formula against Python's integers, and what must change them or not."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zbfx.runtime.fingerprint import ROW, fingerprints

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]


def one(tensor: Tensor) -> int:
    return fingerprints([tensor])[0]


def by_hand(octets: bytes) -> int:
    """The hash in integers of any size."""
    generator = torch.Generator().manual_seed(0)
    weights = [w | 1 for w in torch.randint(-(2**63), 2**63 - 1, (ROW,), generator=generator).tolist()]

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    def combined(words: list[int]) -> int:
        rows = [words[k : k + ROW] for k in range(0, len(words) - len(words) % ROW, ROW)]
        rows.append(words[len(words) - len(words) % ROW :])
        sums = [sum(signed(x + (x >> 32)) * w for x, w in zip(row, weights, strict=False)) for row in rows]
        return signed(sums[0]) if len(sums) == 1 else combined([signed(s) for s in sums])

    def words_of(some: bytes) -> list[int]:
        return [int.from_bytes(some[k : k + 8], sys.byteorder, signed=True) for k in range(0, len(some), 8)]

    whole = len(octets) // 8 * 8
    return combined([combined(words_of(octets[:whole])), *words_of(octets[whole:].ljust(8, b"\0"))])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8 * ROW - 1, 8 * ROW, 8 * ROW + 1, 24 * ROW + 13])
def test_the_formula(size: int) -> None:
    octets = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert one(octets) == by_hand(bytes(octets.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_counts(dtype: torch.dtype) -> None:
    octets = torch.randint(2 if dtype is torch.bool else 256, (48,), dtype=torch.uint8)
    before = one(octets.view(dtype))
    assert one(octets.clone().view(dtype).reshape(3, -1)) == before
    for bit in range(8 * 48) if dtype is not torch.bool else range(0, 8 * 48, 8):
        other = octets.clone()
        other[bit // 8] ^= 1 << (bit % 8)
        assert one(other.view(dtype)) != before


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "odd offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "columns": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "parameter": lambda t: torch.nn.Parameter(t),
    "negated": lambda t: torch.complex(t, -t).conj().imag,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_layouts_do_not_count(look: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert look(values).equal(values)
    assert one(look(values)) == one(values)
    conjugate = torch.complex(values, values).conj()
    assert one(conjugate) == one(conjugate.resolve_conj()) != one(conjugate.conj())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_places_count(dtype: torch.dtype) -> None:
    """Ones at other places, as in masks and one-hot rows: bits that are zero almost everywhere."""
    size = 4 * ROW
    seen = set()
    places = [0, 1, 2, 7, 8, 2048, 4096, ROW - 1, ROW, ROW + 1, 2 * ROW, 3 * ROW, size - 1]
    for place in places:
        values = torch.zeros(size, dtype=dtype)
        values[place] = 1
        seen.add(one(values))
    assert len(seen) == len(places)
    assert one(torch.full((size,), -1)) != one(torch.zeros(size, dtype=torch.int64))
