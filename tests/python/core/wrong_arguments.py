"""Calls every public function, constructor and method of the package with random invalid arguments: a program, so that
test_wrong_arguments.py detects a crash of the interpreter.

    python tests/python/core/wrong_arguments.py --seed 1 --calls 5000 [--only inverse_root] [--first 1234]
    python tests/python/core/wrong_arguments.py --seed 1 --seconds 3600
    python tests/python/core/wrong_arguments.py --seed 1 --calls 20000 --alone "a tensor whose memory is gone"

Many arguments are valid, chosen by name, so that calls pass the first check. Each call is written to --log before it is
made. --first skips earlier calls, for a debugger.
"""

import argparse
import ast
import faulthandler
import gc
import importlib
import inspect
import itertools
import os
import random
import re
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torchium
from torchium import _C
from wrong_values import WILD, Mischief, wild

MODULES = (
    "torchium",
    "torchium.linalg",
    "torchium.utils.cuda_kernels",
    "torchium.optim",
    "torchium.amp",
    "torchium.kernels",
)
ALLOWED = (TypeError, ValueError, RuntimeError, MemoryError, OSError, Mischief)
# A C function's name, which Python users cannot call. A message contains at most `tch_...`, as a prefix.
C_NAME = re.compile(r"\btch_[a-z]")
SECONDS_FOR_A_CALL = 20
# It does not access memory, for any arguments.
SOURCE = "__global__ void nothing(float *x, int n) {}"
# In addition to memory in use at the start: an absurd size must fail, not exhaust the machine.
MEMORY = 4 * 2**30


# --- right arguments, by name -----------------------------------------------------------------------------------------


def matrix(r):
    """Symmetric and positive, mostly 3 by 3, so that two of them usually fit together."""
    n = r.choice((3, 3, 3, 1, 0, 5))
    batch = r.choice(((), (), (2,), (0,), (2, 1)))
    return torch.eye(n, dtype=r.choice((torch.float32, torch.float32, torch.float64))).expand(*batch, n, n).contiguous()


def matrix_of_numpy(r):
    return matrix(r).numpy()


def parameters(r):
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(r.choice((1, 4))))]


def allocate(size):
    """(owner, address), as for _C.Optimizer: aligned to 256 bytes."""
    owner = torch.empty(size + 256, dtype=torch.uint8)
    return owner, (owner.data_ptr() + 255) // 256 * 256


def small_model(r):
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1, bias=False))


def subtract(a, b):
    """A user's loss function, whose exceptions propagate."""
    try:
        return torch.sub(a, b)
    except OverflowError as error:
        raise ValueError(str(error)) from None


def flag(r):
    return r.random() < 0.5


