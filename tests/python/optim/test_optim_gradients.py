"""Gradients as they come: missing, late, zero, in any layout, accumulated; and parameters that move, change their type,
or are shared.
"""

import pytest
import torch
from optim_cases import (
    CLASSES,
    KINDS,
    SECOND_ORDER,
    Trial,
    assert_close,
    assert_same_bits,
    copies,
    exact,
    loss_of,
    make,
    small,
    square,
    train,
    train_square,
)

SHAPES = [(6, 6), (4, 3, 2), (5,), (), (5, 5)]


# --- missing, late, zero


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_a_gradient_stay(kind, device):
    model = small(device)
    model.hidden.weight.requires_grad_(False)
    optimizer = make(kind, model.parameters())
    idle = torch.nn.Parameter(torch.randn(3, 3, device=device))
    optimizer.add_param_group({"params": [idle]})
    before = copies([model.hidden.weight, idle])
    train(model, optimizer, 4)
    assert_same_bits(before, copies([model.hidden.weight, idle]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradients_at_all(kind, device):
    model = small(device)
    optimizer = make(kind, model.parameters())
    before = copies(model.parameters())
    optimizer.step()
    optimizer.step()
    assert_same_bits(before, copies(model.parameters()))
    train(model, optimizer, 3)
    beside = small(device)
    train(beside, make(kind, beside.parameters()), 3)
    assert_same_bits(copies(beside.parameters()), copies(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_come_late_or_stay_away(kind, device):
    """A parameter counts the steps it took part in, not the optimizer's."""
    trial = Trial(kind, SHAPES, device, **exact(kind))
    for step in range(22):
        missing = {0} if step < 6 else {step % 5} if step % 3 == 0 else set()
        trial.step(missing=missing)
    trial.check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_unfrozen_in_mid_training(kind, device):
    trial = Trial(kind, SHAPES, device, **exact(kind))
    trial.params[0].requires_grad_(False)
    for _ in range(5):
        trial.step(missing={0})
    trial.params[0].requires_grad_(True)
    trial.run(8).check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_first_gradient_is_harmless(kind, device):
    model = small(device)
    optimizer = make(kind, model.parameters(), weight_decay=0.0)
    before = copies(model.parameters())
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same_bits(before, copies(model.parameters()))
    first = train(model, optimizer, 1)[0]
    for _ in range(60):
        last = train(model, optimizer, 1)[0]
    assert last < 0.5 * first


@pytest.mark.parametrize("kind", KINDS)
def test_empty_parameters(kind, device):
    empty = [torch.nn.Parameter(torch.empty(s, device=device)) for s in [(0,), (0, 4), (3, 0), (2, 0, 5)]]
    full = torch.nn.Parameter(torch.randn(4, 4, device=device))
    optimizer = make(kind, [*empty, full])
    for _ in range(3):
        for p in (*empty, full):
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert full.isfinite().all()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_not_changed(kind, device):
    model = small(device)
    optimizer = make(kind, model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before = copies(p.grad for p in model.parameters())
        optimizer.step()
        assert_same_bits(before, copies(p.grad for p in model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_are_refused_by_name(kind, device):
    table = torch.nn.Embedding(7, 3, sparse=True, device=device)
    other = torch.nn.Linear(3, 3, device=device)
    named = [("table.weight", table.weight), *other.named_parameters()]
    optimizer = make(kind, named)
    before = copies(p for _, p in named)
    other(table(torch.tensor([1, 3, 3], device=device))).sum().backward()
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"table\.weight") as error:
        optimizer.step()
    assert "sparse" in str(error.value)
    assert_same_bits(before, copies(p for _, p in named))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_gradient_names_an_unnamed_parameter(kind, device):
    params = [torch.nn.Parameter(torch.randn(4, 3, device=device)) for _ in range(3)]
    optimizer = make(kind, params)
    for p in params:
        p.grad = torch.randn_like(p)
    params[2].grad = params[2].grad.to_sparse()
    with pytest.raises((RuntimeError, TypeError, ValueError), match="2"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(4, 3), (5,), (1,), ()])
@pytest.mark.parametrize("kind", KINDS)
def test_lazily_negated_gradients_are_refused_by_name(kind, shape, device):
    """Their memory holds the numbers with the other sign. Refused at the first step and at a later one."""
    named = [("first", torch.nn.Parameter(torch.randn(3, device=device)))]
    named.append(("second", torch.nn.Parameter(torch.randn(shape, device=device))))
    optimizer = make(kind, named)
    spread = torch.randn(shape, dtype=torch.complex64, device=device).conj().imag
    dense = torch._neg_view(torch.randn(shape, device=device))
    for gradient in (spread, dense, spread, dense):
        named[0][1].grad = torch.randn(3, device=device)
        named[1][1].grad = gradient
        assert named[1][1].grad.is_neg()
        before = copies(p for _, p in named)
        with pytest.raises((RuntimeError, TypeError, ValueError), match=r"second.*negated"):
            optimizer.step()
        assert_same_bits(before, copies(p for _, p in named))
        named[1][1].grad = named[1][1].grad.resolve_neg()
        optimizer.step()


@pytest.mark.parametrize("change", ["moved", "emptied", "shrunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_change_a_parameter_when_asked(kind, change, device):
    """A class of tensors may do anything when it is asked about itself: the step follows the parameter or names it."""
    first, second = (torch.nn.Parameter(torch.ones(40, 30, device=device)) for _ in range(2))
    optimizer = make(kind, [("first", first), ("second", second)])
    calls = []

    class Meddler(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if not calls and function in (torch.Tensor.is_neg, torch.Tensor.untyped_storage):
                calls.append(function)
                if change == "shrunk":
                    first.untyped_storage().resize_(16)
                else:
                    first.data = torch.ones(*((40, 30) if change == "moved" else (0, 30)), device=device)
            return super().__torch_function__(function, types, args, kwargs or {})

    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    second.grad = torch.ones(40, 60, device=device)[:, ::2].as_subclass(Meddler)
    before = copies([second])
    if change == "moved":
        optimizer.step()
        assert (first != 1.0).any()
    else:
        with pytest.raises(ValueError, match="first"):
            optimizer.step()
        assert_same_bits(before, copies([second]))
    assert calls


# --- layouts


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last_keeps_its_layout(kind, device):
    """The same numbers in another order of memory: the same training to rounding, and the layout stays."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(6, 4, 3))
        net = net.to(device=device, dtype=torch.float64, memory_format=layout)
        optimizer = make(kind, net.parameters(), **exact(kind))
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=generator).to(device)
            optimizer.zero_grad()
            net(x.contiguous(memory_format=layout)).square().mean().backward()
            optimizer.step()
        for p in net.parameters():
            if p.ndim == 4:
                assert p.is_contiguous(memory_format=layout)
        results.append(copies(net.parameters()))
    assert_close(*results)


def laid_out(g, how):
    """The numbers of g in another layout."""
    if how == "transposed":
        return g.mT.contiguous().mT
    if how == "stepped":
        wide = torch.full((*g.shape[:-1], 2 * g.shape[-1]), float("nan"), dtype=g.dtype, device=g.device)
        wide[..., ::2] = g
        return wide[..., ::2]
    if how == "offset":
        flat = torch.full((g.numel() + 3,), float("nan"), dtype=g.dtype, device=g.device)
        flat[3:] = g.flatten()
        return flat[3:].view(g.shape)
    return g.contiguous()


@pytest.mark.parametrize("how", ["transposed", "stepped", "offset"])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_gradients(kind, how, device):
    results = []
    for layout in ("plain", how):
        generator = torch.Generator().manual_seed(2)
        params = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in [(6, 6), (4, 7), (3, 2, 5)]]
        optimizer = make(kind, params)
        for _ in range(4):
            for p in params:
                p.grad = laid_out(torch.randn(p.shape, generator=generator).to(device), layout)
            optimizer.step()
        results.append(copies(params))
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_gradients(kind, device):
    """What the backward of a sum gives: one number for all elements."""
    results = []
    for expand in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(5, 4, device=device))
        optimizer = make(kind, [p])
        for _ in range(4):
            g = torch.randn(4, device=device).expand(5, 4)
            p.grad = g if expand else g.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        results.append(p.detach().clone())
    assert_same_bits(results[:1], results[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_parameters(kind, device):
    """Stored by columns: the same method on the same matrix."""
    base = torch.randn(7, 7, dtype=torch.float64)
    trial = Trial(kind, [base.mT, (5, 5), torch.randn(5, 4, dtype=torch.float64).mT], device, **exact(kind))
    assert trial.params[0].stride() == (1, 7)
    trial.run(3)
    assert trial.params[0].stride() == (1, 7)
    if kind != "soap":  # whose basis of a tall matrix is open
        trial.run(8).check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_with_gaps_are_refused(kind, device):
    wide = torch.zeros(4, 6, device=device)
    p = torch.nn.Parameter(wide[:, ::2])
    p.grad = torch.ones_like(p)
    with pytest.raises((ValueError, RuntimeError), match=r"gaps|dense"):
        make(kind, [p]).step()
    assert not wide.any()


# --- accumulation and sharing


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients_are_one_large_batch(kind, device):
    models = [square(device), square(device)]
    whole, parts = (make(kind, m.parameters(), **exact(kind)) for m in models)
    assert_close(train_square(models[0], whole, 6), train_square(models[1], parts, 6, parts=4))


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_are_one_parameter(kind, device):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(5, 5, device=device), torch.nn.Linear(5, 5, device=device)
    second.weight = first.weight
    model = torch.nn.Sequential(first, torch.nn.Tanh(), second)
    optimizer = make(kind, model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 5, device=device)).square().mean().backward()
        optimizer.step()
    assert second.weight is first.weight
    assert len(optimizer.state) == 3
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 3


# --- parameters that move or change


@pytest.mark.parametrize("kind", KINDS)
def test_data_replaced_between_steps(kind, device):
    """The optimizer follows a parameter to its new memory, its state stays, and the old memory is left alone."""
    trial = Trial(kind, SHAPES, device, **exact(kind)).run(4)
    old = [p.data for p in trial.params]
    kept = copies(old)
    for p, r in zip(trial.params, trial.references, strict=True):
        p.data = p.data * 0.5
        r.values = r.values * 0.5
    trial.run(8).check(1e-10)
    assert_same_bits(kept, old)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_changed_between_steps(kind, device):
    """model.to(memory_format=channels_last) after some steps: goes on, or says which parameter it was."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3)).to(device)
    optimizer = make(kind, net.named_parameters())

    def step():
        optimizer.zero_grad()
        net(torch.randn(4, 3, 5, 5, device=device)).square().mean().backward()
        optimizer.step()

    step()
    net.to(memory_format=torch.channels_last)
    before = copies(net.parameters())
    try:
        step()
        step()
    except (RuntimeError, TypeError, ValueError) as error:
        assert "0.weight" in str(error)
        assert_same_bits(before, copies(net.parameters()))
    else:
        assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert all(p.isfinite().all() for p in net.parameters())
        assert not torch.equal(before[0], net[0].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_dtype_changed_between_steps(kind, dtype, device):
    """model.half() and the like: state is carried over where it is float32 or converted, or the change is refused."""
    model = small(device)
    optimizer = make(kind, model.named_parameters())
    train(model, optimizer, 4)
    model.to(dtype)
    before = copies(model.parameters())
    loss = loss_of(model, 4)
    optimizer.zero_grad()
    loss.backward()
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError) as error:
        assert any(name in str(error) for name, _ in model.named_parameters())
        assert_same_bits(before, copies(model.parameters()))
    else:
        assert all(p.isfinite().all() for p in model.parameters())
        assert optimizer.stats()["steps"] >= 1
        steps = {float(s["step"]) for s in optimizer.state.values()}
        assert steps <= {4.0, 5.0}  # SOAP's first gradient is not counted
        train(model, optimizer, 2)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_large_rank_and_ones(kind, device):
    """Tensors with many dimensions and dimensions of one element."""
    params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in [(2, 1, 3, 1, 2, 2), (1, 1, 1), (1, 8, 1)]]
    optimizer = make(kind, params)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_another_device_or_shape_cannot_reach_it(kind, device):
    """torch itself refuses to assign such a gradient; one smuggled in through data is refused by the step."""
    p = torch.nn.Parameter(torch.randn(4, 3, device=device))
    optimizer = CLASSES[kind]([("w", p)])
    p.grad = torch.randn_like(p)
    p.data = torch.randn(5, 3, device=device)
    before = p.detach().clone()
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        optimizer.step()
    assert torch.equal(before, p)
