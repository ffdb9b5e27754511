"""The package's front end: lazy names, the factory, library information, the doctor."""

import json
from pathlib import Path

import pytest
import torch
import torchium
from processes import run_python
from torchium import __main__, doctor, factory, library, selftest

# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [("import torchium", {"torch", "numpy", "torchium._C"}), ("import torchium; torchium.linalg", {"torch"})],
)
def test_an_import_loads_nothing_more(code, unwanted):
    assert run_python("-c", f"{code}; import sys; print({unwanted} & set(sys.modules))") == "set()"


@pytest.mark.parametrize("name", ["optim", "GhostClipping"])
def test_a_missing_pytorch_is_named(name):
    code = "import sys; sys.modules['torch'] = None; import torchium\ntry:\n "
    code += f"torchium.{name}\nexcept ImportError as error:\n print(error)"
    assert f"torchium.{name} needs PyTorch" in run_python("-c", code)


@pytest.mark.parametrize("name", torchium.__all__)
def test_public_names_are_there(name):
    assert getattr(torchium, name) is not None
    assert name in dir(torchium)


def test_unknown_name():
    with pytest.raises(AttributeError, match="'torchium' has no attribute 'Shampo'"):
        torchium.Shampo  # noqa: B018


def test_version_is_the_header_s():
    header = Path(torchium.get_include(), "torchium", "version.h").read_text()
    assert f'#define TCH_VERSION_STRING "{torchium.__version__}"' in header


def test_exceptions():
    assert issubclass(torchium.NumericError, RuntimeError)
    assert issubclass(torchium.OutOfMemoryError, MemoryError)


# --- the library ------------------------------------------------------------------------------------------------------


def test_paths_for_extensions():
    """Lists, like those of torch.utils.cpp_extension, for a compiler and a linker."""
    assert all(Path(folder, "torchium", "torchium.h").is_file() for folder in torchium.include_paths())
    assert any(Path(folder, "libtorchium.so").exists() for folder in torchium.library_paths())


def test_is_available():
    assert torchium.is_available("cpu") is True
    assert torchium.is_available(torch.device("cpu")) is True
    assert torchium.is_available("cuda:1000") is False
    assert torchium.is_available() is torchium.is_available("cuda:0")


NO_DEVICES = [(word, ValueError, "device is") for word in ("", "gpu", "cuda:", "cuda:x", "cuda:-1", "meta")]
NO_DEVICES += [(x, TypeError, r"must be a str or a torch\.device") for x in (None, 3, b"cpu", torch.zeros(1))]


@pytest.mark.parametrize(("device", "error", "words"), NO_DEVICES)
def test_is_available_refuses(device, error, words):
    with pytest.raises(error, match=words):
        torchium.is_available(device)


def test_memory_report_of_pools():
    report = torchium.memory_report()
    assert report["cpu"]["total"] > 0
    assert set(torchium.memory_report(device="cpu")) == set(report["cpu"])
    with pytest.raises((ValueError, RuntimeError)):
        torchium.memory_report(device="cuda:1000")


def test_stats_of_pools_are_flat_floats():
    assert {type(value) for value in torchium.stats().values()} == {float}
    assert "cpu/allocated" in torchium.stats()


@pytest.mark.parametrize("function", [torchium.memory_report, torchium.stats])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD([torch.zeros(1)], lr=0.1), "sgd", 3])
def test_reports_refuse_other_optimizers(function, optimizer):
    with pytest.raises(TypeError, match=r"optimizer must be one of torchium\.optim"):
        function(optimizer)


def test_reports_of_an_optimizer(device):
    weight = torch.ones(6, 4, device=device, requires_grad=True)
    optimizer = torchium.create_optimizer("shampoo", [weight])
    assert torchium.memory_report(optimizer)["state"] > 0
    weight.sum().backward()
    optimizer.step()
    assert torchium.memory_report(optimizer) == optimizer.memory_report()
    assert torchium.stats(optimizer)["steps"] == 1


# --- the factory ------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A little of everything: an embedding tied to the head, a norm, a hidden matrix, a module's own parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.temperature = torch.nn.Parameter(torch.ones(()))


NAMES = ["adamw", "kl_shampoo", "lion", "muon", "normuon", "sgd", "shampoo", "soap"]
OF_MODEL = ["kfac", "natural"]


