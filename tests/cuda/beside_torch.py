#!/usr/bin/env python3
"""libtorchium and PyTorch in one process, on one GPU and one stream, whichever was loaded first.

    tests/cuda/beside_torch.py LIBRARY

Exits with 77 where PyTorch or a GPU is missing. Each order runs in a process of its own: work is queued by PyTorch, by
the library and by PyTorch again without waiting in between, and the results are compared with PyTorch's in float64.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

SKIPPED = 77
ORDERS = ("torch-first", "library-first")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))


def check(good, what):
    if not good:
        print(f"FAILED: {what}")
        sys.exit(1)


def relative_error(torch, x, reference):
    return (torch.linalg.norm(x.double() - reference) / torch.linalg.norm(reference)).item()


def symmetric(torch, batch, n):
    """Condition 1e3, eigenvalues up to 1."""
    q, _ = torch.linalg.qr(torch.randn(batch, n, n, dtype=torch.float64, device="cuda"))
    spectrum = torch.logspace(0, -3, n, dtype=torch.float64, device="cuda")
    a = (q * spectrum) @ q.mT
    return 0.5 * (a + a.mT)


def power(torch, a, exponent, damping):
    w, v = torch.linalg.eigh(a.double())
    return (v * (w + damping * w[..., -1:]).pow(exponent).unsqueeze(-2)) @ v.mT


def check_roots(torch, library, batch, n, method):
    """The stream is kept busy first, so that whoever did not wait in its turn would read old numbers."""
    wanted = symmetric(torch, batch, n).float()
    reference = power(torch, wanted, -0.25, 1e-3)
    a = torch.full_like(wanted, float("nan"))
    out = torch.full_like(wanted, float("nan"))
    report = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
    call = library.inverse_root(a, 4, out, method, relative_eps=1e-3, report=report)
    torch.cuda._sleep(20_000_000)
    a.copy_(wanted)
    call()
    doubled = out * 2
    gap = relative_error(torch, doubled / 2, reference)
    check(gap < 1e-3, f"root by {method}, {batch}x{n}: error {gap:.2e}")
    check(report.abs().sum().item() == 0, f"root by {method}, {batch}x{n}: reports {report.tolist()}")


def check_others(torch, library):
    a = torch.randn(9, 14, device="cuda")
    b = torch.randn(21, 6, device="cuda")
    out = torch.full((9 * 21, 14 * 6), float("nan"), device="cuda")
    library.kronecker_product(a, b, out)()
    gap = relative_error(torch, out, torch.kron(a.double(), b.double()))
    check(gap < 1e-6, f"kronecker product: error {gap:.2e}")
    s = symmetric(torch, 3, 70).float()
    x = torch.full_like(s, float("nan"))
    library.matrix_power(s, -0.5, 1e-3, x)()
    w, v = torch.linalg.eigh(s.double())
    gap = relative_error(torch, x, (v * (w + 1e-3).pow(-0.5).unsqueeze(-2)) @ v.mT)
    check(gap < 80 * 2**-24 * 1e3, f"matrix power: error {gap:.2e}")  # (n + 10) u kappa


def run_one(path, order):
    from library import Library

    library = Library(path, "cuda") if order == "library-first" else None
    import torch

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    torch.ones(1, device="cuda").sum().item()
    library = library or Library(path, "cuda")
    device = torch.cuda.current_device()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            library.set_stream(stream.cuda_stream)
            for batch, n in ((5, 40), (3, 200)):
                for method in ("auto", "newton", "eigen"):
                    check_roots(torch, library, batch, n, method)
            check_others(torch, library)
        torch.cuda.synchronize()
    check(torch.cuda.current_device() == device, "the current device was changed")
    library.set_stream(0)
    library.close()
    check(torch.ones(3, device="cuda").sum().item() == 3, "PyTorch does not work after the context is gone")
    print(f"{order}: good, PyTorch {torch.__version__}")


def missing():
    """Why this cannot be run here, or nothing. Asked in another process, which leaves this one untouched."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    probe = subprocess.run(
        [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"], check=False
    )
    return "" if probe.returncode == 0 else "PyTorch sees no GPU"


def main():
    path = sys.argv[1]
    if len(sys.argv) > 2:
        run_one(path, sys.argv[2])
        return 0
    why = missing()
    if why:
        print(f"skipped: {why}")
        return 1 if os.environ.get("TORCHIUM_TEST_REQUIRE_DEVICE") else SKIPPED
    failed = [o for o in ORDERS if subprocess.run([sys.executable, __file__, path, o], check=False).returncode != 0]
    print(f"failed: {', '.join(failed)}" if failed else "both orders are good")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
