"""The documentation is true: every block of every page runs, and what it prints or names is so."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zbfx.graphs
from tests.project.pictures import PICTURE, terminal
from tests.support.documents import PAGES, ROOT, blocks, commands, every_block, run, scripts, text_of
from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks
from zbfx.costs.tables import costs_from_json
from zbfx.plan import CostTable, StageCost
from zbfx.runtime.step import OFFERED
from zbfx.schedule import names, plan
from zbfx.schedule.orders.registry import GENERATORS, SHAPES

# What no test of this file runs, and why.
ELSEWHERE = {
    "torchrun --nproc-per-node=4 -m zbfx profile model.py:pipeline": "tests/cli/test_report.py, over two processes",
    "python benchmarks/compiling/compile_time.py --configs 1.5B --schedules zb-h1": "tests/benchmarks",
    "python launch.py": "tests/project/test_faults_page.py",
    "python -m zbfx playground": "tests/cli/test_playground.py",
}
WITH_OWN_TESTS = {"docs/disk.md", "docs/faults.md", "docs/frameworks.md"}
LAUNCHED = ["README.md", "docs/replicas.md"]
LANGUAGES = {"python", "sh", "text", "json"}  # of which the first two run
TRANSFORMERS = [page for page in PAGES if "from transformers" in text_of(page) and page not in WITH_OWN_TESTS]
RUN_HERE = [page for page in PAGES if page not in WITH_OWN_TESTS and set(blocks(page, "python")) - set(scripts(page))]
COMMANDS = sorted({(command, page) for page in PAGES for command in commands(page)})
OF_ZBFX = sorted({command for command, _ in COMMANDS if command.startswith("python -m zbfx ")} - set(ELSEWHERE))
MAKE = [command for command, _ in COMMANDS if command.startswith("make ")]
PIP = [command for command, _ in COMMANDS if command.startswith("pip ")]

needs_transformers = [pytest.mark.transformers, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder of its own, what torchrun tells the only process, and the library as it was afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (told | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    generators, shapes = dict(GENERATORS), dict(SHAPES)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for registry, before in ((GENERATORS, generators), (SHAPES, shapes)):
        for name in [*registry]:
            if name not in before:
                del registry[name]


def run_here(page: str) -> dict[str, object]:
    """Run a page's Python, but for what torchrun starts, and return its names. Errors have lines of the page."""
    found: dict[str, object] = {}
    whole, launched = text_of(page), scripts(page)
    for code in blocks(page, "python"):
        if code not in launched:
            above = whole[: whole.index(code)].count("\n")
            exec(compile("\n" * above + code, page, "exec"), found)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=needs_transformers if page in TRANSFORMERS else []) for page in RUN_HERE]
)
def test_the_python_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_here(page)
    printed = capsys.readouterr().out
    CLAIMS.get(page, lambda *_: None)(printed, names)


def programs_are_as_printed(printed: str, _: object) -> None:
    (program,) = (block for block in blocks("docs/programs.md", "text") if block.startswith("def forward"))
    assert printed == program


def a_family_is_short_and_good(printed: str, _: object) -> None:
    code = blocks("docs/own_schedules.md", "python")[0]
    assert len(code.splitlines()) <= 30
    assert "v-eager" in names()
    rate, peak, limit = re.match(r"(\S+) in (\S+) of (\S+),", printed).groups()  # type: ignore[union-attr]
    assert 0 < float(rate) < 0.35
    assert float(peak) <= float(limit) == 16


def passes_do_what_is_said(_: str, names: dict[str, object]) -> None:
    for code in blocks("docs/passes.md", "python"):
        assert len(code.splitlines()) <= 45
    before, after = (names[name].costs.stages[1].backward_input_s for name in ("before", "after"))  # type: ignore[attr-defined]
    assert after < before


