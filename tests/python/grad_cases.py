"""Layers and models for tests of per-sample gradients, and the reference: a plain loop over the samples, in float64,
with PyTorch's autograd.

Bounds. Forward and backward of everything here are sums of at most a few thousand products: in float64 they agree with
the reference to about 1e-13 of the norm, and BOUND64 leaves a factor for cancellation; in float32, with rounding of
6e-8 per operation, to about 1e-6 of it.
"""

import copy
import math

import torch
import torchium
from models import GPT2
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.backends.cudnn.allow_tf32 = False  # of float32 convolutions on a GPU, whose operands would have 11 bits

BOUND64 = 1e-10
BOUND32 = 2e-5


def loss_of(output, target):
    """Each sample's loss: the mean squared distance to its target, which is as large as its output."""
    return ((output - target) ** 2).flatten(1).mean(1)


class Parts(nn.Module):
    """Layers by name, and the function applied to them: a function of this module and the inputs."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.function = forward

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Add(nn.Module):
    """A parameter used directly in forward(): no rule."""

    def __init__(self, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return torch.tanh(x + self.shift)


def first_of(inner):
    """Wraps a module that returns a tuple."""
    return Parts(lambda m, x: m.inner(x)[0], inner=inner)


class Recurrent(nn.Module):
    """No rule, and the samples in another dimension of each result: of y in the first or second, of the nested states
    in the second of [layers, samples, width]."""

    def __init__(self, layers, width, batch_first):
        super().__init__()
        self.weight, self.batch_first, self.states = nn.Parameter(torch.randn(layers, width, width)), batch_first, True

    def forward(self, x, state):
        h, c = state
        rows, last = x.unbind(1 if self.batch_first else 0), []
        for k, weight in enumerate(self.weight):
            one, seen = h[k], []
            for row in rows:
                one = torch.tanh(row @ weight + one * c[k])
                seen.append(one)
            rows = seen
            last.append(one)
        y, h = torch.stack(rows, 1 if self.batch_first else 0), torch.stack(last)
        return (y, {"h": h, "c": (h * c, [h.argmax(2)])}) if self.states else y


class RecurrentModel(nn.Module):
    """[samples, T, width] to [samples, width], from all results of a recurrent module, with initial states."""

    def __init__(self, layers, width, batch_first=True):
        super().__init__()
        self.layers, self.inner = layers, Recurrent(layers, width, batch_first)

    def forward(self, x):
        h = torch.stack([x.mean(1) + k for k in range(self.layers)])
        y = self.inner(x if self.inner.batch_first else x.transpose(0, 1), (h, 2 * h))
        y, states = y if isinstance(y, tuple) else (y, {"h": h, "c": (h,)})
        return y.sum(1 if self.inner.batch_first else 0) + (states["h"] * 3 + states["c"][0]).sum(0)


class Attention(nn.Module):
    def __init__(self, width, heads, batch_first=True, **kwargs):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first, **kwargs)

    def forward(self, x):
        first = self.attention.batch_first
        x = x if first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1 if first else 0), dtype=x.dtype, device=x.device)
        out, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return out if first else out.transpose(0, 1)


def tokens(*shape, rows=7):
    return lambda batch, dtype, device: torch.randint(rows, (batch, *shape), device=device)


def numbers(*shape):
    return lambda batch, dtype, device: torch.randn(batch, *shape, dtype=dtype, device=device)


# Name: (constructor, the input of B samples). Each has a rule.
LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), numbers(5)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), numbers(5)),
    "linear 1 to 1": (lambda: nn.Linear(1, 1), numbers(1)),
    "linear on sequences": (lambda: nn.Linear(5, 3), numbers(7, 5)),
    "linear on long sequences": (lambda: nn.Linear(3, 2), numbers(65, 3)),
    "linear on images": (lambda: nn.Linear(4, 6), numbers(2, 3, 2, 4)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), numbers(3, 9)),
    "conv1d same even": (lambda: nn.Conv1d(2, 3, 4, padding="same"), numbers(2, 9)),
    "conv1d same dilated": (lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=3), numbers(2, 11)),
    "conv1d valid": (lambda: nn.Conv1d(2, 3, 3, padding="valid", bias=False), numbers(2, 6)),
    "conv1d circular": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), numbers(2, 6)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), numbers(3, 6, 5)),
    "conv2d 1x1": (lambda: nn.Conv2d(3, 4, 1), numbers(3, 4, 5)),
    "conv2d stride": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(1, 2)), numbers(3, 7, 8)),
    "conv2d dilation": (lambda: nn.Conv2d(2, 4, 3, dilation=(2, 1), padding=2), numbers(2, 7, 6)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), numbers(4, 5, 4)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), numbers(4, 5, 6)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), numbers(2, 5, 4)),
    "conv2d replicate": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate"), numbers(2, 5, 4)),
    "conv2d same reflect": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="reflect"), numbers(2, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 1)), numbers(2, 4, 5, 3)),
    "conv3d groups": (lambda: nn.Conv3d(4, 2, 2, groups=2, padding_mode="circular", padding=1), numbers(4, 3, 3, 3)),
    "embedding": (lambda: nn.Embedding(7, 4), tokens(6)),
    "embedding of one token": (lambda: nn.Embedding(7, 4), tokens()),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), tokens(9)),
    "embedding on grids": (lambda: nn.Embedding(7, 4), tokens(3, 2)),
    "layer norm": (lambda: nn.LayerNorm(5), numbers(5)),
    "layer norm on sequences": (lambda: nn.LayerNorm(5, eps=1e-3), numbers(7, 5)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((3, 5)), numbers(2, 3, 5)),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), numbers(4, 5)),
    "rms norm": (lambda: nn.RMSNorm(5), numbers(7, 5)),
    "rms norm with eps": (lambda: nn.RMSNorm((2, 5), eps=1e-2), numbers(3, 2, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 6), numbers(6, 4, 3)),
    "group norm without positions": (lambda: nn.GroupNorm(3, 6), numbers(6)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True), numbers(4, 6)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True), numbers(3, 4, 5)),
}

# None has a rule: they run sample by sample.
UNITS = {
    "own parameter": (lambda: Add(3, 4), numbers(3, 4)),
    "scalar parameter": (lambda: Add(), numbers(3)),
    "prelu": (lambda: nn.PReLU(3), numbers(3, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), numbers(3, 4, 3)),
    "attention": (lambda: Attention(8, 2), numbers(5, 8)),
    "attention, sequence first": (lambda: Attention(8, 2, batch_first=False), numbers(5, 8)),
    "lstm": (lambda: first_of(nn.LSTM(3, 4, batch_first=True)), numbers(5, 3)),
    "gru of two layers": (
        lambda: first_of(nn.GRU(3, 4, num_layers=2, batch_first=True, bidirectional=True)),
        numbers(4, 3),
    ),
    "recurrent, with states": (lambda: RecurrentModel(2, 3), numbers(4, 3)),
    "recurrent, sequence first": (lambda: RecurrentModel(2, 3, batch_first=False), numbers(4, 3)),
    "batch norm in eval mode": (lambda: trained_batch_norm(), numbers(3, 4, 2)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), numbers(4)),
    "subclass of linear": (lambda: Doubled(4, 3), numbers(4)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), numbers(5, 8)),
}


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x) ** 2


def trained_batch_norm():
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(8, 3, 4, 4) * 3 + 1)
    return norm.eval()


class ConvNet(nn.Module):
    """With in-place operations after layers, which hooks must support."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.features(x))


