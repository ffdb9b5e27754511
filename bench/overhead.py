"""Overhead of the Python package: the time of a call minus the time spent inside the library, which the extension
counts. After synchronization code is slower for a while because of cold caches, so PyTorch's own time to create the
result is measured in the same place."""

import gc
import statistics
import time
from functools import partial

import torch
from steps import CLASSES, NEVER, copies, from_c, from_python
from timing import in_rounds, waiter

CALL_LIMIT_US, STEP_LIMIT_US = 15.0, 200.0
SIZES = {"any": (4, 4), "left": (2, 2), "right": (2, 2), "tall": (4, 1), "spd": (4, 4)}
# A function of torchium.linalg and its arguments; strings name operands.
CALLS = [
    ("matmul", "spd", "any"),
    ("symmetric_product", "spd", "spd"),
    ("gram", "any"),
    ("eigh", "spd"),
    ("matrix_power", "spd", -0.3),
    ("inverse_root", "spd", 4),
    ("orthogonalize", "any"),
    ("kronecker_product", "left", "right"),
    ("kronecker_matmul", "left", "right", "tall"),
    ("kronecker_apply", "spd", "spd", "any"),
    ("kronecker_solve", "spd", "spd", "any", 0.1),
    ("nearest_kronecker", "any", (2, 2), (2, 2)),
]
RECORDED, UNRECORDED, NUMPY = "autograd", "no autograd", "NumPy"
STEPS = {
    "sgd": {"momentum": 0.9},
    "adamw": {},
    "shampoo": {"precondition_frequency": NEVER},
    "kl_shampoo": {"precondition_frequency": NEVER},
    "soap": {"precondition_frequency": NEVER},
    "muon": {},
}


def beyond(function, seconds):
    """Median microseconds of a call, and of the part outside the library."""
    from torchium._C import library_time

    whole, own = [], []
    for _ in range(20):
        function()
    gc.disable()
    try:
        stop = time.perf_counter() + seconds
        while len(whole) < 50 or time.perf_counter() < stop:
            before, start = library_time(), time.perf_counter_ns()
            function()
            whole.append(1e-3 * (time.perf_counter_ns() - start))
            own.append(whole[-1] - 1e-3 * (library_time() - before))
    finally:
        gc.enable()
    return statistics.median(whole), statistics.median(own)


class Nothing(torch.autograd.Function):
    """The minimal autograd function: it saves its tensor and creates a result."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.new_empty(a.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


def call(bench, how, name, *arguments):
    import torchium

    made = {key: torch.randn(size, generator=torch.Generator().manual_seed(5)) for key, size in SIZES.items()}
    made["spd"] = made["any"] @ made["any"].T + torch.eye(4)
    made = {key: a.to(bench.device).requires_grad_(how == RECORDED) for key, a in made.items()}
    if how == NUMPY:
        made = {key: a.numpy() for key, a in made.items()}
    operands = [made.get(a, a) if isinstance(a, str) else a for a in arguments]
    function = partial(getattr(torchium.linalg, name), *operands)
    record = super(torch.autograd.Function, Nothing).apply  # without the Python part of Function.apply
    least = partial(record, made["any"]) if how == RECORDED else partial(torch.empty, 4, 4, device=bench.device)
    with torch.set_grad_enabled(how == RECORDED):
        try:
            whole, own = beyond(function, 0.3 * bench.seconds)
        except RuntimeError as refusal:  # no derivative
            return {"function": name, "how": how, "refused": str(refusal).splitlines()[0]}

        def both():
            function()
            least()

        torch_us = beyond(both, 0.3 * bench.seconds)[1] - own
    return {"function": name, "how": how, "package_us": whole, "overhead_us": own, "torch_overhead_us": torch_us}


def step(bench, kind):
    """A step of 200 small parameters vs the same from C, and vs PyTorch's own class, if any."""
    parameters = [torch.nn.Parameter(0.1 * torch.randn(size, device=bench.device)) for size in 100 * [(8, 8), (8,)]]
    for p in parameters:
        p.grad = 0.1 * torch.randn_like(p)
    library = from_c(bench, kind, parameters, lr=1e-4, **STEPS[kind])
    sides = {"package": from_python(kind, parameters, lr=1e-4, **STEPS[kind]).step, "library": library.step}
    if kind in ("adamw", "sgd"):
        sides["torch"] = getattr(torch.optim, CLASSES[kind])(copies(parameters), lr=1e-4, fused=True).step
    times = in_rounds(sides, waiter(bench.device), bench.seconds, 1 if bench.cuda else 5)
    library.close()
    added = statistics.median(a - b for a, b in zip(times["package"], times["library"], strict=True))
    found = {"class": CLASSES[kind], "parameters": len(parameters), "overhead_us": added}
    return found | {f"{name}_us": statistics.median(each) for name, each in times.items()}


def line(found, limit):
    if "refused" in found:
        return f"call {found['function']:<20} {found['how']:<12} refused: {found['refused']}"
    name, how = found.get("function") or f"{found['class']}.step", found.get("how", "")
    said = f"call {name:<20} {how:<12} {found['package_us']:>8.2f} us, adds {found['overhead_us']:.2f}"
    said += "".join(f", {key} {found[key]:.2f}" for key in ("torch_overhead_us", "torch_us") if key in found)
    return f"{said}  | limit {limit:g} {'met' if found['overhead_us'] <= limit else 'NOT MET'}"


def measure(bench):
    """Every function and every class, each on its own."""
    found = {"calls": [], "steps": []}
    for how in (UNRECORDED, RECORDED) if bench.cuda else (UNRECORDED, RECORDED, NUMPY):
        for entry in CALLS:
            found["calls"].append(call(bench, how, *entry))
            print(line(found["calls"][-1], CALL_LIMIT_US), flush=True)
    for kind in CLASSES:
        found["steps"].append(step(bench, kind))
        print(line(found["steps"][-1], STEP_LIMIT_US), flush=True)
    return found
