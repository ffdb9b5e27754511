"""Runs the Python code of the documentation: the blocks of a page one after the other, in one namespace, in an empty
folder. Words after "```python" are what a block needs, a module or "gpu": where that is missing, it is left out. A word
with a dot, in any language, is a file of examples/python that the block is an excerpt of: it is compared, not run, and
the file is in the folder. Blocks "```diff python" are the code before and after a change: after it they are part of the
page, before it they are run one by one, where the modules that follow are installed. The table of memory is compared
with what its script prints.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "python"
PAGES = [ROOT / "README.md", *sorted(FOLDER.glob("*.md"))]
EXAMPLES = ROOT / "examples" / "python"
BLOCK = re.compile(r"^```(diff )?python((?: [^.\s]+)*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^```\w+ (\w+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def one_thread():
    """Everything here is small, and threads that wait for each other on a busy machine are slow."""
    from torchium import _C

    before = torch.get_num_threads(), _C.get_num_threads()
    torch.set_num_threads(1)
    _C.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    _C.set_num_threads(before[1])


class Block:
    """A block of a page: what it needs, and its code behind as many empty lines as put it on its line of the page."""

    def __init__(self, text, match):
        self.is_diff, self.needs = bool(match[1]), match[2].split()
        self.lines = [""] * (text[: match.start()].count("\n") + 1) + match[3].splitlines()

    def code(self, side="+"):
        if not self.is_diff:
            return "\n".join(self.lines)
        kept = [line[1:] if line[:1] in (" ", side) else "" for line in self.lines]
        return "\n".join(kept)

    def missing(self, *present):
        return [need for need in self.needs if need not in present and importlib.util.find_spec(need) is None]

    def runs(self, *present):
        """After a change, what was needed before it is needed no more, unless it is still mentioned."""
        needed = [need for need in self.missing(*present) if not self.is_diff or need in self.code()]
        return not needed


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [Block(text, match) for match in BLOCK.finditer(text)]


def run(page, *present, before=None):
    """Runs the blocks of a page for which there is everything they need, in the current folder; with `before` the
    blocks without changes, and that one as it was before its change."""
    names = {"__name__": page.stem}
    for file, _ in EXCERPT.findall(page.read_text(encoding="utf-8")):
        shutil.copy(EXAMPLES / file, file)
    for number, block in enumerate(blocks(page)):
        if before is None:
            wanted = block.runs(*present)
        else:
            wanted = number == before or not (block.is_diff or block.missing(*present))
        if wanted:
            exec(compile(block.code("-" if number == before else "+"), str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


CHANGES = [(page, i) for page in PAGES for i, block in enumerate(blocks(page)) if block.is_diff]


@pytest.mark.parametrize(("page", "number"), CHANGES, ids=lambda value: getattr(value, "name", value))
def test_code_before_a_change_runs(page, number, tmp_path, monkeypatch):
    missing = blocks(page)[number].missing()
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    monkeypatch.chdir(tmp_path)
    run(page, before=number)


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs_on_a_gpu(page, tmp_path, monkeypatch):
    """The blocks that want one too; and the others, which take a GPU where there is one."""
    from torchium import is_available

    if not (torch.cuda.is_available() and is_available("cuda")):
        pytest.skip("no GPU")
    monkeypatch.chdir(tmp_path)
    run(page, "gpu")


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.name)
def test_a_page_has_code(page):
    assert any(not block.needs for block in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_excerpts_are_of_their_files(page):
    for file, excerpt in EXCERPT.findall(page.read_text(encoding="utf-8")):
        assert excerpt in (EXAMPLES / file).read_text(encoding="utf-8"), f"{page.name} shows another {file}"


def test_table_of_memory_is_what_its_script_prints():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(FOLDER / "memory_table.py"), run_name="__main__")
    page = (FOLDER / "performance.md").read_text(encoding="utf-8")
    missing = [row for row in printed.getvalue().splitlines() if row not in page]
    assert not missing
