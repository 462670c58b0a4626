"""What tests of all rooms share: processes for scenarios, and marks that follow from what a test is given."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import OF_TRANSFORMERS
from tests.support.pool import Launch, Pool
from zbfx.schedule import plan

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

SEARCH_S = 0.3
OF_THE_POOL = (  # all files with tests that `launch`
    "tests/benchmarks/test_data_parallel.py",
    "tests/benchmarks/test_optimizer_step.py",
    "tests/benchmarks/test_throughput.py",
    "tests/cli/test_report.py",
    "tests/hf/",
    "tests/numerics/test_grad_dtype.py",
    "tests/processes/",
    "tests/project/test_disk.py",
    "tests/project/test_docs.py",
    "tests/test_user_passes.py",
)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture(scope="session", autouse=True)
def for_small_models() -> Iterator[None]:
    """`compile` searches for a schedule until it meets a bound or the time is up: it needs less. Inductor compiles in
    this process: others start in more time than they save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbfx.candidate.plan", partial(plan, budget_s=SEARCH_S))
        patch.setattr("torch._inductor.config.compile_threads", 1)
        yield


@pytest.fixture
def launch(pool: Pool) -> Launch:
    return pool.launch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            assert item.nodeid.startswith(OF_THE_POOL), f"{item.path} is missing in OF_THE_POOL"
            item.add_marker("processes")
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(value in OF_TRANSFORMERS for value in given if callable(value)):
            item.add_marker("transformers")
        if any(value == "inductor" for value in given if isinstance(value, str)):
            item.add_marker("inductor")
    if config.getoption("dist", "no") != "no":
        longest_first(items)


def pytest_collection_finish() -> None:
    """Modules stay. Without looks at their objects, collecting garbage takes a tenth of the tests' time less."""
    gc.collect()
    gc.freeze()


def longest_first(items: list[pytest.Item]) -> None:
    """What the pool runs, which one worker gets as a whole, before files with slow tests, before files that start
    processes, before the rest: so two workers end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    processes = {item.path for item in items if item.get_closest_marker("processes")}

    def late(item: pytest.Item) -> tuple[bool, ...]:
        return not item.nodeid.startswith(OF_THE_POOL), item.path not in slow, item.path not in processes

    items.sort(key=late)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With `--dist loadfile` all scenarios run in one worker, too, whose processes are started once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OnePool(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "the pool" if nodeid.startswith(OF_THE_POOL) else super()._split_scope(nodeid)

    return OnePool(config, log)
