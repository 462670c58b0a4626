"""Bubble rate against memory limit, for one stage per rank and for the V placement, as in two figures of the paper.

`python -m benchmarks.planner.memory_curve [--settings "1.5B m32" ...] [--csv FILE] [--svg FILE] [--budget SECONDS]`
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.planner.paper_settings import Setting, settings
from zbfx.schedule import plan

MULTIPLES = (0.5, 0.75, 1, 1.125, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3)
WIDTH, HEIGHT, MARGIN = 640, 400, 56
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad")


@dataclass(frozen=True)
class Point:
    setting: str
    placement: str
    limit: float  # multiple of p M_B
    bubble_rate: float
    bound_bubble_rate: float
    proven_optimal: bool
    seconds: float


def point(setting: Setting, placement: str, limit: float, budget_s: float) -> Point:
    costs = setting.linear() if placement == "zb" else setting.v_shaped()
    found = plan(costs, setting.microbatches, mem_limit=f"{limit}x", budget_s=budget_s)
    work = setting.microbatches * float(setting.stage.work_s)
    bound = max(0.0, 1 - work / found.lower_bound_s)
    name = f"{setting.model} m{setting.microbatches}"
    return Point(name, placement, limit, found.bubble_rate, bound, found.gap == 0, found.search_s)


def picture(points: list[Point]) -> str:
    """Lines of bubble rate over limit: one colour per setting, dashed for the V placement."""
    middle = HEIGHT / 2
    highest = max(0.01, *(p.bubble_rate for p in points))
    names = list(dict.fromkeys(p.setting for p in points))

    def x(limit: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (limit - MULTIPLES[0]) / (MULTIPLES[-1] - MULTIPLES[0])

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * rate / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">memory limit in p M_B</text>',
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">bubble rate</text>',
    ]
    for limit in MULTIPLES[::2]:
        parts.append(f'<text x="{x(limit):.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{limit:g}</text>')
    for step in range(5):
        rate = highest * step / 4
        parts.append(f'<text x="{MARGIN - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3f}</text>')
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        for placement, dash in (("zb", "none"), ("v", "5 4")):
            line = [p for p in points if (p.setting, p.placement) == (name, placement)]
            path = " ".join(f"{x(p.limit):.1f},{y(p.bubble_rate):.1f}" for p in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>')
        label = f"{name} (dashed: V)"
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{MARGIN + 16 * index}" text-anchor="end" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--settings", nargs="+", default=["1.5B m32", "6.2B m32", "14.6B m48"], metavar="NAME")
    parser.add_argument("--budget", type=float, default=5.0, metavar="SECONDS", help="per point (default: 5)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    options = parser.parse_args()
    chosen = [s for s in settings() if f"{s.model} m{s.microbatches}" in options.settings]
    points = []
    with open(options.csv, "w", newline="") if options.csv else sys.stdout as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)])
        writer.writeheader()
        for setting in chosen:
            for placement in ("zb", "v"):
                for limit in MULTIPLES:
                    points.append(point(setting, placement, limit, options.budget))
                    writer.writerow(asdict(points[-1]))
                    file.flush()
        if options.svg:
            options.svg.write_text(picture(points))


if __name__ == "__main__":
    main()
