"""The notebook runs from top to bottom, and has no outputs in the repository."""

from __future__ import annotations

import json
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "five_minutes.ipynb"


def test_cells_run_in_order(capsys) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "host    optimizer_states" in shown and "Stage 3 on 1 rank" in shown and "Bound by" in shown
