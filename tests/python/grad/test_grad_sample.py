"""Per-sample gradients, norms and clipped sums vs a loop over single samples; and supported uses of
GradSampleModule."""

import copy
import pickle

import grad_cases as cases
import pytest
import torch
import torchium
from torch import nn
from torch.nn import functional as F
from torchium.utils.cuda_kernels import CUDAGradientOps


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("name", cases.ALL)
def test_samples_of(name, batch, device):
    """Batches may be empty, as with Poisson sampling: then sums are 0, and nothing is divided by 0."""
    model, x, y = cases.make(name, batch, torch.float64, device)
    cases.check_all(model, cases.reference(model, x, y), (x,), y)


@pytest.mark.parametrize(
    "name",
    ["linear on sequences", "conv2d groups", "embedding", "layer norm", "conv net", "gpt with tied head",
     "reused modules", "reused parameter"],
)  # fmt: skip
def test_samples_in_float32(name, device):
    model, x, y = cases.make(name, 4, torch.float32, device)
    cases.check_all(model, cases.reference(model, x, y), (x,), y, cases.BOUND32, "sum")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints(reentrant, device):
    model, x, y = cases.make_checkpointed(reentrant, device)
    cases.check_all(model, cases.reference(model, x, y), (x,), y)


@pytest.mark.parametrize(
    "name", ["linear on sequences", "conv net", "gpt with tied head", "reused modules", "attention"]
)
@pytest.mark.parametrize("batch", [0, 3])
def test_functions_leave_the_model_alone(name, batch, device):
    model, x, y = cases.make(name, batch, torch.float64, device)
    expected = cases.reference(model, x, y)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = pictures(model)
    norms = CUDAGradientOps.per_sample_gradient_norms(model, nn.MSELoss(), x, y)
    assert cases.error(norms, cases.reference_norms(expected)) < cases.BOUND64
    gradients = CUDAGradientOps.per_sample_gradients(model, lambda a, b: cases.loss_of(a, b).mean(), x, y)
    for (parameter, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert cases.error(gradient, expected[parameter]) < cases.BOUND64, parameter
    assert pictures(model) == before
    assert all((p.grad == 1).all() for p in model.parameters())


def pictures(model):
    """Everything that hooks could leave behind."""
    return [
        (
            sorted(m.__dict__),
            {name: list(value) for name, value in m.__dict__.items() if name.endswith("hooks")},
            m.training,
            m.__dict__.get("forward"),
        )
        for m in model.modules()
    ] + [(sorted(p.__dict__), p.requires_grad, list(p._backward_hooks or ())) for p in model.parameters()]


def test_reductions_of_the_function(device):
    model, x, y = cases.make("linear", 4, torch.float64, device)
    expected = cases.reference(model, x, y)
    losses = {"mean": nn.MSELoss(), "sum": lambda a, b: F.mse_loss(a, b, reduction="sum") / 3, "vector": cases.loss_of}
    losses["sum"].reduction = "sum"
    for kind, loss in losses.items():
        gradients = CUDAGradientOps.per_sample_gradients(model, loss, x, y)
        assert cases.error(gradients[0], expected["weight"]) < cases.BOUND64, kind


def test_inputs_of_the_function(device):
    model = nn.Bilinear(3, 4, 2, device=device).double()
    a, b = torch.randn(5, 3, device=device).double(), torch.randn(5, 4, device=device).double()
    y = torch.zeros(5, 2, device=device)
    one = CUDAGradientOps.per_sample_gradients(model, cases.loss_of, (a, b), y)
    two = CUDAGradientOps.per_sample_gradients(model, cases.loss_of, {"input1": a, "input2": b}, y)
    for i in range(5):
        model.zero_grad()
        cases.loss_of(model(a[i : i + 1], b[i : i + 1]), y[i : i + 1]).sum().backward()
        for p, first, second in zip(model.parameters(), one, two, strict=True):
            assert cases.error(first[i], p.grad) < cases.BOUND64
            assert cases.error(second[i], p.grad) < cases.BOUND64


# --- what a module may do ---------------------------------------------------------------------------------------------


def test_frozen_parameters_have_none(device):
    model, x, y = cases.make("conv net", 3, torch.float64, device)
    model.features[0].weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    expected = cases.reference(model, x, y)
    wrapped = torchium.GradSampleModule(model)
    cases.loss_of(wrapped(x), y).mean().backward()
    assert model.features[0].weight.grad_sample is None and model.head.bias.grad_sample is None
    cases.check(model, expected, cases.BOUND64)
    wrapped.to_standard_module()
    gradients = CUDAGradientOps.per_sample_gradients(model, cases.loss_of, x, y)
    assert [g is None for g in gradients] == [not p.requires_grad for p in model.parameters()]


def test_unused_parameters(device):
    model = cases.Parts(lambda m, x: m.used(x), used=nn.Linear(3, 3), unused=nn.Linear(3, 3)).to(device)
    wrapped = torchium.GradSampleModule(model)
    wrapped(torch.randn(4, 3, device=device)).sum().backward()
    assert model.unused.weight.grad_sample is None and model.unused.weight.grad is None
    wrapped.to_standard_module()
    gradients = CUDAGradientOps.per_sample_gradients(
        model, lambda a, b: a.sum(), torch.randn(4, 3, device=device), None
    )
    assert (gradients[2] == 0).all() and gradients[2].shape == (4, 3, 3)


def test_without_gradients_nothing_is_kept(device):
    model, x, y = cases.make("conv net", 3, torch.float32, device)
    wrapped = torchium.GradSampleModule(model)
    with torch.no_grad():
        output = wrapped(x)
    assert not output.requires_grad
    assert all(p.grad_sample is None for p in model.parameters())
    wrapped.eval()
    cases.loss_of(wrapped(x), y).mean().backward()
    assert all(p.grad_sample is not None for p in model.parameters())


def test_disabled_hooks(device):
    model, x, y = cases.make("linear", 3, torch.float32, device)
    wrapped = torchium.GradSampleModule(model)
    wrapped.disable_hooks()
    cases.loss_of(wrapped(x), y).mean().backward()
    assert model.weight.grad is not None and model.weight.grad_sample is None
    wrapped.enable_hooks()
    cases.loss_of(wrapped(x), y).mean().backward()
    assert model.weight.grad_sample is not None


@pytest.mark.parametrize("name", cases.MODELS)
def test_hooks_come_off(name, device):
    model, x, y = cases.make(name, 2, torch.float32, device)
    before = pictures(model)
    wrapped = torchium.GradSampleModule(model)
    cases.loss_of(wrapped(x), y).mean().backward()
    assert wrapped.to_standard_module() is model
    assert pictures(model) == before


def test_is_the_model_for_others(device):
    model, _, _ = cases.make("conv net", 2, torch.float32, device)
    wrapped = torchium.GradSampleModule(model)
    assert wrapped._module is model and wrapped.head is model.head
    assert list(wrapped.state_dict()) == list(model.state_dict())
    wrapped.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()})
    assert (model.head.weight == 0).all()
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = wrapped.nothing_like_this
    assert {name for name, _ in wrapped.trainable_parameters()} == {name for name, _ in model.named_parameters()}


