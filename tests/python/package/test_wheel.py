"""The installed package: a wheel in a new virtual environment, without PyTorch, then with it.

The wheel is built from the source distribution, without CUDA, unoptimized, in folders that are kept, so that a second
run recompiles only changes. TORCHIUM_TEST_SITE is a folder with an installed package to test instead, if no wheel can
be built.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILD = Path(os.environ.get("TORCHIUM_WHEEL_BUILD", ROOT / "build" / "wheel"))
SITE = os.environ.get("TORCHIUM_TEST_SITE")
PACKAGES = Path(sysconfig.get_path("purelib"))

pytestmark = pytest.mark.skipif(
    SITE is None and importlib.util.find_spec("scikit_build_core") is None, reason="scikit-build-core is not installed"
)
needs_wheel = pytest.mark.skipif(SITE is not None, reason="a package that was installed without a wheel")


def run(*command, env=None, status=0, cwd=None):
    """The standard output of a program that exits with `status`, without environment variables that select another
    torchium or libtorchium than the installed one."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")}
    command = [str(word) for word in command]
    done = subprocess.run(command, env=clean | (env or {}), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == status, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(folder)!r}))"
    return folder / run(sys.executable, "-c", code, cwd=ROOT).split()[-1]


def unpack(archive, folder):
    """Extracts an sdist to `folder`. An unchanged file keeps its time, and so its object file."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.isfile():
                path = folder.joinpath(*Path(member.name).parts[1:])
                text = tar.extractfile(member).read()
                if not path.is_file() or path.read_bytes() != text:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(text)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    unpack(sdist, BUILD / "source")
    run(
        sys.executable, "-m", "pip", "wheel", BUILD / "source", "--no-build-isolation", "--no-deps", "--no-index",
        "-w", folder, "-C", "cmake.define.TORCHIUM_CUDA=OFF", "-C", "cmake.build-type=Debug",
        "-C", f"build-dir={BUILD / 'objects'}",
    )  # fmt: skip
    (file,) = folder.glob("*.whl")
    return file


class Environment:
    """A virtual environment with torchium in it, sharing only these other packages."""

    def __init__(self, folder):
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin" / "python"
        self.site = Path(self.ask("import sysconfig; print(sysconfig.get_path('purelib'))"))

    def ask(self, code, **options):
        return run(self.python, "-c", code, **options).strip()

    def share(self, *names):
        for name in names:
            if (PACKAGES / name).exists():
                (self.site / name).symlink_to(PACKAGES / name)

    def share_everything(self):
        (self.site / "shared.pth").write_text(f"{PACKAGES}\n")


def installed(folder, request):
    environment = Environment(folder)
    if SITE is None:
        wheel = request.getfixturevalue("wheel")
        run(sys.executable, "-m", "pip", "--python", environment.python, "install", "--no-deps", "--no-index", wheel)
    else:
        (environment.site / "site.pth").write_text(f"{Path(SITE).resolve()}\n")
    return environment


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory, request):
    environment = installed(tmp_path_factory.mktemp("without_torch"), request)
    environment.share("numpy", "numpy.libs")
    return environment


@pytest.fixture(scope="module")
def beside_torch(tmp_path_factory, request):
    pytest.importorskip("torch")
    environment = installed(tmp_path_factory.mktemp("beside_torch"), request)
    environment.share_everything()
    return environment


@needs_wheel
def test_one_wheel_for_all_pythons(wheel):
    version = next(
        line.split('"')[1]
        for line in (ROOT / "include/torchium/version.h").read_text().splitlines()
        if line.startswith("#define TCH_VERSION_STRING")
    )
    assert wheel.name == f"torchium_native-{version}-cp310-abi3-linux_{os.uname().machine}.whl"


@needs_wheel
def test_wheel_holds_the_package_and_the_library(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "_C.abi3.so", "_C.pyi", "__init__.py", "py.typed", "bin/torchium", "lib/libtorchium.so",
        "include/torchium/torchium.h", "lib/cmake/torchium/torchium-config.cmake", "lib/pkgconfig/torchium.pc",
    ):  # fmt: skip
        assert f"torchium/{name}" in names
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python/torchium").rglob("*.py")}
    assert sources <= names
    headers = {f"torchium/include/torchium/{p.name}" for p in (ROOT / "include/torchium").glob("*.h")}
    assert headers <= names
    assert not [name for name in names if "__pycache__" in name or name.split("/")[0] not in top_folders(wheel)]


def top_folders(wheel):
    name, version, *_ = wheel.name.split("-")
    return "torchium", f"{name}-{version}.dist-info"


@needs_wheel
def test_libraries_are_looked_for_beside_the_package(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    run(sys.executable, ROOT / "tests" / "package" / "test_runpaths.py", tmp_path, BUILD / "objects")


@needs_wheel
def test_source_distribution_holds_what_is_needed(sdist):
    with tarfile.open(sdist) as archive:
        paths = [Path(*Path(member).parts[1:]) for member in archive.getnames()]
    assert {p.parts[0] for p in paths} == {
        "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "cli", "cmake", "include", "pyproject.toml", "python",
        "src",
    }  # fmt: skip
    assert not [p for p in paths if p.suffix in (".so", ".pyc", ".o")]


def test_import_loads_no_torch_and_no_library(without_torch):
    code = "import torchium, sys; print([m for m in sys.modules if m in ('torch', 'numpy', 'torchium._C')])"
    assert without_torch.ask(code) == "[]"


def test_libraries_are_those_of_the_package(without_torch):
    code = "import torchium, torchium._C as c; print(c.__file__, c.library_path(), torchium.__version__, sep='\\n')"
    extension, library, version = without_torch.ask(code).splitlines()
    assert Path(library).resolve().is_relative_to(Path(extension).resolve().parent / "lib")
    if SITE is None:
        assert Path(extension).is_relative_to(without_torch.site / "torchium")
        code = "import importlib.metadata as m; print(m.version('torchium-native'), m.requires('torchium-native'))"
        installed_version, needs = without_torch.ask(code).split(maxsplit=1)
        assert installed_version == version
        needs = [need.replace('"', "'") for need in ast.literal_eval(needs)]
        assert needs == ["scipy-openblas32>=0.3.34", "torch>=2.4; extra == 'torch'"]


SMOKE = ROOT / "tests" / "package" / "wheel_smoke.py"


def test_numpy_without_torch(without_torch):
    pytest.importorskip("numpy")
    run(without_torch.python, SMOKE, "numpy")


def test_what_needs_torch_says_so(without_torch):
    for name in ("optim", "amp", "utils.cuda_kernels"):
        code = f"try:\n    import torchium.{name}\nexcept ModuleNotFoundError as e:\n    print(e.name)"
        assert without_torch.ask(code) == "torch"


def test_doctor_without_torch(without_torch):
    report = json.loads(run(without_torch.python, "-m", "torchium", "doctor", "--json"))
    assert report["problems"] == []
    assert report["torch"] is None
    assert [test["passed"] for test in report["tests"]] == [True]
    assert Path(report["library"]["extension"]).name == "_C.abi3.so"
    text = run(without_torch.python, "-m", "torchium")
    assert "not installed: torchium.optim" in text and "Problems\n  none" in text


def test_doctor_explains_a_library_that_is_gone(without_torch, tmp_path):
    """A package whose libtorchium is missing: the doctor starts, reports it and exits with status 1."""
    folder = Path(without_torch.ask("import torchium; print(torchium.__path__[0])"))
    (tmp_path / "torchium").mkdir()
    for file in folder.iterdir():
        if file.name not in ("lib", "__pycache__"):
            (tmp_path / "torchium" / file.name).symlink_to(file)
    (tmp_path / "torchium" / "_C.abi3.so").unlink()
    (tmp_path / "torchium" / "_C.abi3.so").write_bytes((folder / "_C.abi3.so").read_bytes())
    report = json.loads(run(without_torch.python, "-m", "torchium", "--json", cwd=tmp_path, status=1))
    assert report["library"] is None
    assert "libtorchium" in report["problems"][0]["what"]
    assert "install it again" in report["problems"][0]["remedy"]


def test_a_cmake_project_uses_the_installed_library(without_torch, tmp_path):
    prefix = Path(without_torch.ask("import torchium as t; print(t.get_library_dir())")).parent
    version = without_torch.ask("import torchium as t; print(t.__version__)")
    project = ROOT / "tests" / "package" / "consumer" / "project"
    run("cmake", "-S", project, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", f"-Dwanted_version={version}")
    run("cmake", "--build", tmp_path)
    run(tmp_path / "consumer")


def test_optimizer_beside_torch(beside_torch):
    run(beside_torch.python, SMOKE, "numpy", "torch")


def test_doctor_beside_torch(beside_torch):
    # The wheel of these tests is CPU-only, which the doctor would report on a machine with a GPU.
    env = {"CUDA_VISIBLE_DEVICES": ""} if SITE is None else None
    report = json.loads(run(beside_torch.python, "-m", "torchium", "--json", env=env))
    assert report["problems"] == []
    assert report["torch"]["version"]
    assert {test["passed"] for test in report["tests"]} == {True}
    assert len(report["tests"]) >= 3
