"""`python -m zbfx playground`: what its sliders ask for, over the loopback alone."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict
from time import process_time
from typing import Any

import pytest

from zbfx.cli import main
from zbfx.errors import ZbfxError
from zbfx.playground import LOOPBACK, PRESETS, answer, server

ANSWERED_S = 1.0


def views_of(text: str) -> list[Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return list(json.loads(data)["views"])


def iteration_of(view: Any) -> float:
    return float(max(view["times"][end] for lane in view["lanes"] for end in lane["end"]))


def test_the_sliders_are_the_costs() -> None:
    """The formulas of `docs/schedules.md`: m (F + B + W) and the bubbles of ZB-H1 and 1F1B."""
    f, b, w = 2, 3, 5
    first, *others = views_of(answer({"p": "4", "m": "8", "t_f": "2", "t_b": "3", "t_w": "5", "schedule": "1f1b"}))
    assert iteration_of(first) == 8 * (f + b + w) + 3 * (f + b + w)
    assert [view["name"] for view in others] == ["gpipe", "zb-h1", "zb-h2"]


def test_a_placement_shares_a_rank() -> None:
    first, *_ = views_of(answer({"placement": "v", "schedule": "zb-v-order", "p": "2", "m": "4"}))
    assert sum(len(lane["actions"].split()) for lane in first["lanes"]) == 3 * 4 * 4
    times, lane = first["times"], first["lanes"][0]
    busy = sum(times[end] - times[start] for start, end in zip(lane["start"], lane["end"], strict=True))
    assert busy == pytest.approx(4 * 3)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_answered(preset: str) -> None:
    assert views_of(answer({name: str(value) for name, value in asdict(PRESETS[preset]).items()}))


def test_an_answer_takes_well_under_a_second() -> None:
    query = {"p": "8", "m": "32", "t_f": "18.5", "t_b": "18.1", "t_w": "9.3", "t_comm": "0.6"}
    answer(query)
    begun = process_time()
    answer(query)
    assert process_time() - begun < ANSWERED_S


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"p": "four"}, "numbers but for the last two"),
        ({"q": "4"}, "the sliders are p, m, "),
        ({"p": "0"}, "above 0"),
        ({"p": "1000", "m": "1000"}, "at most"),
        ({"placement": "x"}, "placement is one of one, v, looped"),
        ({"schedule": "zb-h3"}, "zb-h3"),
        ({"t_f": "-1"}, "forward_s"),
    ],
)
def test_mistakes_are_named(query: dict[str, str], words: str) -> None:
    with pytest.raises(ZbfxError, match=words):
        answer(query)


@pytest.fixture
def port() -> Iterator[int]:
    with server(0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield int(serving.server_address[1])
        serving.shutdown()
        thread.join()


def got(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(LOOPBACK, port)
    connection.request("GET", path, headers={"Host": host or f"{LOOPBACK}:{port}"})
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def test_ports_that_cannot_be_served_are_named(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, reason in ((port, "Address already in use"), (99999, "ports go to 65535")):
        assert main(["playground", "--port", str(wrong)]) == 2
        assert f"cannot serve on port {wrong}: {reason}. Name another" in capsys.readouterr().err


def test_it_serves_this_machine_alone(port: int) -> None:
    status, text = got(port, "/")
    assert (status, "zb-v-order" in text) == (200, True)
    status, text = got(port, "/page?p=2&m=3&schedule=gpipe")
    assert (status, len(views_of(text)[0]["lanes"])) == (200, 2)
    assert "found 0, 8" in got(port, "/page?p=0")[1]
    assert got(port, "/elsewhere")[0] == 404
    assert got(port, "/", host="example.org")[0] == 403
