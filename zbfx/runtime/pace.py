"""How long actions take on this rank, step by step, and since when one takes longer. In: seconds of each action, as the
host runs it. Out: `Pace`, with typical seconds and `Drift`s. Nothing is sent and nothing waits; on a GPU, where the
host only launches, nothing is noted (`step.profile` measures there)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from zbfx.plan import Action, Kind

RECENT = 8  # steps in a row that are slow, before it is called a drift
KEPT_STEPS = 64
SLOWER = 1.5  # times what is usual
NOISE_S = 1e-4  # slower by less is noise
LOADING_STEPS = 2  # first steps, which load and allocate

ActionKind = tuple[Kind, int]  # a kind of action, and its stage


@dataclass(frozen=True)
class Drift:
    """Actions of a kind and stage that take longer than before, since a step, which counts from 1."""

    rank: int
    kind: Kind
    stage: int
    since_step: int
    before_s: float
    now_s: float

    def __str__(self) -> str:
        return (
            f"{self.kind} of stage {self.stage} takes {self.now_s * 1e3:.3g} ms since step {self.since_step}, "
            f"{self.before_s * 1e3:.3g} ms before"
        )


class Pace:
    """The pace of a rank: the mean seconds of an action by kind and stage, in each of the last steps."""

    def __init__(self, rank: int) -> None:
        self.rank, self.steps = rank, 0
        self.current: dict[Action, float] = defaultdict(float)
        self.means: dict[ActionKind, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_STEPS))
        self.drifts: dict[ActionKind, Drift] = {}

    def add(self, action: Action, seconds: float) -> None:
        self.current[action] += seconds  # a W may run in pieces

    def end_step(self, number: int) -> list[Drift]:
        """A step of this number ends; the drifts that are new. Those that are over are forgotten."""
        self.steps += 1
        found: dict[ActionKind, list[float]] = defaultdict(list)
        for action, seconds in self.current.items():
            found[action.kind, action.stage].append(seconds)
        self.current.clear()
        for part, each in found.items() if self.steps > LOADING_STEPS else ():
            self.means[part].append(sum(each) / len(each))
        return self.look(number) if self.steps % RECENT == 0 else []

    def look(self, number: int) -> list[Drift]:
        new = []
        for part, means in self.means.items():
            values = list(means)
            earlier, recent = values[:-RECENT], values[-RECENT:]
            if len(earlier) < RECENT:
                continue
            known = self.drifts.get(part)
            usual_s = known.before_s if known else median(earlier)
            is_slow = min(recent) > max(SLOWER * usual_s, usual_s + NOISE_S)
            if is_slow and known is None:
                slow = next((k for k, mean in enumerate(reversed(values)) if mean <= SLOWER * usual_s), len(values))
                self.drifts[part] = Drift(self.rank, *part, number - slow + 1, usual_s, median(recent))
                new.append(self.drifts[part])
            elif known is not None and max(recent) <= SLOWER * usual_s:
                del self.drifts[part]
        return new

    @property
    def seconds(self) -> Mapping[ActionKind, float]:
        """What an action takes, by kind and stage: the median of the last steps."""
        return {part: median(list(means)[-RECENT:]) for part, means in self.means.items() if means}