RIGHT = {
    "matrix": matrix,
    "power": lambda r: r.choice((-0.5, 0.5, -1.0)),
    "root": lambda r: r.choice((1, 2, 4)),
    "eps": lambda r: r.choice((0.0, 1e-6)),
    "method": lambda r: r.choice(("auto", "eigen", "newton", "polar_express", "muon", "minimax")),
    "steps": lambda r: r.choice((1, 5)),
    "device": lambda r: r.choice(("cpu", torch.device("cpu"))),
    "kind": lambda r: r.choice(("shampoo", "kl_shampoo", "soap", "muon", "normuon", "adamw", "lion", "sgd", "cpu")),
    "dtype": lambda r: r.choice(("float32", torch.float32)),
    "shape": lambda r: r.choice(((3, 3), (), (2, 0))),
    "shape_a": lambda r: (1, 3),
    "shape_b": lambda r: (3, 1),
    "memory_budget": lambda r: r.choice((None, 0, 10**6)),
    "name": lambda r: r.choice(("shampoo", "Muon", "adamw", "nothing")),
    "pattern": lambda r: r.choice(("s*", "")),
    "params": parameters,
    "model": small_model,
    "layers": lambda r: [(_C.Layer("linear"), 3, 2, True, "a"), (_C.Layer("linear"), 2, 1, False, "b")],
    "layer": lambda r: r.choice((0, 0, _C.Layer("linear"))),
    "counts": lambda r: [1, 0, 1, 0],
    "kernel": lambda r: r.choice((None, (3,), (2, 3), (1, 1, 1))),
    "input": lambda r: torch.ones(r.choice((5, 5, 0)), 3),
    "output_gradient": lambda r: torch.ones(r.choice((5, 5, 0)), 2),
    "tokens": lambda r: torch.zeros(5, 4, dtype=torch.int64),
    "parts": lambda r: r.choice((1, 2, 3)),
    "sharing": lambda r: r.choice(("expand", "reduce")),
    "max_norm": lambda r: r.choice((0.5, 3)),
    "loss_reduction": lambda r: r.choice(("mean", "sum")),
    "loss_fn": lambda r: r.choice((lambda a, b: subtract(a, b).mean(), subtract, lambda a, b: a.sum())),
    "inputs": lambda r: r.choice((torch.ones(r.choice((5, 5, 1, 0)), 3), "float x", "T x, int n")),
    "targets": lambda r: torch.ones(5, 1),
    "outputs": lambda r: r.choice((torch.ones(5, 3, requires_grad=True) * 2, "float y", "T y")),
    "operation": lambda r: "y = x",
    "preamble": lambda r: "",
    "derivative": lambda r: r.choice((None, {"x": "grad"}, ("grad",))),
    "source": lambda r: r.choice((SOURCE, None)),
    "path": lambda r: None,
    "options": lambda r: r.choice(((), ["-DX=1"], ("-O2",))),
    "includes": lambda r: (),
    "include_dirs": lambda r: (),
    "cache": flag,
    "grid": lambda r: r.choice((1, (2, 1), (1, 1, 3), 0)),
    "block": lambda r: r.choice((32, (2, 2, 2))),
    "args": lambda r: r.choice(((torch.ones(3), 3), (None, 3), (np.ones(3, dtype=np.float32), 3))),
    "shared_mem": lambda r: r.choice((0, 16)),
    "loss": lambda r: r.choice(("cross_entropy", "mse")),
    "params_or_model": lambda r: r.choice((parameters(r), torch.nn.Linear(3, 2))),
    "parameters": parameters,
    "gradients": lambda r: [torch.ones(3, 2), r.choice((None, torch.ones(4)))],
    "config": lambda r: {
        "kind": r.choice(("shampoo", "kl_shampoo", "soap", "muon", "normuon", "adamw", "lion", "sgd")),
        "lr": 0.1,
    },
    "names": lambda r: ["a", "b"],
    "use_adamw": lambda r: r.choice(([False, True], (), ("*",))),
    "group": lambda r: 0,
    "number": lambda r: 0,
    "allocate": lambda r: r.choice((None, allocate)),
    "closure": lambda r: None,
    "lr": lambda r: r.choice((0.1, torch.tensor(0.1))),
    "betas": lambda r: (0.9, 0.99),
}
for _name in ("a", "b", "A", "B", "x", "X", "m", "M", "grad"):
    RIGHT[_name] = lambda r: r.choice((matrix, matrix_of_numpy))(r)
for _name in ("out", "w", "v", "residual", "error", "report"):
    RIGHT[_name] = lambda r: r.choice((None, torch.zeros(3, 3), torch.zeros(3), np.zeros((3, 3), dtype=np.float32)))
for _name in ("norms", "weights", "dots"):
    RIGHT[_name] = lambda r: torch.ones(5, dtype=torch.float64)
for _name in ("weight", "bias"):
    RIGHT[_name] = lambda r: r.choice((None, torch.ones(2, 3), torch.ones(5, 2, 3), torch.ones(2), flag(r)))