def test_list_optimizers():
    assert torchium.list_optimizers() == sorted(NAMES + OF_MODEL)
    assert torchium.list_optimizers("s*") == ["sgd", "shampoo", "soap"]
    assert torchium.list_optimizers("S?ap") == ["soap"]
    assert torchium.list_optimizers("tiger") == []
    with pytest.raises(TypeError, match="pattern must be a str"):
        torchium.list_optimizers(3)


@pytest.mark.parametrize("name", [*NAMES, "Shampoo", "SOAP", "CUDAShampoo"])
def test_create_from_parameters(name, device):
    model = Model().to(device)
    optimizer = torchium.create_optimizer(name, model.parameters(), lr=0.01)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__.lower() == name.lower().replace("_", "")
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", [*OF_MODEL, "KFAC", "NaturalGradient"])
def test_create_what_looks_at_layers(name, device):
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torchium.create_optimizer(name, model, lr=0.01)
    assert type(optimizer).__name__.lower().startswith(name.lower())
    assert torchium.memory_report(optimizer).forecast and torchium.stats(optimizer)["steps"] == 0
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        torchium.create_optimizer(name, model.parameters())
    with pytest.raises(ValueError, match="mean nothing to"):
        torchium.create_optimizer(name, model, no_decay_1d=True)


