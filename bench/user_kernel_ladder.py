#!/usr/bin/env python3
"""A user's kernel from the first that works to a tuned one: AdamW over all weights of a GPT-2, beside the built-in.

    PYTHONPATH=build/cuda/python bench/user_kernel_ladder.py [--json FILE]
    PYTHONPATH=build/release/python bench/user_kernel_ladder.py --device cpu

Memory decides: an element has 16 bytes to be read (p, g, m, v) and 12 to be written, and a step of AdamW cannot take
less than the copy of as many bytes, which is the first row. GB/s count those 28 bytes whatever a rung moves. Every rung
is checked first, on an odd number of elements against the same steps in float64. Times are medians of CUDA events; on
the CPU the shortest of several by the clock, with one thread. docs/python/kernels.md tells the story, and
bench/ladder/cuda_updates.md is the built-in's own ladder.
"""

import argparse
import sys

import figures
import torch
import torchium
from optim_compare import GPT2, GPT2_VECTORS
from timing import Clock
from torchium import _C
from torchium.optim import AdamW, Kernel

BYTES = 28
NUMBERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01}
CHECKED = 100_003
# Five steps, each with a few roundings of a weight near 1 and of a step near lr.
BOUND = 2e-6

# --- the rungs --------------------------------------------------------------------------------------------------------

NUMBERS_OF_C = "float lr, float beta1, float beta2, float eps, float decay, float fix1, float fix2"

THREE = (
    """
    __global__ void first(const float *g, float *m, float beta1, int n)
    {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) m[i] = beta1 * m[i] + (1 - beta1) * g[i];
    }
    """,
    """
    __global__ void second(const float *g, float *v, float beta2, int n)
    {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
    }
    """,
    """
    __global__ void step(float *p, const float *m, const float *v, float lr, float eps, float decay, float fix1,
                         float fix2, int n)
    {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) p[i] -= lr * (m[i] / fix1 / (sqrtf(v[i] / fix2) + eps) + decay * p[i]);
    }
    """,
)

FUSED = f"""
__global__ void adamw(float *p, const float *g, float *m, float *v, {NUMBERS_OF_C}, int n)
{{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{
        m[i] = beta1 * m[i] + (1 - beta1) * g[i];
        v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
        p[i] -= lr * (m[i] / fix1 / (sqrtf(v[i] / fix2) + eps) + decay * p[i]);
    }}
}}
"""

STRIDED = f"""
__global__ void adamw(float *p, const float *g, float *m, float *v, {NUMBERS_OF_C}, int n)
{{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {{
        m[i] = beta1 * m[i] + (1 - beta1) * g[i];
        v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
        p[i] -= lr * (m[i] / fix1 / (sqrtf(v[i] / fix2) + eps) + decay * p[i]);
    }}
}}
"""

# Sixteen bytes at a time: a quarter of the requests to memory. Two vec4s a thread: all eight loads are asked for before
# the first is needed.
VEC4S = f"""
struct alignas(16) four {{ float at[4]; }};

__global__ void __launch_bounds__(256) adamw(float *p, const float *g, float *m, float *v, {NUMBERS_OF_C}, int n)
{{
    const int vec4s = n / 4;
    const int first = blockIdx.x * (blockDim.x * VEC4S) + threadIdx.x;
    four P[VEC4S], G[VEC4S], M[VEC4S], V[VEC4S];
#pragma unroll
    for (int s = 0; s < VEC4S; s++) {{
        int i = first + s * blockDim.x;
        if (i < vec4s) {{
            G[s] = reinterpret_cast<const four *>(g)[i];
            P[s] = reinterpret_cast<const four *>(p)[i];
            M[s] = reinterpret_cast<const four *>(m)[i];
            V[s] = reinterpret_cast<const four *>(v)[i];
        }}
    }}
#pragma unroll
    for (int s = 0; s < VEC4S; s++) {{
        int i = first + s * blockDim.x;
        if (i < vec4s) {{
#pragma unroll
            for (int e = 0; e < 4; e++) {{
                float grad = G[s].at[e];
                M[s].at[e] = beta1 * M[s].at[e] + (1 - beta1) * grad;
                V[s].at[e] = beta2 * V[s].at[e] + (1 - beta2) * grad * grad;
                P[s].at[e] -= lr * (M[s].at[e] / fix1 / (sqrtf(V[s].at[e] / fix2) + eps) + decay * P[s].at[e]);
            }}
            reinterpret_cast<four *>(p)[i] = P[s];
            reinterpret_cast<four *>(m)[i] = M[s];
            reinterpret_cast<four *>(v)[i] = V[s];
        }}
    }}
    int i = vec4s * 4 + threadIdx.x;  // what is left, three elements at most
    if (blockIdx.x == 0 && i < n) {{
        m[i] = beta1 * m[i] + (1 - beta1) * g[i];
        v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
        p[i] -= lr * (m[i] / fix1 / (sqrtf(v[i] / fix2) + eps) + decay * p[i]);
    }}
}}
"""

