#!/usr/bin/env python3
"""The optimizers of libtorchium beside PyTorch's own, step by step, and the loss scaler beside torch.amp.GradScaler.

    tests/optim/optim_against_torch.py LIBRARY [DEVICE]

Exits with 77 where PyTorch or the device is missing. Both sides get the same parameters and the same fresh gradients
for 25 steps; differences are shares of the way a parameter has gone. AdamW and SGD must agree to rounding: a step is
a dozen roundings, whose order the two choose differently, and a moving average carries those of the steps before.
Muon is compared twice: with PyTorch's functions in float64, without its rounding to bfloat16, where the two must agree
to rounding; and as it is, where PyTorch's bfloat16 is what keeps them apart.
"""

import ctypes
import importlib.util
import os
import pathlib
import sys

SKIPPED = 77
STEPS = 25
SHAPES = [(37,), (13, 9), (17, 61), (3, 4, 5), (), (64, 33), (5, 40)]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

ADAMW = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0},
    "betas": {"betas": (0.5, 0.97), "eps": 1e-3},
    "amsgrad": {"amsgrad": True, "betas": (0.9, 0.5)},
    "maximize": {"maximize": True},
    "everything": {"amsgrad": True, "maximize": True, "weight_decay": 0.3, "betas": (0.8, 0.6), "eps": 1e-2},
}
SGD = {
    "defaults": {},
    "decay": {"weight_decay": 0.2},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "maximize": {"maximize": True},
    "everything": {"momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1, "maximize": True},
    "nesterov and decay": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
}
MUON = {
    "defaults": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "no nesterov": {"nesterov": False},
    "momentum": {"momentum": 0.6},
    "decay": {"weight_decay": 0.5},
    "coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7},
    "eps": {"eps": 30.0, "ns_steps": 3},
}
# Parameters of size 1, stored at each step, on a way of some hundredths a step.
ROUNDED_PARAMETERS = 30
# How far apart bfloat16 may leave two Muons. Measured on a CPU, where only PyTorch rounds to it: 0.0007 to 0.004 for
# these settings. On a GPU both do.
BFLOAT16 = {"cpu": 0.01, "cuda": 0.02}
failures = []


def check(good, what):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}")


def say(what):
    if not failures:
        print(what)


def ours(name, options):
    """PyTorch's options under the library's names."""
    renamed = {}
    for key, value in options.items():
        if key == "betas":
            renamed["beta1"], renamed["beta2"] = value
        elif key == "adjust_lr_fn":
            renamed["muon_lr"] = {"original": 0, "match_rms_adamw": 1}[value]
        elif key == "ns_coefficients":
            renamed["muon_coefficients"] = value
        elif key == "ns_steps":
            renamed["muon_steps"] = value
        else:
            renamed[key] = value
    if name == "muon":
        renamed["muon_method"] = 1
    return renamed


def laid_out(torch, shape, dtype, device, transpose):
    x = torch.randn(shape, dtype=torch.float64, device=device).to(dtype)
    return x.mT.contiguous().mT if transpose and x.ndim >= 2 else x


def run(torch, library, name, options, dtype, shapes, transpose=False, lr=0.01):
    """Runs both and returns the largest difference as a share of the way PyTorch's parameter has gone."""
    from optimizers import Optimizer, defaults

    torch.manual_seed(3)
    mine = [laid_out(torch, s, dtype, library.device, transpose) for s in shapes]
    theirs = [p.clone(memory_format=torch.preserve_format).requires_grad_() for p in mine]
    lengths = [torch.zeros((), dtype=torch.float64, device=library.device) for _ in mine]
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": torch.optim.Muon}
    reference = kinds[name](theirs, lr=lr, **options)
    optimizer = Optimizer(library, defaults(library, name, lr=lr, **ours(name, options)), mine)
    for _ in range(STEPS):
        before = [p.detach().clone() for p in theirs]
        for p in theirs:
            p.grad = torch.randn_like(p)
        optimizer.set_gradients([p.grad for p in theirs])
        optimizer.step()
        reference.step()
        for length, p, b in zip(lengths, theirs, before, strict=True):
            length += (p.detach().double() - b.double()).norm()
    library.synchronize()
    stats = optimizer.stats()
    check(stats["steps"] == STEPS and stats["skipped"] == 0, f"{name}: statistics {stats} after {STEPS} steps")
    optimizer.close()
    pairs = zip(theirs, mine, lengths, strict=True)
    return max(((a.detach().double() - b.double()).norm() / length).item() for a, b, length in pairs)


def check_elementwise(torch, library, name, table):
    for dtype, unit in ((torch.float64, 2.0**-53), (torch.float32, 2.0**-24)):
        for label, options in table.items():
            worst = run(torch, library, name, options, dtype, SHAPES, lr=0.05)
            good = worst <= (2 * (STEPS + 10) + ROUNDED_PARAMETERS) * unit
            check(good, f"{name}, {label}, {dtype}: off by {worst:.2e} of the way")
    say(f"{name}: {len(table)} settings agree with PyTorch {torch.__version__} to rounding")


def exact_muon(torch):
    """PyTorch's Muon without its rounding to bfloat16: the same functions in the gradient's own type."""
    import torch.optim._muon as module

    def orthogonalize(grad, coefficients, steps, eps):
        a, b, c = coefficients
        x = grad.mT if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if grad.size(0) > grad.size(1) else x

    return module, orthogonalize


