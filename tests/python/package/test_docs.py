"""Runs the Python code of the documentation: the blocks of a page in sequence, in one namespace, in an empty folder.
Words after "```python" are requirements of a block, a module or "gpu": if one is missing, the block is skipped. A word
with a dot, in any language, is a file of examples/python that the block is an excerpt of: it is compared, not run, and
the file is copied to the folder. Blocks "```diff python" are the code before and after a change: the new code is part
of the page, the old code runs separately, if the modules that follow are installed. The memory table is compared with
its script's output.

If an indented block follows a block that prints, directly or after a line that contains "printed", it is the expected
output, compared on the CPU. Integers and words must be equal; numbers with a decimal point may differ by 10 % or by one
in the last digit, and those with an exponent, losses and errors, by a factor of three, since machines round
differently.
"""

import contextlib
import importlib
import importlib.util
import inspect
import io
import platform
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "python"
BOTH = [ROOT / "docs" / name for name in ("kernels.md", "kfac.md", "per-sample-gradients.md")]  # C and Python
GUIDES = [*sorted(FOLDER.glob("*.md")), *BOTH]
PAGES = [ROOT / "README.md", *GUIDES]
EXAMPLES = ROOT / "examples" / "python"
BLOCK = re.compile(r"^```(diff )?python((?: [^.\s]+)*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n\n(?:[^\n ][^\n]*\bprint(?:s|ed)\b[^\n]*:\n\n)?((?:    [^\n]*\n|\n(?=    ))+)")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
EXCERPT = re.compile(r"^```\w+ (\w+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block:
    """A block of a page: its requirements, its code preceded by empty lines to keep line numbers, and its expected
    output."""

    def __init__(self, text, match):
        self.is_diff, self.needs = bool(match[1]), match[2].split()
        self.lines = [""] * (text[: match.start()].count("\n") + 1) + match[3].splitlines()
        shown = OUTPUT.match(text, match.end())
        self.shown = shown[1] if shown else ""

    def code(self, side="+"):
        if not self.is_diff:
            return "\n".join(self.lines)
        kept = [line[1:] if line[:1] in (" ", side) else "" for line in self.lines]
        return "\n".join(kept)

    def missing(self, *present):
        return [need for need in self.needs if need not in present and importlib.util.find_spec(need) is None]

    def runs(self, *present):
        """After a change, earlier requirements no longer apply unless they are still mentioned."""
        needed = [need for need in self.missing(*present) if not self.is_diff or need in self.code()]
        return not needed


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [Block(text, match) for match in BLOCK.finditer(text)]


def run(page, *present, before=None):
    """Runs the blocks of a page whose requirements are met, in the current folder; with `before` the blocks without
    changes, and that one before its change."""
    names = {"__name__": page.stem}
    for file, _ in EXCERPT.findall(page.read_text(encoding="utf-8")):
        shutil.copy(EXAMPLES / file, file)
    for number, block in enumerate(blocks(page)):
        if before is None:
            wanted = block.runs(*present)
        else:
            wanted = number == before or not (block.is_diff or block.missing(*present))
        if wanted:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code("-" if number == before else "+"), str(page), "exec"), names)
            if block.shown and printed.getvalue() and before is None and not torch.cuda.is_available():
                assert different(block.shown, printed.getvalue(), platform.machine()) is None


# The pages' output is from this processor. Others round differently, which training amplifies: there only the order of
# magnitude is compared.
PRINTED_ON = "aarch64"


def different(shown, printed, machine=PRINTED_ON):
    """The difference between an output and the page's, or None."""
    near = {"e": 3, ".": 1.1} if machine == PRINTED_ON else {"e": 10, ".": 2}
    texts = [" ".join(NUMBER.sub("#", text).split()) for text in (shown, printed)]
    if texts[0] != texts[1]:
        return f"the page shows\n{shown}\nand this was printed:\n{printed}"
    for old, new in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        whole = not any(mark in old + new for mark in ".e")
        factor = 1 if whole else near["e" if "e" in old + new else "."]
        low, high = sorted((abs(float(old)), abs(float(new))))
        last = 0 if whole or "e" in old + new else 1.01 * 10.0 ** -len(old.partition(".")[2])
        if high > max(factor * low, low + last) or float(old) * float(new) < 0:
            return f"the page shows {old} where {new} was printed"
    return None


