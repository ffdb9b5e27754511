"""Matrix functions vs common PyTorch implementations: inverse roots, powers, Kronecker and host products."""

import math
import time
from functools import partial

import torch
from cases import Work, frobenius, returning
from timing import host_ms

DAMPING, ROOT = 1e-6, 4  # relative to the largest eigenvalue, which is 1
METHODS = ("auto", "newton", "eigen")


def symmetric_batch(bench, batch, n, seed, dtype=torch.float32, spectrum="power"):
    """Matrices with random eigenvectors and eigenvalues i^-2, or geometric from 1 to 1e-6. Sixteen have their own
    eigenvectors, the others are those with the signs of random coordinates changed: different matrices with the same
    spectrum, generated quickly."""
    generator, double = bench.random(seed), {"dtype": torch.float64, "device": bench.device}
    values = torch.arange(1, n + 1, **double).pow(-2) if spectrum == "power" else torch.logspace(0, -6, n, **double)
    made = []
    for _ in range(min(batch, 16)):
        q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, **double))
        a = (q * values) @ q.T
        made.append((0.5 * (a + a.T)).to(dtype))
    base = torch.stack(made)
    if batch == len(base):
        return base
    out = torch.empty(batch, n, n, dtype=dtype, device=bench.device)
    for piece in out.split(len(base)):
        signs = torch.randint(0, 2, (len(piece), n), device=bench.device, generator=generator).to(dtype) * 2 - 1
        torch.mul(base[: len(piece)], signs[:, :, None] * signs[:, None, :], out=piece)
    return out