def test_copies_are_their_own(device):
    model, x, y = cases.make("linear", 3, torch.float64, device)
    wrapped = torchium.GradSampleModule(model)
    plain = copy.deepcopy(model)  # of the wrapped model, including hooks
    other = copy.deepcopy(wrapped)
    with torch.no_grad():
        plain.weight += 1.0
        other._module.weight += 2.0
    assert cases.error(plain(x), F.linear(x, plain.weight, plain.bias)) < 1e-12
    expected = cases.reference(other.to_standard_module(), x, y)
    other = torchium.GradSampleModule(other._module)
    cases.loss_of(other(x), y).mean().backward()
    cases.check(other._module, expected, cases.BOUND64)
    assert model.weight.grad_sample is None
    assert cases.error(pickle.loads(pickle.dumps(model))(x), model(x)) < 1e-12


def test_two_passes_before_one_backward(device):
    """A sample's loss may depend on two outputs of the model."""
    model, x, y = cases.make("linear", 3, torch.float64, device)
    first, second = cases.reference(model, x, y), cases.reference(model, 2 * x, y)
    wrapped = torchium.GradSampleModule(model)
    (cases.loss_of(wrapped(x), y) + cases.loss_of(wrapped(2 * x), y)).mean().backward()
    cases.check(model, {name: first[name] + second[name] for name in first}, cases.BOUND64)


