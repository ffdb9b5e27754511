"""What Python adds to the library, in microseconds of the host: to a call of a matrix function on matrices so small
that the arithmetic is nothing, and to a step of an optimizer with 200 small parameters. Used by python_compare.py.

For a matrix function it is the time of the call less the time that the same call spent inside the library, which the
extension counts: a call that waits for the device waits in there, at one time longer than at another. After a wait all
code is slower for a while, since caches have other things in them; so what PyTorch itself takes for the result, and for
recording, is measured in the same place. For a step the library's own time is that of the same C function through
ctypes, less what ctypes takes for as many arguments; in a round of the clock every side has its turn, and differences
are taken round by round, so that whatever else the machine does meets all sides alike. On a GPU only the calls are
timed; the device is synchronized between the rounds.
"""

import gc
import importlib
import statistics
import time
from functools import partial

import torch
from optim_compare import torch_optimizer
from optimizers import GRAFTING, NONFINITE, Optimizer, defaults
from timing import in_rounds, waiter

CALL_LIMIT_US = 15.0
STEP_LIMIT_US = 200.0
NEVER = 1 << 20  # a frequency: no refresh among the steps that are timed
SMALL = 100 * [(8, 8), (8,)]


def less(first, *others):
    """Median over the rounds of the first side less the others."""
    return statistics.median(a - sum(b) for a, *b in zip(first, *others, strict=True))


def idle(library, *arguments):
    """A call with these arguments that does nothing: it reads a number of the context, which is 0."""
    return library.prepare("tch_context_get_workspace_limit", *arguments)


# --- matrix functions -------------------------------------------------------------------------------------------------

LINALG = "torchium.linalg"
OPS = "torchium.utils.cuda_kernels:CUDAMatrixOps"
MEMORY = "torchium.utils.cuda_kernels:CUDAMemoryOps"

# Where a function is, its name and its arguments; the C function it stands for, as the extension has it, and its
# arguments. A text that names one of the operands stands for it.
CALLS = [
    (LINALG, "matmul", ["spd", "any"], "matmul", ["spd", "any", "out"]),
    (LINALG, "symmetric_product", ["spd", "spd"], "symmetric_product", ["spd", "spd", "out"]),
    (LINALG, "gram", ["any"], "gram", [1.0, "any", False, 0.0, "out"]),
    (LINALG, "eigh", ["spd"], "eigh", ["spd", "values", "out", None]),
    (LINALG, "matrix_power", ["spd", -0.3], "matrix_power", ["spd", -0.3, 0.0, "out", None]),
    (LINALG, "inverse_root", ["spd", 4], "inverse_root", ["spd", 4, 0.0, 0.0, "auto", 0.0, "out", None, None]),
    (LINALG, "orthogonalize", ["any"], "orthogonalize", ["any", 5, "polar_express", "out"]),
    (LINALG, "kronecker_product", ["left", "right"], "kronecker_product", ["left", "right", "out"]),
    (LINALG, "kronecker_matmul", ["left", "right", "tall"], "kronecker_matmul", ["left", "right", "tall", "tall_out"]),
    (LINALG, "kronecker_apply", ["spd", "spd", "any"], "kronecker_apply", ["spd", "spd", "any", "out"]),
    (LINALG, "kronecker_solve", ["spd", "spd", "any", 0.1], "kronecker_solve", ["spd", "spd", "any", 0.1, "out", None]),
    (LINALG, "nearest_kronecker", ["any", (2, 2), (2, 2)], "nearest_kronecker", ["any", "left_out", "right_out", None]),
    (OPS, "matrix_sqrt_inv_eigen", ["spd"], "matrix_power", ["spd", -0.25, 1e-8, "out", None]),
    (OPS, "batch_matrix_multiply", ["spd", "any"], "matmul", ["spd", "any", "out"]),
    (OPS, "kronecker_product_approx", ["left", "right"], "kronecker_product", ["left", "right", "out"]),
    (OPS, "kronecker_matmul", ["left", "right", "tall"], "kronecker_matmul", ["left", "right", "tall", "tall_out"]),
    (OPS, "kronecker_solve", ["spd", "spd", "any", 0.1], "kronecker_solve", ["spd", "spd", "any", 0.1, "out", None]),
    (OPS, "nearest_kronecker", ["any", (2, 2), (2, 2)], "nearest_kronecker", ["any", "left_out", "right_out", None]),
    (OPS, "inverse_root", ["spd", 4], "inverse_root", ["spd", 4, 0.0, 0.0, "auto", 0.0, "out", None, None]),
    (OPS, "orthogonalize", ["any"], "orthogonalize", ["any", 5, "polar_express", "out"]),
    (MEMORY, "memory_efficient_matmul", ["spd", "any"], "matmul_chunked", ["spd", "any", 0, "out"]),
]