for _name in ("alpha", "beta", "damping", "tolerance", "relative_eps", "weight_decay", "momentum"):
    RIGHT[_name] = lambda r: r.choice((0.0, 0.1, 1.0))
for _name in ("stream", "grad_scale", "found_inf", "memory_format"):
    RIGHT[_name] = lambda r: None
for _name in ("allow_strided", "accumulate", "batch_first", "strict", "gradients", "rounded"):
    RIGHT.setdefault(_name, flag)
for _name in ("transpose", "return_residual", "channels_last", "nesterov", "maximize", "enabled", "divide"):
    RIGHT[_name] = flag


def argument(r, name, target, wildness):
    """(description, object): a valid one, the default, or anything at all."""
    if r.random() >= wildness:
        if name in RIGHT:
            return "right", RIGHT[name](r)
        if target.defaults.get(name, inspect.Parameter.empty) is not inspect.Parameter.empty:
            return "default", target.defaults[name]
    return wild(r, for_torch=not target.ours)


# --- what there is to call --------------------------------------------------------------------------------------------


class Target:
    """A callable under test. `make` creates it anew: methods get a new object each time. `defaults` has its arguments
    by name, with inspect.Parameter.empty for those without one."""

    def __init__(self, title, make, defaults, ours=True):
        self.title, self.make, self.defaults, self.ours = title, make, defaults, ours


def public_names(module):
    return getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]


def defaults_of(function):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind not in kinds}
    except (TypeError, ValueError):
        return {}


def defaults_of_stub(arguments):
    return dict.fromkeys((a.arg for a in arguments if a.arg != "self"), inspect.Parameter.empty)


def is_ours(function):
    """Methods inherited from torch.optim.Optimizer are called too, but their exceptions are PyTorch's."""
    return (getattr(function, "__module__", None) or "").startswith("torchium")


def targets_of_python():
    seen = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.ismodule(value) or not callable(value) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, type):
                yield from targets_of_class(f"{module_name}.{name}", value)
            else:
                yield Target(f"{module_name}.{name}", lambda f=value: f, defaults_of(value))


def targets_of_class(title, cls):
    if issubclass(cls, BaseException):
        return
    yield Target(title, lambda: cls, defaults_of(cls), is_ours(cls.__init__))
    if cls is torchium.optim.TorchiumOptimizer:
        return  # its methods are those of its subclasses
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if name.startswith("_") or isinstance(function, property) or not callable(getattr(cls, name)):
            continue
        if isinstance(function, staticmethod):
            yield Target(f"{title}.{name}", lambda n=name: getattr(cls, n), defaults_of(getattr(cls, name)))
        else:
            defaults = defaults_of(getattr(cls, name))
            defaults.pop("self", None)
            yield Target(f"{title}().{name}", lambda n=name: getattr(specimen(cls), n), defaults, is_ours(function))


class Descent(torchium.optim.MatrixOptimizer):
    def direction(self, gradients, state, group):
        return gradients


def specimen(cls):
    """An object in use, to call its methods."""
    if cls in (torchium.optim.KFAC, torchium.optim.NaturalGradient, torchium.optim.KFACPreconditioner):
        return stepped(cls)
    if issubclass(cls, torch.optim.Optimizer):
        made = parameters(random)
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        optimizer = (Descent if cls is torchium.optim.MatrixOptimizer else cls)(made, lr=0.1)
        optimizer.step()
        return optimizer
    if issubclass(cls, torch.amp.GradScaler):
        scaler = cls("cpu")
        scaler.scale(torch.ones(()))
        return scaler
    if cls is torchium.GhostClipping:
        return cls(small_model(random), 1.0)
    if cls is torchium.kernels.Kernel:
        return cls(SOURCE)
    return cls(small_model(random)) if cls in (torchium.GradSampleModule, torchium.per_sample_norms) else cls()


def stepped(cls):
    """An object attached to a model's layers, after a step."""
    model = small_model(random)
    made = cls(model)
    made.model = model  # which must outlive it
    model(torch.ones(5, 3)).square().mean().backward()
    made.step()
    return made


