"""Per-sample gradients: one linear layer through the C library vs PyTorch, a small GPT through the Python package vs
its plain backward pass, and modules vs Opacus."""

import contextlib
import copy
import statistics
import time

import torch
from cases import Work, finite, frobenius, returning
from library import linear_layer
from timing import waiter
from torch import nn
from torch.nn import functional

# With operands rounded to TF32, or of bfloat16, the error of each term of a norm or a factor is at most 2^-11, and
# random; the bound is for their sum.
ROUNDED = 2**-11


def layer(bench, batch, positions, inputs, outputs, dtype):
    """Inputs and output gradients of a linear layer."""
    generator = bench.random(positions)
    shapes = (batch, positions, inputs), (batch, positions, outputs)
    return [torch.randn(shape, device=bench.device, generator=generator).to(dtype) for shape in shapes]


def largest_gap(x, reference, size):
    return finite(((x.double() - reference).abs() / size).amax().item())


def gradients(batch, positions, inputs, outputs, bench, dtype=torch.float32):
    """With one position each gradient is an outer product, dominated by its stores."""
    x, g = layer(bench, batch, positions, inputs, outputs, dtype)
    out = bench.poisoned(batch, outputs, inputs, dtype=dtype)
    reference = torch.einsum("btp,btd->bpd", g.double(), x.double())
    anchors = {"torch einsum": lambda: torch.einsum("btp,btd->bpd", g, x), "torch bmm": lambda: torch.bmm(g.mT, x)}
    ours = returning(bench.library.grad_samples(linear_layer(), x, g, out), out)
    allowed = 2**-24 if positions == 1 else 2 * frobenius(torch.bmm(g.mT, x), reference)
    return Work({"samples": ours}, anchors, lambda made: frobenius(made, reference), allowed)


def norms(batch, positions, inputs, outputs, dtype, bench, bias=True):
    """Squared norms of the gradients of the weight, and of weight and bias, vs the Gram form."""
    x, g = layer(bench, batch, positions, inputs, outputs, dtype)
    formed = torch.stack([(b.mT @ a).square().sum() for a, b in zip(x.double(), g.double(), strict=True)])
    reference = formed + g.double().sum(1).square().sum(1) if bias else formed

    def gram():
        inner, outer = torch.bmm(x, x.mT).float(), torch.bmm(g, g.mT).float()
        return (inner * outer).sum((1, 2)) + (outer.sum((1, 2)) if bias else 0.0)

    ours = {}
    for name, rounded in (("rounded", True), ("exact", False)):
        out = bench.poisoned(batch, dtype=torch.float64)
        ours[name] = returning(bench.library.grad_norms(linear_layer(rounded), x, g, out, bias), out)
    anchors = {"torch Gram form": gram}
    return Work(ours, anchors, lambda made: largest_gap(made, reference, reference), ROUNDED)


def factors(batch, positions, inputs, outputs, dtype, bench):
    """KFAC's two factors of the layer."""
    x, g = layer(bench, batch, positions, inputs, outputs, dtype)
    rows = batch * positions
    x, g = x.reshape(rows, -1), g.reshape(rows, -1)
    references = x.double().mT @ x.double() / rows, g.double().mT @ g.double() / batch

    def products(a, b):
        return lambda: (a.mT @ a / rows, b.mT @ b / batch)

    ours = {}
    for name, rounded in (("rounded", True), ("exact", False)):
        out = bench.poisoned(inputs, inputs), bench.poisoned(outputs, outputs)
        shaped = x.view(batch, positions, -1), g.view(batch, positions, -1)
        ours[name] = returning(bench.library.grad_factors(linear_layer(rounded), *shaped, 1.0, 0.0, *out), out)
    anchors = {"torch, two float32 products": products(x.float(), g.float())}
    if dtype != torch.float32:
        anchors["torch, two products"] = products(x, g)

    def gap(pair):
        return max(frobenius(made[None], wanted[None]) for made, wanted in zip(pair, references, strict=True))

    return Work(ours, anchors, gap, ROUNDED)


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
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
        return x + self.down(functional.gelu(self.up(self.after(x))))


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


def gpt(layers, width, heads, vocabulary, length, batch, tied, bench):
    """Milliseconds of the backward pass under bfloat16 autocast including per-sample work, and the peak of PyTorch's
    memory in one pass beyond the parameters, plus Torchium's pool."""
    import torchium

    torch.manual_seed(0)
    model = GPT(layers, width, heads, vocabulary, length, tied).to(bench.device)
    x, y = (torch.randint(vocabulary, (batch, length), device=bench.device) for _ in range(2))
    wait = waiter(bench.device)

    def backward_ms(context):
        model.zero_grad(set_to_none=True)
        with context:
            with torch.autocast(bench.device.type, dtype=torch.bfloat16):
                logits = model(x)
                loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            del logits
            wait()
            start = time.perf_counter()
            loss.backward()
        wait()
        return 1e3 * (time.perf_counter() - start)

    def memory(context):
        if not bench.cuda:
            return None
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward_ms(context)
        pool = torchium._C.memory_info(str(torch.device("cuda", torch.cuda.current_device())))["reserved"]
        return torch.cuda.max_memory_allocated() - before + pool

    ways = {
        "clipped sum": torchium.GhostClipping(model, 1.0),
        "norms": torchium.per_sample_norms(model),
        "norms and gradients": torchium.per_sample_norms(model, gradients=True),
        "plain": contextlib.nullcontext(),
    }
    rounds = 3 if bench.quick or not bench.cuda else 20
    ms = {}
    for name, context in ways.items():
        ms[name] = statistics.median([backward_ms(context) for _ in range(3 + rounds)][3:])
    plain = {"plain backward pass": ms.pop("plain")}
    return Work(ms, plain, more=lambda: {"memory": {name: memory(context) for name, context in ways.items()}})


# --- modules vs Opacus ------------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """Linear layers over positions, as in a transformer."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def convolutions():
    first = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(64 * 15 * 15, 10))


def feed():
    return nn.Sequential(nn.LayerNorm(128), Feed(128), nn.LayerNorm(128), Feed(128))


def words():
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64))


def module(make, shape, bench):
    """Forward and backward of `GradSampleModule`, Torchium's and Opacus's, whose gradients are compared."""
    import torchium
    from peers import found

    torch.manual_seed(0)
    model = make().to(bench.device)
    x = torch.randint(1000, shape) if make is words else torch.randn(shape)
    x = x.to(bench.device)

    def step(wrapper):
        wrapped = wrapper(copy.deepcopy(model))

        def run():
            wrapped.zero_grad()
            for parameter in wrapped.parameters():
                parameter.grad_sample = None
            wrapped(x).square().flatten(1).sum(1).mean().backward()
            return wrapped

        return run

    anchors = {}
    if found("opacus"):
        from opacus import GradSampleModule

        anchors["Opacus"] = step(GradSampleModule)
    ours = step(torchium.GradSampleModule)
    reference = [parameter.grad_sample.double() for parameter in ours().parameters()]

    def gap(wrapped):
        pairs = zip(wrapped.parameters(), reference, strict=True)
        return max(float((p.grad_sample.double() - wanted).norm() / wanted.norm()) for p, wanted in pairs)

    return Work({"torchium": ours}, anchors, gap)
