"""Runs every file of examples/python, with settings small enough for a test.

Training examples run inside this process, like scripts, because importing PyTorch takes longer than training.
"""

import hashlib
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from processes import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "python"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
TINY_GPT = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4", "--sample", "5"]


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs an example like `python NAME ARGUMENTS`, and returns its output."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def table(output: str) -> dict[str, list[str]]:
    """The rows of the comparison's table by optimizer."""
    rows = (line.split() for line in output.splitlines())
    names = ("adamw", "muon", "soap", "shampoo", "kfac", "ekfac", "natural")
    return {row[0]: row[1:] for row in rows if len(row) > 8 and row[0] in names}


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_what_it_shows(name):
    head = (FOLDER / name).read_text(encoding="utf-8").split('"""')
    assert head[0] == "" and len(head[1]) > 60
    assert name in head[1] or name in ("compare.py", "digits.py", "distributed_run.py", "grammar.py")


# --- char_gpt.py, kfac.py --------------------------------------------------------------------------------------------


def test_char_gpt_learns_with_every_optimizer(script, device, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat.\n" * 60)
    output = script("char_gpt.py", *TINY_GPT, "--device", device, "--text", str(text), "--steps", "60")
    rows = table(output)
    assert list(rows) == ["shampoo", "soap", "muon", "adamw"]
    letters = len(set(text.read_text()))
    for name, row in rows.items():
        assert row[1] == "60"
        assert float(row[2]) < 0.8 * math.log(letters), f"{name} has not learnt"
    assert output.count("writes:") == 4


def test_char_gpt_on_the_grammar(script):
    output = script("char_gpt.py", *TINY_GPT, "--steps", "2", "--optimizers", "muon", "--lr", "muon=0.01")
    assert table(output)["muon"][0] == "0.01"
    assert re.search(r"muon +step +0, held-out loss \d", output), "a run without a terminal shows its progress"


@pytest.mark.parametrize("arguments", [["--optimizers", "adam"], ["--lr", "adan=1"], ["--steps", "0"]])
def test_wrong_options_are_refused(script, arguments):
    with pytest.raises(SystemExit, match=arguments[1].partition("=")[0]):
        script("char_gpt.py", *TINY_GPT, *arguments)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_char_gpt_in_every_precision(script, device, precision):
    output = script("char_gpt.py", *TINY_GPT, "--device", device, "--precision", precision, "--steps", "12")
    rows = table(output)
    assert list(rows) == ["shampoo", "soap", "muon", "adamw"]
    assert all(math.isfinite(float(row[2])) for row in rows.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kfac(script, device, precision):
    rows = table(script("kfac.py", "--quick", "--device", device, "--precision", precision))
    assert list(rows) == ["kfac", "ekfac", "natural", "adamw"]
    assert all(math.isfinite(float(row[2])) for row in rows.values())


def test_the_grammar_keeps_its_promises():
    from grammar import NUMBERS, write

    text = write(50_000, seed=5)
    sums = re.findall(r"(\w+) and (\w+) make (\w+)\.", text)
    assert len(sums) > 20 and all(NUMBERS.index(a) + NUMBERS.index(b) == NUMBERS.index(c) for a, b, c in sums)
    names = re.findall(r'(\w+) said: "[^"]*", and (\w+) ', text)
    assert len(names) > 20 and all(a == b for a, b in names)
    assert write(50_000, seed=5) == text and write(50_000, seed=6) != text


# --- the others ------------------------------------------------------------------------------------------------------


def test_matrix_optimizer(script, device):
    output = script("matrix_optimizer.py", "--steps", "40", "--device", device)
    sgd, by_kernel, by_library = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output))
    # Roots with an error of 1e-3 at most, of which each step uses the direction.
    assert by_kernel < sgd and math.isclose(by_kernel, by_library, rel_tol=1e-2)
    assert "in use: True" in output and "rows" in output.splitlines()[-1]


@pytest.fixture
def extensions(monkeypatch):
    """C++ extensions are built in one folder: a second library with the operators of the first aborts the process."""
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    if shutil.which(os.environ.get("CXX", "c++")) is None or not cpp_extension.is_ninja_available():
        pytest.skip("a C++ extension needs a compiler and ninja")
    folder = Path(os.environ["TORCHIUM_CACHE"]) / "extensions"
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))


