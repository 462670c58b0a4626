"""What the terminal shows, as a picture: `python -m tests.project.pictures` makes docs/pictures/terminal.svg."""

from __future__ import annotations

import io
import re

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from tests.support.documents import ROOT
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import plan
from zbfx.show.text import coloured_grid

PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
WIDTH = 120
WITHOUT_NETWORK = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def terminal() -> str:
    """ZB-H1 on four ranks: F, B and W take 2, 3 and 2, a message 1, within the memory of 1F1B."""
    stage = StageCost(2, 3, 2, saved_bytes=2, weight_saved_bytes=1)
    found = plan(CostTable.chain([stage] * 4, 1), 8, schedule="zb-h1", mem_limit="1x")
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(coloured_grid(found, WIDTH), end="")
    title = "python -m zbfx show --costs costs.json --microbatches 8 --schedule zb-h1 --mem-limit 1x"
    return console.export_svg(title=title, code_format=WITHOUT_NETWORK, unique_id="zbfx")


if __name__ == "__main__":
    PICTURE.write_text(terminal())
