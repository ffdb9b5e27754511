"""The numbers that pages show are those of bench/results: bench/page_figures.py compares them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("page_figures", ROOT / "bench" / "page_figures.py")
page_figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(page_figures)


@pytest.mark.parametrize("path", page_figures.pages(), ids=page_figures.name_of)
def test_numbers_of_a_page_are_those_that_were_measured(path):
    text = path.read_text(encoding="utf-8")
    assert list(page_figures.problems(text, page_figures.name_of(path) in page_figures.PAGES)) == []


def test_a_table_without_a_source_is_noticed():
    table = "| a step of | ours, ms |\n|---|---|\n| AdamW | 0.590 |\n"
    assert any("does not say where" in problem for problem in page_figures.problems(table, whole=True))


@pytest.mark.parametrize("path", page_figures.pages(), ids=page_figures.name_of)
def test_another_measurement_would_be_noticed(path, monkeypatch):
    """Every measured number a tenth larger: no comment of the pages is without effect."""
    measured = page_figures.measured
    monkeypatch.setattr(page_figures, "measured", lambda *place: 1.1 * measured(*place))
    for text, comment in page_figures.texts(path.read_text(encoding="utf-8")):
        if comment and not comment.startswith("none,"):
            assert list(page_figures.check(comment, text)), comment
