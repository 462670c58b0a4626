"""The times recovered from the paper's ZB-V table reproduce the column that they were not fitted to."""

from itertools import islice

import pytest

from benchmarks.planner.paper_fit import rate_of, zbv_settings


@pytest.mark.slow
def test_zb_h2_follows_from_1f1b_and_zb_h1() -> None:
    settings = list(islice(zbv_settings(), 3))
    assert [setting.name for setting in settings] == ["6.2B p=16 m=48", "6.2B p=16 m=64", "6.2B p=16 m=128"]
    for setting in settings:
        rates = {name: rate_of(setting, name) for name in ("1f1b", "zb-h1", "zb-h2")}
        assert rates == pytest.approx({name: setting.paper_rates[name] for name in rates}, abs=1.5e-4)
