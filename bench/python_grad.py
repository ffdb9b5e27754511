#!/usr/bin/env python3
"""Times per-sample gradients through the Python package: one linear layer beside the ways PyTorch has for it,
and the norms and clipped sums of a whole small GPT beside its plain backward pass.

    PYTHONPATH=build/release/python bench/python_grad.py [--device cuda] [--quick] [--json FILE]

Times are medians, by device events on a GPU. `backward` is the backward pass alone with what the package does in it and
at its end; `pass` is forward and backward. Memory is the peak of PyTorch's allocator in one pass, beyond the
parameters, and what Torchium's own pool holds after it. On the CPU, and with --quick, sizes are small: a check that all
of it runs.
"""

import argparse
import contextlib
import statistics
import time

import figures
import torch
import torchium
from timing import Clock
from torch import nn
from torch.nn import functional as F
from torchium import _C

GPT_SIZES = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "batch": 8}
TINY_SIZES = {"layers": 2, "width": 32, "heads": 2, "length": 16, "batch": 4}
GPT_VOCABULARIES = (
    50257,
    50304,
)  # GPT-2's own, whose rows have no whole number of 16 bytes, and the next multiple of 64
TINY_VOCABULARIES = (101,)


# --- one linear layer -------------------------------------------------------------------------------------------------


def linear_gradients(device, clock, seconds, small):
    """Row 11: gradients of a linear layer, each side making its result."""
    b, d, p = (64, 128, 128) if small else (256, 1024, 1024)
    x, g = torch.randn(b, d, device=device), torch.randn(b, p, device=device)
    layer = _C.Layer("linear")

    def ours():
        made = torch.empty(b, p, d, device=device)
        _C.grad_samples(layer, x, g, made, None)
        return made

    sides = {
        "torchium": ours,
        "einsum": lambda: torch.einsum("bo,bi->boi", g, x),
        "bmm": lambda: torch.bmm(g[:, :, None], x[:, None, :]),
    }
    reference = torch.einsum("bo,bi->boi", g.double(), x.double())
    return {
        "what": f"gradients, linear {d} to {p}, B = {b}, float32",
        "ms": {name: clock.median(side, seconds) for name, side in sides.items()},
        "error": {name: relative_error(side(), reference) for name, side in sides.items()},
    }


def linear_norms(device, clock, seconds, small, dtype, rounded):
    """Row 12: squared norms of a linear layer on sequences."""
    b, t, d, p = (8, 32, 48, 64) if small else (32, 256, 768, 3072)
    x, g = torch.randn(b, t, d, device=device, dtype=dtype), torch.randn(b, t, p, device=device, dtype=dtype)
    layer = _C.Layer("linear", rounded=rounded)

    def ours():
        norms = torch.empty(b, dtype=torch.float64, device=device)
        _C.grad_norms(layer, x, g, 1, False, norms)
        return norms

    def gram():
        return (x @ x.mT).float().mul((g @ g.mT).float()).sum((1, 2))

    formed = torch.einsum("bto,bti->boi", g.double(), x.double())
    reference = formed.flatten(1).square().sum(1)
    name = str(dtype).removeprefix("torch.") + (", TF32 allowed" if rounded and dtype == torch.float32 else "")
    sides = {"torchium": ours, "Gram form": gram}
    with tf32(rounded):
        return {
            "what": f"norms, linear {d} to {p}, B = {b}, T = {t}, {name}",
            "ms": {side: clock.median(function, seconds) for side, function in sides.items()},
            "error": {side: relative_error(function(), reference) for side, function in sides.items()},
        }


def relative_error(value, reference):
    return ((value.double() - reference).norm() / reference.norm()).item()


@contextlib.contextmanager
def tf32(allowed):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    yield
    torch.set_float32_matmul_precision(before)


# --- a small GPT ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, length, tied):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        places = torch.arange(x.size(1), device=x.device)[None]
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


