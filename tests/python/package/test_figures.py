"""The numbers on pages equal those of bench/results: bench/page_figures.py compares them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("page_figures", ROOT / "bench" / "page_figures.py")
page_figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(page_figures)
PAGES = {name: page for name, *page in page_figures.pages()}


@pytest.mark.parametrize("name", PAGES)
def test_numbers_of_a_page_are_those_that_were_measured(name):
    assert list(page_figures.problems(*PAGES[name])) == []


def test_a_table_without_a_source_is_noticed():
    page = "# Steps\n\n| a step of | ours, ms |\n|---|---|\n| AdamW | 0.590 |\n"
    assert any("does not say where" in problem for problem in page_figures.problems(page, "", whole=True))


@pytest.mark.parametrize("name", PAGES)
def test_another_measurement_would_be_noticed(name, monkeypatch):
    """Every measured number 10 % larger: each one affects a page's figures."""
    measured = page_figures.measured
    monkeypatch.setattr(page_figures, "measured", lambda *place: 1.1 * measured(*place))
    page, figures, _ = PAGES[name]
    for lines, text in page_figures.blocks(page_figures.sections(page), figures):
        if not lines[0].startswith("none,"):
            assert list(page_figures.check(lines, text)), lines
