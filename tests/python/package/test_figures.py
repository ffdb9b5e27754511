"""The numbers that pages show are those of bench/results: bench/page_figures.py compares them."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("page_figures", ROOT / "bench" / "page_figures.py")
page_figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(page_figures)

PAGE = """# A page

| a step of | model | ours, ms | beside it, ms | times |
|---|---|---|---|---|
| AdamW | GPT-2 | 0.590 | 0.724 (torch fused) | **1.2** |
| Muon | GPT-2 | 2.28 | 20.9 | 9.2 |

<!-- figures: steps rows
| | | ours_ms | anchors_ms.~ | anchors_ms.~ / ours_ms |
each {0} step @ {1}
-->

Looking takes 0.69 ms, and steps 0.6 to 2.3.

<!-- figures: steps rows
0.69 = AdamW step @ GPT-2 -> with_check_ms
0.6 = min GPT-2 -> ours_ms
2.3 = max GPT-2 -> ours_ms
-->
"""
ROWS = [
    {"work": "AdamW step", "size": "GPT-2", "ours_ms": 0.58963, "anchors_ms": {"fused": 0.72419, "foreach": 2.0241},
     "with_check_ms": 0.69421},
    {"work": "Muon step", "size": "GPT-2", "ours_ms": 2.2778, "anchors_ms": {"torch Muon": 20.855}},
]  # fmt: skip


@pytest.mark.parametrize("path", page_figures.pages(), ids=page_figures.name_of)
def test_numbers_of_a_page_are_those_that_were_measured(path):
    text = path.read_text(encoding="utf-8")
    assert list(page_figures.problems(text, page_figures.name_of(path) in page_figures.PAGES)) == []


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "steps.json").write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(page_figures, "ROOT", tmp_path)


def test_right_numbers_are_accepted(results):
    assert list(page_figures.problems(PAGE, whole=True)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("0.590", "0.591", "0.591 stands there, 0.58963 was measured"),
        ("0.724 (torch", "0.734 (torch", "0.734 stands there"),
        ("**1.2**", "**1.3**", "1.3 stands there"),
        ("| 2.28 | 20.9 |", "| 2.28 | |", "no number in the cell"),
        ("takes 0.69 ms", "takes 0.68 ms", "0.69 is not in the text above"),
        ("0.69 = AdamW step @ GPT-2 -> with_check_ms", "0.69 = AdamW step @ GPT-3 -> with_check_ms", "no row is"),
        ("2.3 = max", "2.3 = min", "2.3 stands there, 0.58963 was measured"),
        ("2.3 = max GPT-2", "2.3 = GPT-2", "2 rows are"),
        ("each {0} step", "{0} step", "more rows than the comment"),
        ("-> with_check_ms", "-> without_check_ms", "has no 'without_check_ms'"),
        ("figures: steps rows\n|", "figures: other rows\n|", "there is no bench/results/other.json"),
    ],
)
def test_wrong_numbers_and_comments_are_noticed(results, right, wrong, why):
    assert right in PAGE
    assert any(why in problem for problem in page_figures.problems(PAGE.replace(right, wrong), whole=True))


def test_a_table_without_a_source_is_noticed(results):
    bare = re.sub(r"<!-- figures.*?-->\n", "", PAGE, count=1, flags=re.DOTALL)
    assert any("does not say where" in problem for problem in page_figures.problems(bare, whole=True))
    assert not any("does not say where" in problem for problem in page_figures.problems(bare))


@pytest.mark.parametrize("path", page_figures.pages(), ids=page_figures.name_of)
def test_another_measurement_would_be_noticed(path, monkeypatch):
    """Every measured number a tenth larger: no comment of the pages is without effect."""
    measured = page_figures.measured
    monkeypatch.setattr(page_figures, "measured", lambda *place: 1.1 * measured(*place))
    for text, comment in page_figures.texts(path.read_text(encoding="utf-8")):
        if comment and not comment.startswith("none,"):
            assert list(page_figures.check(comment, text)), comment
