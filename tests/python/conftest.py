"""Shared fixtures: devices, and seeds of random numbers.

A test with the fixture `device` runs on the CPU, and again, marked `gpu`, if PyTorch and the library can use a GPU.
TORCHIUM_TEST_SEED, as in the C tests, changes all numbers; the word `random` draws a seed, which pytest prints in its
header.
"""

import functools
import gc
import importlib.util
import os
import random
import zlib

import pytest

ASKED = os.environ.get("TORCHIUM_TEST_SEED", "1")
SEED = random.SystemRandom().randrange(2**31) if ASKED == "random" else int(ASKED)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: wants a GPU")


def pytest_ignore_collect(collection_path):
    """Files that import PyTorch are skipped if it is missing."""
    if collection_path.suffix == ".py" and importlib.util.find_spec("torch") is None:
        return "\nimport torch\n" in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_finish():
    """Leaves what is loaded out of later garbage collections: PyTorch's objects would take 0.15 s of each."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config):
    return f"TORCHIUM_TEST_SEED={SEED}"


@functools.cache
def why_no_gpu():
    """The reason why tests cannot use a GPU, or None."""
    torch = pytest.importorskip("torch")
    from torchium import _C

    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if _C.device_count("cuda") == 0:
        return next(b["reason"] for b in _C.backends() if b["name"] == "cuda")
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and why_no_gpu() is not None:
        pytest.skip(why_no_gpu())
    return request.param


@pytest.fixture(autouse=True, scope="session")
def kernel_cache(tmp_path_factory):
    """Kernels are cached in the build folder, if ctest sets one, instead of the user's."""
    if "TORCHIUM_CACHE" not in os.environ:
        os.environ["TORCHIUM_CACHE"] = str(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def gpu():
    """For tests of GPUs, marked so."""
    if why_no_gpu() is not None:
        pytest.skip(why_no_gpu())
    return "cuda"


def pytest_generate_tests(metafunc):
    """A test with `kind`, and without its own list, runs with every optimizer of parameters."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "kind" in metafunc.fixturenames and not any("kind" in mark.args[0] for mark in marks):
        from optim_cases import KINDS

        metafunc.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fresh_numbers(request):
    """Seeds every generator by the run, the file and the test, so that a single test repeats its numbers.

    The folder is ignored: a test that moves to another one keeps its numbers.
    """
    name = f"tests/python/{request.node.path.name}::{request.node.nodeid.partition('::')[2]}"
    seed = (SEED + zlib.crc32(name.encode())) % 2**31
    random.seed(seed)
    for name in ("numpy", "torch"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        (module.random.seed if name == "numpy" else module.manual_seed)(seed)


@pytest.fixture
def one_thread():
    """For small tensors: threads would only synchronize."""
    import torch
    from torchium import _C

    before = torch.get_num_threads(), _C.get_num_threads()
    torch.set_num_threads(1)
    _C.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    _C.set_num_threads(before[1])
