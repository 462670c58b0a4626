"""Hashes of the bits of tensors, made on their devices: whether processes hold the same values, without sending them.
A tensor's bytes are 64-bit words in rows. A row's hash is the sum of its words, each with its high half added to its
low one and multiplied by a random odd number of its place, modulo 2^64; the hashes of the rows are words again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROW = 1 << 16  # words: half a megabyte, which stays in the cache of a CPU core
GPU_ROWS = 128  # at once: enough to hide the launches


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A hash of the bits of each tensor: any one element that differs changes it, on every device alike. Waits for the
    devices. Reads the memory once (2 GB a second on a CPU core); holds at most 64 MiB, and a copy if not contiguous."""
    weights, on_device = odd_numbers(), dict[torch.device, Tensor]()
    hashes = []
    for tensor in tensors:
        if tensor.device not in on_device:
            on_device[tensor.device] = weights.to(tensor.device)
        hashes.append(fingerprint(tensor, on_device[tensor.device]))
    return [int(found) for found in hashes]


def odd_numbers() -> Tensor:
    """The random numbers of the places in a row."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (ROW,), generator=generator).bitwise_or_(1)


@torch.no_grad()
def fingerprint(tensor: Tensor, weights: Tensor) -> Tensor:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    octets = values.reshape(-1).view(torch.uint8)
    if octets.storage_offset() % 8 or octets.data_ptr() % 8:  # a view into other tensors
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    rest = octets.new_zeros(8)
    rest[: octets.numel() - whole] = octets[whole:]
    words = octets[:whole].view(torch.int64)
    return combined(torch.cat([combined(words, weights)[None], rest.view(torch.int64)]), weights)


def combined(words: Tensor, weights: Tensor) -> Tensor:
    whole = len(words) // ROW * ROW
    rows = words[:whole].view(-1, ROW)
    parts = [*rows.split(GPU_ROWS if words.is_cuda else 1), words[whole:].unsqueeze(0)]
    sums = torch.cat([(part >> 32).add_(part).mul_(weights[: part.shape[1]]).sum(1) for part in parts])
    return sums[0] if len(sums) == 1 else combined(sums, weights)