def reference_power(a, power):
    """The power of the damped matrices from float64 decompositions of the rounded inputs, a few at a time. For float64
    by singular values, which are the eigenvalues here: eigenvalues would compare PyTorch with itself."""
    parts = []
    for piece in a.split(max(1, 2**25 // a.shape[-1] ** 2)):
        if a.dtype == torch.float64:
            v, w, _ = torch.linalg.svd(piece)
            largest = w[:, :1]
        else:
            w, v = torch.linalg.eigh(piece.double())
            largest = w[:, -1:]
        parts.append((v * (w.clamp_min(0) + DAMPING * largest).pow(power).unsqueeze(-2)) @ v.mT)
    return torch.cat(parts)


def torch_power(a, power, dtype=None):
    w, v = torch.linalg.eigh(a.to(dtype or a.dtype))
    return ((v * (w.clamp_min(0) + DAMPING * w[:, -1:]).pow(power).unsqueeze(-2)) @ v.mT).to(a.dtype)


def torch_newton_root(a):
    """The textbook coupled Newton iteration for A^(-1/4), batched: M -> I while X -> the root."""
    eye = torch.eye(a.shape[-1], device=a.device)
    damped = a + DAMPING * eye
    z = (1 + ROOT) / (2 * torch.linalg.matrix_norm(damped))[:, None, None]
    m, x = damped * z, eye * z ** (1 / ROOT)
    previous = math.inf
    for _ in range(60):
        t = (1 + 1 / ROOT) * eye - m / ROOT
        x = x @ t
        square = t @ t
        m = square @ square @ m
        off = (m - eye).abs().amax().item()
        if not off < previous or off < 1e-6:  # converged, or dominated by rounding
            break
        previous = off
    return x


def root_call(bench, a, method, tolerance=0.0):
    """Writes the roots of `a` to separate memory, which stays NaN if a root fails."""
    out, report = torch.full_like(a, math.nan), torch.full((len(a),), -1, dtype=torch.int32, device=bench.device)
    options = {"relative_eps": DAMPING, "tolerance": tolerance, "report": report}
    return returning(bench.library.inverse_root(a, ROOT, out, method, **options), out)


def some_error(x, picked, reference):
    """Of a subset of a batch; infinite if any root failed."""
    return math.inf if x.isnan().any() else frobenius(x[picked], reference)


def inverse_root(batch, n, bench, dtype=torch.float32, methods=METHODS, tolerance=0.0, theirs=None, spectrum="power"):
    """A^(-1/4); `tolerance` 0 is the library's default, `theirs` PyTorch's compute type."""
    a = symmetric_batch(bench, batch, n, batch + n, dtype, spectrum)
    anchors = {"torch eigh": lambda: torch_power(a, -1 / ROOT, theirs)}
    if bench.cuda or bench.tiny:
        anchors["torch textbook Newton"] = lambda: torch_newton_root(a)
    reference = reference_power(a, -1 / ROOT)
    ours = {method: root_call(bench, a, method, tolerance) for method in methods}
    allowed = tolerance or (1e-9 if dtype == torch.float64 else 1e-3)
    return Work(ours, anchors, lambda x: frobenius(x, reference), allowed)


def eigen_power(batch, n, bench, power=-0.3, dtype=torch.float32, spectrum="power"):
    """Errors of both are rounding errors of the same size: which is larger is random."""
    a = symmetric_batch(bench, batch, n, 4, dtype, spectrum)
    reference, theirs = reference_power(a, power), torch_power(a, power)
    out, report = torch.full_like(a, math.nan), torch.full((batch,), -1, dtype=torch.int32, device=bench.device)
    ours = returning(bench.library.matrix_power(a, power, DAMPING, out, report), out)
    anchors = {"torch eigh": lambda: torch_power(a, power)}
    return Work({"eigen": ours}, anchors, lambda x: frobenius(x, reference), 2 * frobenius(theirs, reference))


def kronecker(m, p, bench, dtype=torch.float32):
    a, b = (torch.randn(k, k, dtype=dtype, device=bench.device, generator=bench.random(k)) for k in (m, p))
    out = bench.poisoned(m * p, m * p, dtype=dtype)
    reference = torch.kron(a.double(), b.double())[None]
    ours = returning(bench.library.kronecker_product(a, b, out), out)

    def gap(x):
        return frobenius(x[None], reference)

    return Work({"kernel": ours}, {"torch.kron": lambda: torch.kron(a, b)}, gap, gap(torch.kron(a, b)))


def torch_streamed(a, b, device, rows):
    """A host-resident product by panels of rows: copy in, multiply, copy out."""
    out = torch.empty(a.shape[0], b.shape[1])
    resident = b.to(device)
    for first in range(0, a.shape[0], rows):
        out[first : first + rows] = (a[first : first + rows].to(device) @ resident).cpu()
    return out


def host_product(m, k, n, budget, pinned, bench):
    """The limit is the arithmetic alone, as measured by PyTorch on a resident panel; the target is 1.25 times that."""
    pinned = pinned and bench.cuda

    def host_matrix(rows, columns):
        host = torch.empty(rows, columns, pin_memory=pinned)
        for piece in host.split(4096):
            piece.copy_(torch.rand(piece.shape, device=bench.device) - 0.5)
        return host

    a, b = host_matrix(m, k), host_matrix(k, n)
    out = torch.full((m, n), math.nan, pin_memory=pinned)
    picked, rows = torch.linspace(0, m - 1, 8).long(), max(1, m // 16)
    reference = a[picked].to(bench.device).double() @ b.to(bench.device).double()
    panel, resident = a[:rows].to(bench.device), b.to(bench.device)
    limit = m / rows * bench.clock.median(lambda: panel @ resident, bench.seconds)
    kept = []
    theirs = host_ms(lambda: kept.append(torch_streamed(a, b, bench.device, rows)))
    call = bench.library.matmul_chunked(a, b, budget, out)
    call()
    ours = min(host_ms(call) for _ in range(3))

    def gap(x):
        whole = all(not torch.isnan(piece).any() for piece in x.split(8192))
        return frobenius(x[picked].to(bench.device)[None], reference[None]) if whole else math.inf

    more = {"limit_ms": limit, "target_ms": 1.25 * limit, "budget_bytes": budget}
    more["errors"] = {"streamed": gap(out), "torch in panels": gap(kept[0])}
    allowed = 2 * gap(kept[0])
    return Work({"streamed": ours}, {"torch in panels": theirs}, allowed=allowed, more=lambda: more)


def scratch(batch, n, bench):
    """Workspace of a batch of roots, beyond the matrices and their roots, without a limit and with several."""
    a = symmetric_batch(bench, batch, n, 16)
    reference, library, state = reference_power(a[:1], -1 / ROOT), bench.library, 2 * a.numel() * a.element_size()
    for share in (None, 1.0, 0.5, 0.15, 0.05):
        limit = 0 if share is None else int(share * state)
        library.trim()
        library.set_workspace_limit(limit)
        library.reset_peak()
        before = library.memory()["allocated"]
        row = {"share_of_state": share, "limit_bytes": limit, "state_bytes": state}
        try:
            call = root_call(bench, a, "auto")
            row |= {"ms": bench.clock.median(call, bench.seconds), "error": some_error(call(), slice(0, 1), reference)}
            row["peak_bytes"] = library.memory()["peak"] - before
        except RuntimeError as refusal:
            row["refused"] = str(refusal)
        yield row
    library.set_workspace_limit(0)
    library.trim()


# --- scaling with size ------------------------------------------------------------------------------------------------


def affordable(bench, function, a):
    """The part of a batch that takes about a second."""
    part = a[:8].contiguous()
    each = bench.clock.median(partial(function, part), 0.0) / len(part)
    return a[: max(len(part), int(1000 / max(each, 1e-6)))].contiguous()


def sweep_rows(bench, batch, n, anchors):
    a = symmetric_batch(bench, batch, n, 1000 + n)
    picked = torch.tensor(sorted({0, batch // 2, batch - 1}), device=bench.device)
    reference = reference_power(a[picked], -1 / ROOT)
    sides = {method: (root_call(bench, a, method), batch) for method in METHODS}
    for name, function in anchors.items():
        part = affordable(bench, function, a)
        sides[name] = partial(function, part), len(part)
    for name, (function, count) in sides.items():
        ms = bench.attempt(f"{name}, n = {n}, batch {batch}", bench.clock.median, function, bench.seconds)
        if ms is not None:
            inside = picked < count
            row = {"sweep": "size", "method": name, "n": n, "batch": count, "ms": ms, "us_per_matrix": 1e3 * ms / count}
            yield row | {"error": some_error(function(), picked[inside], reference[inside])}


def sweep(bench, limit):
    """Inverse roots over n at a constant number of elements; stops starting new sizes after `limit` seconds."""
    stop = time.perf_counter() + limit
    anchors = {"torch eigh": partial(torch_power, power=-1 / ROOT), "torch textbook Newton": torch_newton_root}
    sizes = (8, 16, 24) if bench.tiny else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    for n in sizes:
        if time.perf_counter() < stop:
            yield from sweep_rows(bench, max(1, (2**12 if bench.tiny else 2**24) // n**2), n, anchors)
