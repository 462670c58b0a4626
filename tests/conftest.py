"""What tests of all rooms share: processes for scenarios, and marks that follow from what a test is given."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import OF_TRANSFORMERS
from tests.support.pool import Launch, Pool
from tests.support.small import settle_for_small_models

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
# Rooms whose tests are of what becomes of a trace.
BELOW_TRACES = ("memory", "passes", "program")


@cache
def is_of_the_pool(file: Path) -> bool:
    """Whether tests of a file run scenarios."""
    return "import Launch" in file.read_text()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture(scope="session", autouse=True)
def for_small_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        settle_for_small_models(patch)
        yield


@pytest.fixture(scope="session")
def all_traces() -> dict[str, Any]:
    return {}


@pytest.fixture
def known_traces(monkeypatch: pytest.MonkeyPatch, all_traces: dict[str, Any]) -> None:
    """Models that are alike are traced once for all tests that ask for this, and for those in BELOW_TRACES."""
    from tests.support.known_traces import trace_once  # brings all of zbfx

    trace_once(monkeypatch, all_traces)


@pytest.fixture(autouse=True)
def known_traces_in_rooms_below(request: pytest.FixtureRequest) -> None:
    if request.path.relative_to(TESTS).parts[0] in BELOW_TRACES:
        request.getfixturevalue("known_traces")


@pytest.fixture
def launch(pool: Pool) -> Launch:
    return pool.launch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(value in OF_TRANSFORMERS for value in given if callable(value)):
            item.add_marker("transformers")
        if any(value == "inductor" for value in given if isinstance(value, str)):
            item.add_marker("inductor")
    if config.getoption("dist", "no") != "no":
        longest_first(items)


def pytest_collection_finish() -> None:
    """Modules stay. Without looks at their objects, collecting garbage takes a tenth of the tests' time less, and less
    again where it looks at other objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def longest_first(items: list[pytest.Item]) -> None:
    """What the pool runs, which one worker gets as a whole, before files with many slow tests, before files with few,
    before files that start processes, before the rest: so two workers end together."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    processes = {item.path for item in items if item.get_closest_marker("processes")}

    def order(item: pytest.Item) -> tuple[bool, int, bool]:
        return not is_of_the_pool(item.path), -slow[item.path], item.path not in processes

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With `--dist loadfile` all scenarios run in one worker, too, whose processes are started once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OnePool(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = config.rootpath / nodeid.partition("::")[0]
            return "the pool" if is_of_the_pool(file) else super()._split_scope(nodeid)

    return OnePool(config, log)