class Passes:
    """One way of going forward and backward, with events around both."""

    def __init__(self, model, batch, device):
        self.model, self.device = model, device
        self.x, self.y = batch

    def run(self, context, mark=lambda: None):
        """`mark` is called before the forward pass, before the backward pass and at the end."""
        self.model.zero_grad(set_to_none=True)
        mark()
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                logits = self.model(self.x)
                loss = F.cross_entropy(logits.flatten(0, 1), self.y.flatten())
            del logits
            mark()
            loss.backward()
        mark()

    def times(self, context, rounds):
        """Medians of the backward pass and of both, in milliseconds."""
        both = []
        for _ in range(rounds):
            marks = []
            self.run(context, lambda marks=marks: marks.append(self.now()))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                both.append((marks[1].elapsed_time(marks[2]), marks[0].elapsed_time(marks[2])))
            else:
                both.append((1e3 * (marks[2] - marks[1]), 1e3 * (marks[2] - marks[0])))
        return [statistics.median(column) for column in zip(*both, strict=True)]

    def now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def memory(self, context):
        """Bytes: PyTorch's peak beyond what was there before the pass, and what Torchium's pool holds after it."""
        if self.device.type != "cuda":
            return None
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(context)
        torch.cuda.synchronize()
        return {
            "torch": torch.cuda.max_memory_allocated() - before,
            "pool": _C.memory_info(str(torch.device("cuda", torch.cuda.current_device())))["reserved"],
        }


def gpt(device, sizes, vocabulary, tied, rounds):
    sizes = dict(sizes, vocabulary=vocabulary)
    shape = (sizes.pop("batch"), sizes["length"])
    torch.manual_seed(0)
    model = GPT(**sizes, tied=tied).to(device)
    batch = [torch.randint(sizes["vocabulary"], shape, device=device) for _ in range(2)]
    passes = Passes(model, batch, device)
    ways = {
        "plain": contextlib.nullcontext(),
        "norms": torchium.per_sample_norms(model),
        "norms and gradients": torchium.per_sample_norms(model, gradients=True),
        "clipped sum": torchium.GhostClipping(model, 1.0),
    }
    entry = {
        "what": f"GPT, {sizes['layers']} layers of {sizes['width']}, V = {vocabulary}, B x T = {shape}, "
        f"tied head: {tied}",
        "ways": {},
    }
    for name, context in ways.items():
        passes.times(context, 3)  # to warm up
        backward, whole = passes.times(context, rounds)
        entry["ways"][name] = {"backward_ms": backward, "pass_ms": whole, "memory": passes.memory(context)}
    return entry


# --- what is shown ----------------------------------------------------------------------------------------------------


def show_row(entry):
    print(entry["what"])
    for name, ms in entry["ms"].items():
        print(f"    {name:12} {ms:10.4f} ms   error {entry['error'][name]:.1e}", flush=True)


def show_gpt(entry):
    print(entry["what"])
    first = entry["ways"]["plain"]
    for name, way in entry["ways"].items():
        line = (
            f"    {name:20} backward {way['backward_ms']:9.3f} ms ({way['backward_ms'] / first['backward_ms']:.2f} x)"
        )
        line += f"   pass {way['pass_ms']:9.3f} ms ({way['pass_ms'] / first['pass_ms']:.2f} x)"
        if way["memory"] is not None:
            whole = [sum(w["memory"].values()) for w in (way, first)]
            line += f"   memory {whole[0] / 2**20:8.0f} MiB ({whole[0] / whole[1]:.3f} x)"
        print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    small = options.quick or device.type == "cpu"
    seconds, clock = 0.1 if small else 1.0, Clock(device)
    found = {
        "device": str(device),
        "torch": torch.__version__,
        "torchium": torchium.__version__,
        "rows": [],
        "gpt": [],
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    found["rows"].append(linear_gradients(device, clock, seconds, small and options.quick))
    show_row(found["rows"][-1])
    for dtype, rounded in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        found["rows"].append(linear_norms(device, clock, seconds, small, dtype, rounded))
        show_row(found["rows"][-1])
    sizes, rounds = (TINY_SIZES, 3) if small else (GPT_SIZES, 20)
    for vocabulary in TINY_VOCABULARIES if small else GPT_VOCABULARIES:
        for tied in (False, True):
            found["gpt"].append(gpt(device, sizes, vocabulary, tied, rounds))
            show_gpt(found["gpt"][-1])
    if options.json is not None:
        figures.write(options.json, found)


if __name__ == "__main__":
    main()