def the_table_is_the_planners(printed: str, _: object) -> None:
    """All rows but that of zb-v to the digit; zb-v is found by a search that the clock ends."""
    rows = re.findall(r"^\| `\w[\w-]*` \|.*$", text_of("docs/schedules.md"), re.MULTILINE)
    written, found = ({row.split("`")[1]: row for row in side} for side in (rows, printed.splitlines()))
    searched = "zb-v"
    assert written.keys() == found.keys() == set(names()) - {"auto", "ilp"}
    for name in written.keys() - {searched}:
        assert found[name] == written[name]
    here, there = (float(row[searched].split("|")[2]) for row in (found, written))
    assert here == pytest.approx(there, rel=0.04)


def averages_are_saved(printed: str, _: object) -> None:
    assert printed.startswith("5 gradient norm 0.")
    assert Path("run/step-5").is_dir()


CLAIMS: dict[str, Callable[[str, dict[str, object]], None]] = {
    "docs/programs.md": programs_are_as_printed,
    "docs/own_schedules.md": a_family_is_short_and_good,
    "docs/optimizer.md": averages_are_saved,
    "docs/passes.md": passes_do_what_is_said,
    "docs/schedules.md": the_table_is_the_planners,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name, and links to those of the repository."""
    path = tmp_path_factory.mktemp("docs")
    (costs,) = blocks("docs/planning.md", "json")
    (path / "costs.json").write_text(costs)
    (model,) = (code for code in blocks("docs/planning.md", "python") if "def pipeline" in code)
    (path / "model.py").write_text(model)
    for name in ("examples", "benchmarks"):
        (path / name).symlink_to(ROOT / name)
    return path


@pytest.fixture
def zbfx_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What a command of `python -m zbfx` prints, in the folder, but without a process of its own."""

    def run(command: str) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["zbfx", *shlex.split(command)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("zbfx", run_name="__main__")
        printed = capsys.readouterr()
        assert ended.value.code == 0, printed.out + printed.err
        return printed.out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", OF_ZBFX)
def test_command_of_zbfx_runs(command: str, zbfx_prints: Callable[[str], str]) -> None:
    zbfx_prints(command.removeprefix("python -m zbfx"))


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE)


@pytest.mark.parametrize("command", PIP)
def test_extras_exist(command: str) -> None:
    for extra in re.findall(r"\[(\w+)\]", command):
        assert re.search(rf"^{extra} = \[", text_of("pyproject.toml"), re.MULTILINE)


def test_every_command_and_block_is_run_by_a_test() -> None:
    known = {*OF_ZBFX, *MAKE, *PIP, *ELSEWHERE}
    launched = {
        (command, page) for command, page in COMMANDS if re.fullmatch(r"torchrun --nproc-per-node=\d \w+.py", command)
    }
    assert {command for command, _ in set(COMMANDS) - launched} - known == set()
    assert {page for _, page in launched} <= {*LAUNCHED, "docs/start.md", *WITH_OWN_TESTS}
    assert {language for page in PAGES for language, _ in every_block(page)} <= LANGUAGES


@pytest.mark.parametrize("page", LAUNCHED)
def test_script_runs(launch: Launch, page: str, tmp_path: Path) -> None:
    """The README's with its command, others by ranks that are there."""
    (code,), (command,) = scripts(page), (command for command in commands(page) if command.startswith("torchrun"))
    (tmp_path / "train.py").write_text(code)
    ranks = int(command.split("=")[1].split()[0])
    if page == "README.md":
        printed = run(shlex.split(command), tmp_path)
        the_readme_trains_a_model(printed, tmp_path)
    else:
        assert command == f"torchrun --nproc-per-node={ranks} train.py"
        printed = "".join(found.out for found in run_on_ranks(launch, ranks, "train.py", folder=tmp_path).values())
    losses = re.findall(r"loss (\d+\.\d+)", printed)
    assert len(losses) == ranks
    assert len(set(losses)) == 1


def the_readme_trains_a_model(printed: str, folder: Path) -> None:
    # The two ranks may write into one line.
    assert sorted(re.findall(r"rank (\d): loss [\d.]+, trains (\[.*?\])", printed)) == [
        ("0", "['0.weight', '0.bias', '2.weight', '2.bias']"),
        ("1", "['4.weight', '4.bias']"),
    ]
    weights = torch.load(folder / "model.pt", weights_only=True)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(16, 64), torch.nn.GELU(), linear(64, 64), torch.nn.GELU(), linear(64, 10))
    model.load_state_dict(weights)