def group_of(optimizer, parameter):
    (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    return group


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_a_model(name):
    model = Model()
    optimizer = torchium.create_optimizer(name, model, weight_decay=0.1, use_adamw="embedding", no_decay_1d=True)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    assert count == len(list(model.parameters()))
    assert group_of(optimizer, model.tokens.weight).get("use_adamw", True) is True  # three have no such option
    assert group_of(optimizer, model.tokens.weight)["weight_decay"] == 0.1
    assert not group_of(optimizer, model.hidden.weight).get("use_adamw")
    assert group_of(optimizer, model.hidden.weight)["weight_decay"] == 0.1
    for vector in (model.hidden.bias, model.norm.weight, model.temperature):
        assert group_of(optimizer, vector)["weight_decay"] == 0.0


@pytest.mark.parametrize(
    "pattern",
    ["embedding", "Embedding", "tokens", "tokens.weight", "tok*", "head", torch.nn.Embedding, ["head", "tokens"]],
)
def test_patterns_find_a_shared_matrix_by_any_owner(pattern):
    model = Model()
    chosen = factory._grouped(model, factory._matching(model, factory._as_patterns(pattern)), False)
    assert [name for name, _ in chosen[True, False]] == ["tokens.weight"]


REFUSED = [
    (("muon", Model(), {"use_adamw": ("embeding",)}), ValueError, "'embeding' matches no parameter of 'Model'"),
    (("muon", list(Model().parameters()), {"use_adamw": ("embedding",)}), ValueError, "need a model"),
    (("muon", list(Model().parameters()), {"no_decay_1d": True}), ValueError, "need a model"),
    (("shampo", Model(), {}), ValueError, "name is 'shampo', expected one of .* did you mean 'shampoo'"),
    (
        ("tiger", Model(), {}),
        ValueError,
        "name is 'tiger', expected one of adamw, kfac, kl_shampoo, lion, muon, natural, normuon, sgd",
    ),
    ((None, Model(), {}), TypeError, "name must be a str, got 'NoneType'"),
    (("muon", Model(), {"use_adamw": 3}), TypeError, "use_adamw must"),
    (("muon", Model(), {"use_adamw": (3,)}), TypeError, "use_adamw must hold"),
    (("muon", torch.nn.Identity(), {}), ValueError, "without parameters"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_the_factory_refuses(arguments, error, words):
    name, model, options = arguments
    with pytest.raises(error, match=words):
        torchium.create_optimizer(name, model, **options)


# --- the doctor -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examined():
    found = doctor.examine()
    assert json.loads(json.dumps(found)) == found
    return json.dumps(found)


@pytest.fixture
def report(examined):
    return json.loads(examined)


def test_doctor_finds_all_well(report):
    assert report["problems"] == []
    assert report["library"]["version"] == torchium.__version__
    assert all(test["passed"] for test in report["tests"])
    devices = {test["device"] for test in report["tests"]}
    assert devices >= {"cpu", "cuda:0"} if torchium.is_available("cuda") else devices == {"cpu"}


def test_doctor_names_files(report):
    assert Path(report["library"]["file"]).name.startswith("libtorchium.so")
    assert any(Path(report["library"]["file"]).samefile(path) for path in report["loaded"]["libtorchium"])
    assert report["loaded"]["libgomp"]


def test_doctor_text_and_json_agree(report):
    text = __main__.text_of(report)
    assert text.startswith(f"Torchium {torchium.__version__}\n")
    assert text.endswith("Problems\n  none")
    for word in ("Devices", "Self-test", "PyTorch", report["library"]["file"], report["torch"]["version"]):
        assert word in text
    assert max(map(len, text.splitlines())) < 200


def test_doctor_tries_a_kernel(report, tmp_path, monkeypatch):
    assert report["kernels"]["cpu"] == "compiled" and Path(report["kernels"]["cache"]).is_absolute()
    monkeypatch.setenv("TORCHIUM_CXX", "/no/such/compiler")
    monkeypatch.setenv("TORCHIUM_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    found = doctor._examine_kernels(report)
    assert "TORCHIUM_CXX" in found["cpu"] and "others may write to" in found["cache"]
    assert report["problems"] == []


def test_doctor_tells_what_is_wrong(report):
    doctor._problem(report, "the moon is full", "wait")
    assert "1.            the moon is full. Wait." in __main__.text_of(report)


def test_doctor_sees_that_versions_differ(report):
    report["package"]["installed_version"] = "9.9.9"
    doctor._compare_versions(report)
    assert "9.9.9" in report["problems"][0]["what"]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes importlib.metadata find a distribution that does not exist."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def pretend(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return pretend


def test_doctor_knows_the_name_on_pypi(installed):
    installed("torchium-native", "1.2.3")
    assert doctor._installed_version(doctor._DISTRIBUTION) == "1.2.3"


@pytest.mark.parametrize("ours", [None, "1.2.3"])
def test_doctor_sees_another_project_of_that_name(installed, ours):
    installed("torchium", "0.0.9")
    report = {"package": {"installed_version": ours}, "problems": []}
    doctor._look_for_namesake(report)
    (problem,) = report["problems"]
    assert "torchium 0.0.9" in problem["what"]
    assert ("beside torchium-native 1.2.3" if ours else "torchium-native is not") in problem["what"]
    assert "pip uninstall torchium torchium-native; pip install torchium-native" in problem["remedy"]


def test_doctor_names_openblas(report):
    """The one in use, with version, threads and origin, and a remedy if there is none."""
    details = next(b["details"] for b in report["library"]["backends"] if b["name"] == "cpu")
    assert "(OpenBLAS " in details and ("OpenMP threads" in details or "one thread" in details)
    assert "\n  OpenBLAS " in __main__.text_of(report)
    assert doctor._OPENBLAS.startswith("install OpenBLAS (pip install scipy-openblas32")


def test_doctor_sees_a_gpu_that_only_torch_uses(report):
    report["torch"] |= {"gpus": ["NVIDIA H200"], "hip": None}
    report["library"]["backends"] = [{"name": "cuda", "available": False, "reason": "no driver; install it"}]
    doctor._compare_cuda(report)
    assert report["problems"] == [
        {"what": "PyTorch uses NVIDIA H200 and Torchium does not: no driver", "remedy": "install it"}
    ]


def test_doctor_reports_a_test_that_fails(monkeypatch, report):
    monkeypatch.setattr(selftest, "_LARGEST_RESIDUAL", 1e-30)
    tests = doctor._run_tests(report)
    assert [test for test in tests if test["passed"] is False]
    assert "residual" in report["problems"][0]["what"]


def test_doctor_as_a_program():
    assert run_python("-m", "torchium", "doctor").endswith("Problems\n  none")
    assert __main__.main(["--json"]) == 0


@pytest.mark.parametrize("arguments", [["nurse"], ["--yaml"], ["doctor", "doctor"]])
def test_doctor_usage(arguments):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(arguments)
    assert stopped.value.code == 2


def test_command_without_its_program(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "__main__.py"))
    monkeypatch.setattr(library._C, "library_path", lambda: str(tmp_path / "lib" / "libtorchium.so"))
    with pytest.raises(SystemExit) as stopped:
        __main__.command()
    assert stopped.value.code == 1
    assert "cannot be run (No such file or directory)" in capsys.readouterr().err