# Of every _C.Optimizer created here.
PARAMETERS = [torch.ones(3, 2), torch.ones(4)]


class BriefKernel:
    """A _C.Kernel with limited launches: a grid of billions is valid, but takes hours."""

    made = None

    def __init__(self):
        BriefKernel.made = BriefKernel.made or _C.Kernel("cpu", SOURCE, None, "nothing", (), (), True)
        self.info, self.parameters = self.made.info, self.made.parameters

    def launch(self, grid, *positional, **keywords):
        for extent in grid if isinstance(grid, (tuple, list)) else (grid,):
            if isinstance(extent, (int, np.integer)) and extent > 1000:
                raise ValueError("too long for a test")
        self.made.launch(grid, *positional, **keywords)


def extension_specimen(name):
    if name == "Memory":
        return _C.Memory((2, 3), "float32", "cpu")
    if name == "Scaler":
        return _C.Scaler("cpu")
    if name == "Kernel":
        return BriefKernel()
    if name == "Elementwise":
        source = "__global__ void same(long long n, long long packs, const float *x, float *y) { y[0] = x[0]; }"
        return _C.Elementwise(_C.Kernel("cpu", source, None, "same", (), (), True), 1, (None,), 4, 1, 1, 100)
    if name == "Kfac":
        kfac = _C.Kfac("cpu", {}, RIGHT["layers"](random))
        kfac.observe(0, torch.ones(5, 3), torch.ones(5, 2), 1.0)
        kfac.refresh()
        return kfac
    optimizer = _C.Optimizer("cpu")
    optimizer.add_group({"kind": random.choice(("shampoo", "adamw"))}, PARAMETERS, ["a", "b"], [False, False])
    return optimizer


