"""Which OpenBLAS is taken, and how it lives beside those of NumPy, SciPy and PyTorch. OpenBLAS is opened once in a
process, so every case is a process of its own; only those that are about PyTorch load it, which takes seconds."""

import os
import subprocess
import sys

import pytest
from torchium import _openblas

FILE = os.fsdecode(_openblas.find() or "")
needs_pip_s = pytest.mark.skipif(not FILE, reason="scipy-openblas32 is not installed here")

DETAILS = "from torchium import _C; b = _C.backends()[0]; print(b['details'] if b['available'] else b['reason'])"


def run(*arguments, **variables):
    """What a new Python prints; `variables` are added to its environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHIUM_BLAS", "OPENBLAS_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment | variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def package(folder, content):
    """A package scipy_openblas32 in a folder, with something in place of the library."""
    library = folder / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
    library.parent.mkdir(parents=True)
    (folder / "scipy_openblas32" / "__init__.py").touch()
    library.write_bytes(content)
    return library


# --- which one --------------------------------------------------------------------------------------------------------


@needs_pip_s
def test_pip_s_comes_before_the_system_s():
    details = run("-c", DETAILS)
    assert details.startswith(f"{FILE} (OpenBLAS 0.3.") and "pip's scipy-openblas32" in details
    assert "one thread" in details  # it has a pool of its own, which is kept out of ours


@needs_pip_s
def test_variable_comes_first(tmp_path):
    other = tmp_path / "libmine.so"
    other.symlink_to(FILE)
    details = run("-c", DETAILS, TORCHIUM_BLAS=str(other))
    assert details.startswith(f"{other} (") and "TORCHIUM_BLAS" in details


def test_a_damaged_file_is_passed_over(tmp_path):
    """Whether the system has another or not, the reason is there to be read."""
    library = package(tmp_path, b"not a library")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = run("-c", DETAILS, PYTHONPATH=path)
    assert f"{library} was passed over: " in said or f"tried {library}: " in said, said
    assert "too short" in said or "ELF" in said, said


def test_a_variable_that_names_nothing_usable(tmp_path):
    """No other is tried, and the message says what to do."""
    code = """
import numpy as np, torchium
try:
    torchium.linalg.gram(np.eye(3))
except RuntimeError as error:
    print(error)
"""
    said = run("-c", code, TORCHIUM_BLAS="/no/such/libopenblas.so")
    assert "TORCHIUM_BLAS names, /no/such/libopenblas.so: no such file" in said and "unset the variable" in said


def test_looking_does_not_load(tmp_path, monkeypatch):
    library = package(tmp_path, b"")
    (tmp_path / "scipy_openblas32" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scipy_openblas32", raising=False)
    assert _openblas.find() == os.fsencode(library)


def test_a_module_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "scipy_openblas32.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scipy_openblas32", raising=False)
    assert _openblas.find() is None


# --- beside others ----------------------------------------------------------------------------------------------------

# Sizes are large enough that every thread gets a part. Bounds are some ten times the errors of float32 and float64 sums
# of 400 to 500 terms: elements are below 5, those of the Gram matrix below 700.
BESIDE = """
import ctypes, importlib.util, os, sys, threading, time
from pathlib import Path

def use_torchium():
    import numpy as np
    from torchium import linalg
    assert np.allclose(linalg.gram(np.eye(300)), np.eye(300))

for name in sys.argv[1:]:
    if name == "torchium":
        use_torchium()
    elif importlib.util.find_spec(name):
        importlib.import_module("scipy.linalg" if name == "scipy" else name)

import numpy as np
import torch
from torchium import linalg

def numpy_s_threads():
    "The count of NumPy's own OpenBLAS, where it has one that can be asked."
    files = Path(np.__file__).parent.parent.glob("numpy.libs/libscipy_openblas*")
    asked = [getattr(ctypes.CDLL(str(f)), "scipy_openblas_get_num_threads64_", None) for f in files]
    return [count() for count in asked if count]

def counts():
    return torch.get_num_threads(), numpy_s_threads()

before = counts()
random = np.random.default_rng(1)
x = random.standard_normal((400, 500))
a = x @ x.T / 500 + np.eye(400)
values, vectors = np.linalg.eigh(a)
root = vectors * values ** -0.25 @ vectors.T

def check(a=a):
    single = a.astype(np.float32)
    assert abs(linalg.matmul(single, single) - a @ a).max() < 1e-4
    assert abs(linalg.gram(x.astype(np.float32)) - x @ x.T).max() < 1e-3
    assert abs(linalg.matrix_power(a, -0.25) - root).max() < 1e-11
    assert abs(linalg.inverse_root(torch.from_numpy(single), 4).numpy() - root).max() < 1e-3

check()
assert counts() == before, (before, counts())
assert torch.allclose(torch.from_numpy(a) @ torch.from_numpy(root), torch.from_numpy(a @ root), atol=1e-10)
try:
    import scipy.linalg
    assert abs(scipy.linalg.cholesky(a, lower=True) - np.linalg.cholesky(a)).max() < 1e-12
except ImportError:
    pass

failures = []
def work():
    try:
        for _ in range(3):
            assert abs(linalg.matmul(a, a) - a @ a).max() < 1e-10
            assert abs(linalg.matrix_power(a, -0.25) - root).max() < 1e-11
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures

child = os.fork()  # computes on one thread: GNU's OpenMP runtime does not start others after a fork
if child == 0:
    fine = abs(linalg.matrix_power(a, -0.25) - root).max() < 1e-11
    os._exit(0 if fine else 1)
end = time.monotonic() + 30
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    if time.monotonic() > end:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.01)
assert ended[1] == 0, ended
check()  # the parent goes on as before
assert counts() == before, (before, counts())
print("fine")
"""


@pytest.mark.parametrize("order", ["torch numpy scipy torchium", "torchium scipy numpy torch"])
def test_beside_others(order, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    program = tmp_path / "beside.py"
    program.write_text(BESIDE)
    assert run(str(program), *order.split()) == "fine"
