"""Colours are told apart by readers with each kind of weak colour vision."""

from __future__ import annotations

from itertools import combinations

import numpy
import pytest

from zbfx.show.palette import FILLS, IDLE_FILLS

# Linear RGB as it is seen without long, middle or short cones: Machado, Oliveira and Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), table 1, severity 1.
SEEN: dict[str, list[list[float]]] = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
JUST_NOTICEABLE = 2.3  # of CIE 1976 L*a*b*
WHITE = numpy.array([0.95047, 1.0, 1.08883])
XYZ = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, seen: list[list[float]]) -> numpy.ndarray:
    srgb = numpy.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = numpy.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    x, y, z = numpy.cbrt(XYZ @ numpy.clip(numpy.array(seen) @ linear, 0, 1) / WHITE)
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("fills", [FILLS, IDLE_FILLS], ids=["actions", "idle"])
def test_any_two_colours_are_far_apart(fills: dict[str, str], eyes: str) -> None:
    apart = {
        (a, b): float(numpy.linalg.norm(lab(fills[a], SEEN[eyes]) - lab(fills[b], SEEN[eyes])))
        for a, b in combinations(fills, 2)
    }
    assert min(apart.values()) > 5 * JUST_NOTICEABLE, sorted(apart.items(), key=lambda item: item[1])[:3]


@pytest.mark.parametrize("fill", FILLS.values())
def test_labels_are_read_on_every_fill(fill: str) -> None:
    """Black on the fill has a contrast of 4.5, which the Web Content Accessibility Guidelines ask for."""
    srgb = numpy.array([int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = numpy.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    assert (XYZ[1] @ linear + 0.05) / 0.05 >= 4.5
