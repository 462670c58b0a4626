"""All schedules at the paper's twelve settings, as `python -m zbfx compare` has them: one JSON object a row.

`python -m benchmarks.planner.paper_compare [--seconds 60]`. The time is shared: every schedule that is searched for
gets what the ones before have left. Schedules with one stage a rank have the paper's times, V schedules halves of them.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.planner.paper_settings import settings
from zbfx.errors import ZbfxError
from zbfx.schedule import names, plan
from zbfx.schedule.orders.registry import SEARCHED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all settings together (default: 60)")
    options = parser.parse_args()
    begun = time.perf_counter()
    asked = [(setting, name) for setting in settings() for name in names()]
    asked.sort(key=lambda entry: entry[1] in SEARCHED)
    for index, (setting, name) in enumerate(asked):
        left = sum(name in SEARCHED for _, name in asked[index:])
        share_s = max(0.05, 0.6 * (options.seconds - (time.perf_counter() - begun)) / max(1, left))
        row = {"setting": setting.name, "schedule": name}
        try:
            costs = [setting.linear(), setting.v_shaped()]
            found = plan(costs, setting.microbatches, schedule=name, mem_limit="2.5x", budget_s=min(5.0, share_s))
        except ZbfxError as refusal:
            print(json.dumps(row | {"error": str(refusal).splitlines()[0][:120]}), flush=True)
            continue
        rates = {"bubble_rate": found.bubble_rate, "gap": found.gap, "seconds": found.search_s}
        print(json.dumps(row | rates), flush=True)
    print(json.dumps({"wall_s": time.perf_counter() - begun, "processor_s": time.process_time()}))


if __name__ == "__main__":
    main()
