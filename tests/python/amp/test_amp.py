"""torchium.amp.GradScaler vs torch.amp.GradScaler: the same scales, flags, parameters and state over many steps."""

import copy
import pickle

import pytest
import torch
import torchium
from optim_cases import through_file
from torchium import amp

STEPS = 60
INFINITIES = {3, 4, 17, 30, 31, 32, 55}


def gradients_of(parameters, step, scale, seed=0):
    """Scaled gradients, new at every step, with an infinity or a NaN at some."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for parameter in parameters:
        fresh = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.grad = fresh.to(parameter.device, parameter.dtype)
    if step in INFINITIES:
        parameters[step % len(parameters)].grad.view(-1)[-1] = float("inf") if step % 2 else float("nan")


def parameters_for(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shapes = [(5, 3), (7,), (2, 3, 2, 2), ()]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def train(scaler, optimizer, parameters, device, unscale=False, clip=None):
    """The scale after every step."""
    scales = []
    for step in range(STEPS):
        scaler.scale(torch.ones((), device=device))
        gradients_of(parameters, step, scaler.get_scale())
        if unscale:
            scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def pair(device, make, **options):
    """PyTorch's scaler and torchium's, each with its own optimizer and parameters."""
    for cls in (torch.amp.GradScaler, amp.GradScaler):
        parameters = parameters_for(device)
        scaler = cls(device, init_scale=2.0**10, growth_interval=5, **options)
        yield scaler, make(parameters), parameters


OPTIMIZERS = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "torchium SGD": lambda p: torchium.optim.SGD(p, lr=0.1, momentum=0.9),
    "torchium AdamW, fused": lambda p: torchium.optim.AdamW(p, lr=0.1, fused=True),
    "torchium Shampoo, fused": lambda p: torchium.optim.Shampoo(p, lr=0.1, precondition_frequency=3, fused=True),
}


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_as_torch(name, unscale, device):
    # Not powers of 2, so that dividing and multiplying by the reciprocal would differ in the last bit.
    other = {"growth_factor": 1.7, "backoff_factor": 0.3} if name == "torch SGD" and unscale else {}
    both = pair(device, OPTIMIZERS[name], **other)
    (theirs, their_optimizer, their_parameters), (ours, our_optimizer, our_parameters) = both
    clip = 1.0 if unscale else None
    expected = train(theirs, their_optimizer, their_parameters, device, unscale, clip)
    scales = train(ours, our_optimizer, our_parameters, device, unscale, clip)
    assert scales == expected
    assert len(set(scales)) > 3  # decreased and increased
    assert ours.state_dict() == theirs.state_dict()
    for a, b in zip(our_parameters, their_parameters, strict=True):
        bound = 1e-6 if other else 0
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_that_only_torch_takes(kind):
    """Falls back to PyTorch's implementation, with its results and errors."""
    results = []
    for cls in (torch.amp.GradScaler, amp.GradScaler):
        parameter = torch.ones(3, 2, requires_grad=True, dtype=torch.complex64 if kind == "complex" else torch.float32)
        gradient = torch.full_like(parameter, 8.0).detach()
        parameter.grad = gradient.to_sparse() if kind == "sparse" else gradient
        scaler = cls("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        try:
            scaler.unscale_(torch.optim.SGD([parameter], lr=0.5))
            results.append(parameter.grad.to_dense())
        except RuntimeError as error:
            results.append(type(error))
    same = torch.equal(*results) if isinstance(results[0], torch.Tensor) else results[0] is results[1]
    assert same


def test_half_gradients_are_refused_as_by_torch(device):
    parameter = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    scaler = amp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


def test_wrong_order_is_refused_as_by_torch(device):
    parameters = parameters_for(device)
    optimizer = torchium.optim.SGD(parameters, lr=0.1)
    scaler = amp.GradScaler(device)
    with pytest.raises(AssertionError):
        scaler.step(optimizer)
    scaler.scale(torch.ones((), device=device))
    gradients_of(parameters, 0, 1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


def test_no_gradients_at_all(device):
    optimizer = torchium.optim.SGD(parameters_for(device), lr=0.1)
    scaler = amp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"])
def test_a_number_without_memory_is_named(name):
    """PyTorch compares it with 1 and aborts the process."""
    hollow = torch.ones(())
    hollow.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=f"{name} must be a number, got a tensor without storage"):
        amp.GradScaler("cpu", **{name: hollow})


def test_state_goes_to_torch_and_back(device):
    (theirs, *_), (ours, optimizer, parameters) = pair(device, OPTIMIZERS["torchium SGD"])
    train(ours, optimizer, parameters, device)
    state = ours.state_dict()
    assert set(state) == {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    fresh = amp.GradScaler(device)
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state_dict() == state
    assert through_file(state) == state


@pytest.mark.parametrize("again", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_go_on_alike(again, device):
    (_, _, _), (scaler, optimizer, parameters) = pair(device, OPTIMIZERS["torch SGD"])
    train(scaler, optimizer, parameters, device)
    other = again(scaler)
    assert other.state_dict() == scaler.state_dict()
    twin = [p.detach().clone().requires_grad_() for p in parameters]
    assert train(other, torch.optim.SGD(twin, lr=0.1), twin, device) == train(scaler, optimizer, parameters, device)


def test_disabled():
    parameters = parameters_for("cpu")
    scaler = amp.GradScaler("cpu", enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    gradients_of(parameters, 0, 1.0)
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0 and not scaler.is_enabled()
    assert isinstance(scaler, torch.amp.GradScaler)  # frameworks read it
