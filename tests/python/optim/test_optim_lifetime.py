"""Optimizers in long-running programs: memory that outlives or is released, rearranged groups, autograd's version
checks, threads, and tensors whose memory is freed."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections import defaultdict

import pytest
import torch
from optim_cases import CLASSES, Trial, assert_same_bits, copies, exact, loss_of, make, pair, small, train, trained

SHAPES = [(6, 6), (5,), (4, 4)]


# --- memory


def test_state_outlives_its_optimizer(kind, device):
    model, optimizer = trained(kind, device, 3)
    views = [v for s in optimizer.state.values() for v in s.values()]
    kept = copies(views)
    del optimizer, model
    gc.collect()
    others = [torch.randn(100_000, device=device) for _ in range(10)]
    assert_same_bits(kept, views)
    del others


def test_nothing_keeps_an_optimizer_alive(kind, device):
    model, optimizer = trained(kind, device, 3)
    gone = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model.out.weight)]
    del optimizer, model
    gc.collect()
    assert [r() for r in gone] == [None, None, None]


# --- groups rearranged, state cleared


def test_groups_that_are_rearranged(kind, device):
    """A group is added late, a parameter is added to another's list, changes its group and leaves; a group leaves and
    returns. All of that is allowed, and the references continue."""
    trial = Trial(kind, SHAPES, device, **exact(kind)).run(5)
    trial.add_group([(4, 4), (7,)], lr=0.003)
    trial.run(4)
    first, second = trial.optimizer.param_groups
    added = trial.add([(3, 3)], exact(kind))
    first["params"].extend(added["params"])
    trial.run(4)
    second["params"].append(first["params"].pop(0))
    trial.references[0].options["lr"] = 0.003
    trial.run(4)
    del first["params"][0]
    trial.optimizer.param_groups.pop(0)
    before = copies(trial.params)
    for _ in range(4):
        trial.step(missing={1, 2, 5})
    assert_same_bits([before[i] for i in (1, 2, 5)], copies(trial.params[i] for i in (1, 2, 5)))
    trial.optimizer.param_groups.insert(0, first)
    for _ in range(4):
        trial.step(missing={1})
    trial.check(1e-10)


@pytest.mark.parametrize("how", ["clear", "replace"])
def test_state_cleared_begins_anew(kind, how, device):
    model, optimizer = trained(kind, device, 4)
    twin = copy.deepcopy(model)
    if how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    train(model, optimizer, 3)
    train(twin, make(kind, twin.parameters()), 3)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


def test_users_keys_in_a_group_are_kept(kind, device):
    """Names and notes that loggers and trainers store there; a group of one tensor that is not in a list."""
    model = small(device)
    optimizer = CLASSES[kind]([{"params": model.out.weight, "name": "out", "note": [1, 2]}])
    optimizer.add_param_group({"params": model.conv.weight, "name": "conv"})
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    assert [g["name"] for g in state["param_groups"]] == ["out", "conv"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["note"] == [1, 2]
    train(model, optimizer, 1)


def test_copies_made_under_a_scheduler(kind, device):
    """A scheduler wraps the step; copies do not step the original. No warning about the order of steps."""
    model, optimizer = trained(kind, device)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train(model, optimizer, 1, step)
            scheduler.step()
    twins = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, 2, 10)
    for twin, other in twins:
        train(twin, other, 2, 10)
        assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


class Named(CLASSES["shampoo"]):
    """A user's subclass."""

    def __init__(self, params, label):
        super().__init__(params, lr=0.02, precondition_frequency=3)
        self.label = label


def test_subclass(device):
    model, twin = small(device), small(device)
    optimizer = Named(model.parameters(), "mine")
    train(model, optimizer, 4)
    train(twin, CLASSES["shampoo"](twin.parameters(), lr=0.02, precondition_frequency=3), 4)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))
    assert type(copy.deepcopy(optimizer)) is Named


# --- autograd


def test_autograd_notices_a_step(kind, device):
    """A step between a forward pass and its backward pass is an error, as with every in-place operation."""
    model, optimizer = trained(kind, device, 2)
    late = loss_of(model, 1)
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="inplace"):
        late.backward()


def test_step_in_inference_mode(kind, device):
    model, optimizer, twin, beside = pair(kind, device)
    loss_of(model, 0).backward()
    with torch.inference_mode():
        optimizer.step()
    train(twin, beside, 1)
    train(model, optimizer, 2, 1)
    train(twin, beside, 2, 1)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


# --- threads


def in_threads(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def test_threads_at_one_optimizer(kind, device):
    """Each step is executed completely or rejected; the count of steps is that of executed ones."""
    _, optimizer = trained(kind, device, 1)
    taken = []

    def work(i):
        for _ in range(50):
            try:
                optimizer.step()
                taken.append(i)
            except RuntimeError as error:
                assert "in use" in str(error)

    in_threads(4, work)
    assert taken
    assert optimizer.stats()["steps"] == len(taken) + 1


def test_a_step_within_a_step(kind, device):
    _, optimizer = trained(kind, device, 1)

    def closure():
        optimizer.step()
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert optimizer.stats()["steps"] == 3


# --- unusable tensors


@pytest.mark.parametrize("left", [0, 140])
@pytest.mark.parametrize("whose", ["parameter", "gradient"])
def test_memory_that_is_gone(kind, whose, left, device):
    """Freed as by FSDP, or an element short: an error that names it."""
    model, optimizer = trained(kind, device, 2)
    p = model.out.weight
    (p if whose == "parameter" else p.grad).untyped_storage().resize_(left)
    before = copies(q for q in model.parameters() if q is not p)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"out\.weight"):
        optimizer.step()
    assert_same_bits(before, copies(q for q in model.parameters() if q is not p))


def test_parameters_without_memory(kind):
    """On the meta device an optimizer can be created, but not step."""
    with torch.device("meta"):
        p = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = make(kind, [("weight", p)])
    p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=r"'weight' is on the meta device .*to_empty"):
        optimizer.step()


def test_a_parameter_that_was_resized(kind, device):
    """Its state does not fit: an error names it, and following its advice resets the parameter's state."""
    model, optimizer = trained(kind, device, 2)
    p = model.out.weight
    p.data = torch.cat([p.data, p.data])
    p.grad = torch.ones_like(p)
    before = copies(model.parameters())
    with pytest.raises(ValueError, match=r"'out\.weight' has shape .* `del optimizer\.state\[parameter\]`"):
        optimizer.step()
    assert_same_bits(before, copies(model.parameters()))
    del optimizer.state[p]
    optimizer.step()
    steps = [int(optimizer.state[q]["counts"][2]) for q in (p, model.hidden.weight)]
    optimizer.state_dict()
    assert [int(optimizer.state[q]["counts"][2]) for q in (p, model.hidden.weight)] == [1, 3], steps


def test_parameters_that_share_memory_are_refused(kind, device):
    base = torch.randn(6, 4, device=device)
    params = [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])]
    before = base.clone()
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="share memory"):
        make(kind, params).step()
    assert torch.equal(before, base)