OPERANDS = {"any": (4, 4), "left": (2, 2), "right": (2, 2), "tall": (4, 1), "spd": (4, 4)}
OUTPUTS = {"out": (4, 4), "left_out": (2, 2), "right_out": (2, 2), "tall_out": (4, 1), "values": (4,)}
RECORDED, UNRECORDED, NUMPY = "autograd", "no autograd", "NumPy"


def operands(device, how):
    """Small matrices by name, and outputs for the calls that are given theirs."""
    generator = torch.Generator().manual_seed(5)
    made = {name: torch.randn(shape, generator=generator) for name, shape in OPERANDS.items() if name != "spd"}
    made["spd"] = made["any"] @ made["any"].T + torch.eye(4)
    made = {name: a.to(device).requires_grad_(how == RECORDED) for name, a in made.items()}
    made |= {name: torch.full(shape, torch.nan, device=device) for name, shape in OUTPUTS.items()}
    return {name: a.numpy() for name, a in made.items()} if how == NUMPY else made


def named(arguments, made):
    return [made.get(a, a) if isinstance(a, str) else a for a in arguments]


def find(where, name):
    """A function of a module, or of a class of it, written module:class."""
    module, _, owner = where.partition(":")
    found = importlib.import_module(module)
    return getattr(getattr(found, owner) if owner else found, name)


def refusal(function):
    """What a function says that has no derivative, asked to record one; None where it does as asked."""
    try:
        function()
    except RuntimeError as said:
        return str(said).splitlines()[0]
    return None


def beyond(function, seconds):
    """Microseconds of a call and, of them, those inside the library: two lists with a figure for each call. One call
    follows the other, so that Python's own memory is where a loop keeps it."""
    inside = importlib.import_module("torchium._C").library_time
    whole, own = [], []
    for _ in range(20):
        function()
    gc.disable()
    try:
        stop = time.perf_counter() + seconds
        while len(whole) < 100 or time.perf_counter() < stop:
            before, start = inside(), time.perf_counter_ns()
            function()
            end = time.perf_counter_ns()
            whole.append(1e-3 * (end - start))
            own.append(1e-3 * (inside() - before))
    finally:
        gc.enable()
    return whole, own


class Nothing(torch.autograd.Function):
    """The least that records: it saves its tensor and makes a result."""

    @staticmethod
    def forward(ctx, a, rows, columns):
        ctx.save_for_backward(a)
        return a.new_empty(rows, columns)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def least(extension, c_arguments, made, how):
    """The extension's call, which is given its results, and then what of a call of the package is PyTorch's own: making
    them, and where a gradient is recorded a function that does nothing. It comes after the same wait as there."""
    sizes = [OUTPUTS[a] for a in c_arguments if a in OUTPUTS]
    source = made[next(a for a in c_arguments if a in OPERANDS)]
    if how == RECORDED:
        parts = [partial(super(torch.autograd.Function, Nothing).apply, source, *sizes[0])]
    else:
        parts = [partial(source.new_empty, *each) for each in sizes]

    def call():
        extension()
        for part in parts:
            part()

    return call