def check_muon(torch, library):
    shapes = [s for s in SHAPES if len(s) == 2]
    module, orthogonalize = exact_muon(torch)
    rounded = module._zeropower_via_newtonschulz
    apart = 0.0
    for label, options in MUON.items():
        for transpose in (False, True):
            what = f"muon, {label}{', transposed' if transpose else ''}"
            module._zeropower_via_newtonschulz = orthogonalize
            worst = run(torch, library, "muon", options, torch.float64, shapes, transpose)
            check(worst <= 1e-9, f"{what}, float64 without bfloat16: off by {worst:.2e} of the way")
            module._zeropower_via_newtonschulz = rounded
            worst = run(torch, library, "muon", options, torch.float32, shapes, transpose)
            check(worst <= BFLOAT16[library.device], f"{what}, float32: off by {worst:.2e} of the way")
            apart = max(apart, worst)
    say(f"muon: {len(MUON)} settings agree with PyTorch {torch.__version__}, whose bfloat16 is {apart:.1e} away")


class ScalerState(ctypes.Structure):
    """tch_scaler_state."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("scale", ctypes.c_double),
        ("growth_factor", ctypes.c_double),
        ("backoff_factor", ctypes.c_double),
        ("growth_interval", ctypes.c_int32),
        ("growth_tracker", ctypes.c_int32),
    ]


class ScalerConfig(ctypes.Structure):
    """tch_scaler_config."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("init_scale", ctypes.c_double),
        ("growth_factor", ctypes.c_double),
        ("backoff_factor", ctypes.c_double),
        ("growth_interval", ctypes.c_int32),
        ("enabled", ctypes.c_int32),
    ]


def scaler_state(library, scaler):
    state = ScalerState(ctypes.sizeof(ScalerState))
    library._check(library.lib.tch_scaler_get_state(scaler, ctypes.byref(state)))
    return state


def check_scaler(torch, library, interval, growth, backoff):
    """The same losses through both, some of them infinite: the same scales, the same parameters."""
    from optimizers import Optimizer, defaults

    torch.manual_seed(5)
    what = f"scaler, interval {interval}, growth {growth}, backoff {backoff}"
    theirs = torch.amp.GradScaler(library.device, 1024.0, growth, backoff, interval)
    config = ScalerConfig(ctypes.sizeof(ScalerConfig), 1024.0, growth, backoff, interval, 1)
    scaler = ctypes.c_void_p()
    library._check(library.lib.tch_scaler_create(library.context, ctypes.byref(config), ctypes.byref(scaler)))
    p = torch.randn(40, 30, dtype=torch.float64, device=library.device).requires_grad_()
    mine = p.detach().clone()
    reference = torch.optim.SGD([p], lr=0.01, momentum=0.9)
    optimizer = Optimizer(library, defaults(library, "sgd", lr=0.01, momentum=0.9), [mine])
    for i in range(60):
        weight = torch.randn_like(p) * (float("inf") if i % 7 == 3 or i % 11 == 0 else 1.0)
        reference.zero_grad()
        theirs.scale((p * weight).sum()).backward()
        optimizer.set_gradients([p.grad.clone()])
        status = library.lib.tch_scaler_step(scaler, optimizer.handle, ctypes.c_int32(1), optimizer._list)
        library._check(status)
        if i % 2:
            theirs.unscale_(reference)
        theirs.step(reference)
        theirs.update()
        library._check(library.lib.tch_scaler_update(scaler))
        state, expected = scaler_state(library, scaler), theirs.state_dict()
        check(state.scale == expected["scale"], f"{what}, step {i}: scale {state.scale}, not {expected['scale']}")
        tracker = expected["_growth_tracker"]
        check(state.growth_tracker == tracker, f"{what}, step {i}: tracker {state.growth_tracker}, not {tracker}")
    gap = (mine - p.detach()).norm() / p.detach().norm()
    exact = growth == 2.0 and backoff == 0.5  # otherwise PyTorch rounds 1 / scale to float32
    check(gap.item() < (1e-12 if exact else 1e-7), f"{what}: parameters are {gap.item():.1e} apart")
    optimizer.close()
    library.lib.tch_scaler_destroy(scaler)


def compare(path, device):
    import torch
    from library import Library

    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    library = Library(path, device)
    library.device = "cpu" if device == "cpu" else "cuda"
    if library.device == "cuda":
        library.set_stream(torch.cuda.current_stream().cuda_stream)
        torch.set_float32_matmul_precision("highest")
    check_elementwise(torch, library, "adamw", ADAMW)
    check_elementwise(torch, library, "sgd", SGD)
    check_muon(torch, library)
    for numbers in ((3, 2.0, 0.5), (1, 1.7, 0.3), (5, 1.001, 0.999)):
        check_scaler(torch, library, *numbers)
    say("scaler: the same scales as torch.amp.GradScaler")
    library.close()


def missing(device):
    """Why this cannot be run here, or nothing."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("numpy") is None:
        return "PyTorch or NumPy is not installed"
    import torch

    if not hasattr(torch.optim, "Muon"):
        return f"PyTorch {torch.__version__} has no Muon"
    return "" if device == "cpu" or torch.cuda.is_available() else "PyTorch sees no GPU"


def main():
    path = sys.argv[1]
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    why = missing(device)
    if why:
        print(f"skipped: {why}")
        return 1 if os.environ.get("TORCHIUM_TEST_REQUIRE_DEVICE") and device != "cpu" else SKIPPED
    compare(path, device)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