def test_first_steps_and_readme_have_one_script() -> None:
    """What `docs/start.md` starts is the README's script but for what the README saves: it runs there."""

    def essence(code: str) -> list[str]:
        return [line.split("  #")[0] for line in code.splitlines() if line.strip()]

    (first,), (readme,) = scripts("docs/start.md"), scripts("README.md")
    assert set(essence(first)) <= set(essence(readme))


@pytest.mark.parametrize("at", [0, 1])
def test_pictures_are_what_show_prints(at: int, zbfx_prints: Callable[[str], str]) -> None:
    picture = [block for block in blocks("README.md", "text") if block.startswith("rank 0 |")][at]
    schedule = ("1f1b", "zb-h1")[at]
    printed = zbfx_prints(f"show --costs costs.json --microbatches 8 --schedule {schedule} --width 80")
    assert printed.startswith(picture)


def test_the_grid_of_the_report_is_what_print_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stage = StageCost(1, 1, 1, saved_bytes=2, weight_saved_bytes=1)
    found = plan(CostTable.chain([stage] * 4, 0.5), 8, schedule="zb-h1", mem_limit="1x")
    (picture,) = blocks("docs/report.md", "text")
    assert str(found) == picture.rstrip("\n")


def test_the_picture_of_the_terminal_is_what_it_shows() -> None:
    def shown(svg: str) -> list[str]:
        return re.findall(r"<text[^>]*>(.*?)</text>", svg)

    assert shown(PICTURE.read_text()) == shown(terminal()), "run python -m tests.project.pictures"


