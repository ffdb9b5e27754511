"""`python -m torchium`: installed packages, loaded libraries, usable devices, and a test of each.

A report is a plain dict (`examine`), printed as text or JSON. Every part is examined even if another one failed:
nothing raises, and report["problems"] lists all problems with remedies.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from torchium import selftest

Report = dict[str, Any]

# The name of this package on PyPI, where the name of its folder belongs to another project.
_DISTRIBUTION = "torchium-native"
_NAMESAKE = "torchium"

# Prefixes of the file names of relevant libraries.
_LIBRARIES = (
    "libtorchium",
    "libopenblas",
    "libscipy_openblas",
    "libgomp",
    "libcuda.",
    "libcudart",
    "libcublas.",
    "libcusolver.",
    "libnvrtc.",
)
# Packages of missing libraries.
_PACKAGES = {
    "libgomp": "it comes with gcc; Debian and Ubuntu: apt-get install libgomp1",
    "libtorchium": f"the package is incomplete: install it again (pip install --force-reinstall {_DISTRIBUTION})",
}
_OPENBLAS = (
    "install OpenBLAS (pip install scipy-openblas32, or on Debian and Ubuntu apt-get install libopenblas0-openmp) or "
    "name its file in TORCHIUM_BLAS"
)
_VARIABLES = (
    "TORCHIUM_BACKEND_PATH",
    "TORCHIUM_BLAS",
    "TORCHIUM_CACHE",
    "TORCHIUM_CACHE_SIZE",
    "TORCHIUM_CPU",
    "TORCHIUM_CUBLAS",
    "TORCHIUM_CUDA_PATH",
    "TORCHIUM_CUDA_RECORD",
    "TORCHIUM_CUSOLVER",
    "TORCHIUM_CXX",
    "TORCHIUM_DEBUG_SYNC",
    "TORCHIUM_NVRTC",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OPENBLAS_CORETYPE",
)


def examine() -> Report:
    """The report as a dict of plain values; `problems` is empty if there are none."""
    report: Report = {
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "package": {"folder": str(Path(__file__).parent), "installed_version": _installed_version(_DISTRIBUTION)},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "problems": [],
    }
    _look_for_namesake(report)
    # PyTorch first, as in most programs, to share its CUDA libraries.
    report["numpy"] = _examine_numpy(report)
    report["torch"] = _examine_torch(report)
    report["library"] = _examine_library(report)
    if report["library"] is not None:
        _compare_versions(report)
        _compare_cuda(report)
        report["tests"] = _run_tests(report)
        report["kernels"] = _examine_kernels(report)
    report["loaded"] = loaded_libraries()
    return report


def loaded_libraries() -> dict[str, list[str]]:
    """The mapped files of the libraries above, by prefix."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return {}
    files = sorted({line.split(maxsplit=5)[5] for line in lines if line.count("/") > 0})
    found = {prefix.rstrip("."): [f for f in files if Path(f).name.startswith(prefix)] for prefix in _LIBRARIES}
    # PyTorch's wheels contain a renamed libgomp.
    return {name: places for name, places in found.items() if places}


def _problem(report: Report, what: str, remedy: str) -> None:
    report["problems"].append({"what": what, "remedy": remedy})


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None  # of ours: used from a build tree


def _look_for_namesake(report: Report) -> None:
    """Both distributions install into the folder torchium and overwrite each other's files."""
    ours, theirs = report["package"]["installed_version"], _installed_version(_NAMESAKE)
    if theirs is not None:
        beside = f"beside {_DISTRIBUTION} {ours}" if ours is not None else f"and {_DISTRIBUTION} is not"
        _problem(
            report,
            f"the package {_NAMESAKE} {theirs}, on PyPI another project's, is installed {beside}; both have their "
            "files in the folder torchium",
            f"remove both and install this one again: pip uninstall {_NAMESAKE} {_DISTRIBUTION}; "
            f"pip install {_DISTRIBUTION}",
        )


def _import(report: Report, name: str) -> Any:
    """A module, or None if it is not installed. An installed module that cannot be imported is a problem."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            _problem(report, f"{name} does not start: {error}", f"install {name} again")
    except Exception as error:  # an import may raise anything
        _problem(report, f"{name} does not start: {type(error).__name__}: {error}", f"install {name} again")
    return None


def _examine_numpy(report: Report) -> Report | None:
    numpy = _import(report, "numpy")
    return None if numpy is None else {"version": numpy.__version__, "file": numpy.__file__}


def _examine_torch(report: Report) -> Report | None:
    torch = _import(report, "torch")
    if torch is None:
        return None
    usable = bool(torch.cuda.is_available())
    return {
        "version": torch.__version__,
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if usable else [],
    }


def _examine_library(report: Report) -> Report | None:
    try:
        from torchium import _C
    except ImportError as error:
        remedy = next(
            (text for name, text in _PACKAGES.items() if name in str(error)), f"install {_DISTRIBUTION} again"
        )
        _problem(report, f"the extension torchium._C does not start: {error}", remedy)
        return None
    library = {
        "version": _C.version,
        "extension": _C.__file__,
        "file": str(Path(_C.library_path()).resolve()),
        "backends": _C.backends(),
        "devices": [device | {"capability": list(device["capability"])} for device in _C.devices()],
    }
    for backend in library["backends"]:
        if backend["name"] == "cpu" and not backend["available"]:
            what, _, remedy = backend["reason"].partition("; ")
            _problem(report, f"the CPU cannot be used: {what}", remedy or _OPENBLAS)
    return library


def _compare_versions(report: Report) -> None:
    installed, loaded = report["package"]["installed_version"], report["library"]["version"]
    if installed is not None and installed != loaded:
        _problem(
            report,
            f"the package is version {installed}, libtorchium is {loaded} ({report['library']['file']})",
            "another libtorchium was found first: look at LD_LIBRARY_PATH, or install torchium-native again",
        )


def _compare_cuda(report: Report) -> None:
    """Reports GPUs that PyTorch can use but Torchium cannot."""
    torch = report["torch"]
    cuda = next((b for b in report["library"]["backends"] if b["name"] == "cuda"), None)
    if torch is None or not torch["gpus"] or (cuda is not None and cuda["available"]):
        return
    if torch["hip"]:
        return  # an AMD GPU, which PyTorch calls cuda as well
    reason = cuda["reason"] if cuda is not None else "this build knows no CUDA module"
    what, _, remedy = reason.partition("; ")
    _problem(report, f"PyTorch uses {torch['gpus'][0]} and Torchium does not: {what}", remedy)


def _examine_kernels(report: Report) -> Report:
    """Whether custom kernels can be compiled, and their cache. They are optional, so a missing compiler is not a
    problem."""
    from torchium import _C

    def answer(ask: Any) -> str:
        try:
            return ask()
        except Exception as error:
            return f"no: {error}"

    def compiled(device: str) -> str:
        source = "__global__ void nothing(float *x) {}"
        _C.Kernel(device, source, None, "nothing", (), (), True)
        return "compiled"

    names = [device["device"] for device in report["library"]["devices"]]
    return {name: answer(lambda name=name: compiled(name)) for name in names} | {
        "cache": answer(_C.kernel_cache_folder)
    }


def _run_tests(report: Report) -> list[Report]:
    tests = selftest.run(numpy=report["numpy"] is not None, torch=report["torch"] is not None)
    for test in tests:
        if test["passed"] is False:
            _problem(report, f"self-test on {test['device']}, {test['name']}: {test['result']}", "please report this")
    return tests
