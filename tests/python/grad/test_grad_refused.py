"""Unsupported uses raise an error that names them, and leave the model unchanged."""

import copy
import re

import grad_cases as cases
import pytest
import torch
import torchium
from test_grad_sample import pictures
from torch import nn
from torch.nn import functional as F
from torchium import _C
from torchium.utils.cuda_kernels import CUDAGradientOps


def with_layer(layer):
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))


WAYS = {
    "module": lambda model: torchium.GradSampleModule(model),
    "norms": lambda model: torchium.per_sample_norms(model),
    "clipping": lambda model: torchium.GhostClipping(model, 1.0),
    "function": lambda model: CUDAGradientOps.per_sample_gradients(model, cases.loss_of, torch.ones(3, 4), None),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(4), "BatchNorm1d.*GroupNorm.*eval"),
        (nn.BatchNorm2d(4, affine=False), "BatchNorm2d"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "BatchNorm1d"),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "InstanceNorm1d.*track_running_stats"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "Embedding.*scale_grad_by_freq"),
        (nn.Linear(4, 4, dtype=torch.complex64), "Linear.*complex64"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_layers_before_anything_runs(way, layer, words):
    model = with_layer(layer)
    before = pictures(model)
    with pytest.raises(NotImplementedError, match=re.compile(r"1\.0 \(" + words, re.DOTALL)):
        way(model)
    assert pictures(model) == before


def test_batch_norm_put_into_training_later():
    model = with_layer(nn.BatchNorm1d(4)).eval()
    wrapped = torchium.GradSampleModule(model)
    wrapped(torch.randn(3, 4)).sum().backward()
    wrapped.zero_grad()
    wrapped.train()
    with pytest.raises(NotImplementedError, match="BatchNorm1d"):
        wrapped(torch.randn(3, 4))
    with torch.no_grad():
        wrapped(torch.randn(3, 4))


def test_not_strict():
    model = with_layer(nn.BatchNorm1d(4))
    wrapped = torchium.GradSampleModule(model, strict=False)
    wrapped(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad_sample.shape == (3, 4, 4)
    copied = copy.deepcopy(wrapped)  # which is as permissive
    copied(torch.randn(2, 4)).sum().backward()
    assert copied._module[0].weight.grad_sample.shape == (2, 4, 4)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_models(way):
    for model in ([], None, nn.Linear):
        with pytest.raises(TypeError, match="model must be"):
            way(model)
    for model, word in (
        (nn.LazyLinear(3), "no shape"),
        (nn.DataParallel(nn.Linear(4, 4)), "DataParallel"),
        *([(torch.compile(nn.Linear(4, 4)), "torch.compile")] if way is WAYS["module"] else []),
        *([(torch.jit.script(nn.Linear(4, 4)), "TorchScript")] if way is WAYS["module"] else []),
    ):
        with pytest.raises(NotImplementedError, match=word):
            way(model)


def test_reductions_and_limits():
    for reduction in ("none", None, 1):
        for make in (torchium.GradSampleModule, torchium.per_sample_norms):
            with pytest.raises(ValueError, match="loss_reduction"):
                make(nn.Linear(2, 2), loss_reduction=reduction)
    for max_norm in (0, -1.0, float("inf"), float("nan"), "1"):
        with pytest.raises(ValueError, match="max_norm"):
            torchium.GhostClipping(nn.Linear(2, 2), max_norm)


def test_arguments_of_the_functions():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    for function in (CUDAGradientOps.per_sample_gradients, CUDAGradientOps.per_sample_gradient_norms):
        before = pictures(model)
        with pytest.raises(TypeError, match="loss_fn must be callable"):
            function(model, None, x, None)
        with pytest.raises(TypeError, match="loss_fn must return a tensor"):
            function(model, lambda a, b: 1.0, x, None)
        with pytest.raises(ValueError, match="inputs has no tensor"):
            function(nn.Identity(), cases.loss_of, {"input": 1}, None)
        assert pictures(model) == before


# --- in a pass --------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A module with parameters and no input that determines the number of samples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight


def changes_input(model, x):
    h = model.first(x.float())
    y = model.second(h)
    h.add_(1.0)
    return y


# Name: the model on rows of six tokens, and words of the message.
WRONG = {
    "positions of all": (
        lambda: cases.Parts(
            lambda m, x: m.tokens(x) + m.positions(torch.arange(x.size(1))),
            tokens=nn.Embedding(5, 3),
            positions=nn.Embedding(6, 3),
        ),
        "positions.*6 samples.*has 4.*positions\\[None\\]",
    ),
    "head by hand": (
        lambda: cases.Parts(lambda m, x: F.linear(m.tokens(x), m.tokens.weight), tokens=nn.Embedding(5, 3)),
        "tokens.weight is used outside",
    ),
    "input changed in place": (
        lambda: cases.Parts(changes_input, first=nn.Linear(6, 6), second=nn.Linear(6, 6)),
        "second.*modified in place|modified by an inplace operation",
    ),
    "no samples": (
        lambda: cases.Parts(lambda m, x: m.linear(x.float()) + m.table(), linear=nn.Linear(6, 3), table=Table()),
        "table \\(Table\\).*no argument",
    ),
    "single samples": (
        lambda: cases.Parts(lambda m, x: torch.stack([m.linear(row) for row in x.float()]), linear=nn.Linear(6, 3)),
        "linear.*without a batch dimension",
    ),
}


@pytest.mark.parametrize("way", ["module", "norms", "clipping", "norms with gradients", "functions"])
@pytest.mark.parametrize(("model", "words"), WRONG.values(), ids=WRONG)
def test_in_a_pass(way, model, words):
    model, x = model(), torch.randint(5, (4, 6))
    before = pictures(model)
    with pytest.raises(RuntimeError, match=re.compile(words, re.DOTALL)):
        run(way, model, x)
    assert pictures(model) == before
    if way != "module" and "gradients" not in way:
        assert all(p.grad is None for p in model.parameters())


def run(way, model, x):
    if way == "module":
        wrapped = torchium.GradSampleModule(model)
        try:
            wrapped(x).sum().backward()
        finally:
            wrapped.to_standard_module()
    elif way == "functions":
        CUDAGradientOps.per_sample_gradients(model, lambda a, b: a.sum(), x, None)
    else:
        context = {
            "norms": torchium.per_sample_norms(model),
            "clipping": torchium.GhostClipping(model, 1.0),
            "norms with gradients": torchium.per_sample_norms(model, gradients=True),
        }[way]
        with context:
            model(x).sum().backward()


# --- samples that are mixed -------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A parameter of its own, and a function of its output."""

    def __init__(self, then, training=True):
        super().__init__()
        self.scale, self.then = nn.Parameter(torch.randn(6)), then
        self.train(training)

    def forward(self, x):
        return self.then(self, x.float() * self.scale)


def noisy(x):
    return x + torch.randn_like(x)


MIXING = {
    "products of samples": lambda m, h: h @ h.mT,
    "mean taken off": lambda m, h: h - h.mean(0),
    "divided by their number": lambda m, h: h / len(h),
    "summed": lambda m, h: h.sum(0, keepdim=True).expand(len(h), -1),
    "in reverse": lambda m, h: h.flip(0),
    "one output": lambda m, h: h.sum(0),
    "mean taken off, noise": lambda m, h: noisy(h) - h.mean(0),
    "mean taken off, dropout": lambda m, h: F.dropout(h - h.mean(0)),
    "mean taken off in a tuple": lambda m, h: (h, h - h.mean(0)),
    "mean taken off in a state": lambda m, h: (h, (h - h.mean(0))[None]),
    "one for each sample": lambda m, h: list(h),
    "one number for each sample": lambda m, h: (h, *range(len(h))),
}
# The message, where the reason is not that values differ.
SHAPES = {
    "products of samples": r"shapes \[\[4, 4\]\] for 4 samples and \[\[1, 1\]\] for one",
    "one output": r"shapes \[\[6\]\] for 4 samples and \[\[6\]\] for one",
    "one for each sample": r"shapes \[\[6\], \[6\], \[6\], \[6\]\] for 4 samples and \[\[6\]\] for one",
}
APART = {
    "noise": lambda m, h: noisy(h),
    "dropout": lambda m, h: F.dropout(h),
    "not finite": lambda m, h: h / h[:, :1].sub(h[:, :1]),
    "largest place": lambda m, h: (h, h.argmax(1)),
    "a state": lambda m, h: (h, h[None]),
    "a state with noise": lambda m, h: (noisy(h), noisy(h)[None]),
    "mean taken off in training": lambda m, h: h - h.mean(0) if m.training else h,
}


@pytest.mark.parametrize("way", ["module", "norms", "clipping", "norms with gradients", "functions"])
@pytest.mark.parametrize("name", MIXING)
def test_mixed_samples(way, name):
    model, x = nn.Sequential(Scaled(MIXING[name]), First()), torch.randint(1, 5, (4, 6))
    before = pictures(model)
    words = SHAPES.get(name, "mixes the samples.*depend on that sample")
    with pytest.raises(NotImplementedError, match=re.compile(rf"0 \(Scaled\) .*{words}")):
        run(way, model, x)
    assert pictures(model) == before
    assert all(p.grad is None for p in model.parameters())


class First(nn.Module):
    def forward(self, x):
        return x[0] if isinstance(x, tuple) else x


@pytest.mark.parametrize("then", APART.values(), ids=APART)
def test_samples_that_are_not_mixed(then):
    model, x = nn.Sequential(Scaled(then, training=False), First()), torch.randint(1, 5, (4, 6))
    wrapped = torchium.GradSampleModule(model, loss_reduction="sum")
    output = wrapped(x)
    assert output.shape == (4, 6)
    output.sum().backward()
    assert torch.allclose(model[0].scale.grad_sample.sum(0), model[0].scale.grad, equal_nan=True)


def test_mixed_samples_in_another_mode():
    model, x = nn.Sequential(Scaled(APART["mean taken off in training"], training=False)), torch.ones(3, 6)
    wrapped = torchium.GradSampleModule(model)
    wrapped(x).sum().backward()
    wrapped.zero_grad()
    wrapped.train()
    with pytest.raises(NotImplementedError, match="mixes the samples"):
        wrapped(torch.randn(3, 6))
    wrapped.eval()
    wrapped(x).sum().backward()


def test_mixed_samples_that_are_let_through():
    model, x = nn.Sequential(nn.Linear(6, 6), Scaled(MIXING["products of samples"])), torch.randn(4, 6)
    expected = model(x)
    wrapped = torchium.GradSampleModule(model, strict=False)
    for _ in range(2):
        wrapped.zero_grad()
        output = wrapped(x)
        assert torch.allclose(output, expected)
        output.sum().backward()
        assert model[1].scale.grad_sample is None and model[1].scale.grad is not None
        assert model[0].weight.grad_sample.shape == (4, 6, 6)


def test_trying_leaves_no_trace():
    """Checking whether a module mixes samples consumes no random numbers and updates no buffers."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return F.dropout(x * self.scale)

    model, x = Counting(), torch.randn(4, 6)
    wrapped = torchium.GradSampleModule(model)
    outputs = []
    for calls in (1, 2):
        torch.manual_seed(7)
        outputs.append(wrapped(x).detach())
        assert model.calls == calls
    assert torch.equal(*outputs)


def test_a_second_pass_over_what_is_there():
    model, x, y = cases.make("conv net", 3, torch.float32, "cpu")
    wrapped = torchium.GradSampleModule(model)
    cases.loss_of(wrapped(x), y).mean().backward()
    loss = cases.loss_of(wrapped(x), y).mean()
    with pytest.raises(RuntimeError, match=r"grad_sample is still there.*zero_grad"):
        loss.backward()
    wrapped.zero_grad()
    cases.loss_of(wrapped(x), y).mean().backward()
    assert model.head.weight.grad_sample.shape == (3, 3, 24)


def test_a_second_backward_through_one_graph():
    for way in (lambda m: torchium.GradSampleModule(m), lambda m: m):
        model, x, y = cases.make("conv net", 3, torch.float32, "cpu")
        wrapped = way(model)
        with torchium.per_sample_norms(model) if wrapped is model else torch.enable_grad():
            loss = cases.loss_of(wrapped(x), y).mean()
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="second backward"):
                loss.backward()


def test_two_passes_in_one_block():
    model, x, y = cases.make("conv net", 3, torch.float32, "cpu")
    with torchium.per_sample_norms(model):
        cases.loss_of(model(x), y).mean().backward()
        loss = cases.loss_of(model(x), y).mean()
        with pytest.raises(RuntimeError, match=r"used again after the norms"):
            loss.backward()


def test_two_numbers_of_samples():
    model, x, y = cases.make("linear", 4, torch.float32, "cpu")
    wrapped = torchium.GradSampleModule(model)
    loss = cases.loss_of(wrapped(x), y).sum() + cases.loss_of(wrapped(x[:2]), y[:2]).sum()
    with pytest.raises(RuntimeError, match=r"weight had \d samples in one use and has \d in another"):
        loss.backward()


def test_one_capture_at_a_time():
    model = nn.Linear(2, 2)
    wrapped = torchium.GradSampleModule(model)
    for way in WAYS.values():
        with pytest.raises(RuntimeError, match="captured already"):
            context = way(model)
            context.__enter__()
    wrapped.to_standard_module()
    torchium.GradSampleModule(model)


def test_backward_outside_the_block():
    model, x, y = cases.make("conv net", 3, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="inside the `with` block"), torchium.per_sample_norms(model):
        loss = cases.loss_of(model(x), y).mean()
    with torchium.per_sample_norms(model) as result:
        loss.backward()  # reaches layers of the previous block, and none of this one
        cases.loss_of(model(x), y).mean().backward()
    reference = cases.reference_norms(cases.reference(model, x, y))
    assert cases.error(result.norms, reference) < cases.BOUND32


def test_norms_before_the_end():
    context = torchium.per_sample_norms(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="no norms yet"):
        _ = context.norms
    with context, pytest.raises(RuntimeError, match="no norms yet"):
        _ = context.norms


# --- the extension ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "dense"}, ValueError, "kind must be"),
        ({"kind": "conv", "kernel": (1, 1, 1, 1)}, ValueError, "kernel must have 1 to 3"),
        ({"kind": "conv", "kernel": "33"}, TypeError, "kernel must be a sequence"),
        ({"kind": "conv", "kernel": (3, 3), "stride": (1,)}, ValueError, "stride has 1 numbers, expected 2"),
        ({"kind": "conv", "kernel": (3.5,)}, TypeError, r"kernel\[0\]"),
        ({"kind": "conv", "kernel": (3,), "padding": "mirror"}, ValueError, "padding must be"),
        ({"kind": "linear", "groups": 0}, ValueError, "groups"),
        ({"kind": "layer_norm", "eps": "small"}, TypeError, "eps"),
        ({"kind": "linear", "surplus": 1}, TypeError, "surplus"),
    ],
)
def test_layer(options, error, words):
    with pytest.raises(error, match=words):
        _C.Layer(**options)
    layer, x, norms = _C.Layer("linear"), torch.ones(2, 3), torch.zeros(2, dtype=torch.float64)
    assert repr(layer) == "<torchium._C.Layer 'linear'>"
    with pytest.raises(TypeError, match=r"layer must be a torchium._C.Layer"):
        _C.grad_norms("linear", x, x, 3, False, norms)
    with pytest.raises(ValueError, match="parts must be between 1 and 3"):
        _C.grad_norms(layer, x, x, 4, False, norms)


def test_state_dict_takes_names():
    """In NumPy integers as a prefix PyTorch raised an IndexError."""
    module = torchium.GradSampleModule(torch.nn.Linear(3, 2))
    with pytest.raises(TypeError, match="prefix must be a string, got float"):
        module.state_dict(prefix=0.5)
    with pytest.raises(TypeError, match="destination must be a dictionary, got list"):
        module.state_dict(destination=[])


@pytest.mark.parametrize("name", ["per_sample_gradients", "per_sample_gradient_norms"])
@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_a_tensor_without_memory_is_named(name, which):
    """PyTorch reads it in the model or in the loss, and crashes the process."""
    given = {"inputs": torch.ones(4, 3), "targets": torch.ones(4, 2)}
    given[which].untyped_storage().resize_(0)
    function = getattr(CUDAGradientOps, name)
    with pytest.raises(TypeError, match=f"{which} must be tensors, got one without storage"):
        function(nn.Linear(3, 2), F.mse_loss, given["inputs"], given["targets"])
    if which == "inputs":
        with pytest.raises(TypeError, match="inputs must be tensors"):
            function(nn.Linear(3, 2), F.mse_loss, {"input": given["inputs"]}, given["targets"])