@pytest.mark.parametrize("name", ["conv net", "gpt with tied head", "encoder layer"])
def test_autocast(name, device):
    """The activations and their gradients have bfloat16's 8 bits, so results have two or three bits less."""
    model, x, y = cases.make(name, 3, torch.float32, device)
    expected = cases.reference(model, x, y)
    with torchium.per_sample_norms(model) as result, torch.autocast(device, dtype=torch.bfloat16):
        cases.loss_of(model(x).float(), y).mean().backward()
    norms = cases.reference_norms(expected)
    assert ((result.norms - norms) / norms).abs().max() < 0.05
    wrapped = torchium.GradSampleModule(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        output = wrapped(x)
    cases.loss_of(output.float(), y).mean().backward()
    for parameter, p in model.named_parameters():
        assert p.grad_sample.dtype == torch.float32
        assert cases.error(p.grad_sample, expected[parameter]) < 0.1, parameter
        assert cases.error(p.grad, p.grad_sample.double().mean(0)) < 0.02, parameter


def test_half_parameters(device):
    """Sums are in float32 and rounded once, to bfloat16's 8 bits, as are outputs and their gradients."""
    model, x, y = cases.make("linear on sequences", 3, torch.bfloat16, device)
    cases.check_all(model, cases.reference(model, x, y), (x,), y, 0.03)


def test_forward_of_a_single_object(device):
    """A forward() assigned to an instance is called, and restored at the end."""
    model, x, y = cases.make("linear", 3, torch.float64, device)
    forward = model.forward = lambda x: F.linear(x, model.weight) * 2
    wrapped = torchium.GradSampleModule(model)
    cases.loss_of(wrapped(x), y).mean().backward()
    got = model.weight.grad_sample
    assert wrapped.to_standard_module().forward is forward
    for i in range(3):
        model.zero_grad()
        cases.loss_of(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        assert cases.error(got[i], model.weight.grad) < cases.BOUND64


def test_a_mistake_of_the_model_is_shown(device):
    model = nn.Sequential(cases.Add(3, 4)).to(device)
    wrapped = torchium.GradSampleModule(model)
    with pytest.raises(RuntimeError, match=r"0 \(Add\).*size of tensor"):
        wrapped(torch.randn(2, 3, 5, device=device))
    wrapped(torch.randn(2, 3, 4, device=device)).sum().backward()
    assert model[0].shift.grad_sample.shape == (2, 3, 4)


def test_dropout_is_drawn_once(device):
    """Also in modules run sample by sample: per-sample gradients are those of the very same pass."""
    model = nn.Sequential(cases.Attention(8, 2, dropout=0.5), nn.Dropout(0.5), nn.Linear(8, 2)).to(device).double()
    x = torch.randn(4, 5, 8, device=device).double()
    wrapped = torchium.GradSampleModule(model)
    cases.loss_of(wrapped(x), torch.zeros(4, 5, 2, device=device)).mean().backward()
    for p in model.parameters():
        assert cases.error(p.grad, p.grad_sample.mean(0)) < cases.BOUND64


def test_sequence_first(device):
    def forward(m, x):
        y, (h, c) = m.lstm(m.tokens(x))
        y, states = m.recurrent(m.norm(y), (h.expand(3, -1, -1), c.expand(3, -1, -1)))
        return m.head(y + states["c"][0][1:2])

    layers = {"tokens": nn.Embedding(7, 4), "lstm": nn.LSTM(4, 5), "norm": nn.LayerNorm(5)}
    layers |= {"recurrent": cases.Recurrent(3, 5, batch_first=False), "head": nn.Linear(5, 3)}
    model = cases.Parts(forward, **layers).double().to(device)
    x = torch.randint(7, (6, 3), device=device)
    y = torch.randn(6, 3, 3, dtype=torch.float64, device=device)
    wrapped = torchium.GradSampleModule(model, batch_first=False, loss_reduction="sum")
    ((wrapped(x) - y) ** 2).sum().backward()
    got = {name: p.grad_sample for name, p in model.named_parameters()}
    wrapped.to_standard_module()
    for i in range(3):
        model.zero_grad()
        ((model(x[:, i : i + 1]) - y[:, i : i + 1]) ** 2).sum().backward()
        for name, p in model.named_parameters():
            assert cases.error(got[name][i], p.grad) < cases.BOUND64, name


@pytest.mark.parametrize("layers, width", [(1, 2), (2, 2), (2, 3), (3, 4)])
def test_states_with_the_samples_in_another_dimension(layers, width, device):
    """Also with equal numbers of samples, layers and features, and with results that vary between calls."""
    model = cases.RecurrentModel(layers, width).double().to(device)
    wrapped = torchium.GradSampleModule(model)
    for batch, states in ((1, True), (2, True), (3, True), (4, False), (2, False), (2, True), (4, True)):
        model.inner.states = states
        x, y = torch.randn(batch, 4, width).double().to(device), torch.randn(batch, width).double().to(device)
        expected = cases.reference(model, x, y)
        wrapped.zero_grad()
        cases.loss_of(wrapped(x), y).mean().backward()
        cases.check(model, expected, cases.BOUND64)