class Checkpointed(nn.Module):
    """With activation checkpointing."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Reused(nn.Module):
    """One module of each kind, called twice, on inputs of different lengths."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.groups, self.shift = nn.LayerNorm(4), nn.GroupNorm(2, 4), Add(4)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.linear(self.norm(x)))
            x = self.groups(self.conv(x.transpose(1, 2))).transpose(1, 2)
            x = self.shift(x)
            x = torch.cat([x, x[:, :1] * 0.5], 1)
        return x


def with_weight(module, weight):
    module.weight = weight
    return module


def tied_linears():
    """Two layers with one weight and separate biases."""
    first = nn.Linear(4, 4)
    second = with_weight(nn.Linear(4, 4), first.weight)
    return Parts(lambda m, x: m.second(torch.tanh(m.first(x))), first=first, second=second)


def tokens_twice():
    """An embedding called on two inputs, and tied to the head."""

    def forward(m, x):
        left, right = m.tokens(x), m.tokens(x.flip(1)[:, :3])
        return m.head(torch.tanh(torch.cat([left, right * 2], 1)))

    embedding = nn.Embedding(7, 4, padding_idx=1)
    return Parts(forward, tokens=embedding, head=with_weight(nn.Linear(4, 7), embedding.weight))


def mixed():
    """A weight shared by a layer with a rule and a module without one."""
    linear = nn.Linear(4, 4)
    other = with_weight(Doubled(4, 4), linear.weight)
    return Parts(lambda m, x: m.other(torch.tanh(m.linear(x))), linear=linear, other=other)


