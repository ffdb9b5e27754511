#!/usr/bin/env python3
"""The loss scaler of libtorchium vs torch.amp.GradScaler, step by step.

    tests/amp/scaler_against_torch.py LIBRARY [DEVICE]

Exits with 77 where PyTorch or the device is missing. The package has PyTorch's own scaler, so this one is called
through ctypes.
"""

import ctypes
import importlib.util
import os
import pathlib
import sys

SKIPPED = 77
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

REALS = [(name, ctypes.c_double) for name in ("scale", "growth_factor", "backoff_factor")]
INTEGERS = [(name, ctypes.c_int32) for name in ("growth_interval", "growth_tracker")]


class ScalerState(ctypes.Structure):
    """tch_scaler_state, and tch_scaler_config, whose last number is `enabled`."""

    _fields_ = [("struct_size", ctypes.c_size_t), *REALS, *INTEGERS]


def check_scaler(torch, library, interval, growth, backoff):
    """The same losses through both, some of them infinite: the same scales, the same parameters."""
    from optimizers import Optimizer, defaults

    torch.manual_seed(5)
    what = f"scaler, interval {interval}, growth {growth}, backoff {backoff}"
    theirs = torch.amp.GradScaler(library.device, 1024.0, growth, backoff, interval)
    size = ctypes.sizeof(ScalerState)
    config, state, scaler = (
        ScalerState(size, 1024.0, growth, backoff, interval, 1),
        ScalerState(size),
        ctypes.c_void_p(),
    )
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
        library._check(library.lib.tch_scaler_step(scaler, optimizer.handle, ctypes.c_int32(1), optimizer._list))
        if i % 2:
            theirs.unscale_(reference)
        theirs.step(reference)
        theirs.update()
        library._check(library.lib.tch_scaler_update(scaler))
        library._check(library.lib.tch_scaler_get_state(scaler, ctypes.byref(state)))
        expected = theirs.state_dict()
        assert state.scale == expected["scale"], f"{what}, step {i}: scale {state.scale}, not {expected['scale']}"
        tracker = expected["_growth_tracker"]
        assert state.growth_tracker == tracker, f"{what}, step {i}: tracker {state.growth_tracker}, not {tracker}"
    gap = (mine - p.detach()).norm() / p.detach().norm()
    exact = growth == 2.0 and backoff == 0.5  # otherwise PyTorch rounds 1 / scale to float32
    assert gap.item() < (1e-12 if exact else 1e-7), f"{what}: parameters are {gap.item():.1e} apart"
    optimizer.close()
    library.lib.tch_scaler_destroy(scaler)


def main():
    path, device = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"
    why = "" if all(map(importlib.util.find_spec, ("torch", "numpy"))) else "PyTorch or NumPy is not installed"
    if not why:
        import torch

        why = "" if device == "cpu" or torch.cuda.is_available() else "PyTorch sees no GPU"
    if why:
        print(f"skipped: {why}")
        return 1 if os.environ.get("TORCHIUM_TEST_REQUIRE_DEVICE") and device != "cpu" else SKIPPED
    from library import Library

    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    library = Library(path, device)
    library.device = "cpu" if device == "cpu" else "cuda"
    if library.device == "cuda":
        library.set_stream(torch.cuda.current_stream().cuda_stream)
    for numbers in ((3, 2.0, 0.5), (1, 1.7, 0.3), (5, 1.001, 0.999)):
        check_scaler(torch, library, *numbers)
    library.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
