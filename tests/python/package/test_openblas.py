"""pip's OpenBLAS is used (test_openblas.c tests the search), together with those of NumPy, SciPy and PyTorch. OpenBLAS
is loaded once per process, so every case is a separate process."""

import os
import sys

import pytest
from processes import run_python
from torchium import _openblas

FILE = os.fsdecode(_openblas.find() or "")
needs_pip_s = pytest.mark.skipif(not FILE, reason="scipy-openblas32 is not installed here")

DETAILS = "from torchium import _C; b = _C.backends()[0]; print(b['details'] if b['available'] else b['reason'])"


def run(*arguments, **variables):
    """The output of a new Python; `variables` are added to its environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHIUM_BLAS", "OPENBLAS_NUM_THREADS")}
    return run_python(*arguments, env=environment | variables)


# --- which one --------------------------------------------------------------------------------------------------------


@needs_pip_s
def test_pip_s_comes_before_the_system_s():
    details = run("-c", DETAILS)
    assert details.startswith(f"{FILE} (OpenBLAS 0.3.") and "pip's scipy-openblas32" in details
    assert "one thread" in details  # it has its own pool, separate from the library's


def test_looking_does_not_load(tmp_path, monkeypatch):
    library = tmp_path / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "scipy_openblas32" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scipy_openblas32", raising=False)
    assert _openblas.find() == os.fsencode(library)


def test_a_module_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "scipy_openblas32.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scipy_openblas32", raising=False)
    assert _openblas.find() is None


# --- with other libraries ---------------------------------------------------------------------------------------------

# Sizes are large enough to occupy every thread. Bounds are about ten times the errors of float32 and float64 sums of
# 400 to 500 terms: elements are below 5.
BESIDE = """
import importlib.util, os, sys, threading

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

threads = torch.get_num_threads()
x = np.random.default_rng(1).standard_normal((400, 500))
a = x @ x.T / 500 + np.eye(400)
values, vectors = np.linalg.eigh(a)
root = vectors * values ** -0.25 @ vectors.T
failures = []

def check():
    try:
        single = a.astype(np.float32)
        assert abs(linalg.matmul(single, single) - a @ a).max() < 1e-4
        assert abs(linalg.matrix_power(a, -0.25) - root).max() < 1e-11
        assert abs(linalg.inverse_root(torch.from_numpy(single), 4).numpy() - root).max() < 1e-3
        assert torch.allclose(torch.from_numpy(a) @ torch.from_numpy(root), torch.from_numpy(a @ root), atol=1e-10)
    except BaseException as error:
        failures.append(error)

check()
at_once = [threading.Thread(target=check) for _ in range(2)]
for thread in at_once: thread.start()
for thread in at_once: thread.join()
child = os.fork()  # computes on one thread: GNU's OpenMP runtime does not start others after a fork
if child == 0:
    os._exit(0 if abs(linalg.matrix_power(a, -0.25) - root).max() < 1e-11 else 1)
assert os.waitpid(child, 0)[1] == 0
check()  # the parent goes on as before
assert not failures, failures
assert torch.get_num_threads() == threads
print("fine")
"""


@pytest.mark.parametrize("order", ["torch numpy scipy torchium", "torchium scipy numpy torch"])
def test_beside_others(order, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    program = tmp_path / "beside.py"
    program.write_text(BESIDE)
    assert run(str(program), *order.split()) == "fine"