def test_outputs_are_compared():
    assert different("    loss 0.50 after 3\n", "loss 0.51 after 3\n") is None
    assert different("    {'a': 1,\n     'b': 2e-3}\n", "{'a': 1, 'b': 1.2e-03}\n") is None
    assert "shows 3 where 4" in different("    loss 0.50 after 3\n", "loss 0.50 after 4\n")
    assert "shows 0.50 where 0.60" in different("    loss 0.50\n", "loss 0.60\n")
    assert "2e-3 where 7e-3" in different("    2e-3\n", "7e-3\n")
    assert different("    2e-3\n", "7e-3\n", "x86_64") is None
    assert sum(bool(block.shown) for page in PAGES for block in blocks(page)) > 15


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
def test_code_of_a_page_runs_on_a_gpu(gpu, page, tmp_path, monkeypatch):
    """The blocks that require one too; and the others, which use a GPU if there is one."""
    monkeypatch.chdir(tmp_path)
    run(page, "gpu")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_page_has_code(page):
    assert any(not block.needs for block in blocks(page)) or page.name == "first-gpt.md"  # which has commands


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


# Options of other packages, and options of groups only.
OTHERS = [
    "affine",
    "algorithm",
    "backend",
    "batch_dims",
    "broadcast_from_rank0",
    "cpu_offload",
    "cuts",
    "enable_timing",
    "extra_include_paths",
    "flatten_optimizer_state_dict",
    "full_state_dict",
    "fullgraph",
    "grafting_config",
    "iterate_averaging_config",
    "mixed_precision",
    "offload_policy",
    "scale_grad_by_freq",
    "sparse",
    "throw_on_early_termination",
    "use_orig_params",
    "use_muon",
    "weights_only",
]
TEXTS = [*PAGES, ROOT / "docs" / "troubleshooting.md"]


def arguments_of(modules):
    """The argument names of everything public in some modules, methods included."""
    public = [getattr(module, name) for module in modules for name in module.__all__]
    methods = [method for item in public if inspect.isclass(item) for _, method in inspect.getmembers(item, callable)]
    found = set()
    for item in public + methods:
        with contextlib.suppress(TypeError, ValueError):  # what is no function, or has no signature
            found |= set(inspect.signature(item).parameters)
    return found


def test_options_in_the_text_exist():
    """`name=value` in a sentence or a table, which no sample runs."""
    modules = ("torchium", "torchium.amp", "torchium.integrations", "torchium.kernels", "torchium.linalg")
    modules = [importlib.import_module(name) for name in (*modules, "torchium.optim", "torchium.utils.cuda_kernels")]
    optim = importlib.import_module("torchium.optim")
    classes = [value for value in vars(optim).values() if hasattr(value, "_options")]
    keys = {option.name for cls in classes for option in cls._options}
    known = arguments_of(modules).union(OTHERS, keys, optim.arguments.KFACOptions.__annotations__)
    unknown = [
        (page.name, name)
        for page in TEXTS
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S))
        for name in re.findall(r"(?<![\w.-])([a-z][a-z_0-9]+)=", code)
        if name not in known
    ]
    assert unknown == []
    assert "precondition_frequency" in known and "refresh_growth" not in known


def test_signatures_have_the_defaults_of_the_classes():
    optim = importlib.import_module("torchium.optim")
    page = (FOLDER / "optimizers.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    (\w+)(\(params, .*?\))\n\n", page, flags=re.M | re.S)
    assert len(shown) >= 8
    for name, arguments in shown:
        written = {}
        exec(f"def signature{re.sub(r'(, [*])?, [.]{3}', '', arguments)}: pass", written)
        real = inspect.signature(getattr(optim, name)).parameters
        for one in inspect.signature(written["signature"]).parameters.values():
            assert real[one.name].default == one.default, f"{name}: {one}"
