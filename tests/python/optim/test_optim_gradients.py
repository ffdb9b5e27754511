"""Gradients that are refused, in any layout; and parameters that move or change their type. C tests have missing and
late gradients (tests/optim/test_optim_steps.c)."""

import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, copies, loss_of, make, train, trained

# Gradients rejected at any step. The memory of a lazily negated one has the numbers with the other sign.
REFUSED = {
    "sparse": lambda p: torch.randn_like(p).to_sparse(),
    "negated": lambda p: torch._neg_view(torch.randn_like(p)),
    "negated,": lambda p: torch.randn(p.shape, dtype=torch.complex64, device=p.device).conj().imag,
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (5,), (1,), ()])
def test_gradients_that_are_refused_by_name(kind, shape, named, device):
    params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in [(3,), shape]]
    optimizer = make(kind, zip(("first", "second"), params, strict=True) if named else params)
    for word, gradient in [*REFUSED.items(), *REFUSED.items()]:
        params[0].grad, params[1].grad = torch.randn_like(params[0]), gradient(params[1])
        before = copies(params)
        with pytest.raises((RuntimeError, TypeError, ValueError), match="second" if named else "1") as error:
            optimizer.step()
        assert word.rstrip(",") in str(error.value)
        assert_same_bits(before, copies(params))
        params[1].grad = torch.randn_like(params[1])
        optimizer.step()


@pytest.mark.parametrize("change", ["moved", "emptied", "shrunk"])
def test_gradients_that_change_a_parameter_when_asked(kind, change, device):
    """Subclasses may run any code when queried: the step follows the parameter or names it."""
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


def test_parameters_with_gaps_are_refused(kind, device):
    wide = torch.zeros(4, 6, device=device)
    p = torch.nn.Parameter(wide[:, ::2])
    p.grad = torch.ones_like(p)
    with pytest.raises((ValueError, RuntimeError), match=r"gaps|dense"):
        make(kind, [p]).step()
    assert not wide.any()


# --- parameters that move or change


CHANGED = [{"memory_format": torch.channels_last}] + [{"dtype": d} for d in (torch.bfloat16, torch.half, torch.double)]


@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_layout_or_dtype_changed_between_steps(kind, change, device):
    """model.half() and similar: continues with the state, or an error names the parameter."""
    model, optimizer = trained(kind, device, 4)
    model.to(**change)
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
        steps = {float(s["step"]) for s in optimizer.state.values()}
        assert steps <= {4.0, 5.0}  # SOAP does not count the first gradient
        train(model, optimizer, 2)
        assert all(p.isfinite().all() for p in model.parameters())
        assert "dtype" in change or model.conv.weight.is_contiguous(**change)
        assert not torch.equal(before[0], next(model.parameters()))


def test_gradient_of_another_device_or_shape_cannot_reach_it(kind, device):
    """torch itself rejects such a gradient; one assigned through data is rejected by the step."""
    p = torch.nn.Parameter(torch.randn(4, 3, device=device))
    optimizer = CLASSES[kind]([("w", p)])
    p.grad = torch.randn_like(p)
    p.data = torch.randn(5, 3, device=device)
    before = p.detach().clone()
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        optimizer.step()
    assert torch.equal(before, p)