def test_figures_of_the_pictures() -> None:
    """The formulas, rates and times that the pages state for the README's two pictures."""
    costs = costs_from_json(json.loads(blocks("docs/planning.md", "json")[0]))
    ours = {name: plan(costs, 8, schedule=name) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert {name: schedule.iteration_s for name, schedule in ours.items()} == {"1f1b": 33, "zb-h1": 27, "zb-h2": 24}
    assert "9/33 for 1F1B, 3/27 for ZB-H1" in " ".join(text_of("docs/schedules.md").split())
    assert "1F1B, which most systems run, ends at 33" in text_of("README.md")
    assert "ZB-H1 ends at 27, with the same peak memory" in text_of("README.md")
    assert {name: max(schedule.peak_bytes) for name, schedule in ours.items()} == {"1f1b": 8, "zb-h1": 8, "zb-h2": 14}


def test_rows_of_the_comparison_were_measured() -> None:
    """Milliseconds of zbfx, of torch with its schedule, and the limit, of README and page: rows of one run."""
    runs = [
        (title, [line.split(" | ") for line in body.splitlines() if line.startswith("| ")])
        for title, body in re.findall(
            r"^## (\S+, b=\d, p=\d)$(.*?)(?=^## |\Z)", text_of("benchmarks/RESULTS.md"), re.M | re.S
        )
    ]
    rows = re.findall(
        r"^\| (\S+) \| (\d) \| (\d+) of (\d)(?: sequences)? \| ([\d.]+) \| (?:\S+ \| )?([\d.]+) \((\w+)\) \| ?([\d.]*)",
        "\n".join(map(text_of, ("README.md", "docs/comparison.md"))),
        re.M,
    )
    assert len(rows) == 13
    for model, ranks, m, b, ours, theirs, peer, limit in rows:
        wanted = {("zbfx", ours), (peer, theirs), *([("limit", limit)] if limit else [])}
        assert any(
            title == f"{model}, b={b}, p={ranks}"
            and wanted
            <= {
                (key, f"{float(row[6]):.1f}")
                for row in table
                if row[0] == f"| {m}" and "inductor" in row[3] + row[1] + ("inductor" if row[1] == "torch" else "")
                for key in ((row[2],) if row[1] == "torch" else (row[1],))
            }
            for title, table in runs
        ), (model, ranks, m, wanted)


def test_figures_of_models_of_transformers_were_measured() -> None:
    """Milliseconds of steps and of phases beside torch.compile, FSDP2 and DDP: rows of `results/llama`."""

    def values(name: str, *keys: str) -> Iterator[float]:
        for line in text_of(f"benchmarks/results/llama/{name}.jsonl").splitlines():
            row = json.loads(line)
            for found in (row[key] for key in keys if key in row):
                yield from found if isinstance(found, list) else [found]

    page = text_of("docs/comparison.md")
    about = page[page.index("## Beside torch.compile, on one GPU") : page.index("## Where something else")]
    steps = [*values("whole_steps", "row_ms"), *values("two_gpus", "row_ms", "step_ms")]
    measured = {f"{ms:.1f}" for ms in (*steps, *values("phases_by_stage", "plain_ms", "stage_ms"))}
    written = re.findall(r"\d+\.\d(?!\d|x|B)", about)
    assert len(written) == 22
    assert [figure for figure in written if figure not in measured] == []


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


def test_files_exist() -> None:
    missing = []
    for page in PAGES:
        base = (ROOT / page).parent
        prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", prose):
            missing += [] if (base / target).exists() else [(page, target)]
        for target in re.findall(r"`((?:zbfx|passes|benchmarks|examples|docs|tests)/[\w./]*)`", text_of(page)):
            missing += [] if (ROOT / target).exists() else [(page, target)]
    assert missing == []


def test_the_tree_of_files_exists() -> None:
    (tree,) = (block for block in blocks("docs/architecture.md", "text") if "candidate.py" in block)
    owner, listed = "", []
    for line in tree.splitlines():
        top, name = re.match(r"(\S*)\s+([\w.]+/?)?", line).groups()  # type: ignore[union-attr]
        owner = top or owner
        listed += [owner, *([owner + name] if name and (name.endswith((".py", ".md", "/"))) else [])]
        listed += [owner + other for other in re.findall(r"[:;] (\w+\.py):", line)]
    assert [path for path in set(listed) if not (ROOT / path).exists()] == []
    assert {"zbfx/pipeline.py", "zbfx/candidate.py", "zbfx/costs/", "docs/"} <= set(listed)


def test_schedules_exist() -> None:
    whole = "\n".join(text_of(page) for page in PAGES)
    quoted = set(re.findall(r"""[`"](gpipe|1f1b|zb-[\w-]+|v-\w+|interleaved-\w+|ilp|auto)[`"]""", whole))
    assert quoted - {"auto", "v-eager"} <= set(names())
    assert set(names()) <= quoted, "the pages name every schedule"


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: zbfx\.([\w.]+)$", text_of("docs/api.md"), re.MULTILINE))
    modules = {"optim": zbfx.optim.__all__, "schedule": zbfx.schedule.__all__}
    public = {name for name in zbfx.__all__ if name not in {*modules, "passes", "__version__"}}
    public |= {f"{module}.{name}" for module, named in modules.items() for name in named}
    constants = {"schedule.LINEAR", "schedule.LOOPED", "schedule.V", "schedule.ANY", "schedule.Schedule"}
    assert public - constants <= listed
    members = re.search(r"Step\n    options:\n      members: \[(.*?)\]", text_of("docs/api.md"), re.DOTALL)
    assert members is not None
    assert set(members[1].replace("\n", " ").replace(",", " ").split()) == set(OFFERED)
