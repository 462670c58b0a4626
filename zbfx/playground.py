"""`zbfx playground`: a local page with a slider for each cost, and the schedules that follow, side by side.

Takes   costs, a limit, a placement and the name of a schedule, from the address that the page's sliders make.
Gives   pages (`zbfx.show.page`), over HTTP, on this machine's loopback alone.
Raises  `ZbfxError` for numbers that are none, or problems that would take long; the page shows its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import names, plan
from zbfx.schedule.orders.registry import LOOPED, V
from zbfx.schedule.others import others
from zbfx.show.page import Subject, asset, page

LOOPBACK = "127.0.0.1"
MOST_CELLS, SEARCH_S = 2048, 0.2  # ranks times microbatches; what a search may take between two moves of a slider
PLACEMENTS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "one": lambda p: tuple(range(p)),
    "v": lambda p: V.placement(p, V.default),
    "looped": lambda p: LOOPED.placement(p, LOOPED.default),
}


@dataclass(frozen=True)
class Sliders:
    """What the page asks for; `limit` is a multiple of what 1F1B's activations need, 0 is none."""

    p: int = 4
    m: int = 8
    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_comm: float = 0.0
    m_b: float = 2.0
    m_w: float = 1.0
    limit: float = 0.0
    placement: str = "one"
    schedule: str = "zb-h1"

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Sliders:
        kinds = {found.name: type(getattr(cls(), found.name)) for found in fields(cls)}
        try:
            found = cls(**{name: kinds[name](value) for name, value in query.items()})
        except (KeyError, ValueError) as error:
            raise ZbfxError(f"the sliders are {', '.join(kinds)}, numbers but for the last two: {error}") from error
        if not (found.p > 0 and found.m > 0 and found.p * found.m <= MOST_CELLS):
            raise ZbfxError(f"p and m are above 0, and p times m is {MOST_CELLS} at most; found {found.p}, {found.m}")
        if found.placement not in PLACEMENTS:
            raise ZbfxError(f"placement is one of {', '.join(PLACEMENTS)}; found {found.placement!r}")
        return found


PRESETS: Mapping[str, Sliders] = {
    "every action takes 1": Sliders(),
    # Times in milliseconds, as the paper profiled them; M_B and M_W as in its table 1, by the hidden size.
    "paper, 1.5B, 8 GPUs": Sliders(8, 24, 18.522, 18.086, 9.337, 0.601, 34 + 5 * 24 * 1024 / 2304, 32),
    "paper, 6.2B, 8 GPUs": Sliders(8, 24, 29.718, 29.444, 19.927, 0.527, 34 + 5 * 32 * 1024 / 4096, 32),
    "paper, 14.6B, 16 GPUs": Sliders(16, 48, 11.347, 11.248, 8.132, 0.377, 34 + 5 * 40 * 1024 / 5120, 32),
}


def answer(query: Mapping[str, str]) -> str:
    """The page of what the sliders ask for."""
    asked = Sliders.of(query)
    placement = PLACEMENTS[asked.placement](asked.p)
    share = asked.p / len(placement)  # a stage of two on a rank takes half as long and holds half as much
    stage = StageCost(*(share * value for value in (asked.t_f, asked.t_b, asked.t_w, asked.m_b, asked.m_w)))
    costs = CostTable.chain([stage] * len(placement), asked.t_comm, placement)
    limit = f"{asked.limit:g}x" if asked.limit else None
    found = plan(costs, asked.m, schedule=asked.schedule, mem_limit=limit, budget_s=SEARCH_S)
    return page(Subject(found, compared=others(found, None)))


def front() -> str:
    """The page of sliders, which shows the answers in a frame."""
    settings = {
        "presets": {name: asdict(sliders) for name, sliders in PRESETS.items()},
        "placements": list(PLACEMENTS),
        "schedules": names(),
        "start": asdict(Sliders()),
    }
    return asset("playground.html").replace("{settings}", json.dumps(settings).replace("<", r"\u003c"))


class Handler(BaseHTTPRequestHandler):
    """Answers this machine's browser, and no page that another site has given it."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        port = self.server.server_address[1]  # type: ignore[index]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self.reply(403, "this page answers to its own address alone")
        elif address.path == "/":
            self.reply(200, front())
        elif address.path == "/page":
            try:
                self.reply(200, answer(dict(parse_qsl(address.query))))
            except ZbfxError as error:
                self.reply(200, f"<!doctype html><title>refused</title><p>{escape(str(error))}</p>")
        else:
            self.reply(404, "there is / and /page")

    def reply(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # the reader has moved a slider on
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal stays as it is."""


def server(port: int) -> ThreadingHTTPServer:
    """Listens on the loopback; port 0 is any that is free. Raises `ZbfxError` where it cannot."""
    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports go to 65535"
        raise ZbfxError(
            f"cannot serve on port {port}: {reason}. Name another with --port; 0 is any free one"
        ) from error
