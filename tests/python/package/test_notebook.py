"""Runs the notebooks of examples/notebooks, cell after cell in one namespace as a kernel does, and sees that they are
kept without outputs, so that a change of one is a change of its text."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_is_one():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch, one_thread, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = {"__name__": "__main__"}
    for number, cell in enumerate(read(path)):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
    assert "at the end" in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_has_no_outputs(path):
    for cell in read(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None