def test_cpp_extension(script, device, extensions, recwarn):
    output = script("cpp_extension.py", "--rows", "24", "--cols", "50", "--repeats", "1", "--device", device)
    rows = dict(re.findall(r"^(\S.*?)  +error (\S+), symmetric", output, re.MULTILINE))
    assert list(rows) == ["C++ extension", "torchium.kernel", "PyTorch"]
    # A sum of 50 float32 products, each rounded: 50 times 6e-8 at most, and no TF32 in these three.
    assert all(float(error) < 3e-6 for error in rows.values()), output
    assert "in its place" not in output, [str(warning.message) for warning in recwarn]


def test_cpp_extension_falls_back(script, device, tmp_path, monkeypatch):
    """Without a compiler it falls back to PyTorch, and the program says so."""
    pytest.importorskip("torch.utils.cpp_extension")
    monkeypatch.setenv("TORCHIUM_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda **_: (_ for _ in ()).throw(RuntimeError("no ninja")))
    with pytest.warns(RuntimeWarning, match="Extension cannot be used, PyTorch stands in: no ninja"):
        output = script("cpp_extension.py", "--rows", "8", "--cols", "9", "--repeats", "1", "--device", device)
    assert re.search(r"C\+\+ extension .*in its place", output)


def test_the_extension_with_launches_compiles():
    """Compiles the whole file by nvcc, wrapper included, once: PyTorch's headers take most of a minute;
    docs/python/cuda-integration.md runs the kernel."""
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source = FOLDER / "matrix_power.cu"
    of = hashlib.sha256(torch.__version__.encode() + source.read_bytes()).hexdigest()
    out = Path(os.environ["TORCHIUM_CACHE"]) / f"matrix_power-{of}.ptx"
    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    options = ["-std=c++20", "-DTORCH_EXTENSION_NAME=matrix_power", "--expt-relaxed-constexpr"]
    options.append("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE")  # a header of PyTorch's CUDA builds only
    command = [nvcc, "-ptx", *options, *(f"-I{folder}" for folder in folders), str(source), "-o", str(out)]
    if not out.exists():
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    names = re.findall(r"\.entry \w*scale_columnsI([fd])E", out.read_text())
    assert sorted(names) == ["d", "f"]


def test_dp_sgd(script, device):
    small = ["--samples", "600", "--steps", "40", "--batch", "64", "--noise", "0.1"]
    output = script("dp_sgd.py", "--device", device, *small)
    assert float(re.search(r"^([\d.]+) % of", output, re.MULTILINE)[1]) > 25  # of ten digits


def check_learnt(said: str) -> None:
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", said).groups())
    assert last < 0.9 * first and "resumed bitwise identical" in said, said


def torchrun(_, __, size: int, arguments: list[str], folder: Path) -> None:
    """torchrun itself, in a process that has loaded PyTorch. Rank R's output is in FOLDER/RUN/attempt_0/R."""
    from torch.distributed.run import main

    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    main(["--standalone", "--nproc-per-node", str(size), "--redirects", "3", "--log-dir", str(folder), *arguments])
    os._exit(0)


def run_by_torchrun(size: int, folder: Path, *arguments: str) -> list[str]:
    """The output of every rank."""
    code = run_ranks(torchrun, 1, size, [str(FOLDER / arguments[0]), *arguments[1:]], folder)
    assert code == [0], "".join(path.read_text() for path in folder.glob("*/attempt_0/*/stderr.log"))
    return [next(folder.glob(f"*/attempt_0/{rank}/stdout.log")).read_text() for rank in range(size)]


def test_ddp_by_torchrun(tmp_path):
    said = run_by_torchrun(2, tmp_path, "ddp.py")[0]
    assert "replicas after 40 steps: 0.0" in said and "resumed bitwise identical" in said, said


BY_TORCHRUN = [(4, "fsdp.py", "--replicas", "2"), (4, "tensor_parallel.py"), (2, "experts.py")]


@pytest.mark.parametrize("run", BY_TORCHRUN, ids=lambda run: f"{run[1]}-{run[0]}")
def test_by_torchrun(run, tmp_path):
    for said in run_by_torchrun(run[0], tmp_path, *run[1:], "--steps", "40"):
        check_learnt(said)