def targets_of_extension():
    """As in _C.pyi: a name missing in the module is an error of the stub."""
    for node in ast.parse(Path(torchium.__path__[0], "_C.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield Target(f"_C.{node.name}", lambda n=node.name: getattr(_C, n), defaults_of_stub(node.args.args))
        elif isinstance(node, ast.ClassDef) and not issubclass(getattr(_C, node.name), BaseException):
            yield from targets_of_extension_class(node)


def targets_of_extension_class(node):
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        names = defaults_of_stub(method.args.args + method.args.kwonlyargs)
        if method.name == "__init__":
            yield Target(f"_C.{node.name}", lambda n=node.name: getattr(_C, n), names)
        else:
            yield Target(
                f"_C.{node.name}().{method.name}",
                lambda n=node.name, m=method.name: getattr(extension_specimen(n), m),
                names,
            )


# --- calling ----------------------------------------------------------------------------------------------------------


def one_wrong(r, target, label):
    """One argument is this invalid object, bare or nested; the others are valid as far as known."""
    value = WILD[label](r)
    key = value if isinstance(value, torch.Tensor) else id(value)  # not everything can be nested
    wrapped = r.choice((value, value, value, [value], (value, value), {"a": value}, {key: "a"}))
    chosen = r.choice([*target.defaults] or ["surplus"])
    given = [(name, *argument(r, name, target, 0.0)) for name in target.defaults if name != chosen]
    keywords = {name: right for name, _, right in given} | {chosen: wrapped}
    return [], keywords, f"{chosen}: {label} in {type(wrapped).__name__}"


def arguments_for(r, target, alone=None):
    """Positional and keyword arguments, and a description of them."""
    if alone and target.ours:
        return one_wrong(r, target, alone)
    wildness = r.choice((0.1, 0.4, 0.8))  # few, so that calls with many arguments pass their first check
    given = [(name, *argument(r, name, target, wildness)) for name in target.defaults]
    if r.random() < 0.3:
        given = given[: r.randrange(len(given) + 1)]
    if r.random() < 0.2:
        given.append(("surplus", *wild(r, for_torch=not target.ours)))
    split = r.randrange(len(given) + 1) if r.random() < 0.5 else len(given)
    positional = [value for _, _, value in given[:split]]
    keywords = {name: value for name, _, value in given[split:]}
    return positional, keywords, ", ".join(f"{name}: {label}" for name, label, _ in given)


def call(target, positional, keywords):
    """The error, or None."""
    try:
        function = target.make()
        exercise(function(*positional, **keywords))
        use_again(getattr(function, "__self__", None))
    except ALLOWED as error:
        return f"speaks of C: {error}" if target.ours and C_NAME.search(str(error)) else None
    except Exception as error:
        if isinstance(error, BufferError) and target.title.endswith("__dlpack__"):
            return None  # raised by DLPack if an array cannot be exported as requested
        return f"{type(error).__name__}: {error}" if target.ours else None
    return None


def exercise(result):
    """An optimizer created with strange options must also take a step, or reject it; and an object attached to a model
    must see a pass."""
    if isinstance(result, torchium.GradSampleModule):
        result(torch.ones(4, 3)).sum().backward()
    elif isinstance(result, torchium.per_sample_norms):
        with result:
            result.model(torch.ones(4, 3)).sum().backward()
    if isinstance(result, torch.optim.Optimizer):
        for group in result.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        result.step()
        result.state_dict()


def use_again(owner):
    """After any method call the object still works."""
    if isinstance(owner, _C.Optimizer):
        owner.step(PARAMETERS, [torch.ones_like(parameter) for parameter in PARAMETERS])
    if isinstance(owner, _C.Kfac):
        owner.precondition(0.1, [torch.ones(2, 3), torch.ones(2), torch.ones(1, 2), None])
    if isinstance(owner, torch.optim.Optimizer):
        owner.step()


def megabytes():
    """Resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 10**6


def limit_memory():
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, resource.RLIM_INFINITY))


def all_targets(only):
    found = sorted([*targets_of_python(), *targets_of_extension()], key=lambda target: target.title)
    return [target for target in found if only in target.title]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=0, help="go on for so long, however many calls that are")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--alone", choices=WILD, help="one argument of a call is this, the others are right")
    parser.add_argument("--log", type=argparse.FileType("w"), default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    faulthandler.enable()
    targets = all_targets(options.only)
    os.environ["TORCHIUM_CACHE"] = tempfile.mkdtemp()
    torchium.linalg.inverse_root(torch.eye(4), 2)  # threads and libraries are loaded before memory is limited
    limit_memory()
    for target in targets:
        target.make()  # an object that cannot be created would leave its methods untested
    wrong = []
    end = time.monotonic() + options.seconds
    done = early = 0
    for i in range(options.calls) if options.seconds == 0 else itertools.count():
        if options.seconds > 0 and time.monotonic() >= end:
            break
        done = i + 1
        r = random.Random(f"{options.seed} {i}")
        random.seed(i)
        target = targets[i % len(targets)]
        positional, keywords, description = arguments_for(r, target, options.alone)
        if i < options.first:
            continue
        line = f"call {i} of seed {options.seed}: {target.title}({description})"
        if options.log is not None:
            options.log.seek(0)
            options.log.truncate()
            options.log.write(line)
            options.log.flush()
        faulthandler.dump_traceback_later(SECONDS_FOR_A_CALL, exit=True)
        verdict = call(target, positional, keywords)
        faulthandler.cancel_dump_traceback_later()
        if verdict is not None:
            wrong.append(f"{line}\n    {verdict}")
        del positional, keywords
        if i % 500 == 0:
            gc.collect()
        if i == 5000:
            early = megabytes()
    print("\n".join(wrong[:100]))
    if early > 0:
        print(f"{early} MB in memory after 5000 calls, {megabytes()} MB at the end")
    print(f"{done} calls of {len(targets)} functions with seed {options.seed}, {len(wrong)} wrong exceptions")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