def measure_call(call, how, device, seconds):
    """What the package, the extension alone, and PyTorch's own part take beyond the time inside the library."""
    where, name, arguments, function, c_arguments = call
    made = operands(device, how)
    found = {"function": f"{where.split('.')[-1].split(':')[-1]}.{name}", "how": how}
    package = partial(find(where, name), *named(arguments, made))
    refused = refusal(package) if how == RECORDED else None
    if refused:
        return found | {"refused": refused}
    extension = partial(find("torchium._C", function), *named(c_arguments, made))
    with torch.set_grad_enabled(how == RECORDED):
        whole, own = beyond(package, 0.4 * seconds)
        alone = beyond(extension, 0.3 * seconds)
        theirs = beyond(least(extension, c_arguments, made, how), 0.3 * seconds) if how != NUMPY else None
    return found | {
        "package_us": statistics.median(whole),
        "library_us": statistics.median(own),
        "overhead_us": less(whole, own),
        "extension_overhead_us": less(*alone),
        "torch_overhead_us": less(*theirs) - less(*alone) if theirs else None,
        "limit_us": CALL_LIMIT_US,
    }


# --- optimizers -------------------------------------------------------------------------------------------------------

CLASSES = {"sgd": "SGD", "adamw": "AdamW", "shampoo": "Shampoo", "soap": "SOAP", "muon": "Muon"}
_C_NAMES = {
    "update_freq": "precondition_frequency",
    "max_precond_dim": "max_preconditioner_dim",
    "method": "muon_method",
}
_C_NUMBERS = {
    "grafting": GRAFTING,
    "nonfinite": NONFINITE,
    "method": {"polar_express": 0, "muon": 1},
    "precision": {"high": 0, "highest": 1},
}


def c_options(options):
    """Options of a class of torchium.optim as fields of tch_optim_config."""
    numbered = {name: _C_NUMBERS[name][value] if name in _C_NUMBERS else value for name, value in options.items()}
    return {_C_NAMES.get(name, name): value for name, value in numbered.items()}


class Pair:
    """One optimizer twice, on copies of the same parameters: `package`, of torchium.optim, and `library`, the C
    interface by ctypes with the same options."""

    def __init__(self, library, kind, parameters, gradients, **options):
        self.kind, self.gradients = kind, gradients
        self.own = [torch.nn.Parameter(p.clone()) for p in parameters]
        for p, g in zip(self.own, gradients, strict=True):
            p.grad = g
        self.package = getattr(importlib.import_module("torchium.optim"), CLASSES[kind])(self.own, **options)
        self.theirs = [p.clone() for p in parameters]
        self.library = Optimizer(library, defaults(library, kind, **c_options(options)), self.theirs)
        self.library.set_gradients(gradients)

    def agree(self):
        """Takes a step with both; whether every parameter came out the same, to the bit."""
        self.package.step()
        self.library.step()
        return all(torch.equal(p.detach(), q) for p, q in zip(self.own, self.theirs, strict=True))

    def close(self):
        self.library.close()
        self.package = None


STEPS = {
    "sgd": {"lr": 1e-4, "momentum": 0.9},
    "adamw": {"lr": 1e-4},
    "shampoo": {
        "lr": 1e-4,
        "betas": (0.9, 1.0),
        "eps": 0.0,
        "relative_eps": 1e-6,
        "grafting": None,
        "update_freq": NEVER,
    },
    "soap": {"lr": 1e-4, "precondition_frequency": NEVER},
    "muon": {"lr": 1e-4},
}


def peer(kind, parameters, gradients):
    """PyTorch's own class at its fastest, for those it has."""
    if kind == "adamw":
        return torch_optimizer(torch.optim.AdamW, parameters, gradients, lr=1e-4, fused=True)
    if kind == "sgd":
        return torch_optimizer(torch.optim.SGD, parameters, gradients, lr=1e-4, momentum=0.9, fused=True)
    return None


