"""What the Python tests share: the devices they run on, and the seed of their random numbers.

A test that takes the fixture `device` runs on the CPU, and once more, marked `gpu`, where a GPU can be used by PyTorch
and by the library. TORCHIUM_TEST_SEED, as for the tests in C, changes all numbers; the word `random` draws a seed,
which pytest prints at its head.
"""

import functools
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
    """Files that import PyTorch at their beginning are left out where it is missing."""
    if collection_path.suffix == ".py" and importlib.util.find_spec("torch") is None:
        return "\nimport torch\n" in collection_path.read_text(encoding="utf-8") or None
    return None


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
    """Kernels are kept in the folder of the build, where ctest names one, and stay out of the user's."""
    if "TORCHIUM_CACHE" not in os.environ:
        os.environ["TORCHIUM_CACHE"] = str(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def gpu():
    """For a test that is about GPUs, and marked so."""
    if why_no_gpu() is not None:
        pytest.skip(why_no_gpu())
    return "cuda"


def pytest_generate_tests(metafunc):
    """A test that takes `kind`, and has no list of its own, runs with every optimizer that takes parameters."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "kind" in metafunc.fixturenames and not any("kind" in mark.args[0] for mark in marks):
        from optim_cases import KINDS

        metafunc.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fresh_numbers(request):
    """Seeds every generator by the run, the file and the test, so that one test alone repeats what it did among others.

    The chapter is left out: a test that moves to another folder keeps its numbers."""
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
    """For what is small: threads would only wait for each other."""
    import torch
    from torchium import _C

    before = torch.get_num_threads(), _C.get_num_threads()
    torch.set_num_threads(1)
    _C.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    _C.set_num_threads(before[1])