OPERATION = """
    m_next = beta1 * m + (1 - beta1) * g;
    v_next = beta2 * v + (1 - beta2) * g * g;
    p_next = p - lr * (m_next / fix1 / (sqrtf(v_next / fix2) + eps) + decay * p);
"""

UPDATE = """
__device__ void own_adamw(tch_element &e, const tch_numbers &k)
{
    e.m = k.beta1 * e.m + k.one_minus_beta1 * e.g;
    e.v = k.beta2 * e.v + k.one_minus_beta2 * e.g * e.g;
    e.p -= k.lr * (e.m / k.correction1 / (sqrt(e.v / k.correction2) + k.eps) + k.weight_decay * e.p);
}
"""


class Problem:
    """Parameters, gradients and moments in four arrays, and where in its training it is."""

    def __init__(self, count, device):
        generator = torch.Generator(device).manual_seed(1)
        self.p, self.g = (torch.randn(count, device=device, generator=generator) for _ in range(2))
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.count, self.steps = count, 0

    def corrections(self):
        self.steps += 1
        return 1 - NUMBERS["beta1"] ** self.steps, 1 - NUMBERS["beta2"] ** self.steps


def three_kernels(problem):
    first, second, step = (torchium.kernel(source) for source in THREE)
    k = NUMBERS
    shape = -(-problem.count // 256), 256

    def go():
        fixes = problem.corrections()
        first(*shape, (problem.g, problem.m, k["beta1"], problem.count))
        second(*shape, (problem.g, problem.v, k["beta2"], problem.count))
        step(*shape, (problem.p, problem.m, problem.v, k["lr"], k["eps"], k["decay"], *fixes, problem.count))

    return go


def one_kernel(source, elements, **options):
    """With so many elements for a thread; 0: with four times the blocks that are under way at once."""

    def make(problem):
        kernel = torchium.kernel(source, "adamw", **options)
        device = problem.p.device
        blocks = -(-problem.count // (256 * elements)) if elements else 4 * kernel.info(device)["suggested_blocks"]

        def go():
            numbers = (*NUMBERS.values(), *problem.corrections())
            kernel(blocks, 256, (problem.p, problem.g, problem.m, problem.v, *numbers, problem.count))

        return go

    return make


def elementwise(problem):
    names = ("p", "g", "m", "v", *NUMBERS, "fix1", "fix2")
    function = torchium.elementwise(
        ", ".join(f"float {name}" for name in names), "float p_next, float m_next, float v_next", OPERATION, "adamw"
    )

    def go():
        arrays = problem.p, problem.m, problem.v
        function(problem.p, problem.g, problem.m, problem.v, *NUMBERS.values(), *problem.corrections(), out=arrays)

    return go


def optimizer(kernel=None, shapes=None):
    """The built-in, or a function for one element in its place, on one parameter or on those of a network."""

    def make(problem):
        sizes = [torch.Size(s).numel() for s in shapes or [(problem.count,)]]
        if sum(sizes) > problem.count:
            return None
        params = [p.requires_grad_() for p in problem.p[: sum(sizes)].detach().split(sizes)]
        for p, g in zip(params, problem.g[: sum(sizes)].split(sizes), strict=True):
            p.grad = g
        k = NUMBERS
        betas, options = (k["beta1"], k["beta2"]), {"lr": k["lr"], "eps": k["eps"], "weight_decay": k["decay"]}
        return AdamW(params, betas=betas, nonfinite="ignore", update_kernel=kernel, **options).step

    return make


def torch_fused(problem):
    p = problem.p.detach().requires_grad_()
    p.grad = problem.g
    k = NUMBERS
    options = {"lr": k["lr"], "betas": (k["beta1"], k["beta2"]), "eps": k["eps"], "weight_decay": k["decay"]}
    return torch.optim.AdamW([p], fused=True, **options).step


NETWORK = GPT2 + GPT2_VECTORS
RUNGS = {
    "1 three kernels, one for each line": three_kernels,
    "2 one kernel, a thread for each element": one_kernel(FUSED, 1),
    "3 a grid-stride loop": one_kernel(STRIDED, 0),
    "4 sixteen bytes at a time": one_kernel(VEC4S, 4, options=["-DVEC4S=1"]),
    "5 two of them a thread, loads first": one_kernel(VEC4S, 8, options=["-DVEC4S=2"]),
    "  torchium.elementwise": elementwise,
    "  update_kernel of torchium.optim.AdamW": optimizer(Kernel(UPDATE, tolerance=1e-4)),
    "  update_kernel, the network's own tensors": optimizer(Kernel(UPDATE, tolerance=1e-4), NETWORK),
    "  built-in torchium.optim.AdamW": optimizer(),
    "  built-in, the network's own tensors": optimizer(None, NETWORK),
    "  torch.optim.AdamW, fused": torch_fused,
}

# --- checking and timing ----------------------------------------------------------------------------------------------


def error(make, device):
    """The largest difference of a weight to the same five steps in float64; None where it does not apply."""
    problem = Problem(CHECKED, device)
    p, g, m, v = (t.double() for t in (problem.p, problem.g, problem.m, problem.v))
    go = make(problem)
    if go is None:
        return None
    k = NUMBERS
    for step in range(1, 6):
        go()
        m = k["beta1"] * m + (1 - k["beta1"]) * g
        v = k["beta2"] * v + (1 - k["beta2"]) * g * g
        moved = m / (1 - k["beta1"] ** step) / ((v / (1 - k["beta2"] ** step)).sqrt() + k["eps"])
        p -= k["lr"] * (moved + k["decay"] * p)
    return (problem.p.double() - p).abs().max().item()


def seconds(function, device):
    """Of a call: on a GPU a median by events, on the CPU, which others use too, the shortest."""
    clock = Clock(device)
    for _ in range(3):
        function()
    return 1e-3 * (min(clock.times(function, 15)) if device == "cpu" else clock.median(function, 0.1))


def copy_seconds(count, device):
    source = torch.ones(count * BYTES // 8, device=device)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), device)


def measure(rung, make, count, device, copy):
    """The figures of a rung, or None where it does not apply."""
    found = error(make, device)
    go = make(Problem(count, device))
    if go is None:
        return None
    took = seconds(go, device)
    row = {"rung": rung.strip(), "us": 1e6 * took, "gbps": count * BYTES / took / 1e9, "of_copy": copy / took}
    checked = "" if found is None else f"  error {found:.1e}" + ("" if found <= BOUND else " TOO LARGE")
    print(f"{rung:<42} {row['us']:9.1f} us {row['gbps']:7.1f} GB/s {100 * copy / took:6.1f} % of a copy{checked}")
    return row | {"error": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, help="all weights of the network on a GPU, 4 million on the CPU")
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cpu":
        torch.set_num_threads(1)
        _C.set_num_threads(1)
    count = arguments.elements or (4_000_000 if device == "cpu" else sum(torch.Size(s).numel() for s in NETWORK))
    name = "the CPU" if device == "cpu" else torch.cuda.get_device_name()
    print(f"AdamW of {count} float32 weights on {name}, {BYTES} bytes each")
    copy = copy_seconds(count, device)
    rows = [{"rung": "copy", "us": 1e6 * copy, "gbps": count * BYTES / copy / 1e9}]
    print(f"{'copy of as many bytes':<42} {1e6 * copy:9.1f} us {rows[0]['gbps']:7.1f} GB/s")
    rows += [row for rung, make in RUNGS.items() if (row := measure(rung, make, count, device, copy)) is not None]
    if arguments.json:
        figures.write(arguments.json, {"device": name, "elements": count, "torch": torch.__version__, "rows": rows})
    return 1 if any((row.get("error") or 0) > BOUND for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