def with_another_lr(optimizer):
    """A step after a change of the learning rate, as with a scheduler."""
    group = optimizer.param_groups[0]
    rates = [1e-4, 2e-4]

    def step():
        rates.reverse()
        group["lr"] = rates[0]
        optimizer.step()

    return step


def measure_step(library, kind, device, seconds):
    """What a step of 200 small parameters costs the host beyond the C step."""
    parameters = [0.1 * torch.randn(shape, device=device) for shape in SMALL]
    gradients = [0.1 * torch.randn(shape, device=device) for shape in SMALL]
    pair = Pair(library, kind, parameters, gradients, **STEPS[kind])
    same = pair.agree()
    sides = {
        "package": pair.package.step,
        "library": pair.library.step,
        "idle": idle(library, pair.library._count, pair.library._list),
        "changed": with_another_lr(pair.package),
    }
    wait, calls = waiter(device), 1 if device.type == "cuda" else 5
    times = in_rounds(sides, wait, seconds, calls)
    theirs = peer(kind, parameters, gradients)
    torch_us = statistics.median(in_rounds({"torch": theirs}, wait, 0.3 * seconds, calls)["torch"]) if theirs else None
    pair.close()
    own = [a - b for a, b in zip(times["library"], times["idle"], strict=True)]
    return {
        "class": CLASSES[kind],
        "parameters": len(SMALL),
        "package_us": statistics.median(times["package"]),
        "library_us": statistics.median(own),
        "overhead_us": less(times["package"], own),
        "overhead_with_lr_changed_us": less(times["changed"], own),
        "torch_us": torch_us,
        "same_as_c": same,
        "limit_us": STEP_LIMIT_US,
    }


# --- the table --------------------------------------------------------------------------------------------------------


def verdict(found):
    return f"limit {found['limit_us']:g} " + ("met" if found["overhead_us"] <= found["limit_us"] else "NOT MET")


def call_line(found):
    if "refused" in found:
        return f"call    {found['function']:<40} {found['how']:<12} refused: {found['refused']}"
    return (
        f"call    {found['function']:<40} {found['how']:<12} {found['package_us']:>8.2f} us"
        f"  C {found['library_us']:.2f}  adds {found['overhead_us']:.2f}, of it the extension"
        f" {found['extension_overhead_us']:.2f}"
        + (f" and PyTorch {found['torch_overhead_us']:.2f}" if found["torch_overhead_us"] is not None else "")
        + f"  {verdict(found)}"
    )


def step_line(found):
    said = (
        f"step    {found['class']:<8} {found['parameters']} parameters {found['package_us']:>8.1f} us"
        f"  C {found['library_us']:.1f}  adds {found['overhead_us']:.1f}, with another lr"
        f" {found['overhead_with_lr_changed_us']:.1f}  {verdict(found)}"
    )
    said += f"  torch fused {found['torch_us']:.1f}" if found["torch_us"] else ""
    return said + ("" if found["same_as_c"] else "  NOT THE SAME AS C")


def overheads(s):
    """Every function and every class, each on its own: `s` has the library, the device, the seconds and the report."""

    def call(entry, how):
        found = measure_call(entry, how, s.device, 0.7 * s.seconds)
        s.report.add("calls", found, call_line(found))

    def step(kind):
        found = measure_step(s.library, kind, s.device, 2 * s.seconds)
        s.report.add("steps", found, step_line(found))

    for how in (UNRECORDED, RECORDED, NUMPY) if s.device.type == "cpu" else (UNRECORDED, RECORDED):
        for entry in CALLS:
            if how != NUMPY or entry[0] == LINALG:
                s.report.attempt(f"{entry[0]} {entry[1]}, {how}", call, entry, how)
    for kind in CLASSES:
        s.report.attempt(f"step of {kind}", step, kind)