MODELS = {
    "conv net": (ConvNet, numbers(1, 8, 8)),
    "gpt": (lambda: GPT2(11, 6, 8, tied=False), tokens(6, rows=11)),
    "gpt with tied head": (lambda: GPT2(11, 6, 8), tokens(6, rows=11)),
    "reused modules": (Reused, numbers(5, 4)),
    "reused parameter": (lambda: nn.Sequential(*[Add(3, 4)] * 2), numbers(3, 4)),
    "layers in turns": (lambda: nn.Sequential(*[nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)] * 3), numbers(4)),
    "tied linear layers": (tied_linears, numbers(6, 4)),
    "tied linear layers on vectors": (tied_linears, numbers(4)),
    "embedding used twice and tied": (tokens_twice, tokens(5)),
    "weight of a layer and a unit": (mixed, numbers(4)),
    "sequential with an unused layer": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), numbers(4)),
}
ALL = LAYERS | UNITS | MODELS


def make_checkpointed(reentrant, device):
    model = GPT2(11, 6, 8)
    model.transformer.h = nn.ModuleList([Checkpointed(block, reentrant) for block in model.transformer.h])
    x = torch.randint(11, (3, 6), device=device)
    return model.double().to(device), x, torch.randn(3, 6, 11, dtype=torch.float64, device=device)


def make(name, batch, dtype, device):
    """The model, its input, and targets."""
    module, data = ALL[name]
    model = module().to(dtype).to(device)
    x = data(batch, dtype, device)
    with torch.no_grad():
        y = torch.randn_like(model(x)) if batch else model(data(1, dtype, device))[:0]
    return model, x, y


def reference(model, x, y, samples=None):
    """By name: gradients of each sample's own loss, [B, ...] in float64, one sample after the other; `samples` has the
    arguments of each if they are not rows of x."""
    model = copy.deepcopy(model).double()
    rows = {n: [] for n, _ in model.named_parameters()}
    for i, arguments in enumerate([(x[i : i + 1],) for i in range(len(x))] if samples is None else samples):
        model.zero_grad()
        output = model(*(a.double() if a is not None and a.is_floating_point() else a for a in arguments))
        loss_of(output, y[i : i + 1].double()).sum().backward()
        for n, p in model.named_parameters():
            rows[n].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {n: torch.stack(rows[n]) if rows[n] else p.new_zeros((0, *p.shape)) for n, p in model.named_parameters()}


def reference_norms(gradients):
    return sum(g.reshape(len(g), math.prod(g.shape[1:])).square().sum(1) for g in gradients.values()).sqrt()


def error(value, expected):
    """Relative to the norm of the expected value."""
    difference = (value.double() - expected).norm()
    return (difference / expected.norm().clamp(min=1e-30)).item() if expected.numel() else 0.0


def clipped(gradients, max_norm):
    """The mean over the samples of the clipped gradients, and the norms."""
    norms = reference_norms(gradients)
    weights = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return {name: torch.tensordot(weights, g, 1) / max(1, len(norms)) for name, g in gradients.items()}, norms


def check(model, expected, bound):
    """`grad_sample` of every trained parameter."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad_sample is not None, name
            assert p.grad_sample.shape == expected[name].shape and p.grad_sample.dtype == p.dtype, name
            assert error(p.grad_sample, expected[name]) < bound, name


def check_clipped(model, expected, bound):
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype
        assert error(p.grad, expected[name]) < bound, name


def check_all(model, expected, arguments, y, bound=BOUND64, reduction="mean"):
    """Gradients, norms and clipped sums of one batch, by GradSampleModule, per_sample_norms and GhostClipping."""
    plain = copy.deepcopy(model)(*arguments) if len(y) else y  # PyTorch refuses some empty batches
    scale = 1 if reduction == "mean" else len(y)
    mean = {name: scale * g.sum(0) / max(1, len(y)) for name, g in expected.items()}
    wrapped = torchium.GradSampleModule(model, loss_reduction=reduction)
    for _ in range(2):  # the first pass looks for uses outside modules, the second does not
        wrapped.zero_grad()
        output = wrapped(*arguments)
        assert output.shape == plain.shape and error(output.detach(), plain.double()) < bound
        getattr(loss_of(output, y), reduction)().backward()
        check(model, expected, bound)
        check_clipped(model, mean, bound)
    wrapped.to_standard_module()
    norms = reference_norms(expected)
    for gradients in (False, True):
        model.zero_grad()
        with torchium.per_sample_norms(model, gradients=gradients, loss_reduction=reduction) as result:
            getattr(loss_of(model(*arguments), y), reduction)().backward()
        assert result.norms.shape == (len(y),) and error(result.norms, norms) < bound
        assert gradients or all(p.grad is None for p in model.parameters())
    check_clipped(model, mean, bound)
    limit = norms.median().item() if len(y) else 0.5  # so that some are clipped and some are not
    for _ in range(2):  # like an optimizer's loop
        model.zero_grad()
        with torchium.GhostClipping(model, limit, loss_reduction=reduction) as clipping:
            getattr(loss_of(model(*arguments), y), reduction)().backward()
    check_clipped(model, {name: scale * g for name, g in clipped(expected, limit)[0].items()}, bound)
    assert error(clipping.norms, norms) < bound
