"""Between torchium.optim and the library: _C.Optimizer and _C.Scaler, memory of the state, parameters that move, their
order, and concurrent calls."""

import copy

import pytest
import torch
import torchium.optim
from optim_cases import CLASSES, assert_same_bits, copies, make
from torchium import _C


def parameters(device, count=3, shape=(6, 5)):
    generator = torch.Generator().manual_seed(count)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for _ in range(count)]


def give_gradients(params, step=0):
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + i)
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def run(optimizer, params, first, last):
    for step in range(first, last):
        give_gradients(params, step)
        optimizer.step()


# --- _C.Optimizer


def handle(device, params, kind="adamw", **config):
    def allocate(size):
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, memory.data_ptr()

    optimizer = _C.Optimizer(device, allocate)
    names = [f"p{i}" for i in range(len(params))]
    optimizer.add_group({"kind": kind, **config}, params, names, [False] * len(params))
    return optimizer


@pytest.mark.parametrize(
    ("config", "error", "word"),
    [
        ({"kind": "adamw", "learning_rate": 0.1}, TypeError, "learning_rate"),
        ({"lr": 0.1}, TypeError, "kind"),
        ({"kind": "adam"}, ValueError, "kind"),
        ({"kind": "adamw", "lr": "fast"}, TypeError, "lr"),
        ({"kind": "adamw", "lr": -1.0}, ValueError, "lr"),
        ({"kind": "adamw", "amsgrad": 2}, ValueError, "amsgrad"),
        ({"kind": "muon", "muon.ns_coefficients": (1.0,)}, ValueError, "muon.ns_coefficients"),
        ({"kind": "shampoo", "shampoo.grafting": "Adam"}, ValueError, "grafting"),
        ({"kind": "sgd", "memory.seed": -1}, ValueError, "seed"),
        ([], TypeError, "config"),
    ],
)
def test_configurations_are_refused_by_name(config, error, word):
    optimizer = _C.Optimizer("cpu")
    with pytest.raises(error, match=word):
        optimizer.add_group(config, [], [], [])


def test_arguments_of_the_handle():
    p = parameters("cpu", 2)
    optimizer = handle("cpu", p)
    give_gradients(p)
    for wrong in ((), ([p[0]],), (p, [None]), (tuple(p),), ([None, p[0]], [None, None]), (["p", "q"],)):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            optimizer.step(*wrong)
    with pytest.raises(ValueError, match="parameter 7"):
        optimizer.get_counts(7)
    with pytest.raises(TypeError):
        optimizer.set_range_hook(print, None)
    with pytest.raises(RuntimeError, match="group"):
        _C.Optimizer("cpu").step([])
    with pytest.raises(TypeError):
        _C.Optimizer("cpu", allocate=3)
    optimizer.step(p)


def test_stats_tell_rates_updates_and_schedules(kind, device):
    """Vs copies of the parameters, and the arithmetic of a schedule."""
    p = [*parameters(device), *parameters(device, 2, (7,))]
    optimizer = make(kind, [{"params": p[:2]}, {"params": p[2:4], "lr": 0.03}, {"params": p[4:]}], lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    run(optimizer, p, 0, 3)
    scheduler.step()
    assert not any(name.startswith("update_rms") for name in optimizer.stats())
    optimizer.measure_update()
    before = copies(p)
    run(optimizer, p, 3, 4)
    moved = {"matrix": [], "AdamW": []}
    for old, new in zip(before, copies(p), strict=True):
        moved["matrix" if old.ndim == 2 else "AdamW"].append((new - old).double().flatten())
    told = [optimizer.stats()]
    run(optimizer, p, 4, 5)  # which does not measure anything
    told.append(optimizer.stats())
    name = CLASSES[kind].__name__
    first_order = {row.method for row in optimizer.summary()} == {name}
    of_matrices = {name: moved["matrix"], "AdamW": moved["AdamW"]}
    expected = {name: [part for parts in moved.values() for part in parts]} if first_order else of_matrices
    for stats in told:
        for method, parts in expected.items():
            rms = torch.cat(parts).square().mean().sqrt().item()
            assert stats[f"update_rms/{method}"] == pytest.approx(rms, rel=1e-5)
    rates = {key: rate for key, rate in told[1].items() if key.startswith("lr/")}
    share = 0.3 if kind == "muon" else 1.0
    assert rates[f"lr/{name}/0"] == 0.01 and rates[f"lr/{name}/1"] == 0.015
    assert rates[f"lr/{name if first_order else 'AdamW'}/2"] == pytest.approx(0.01 * share)
    assert ("interval_mean" in told[1]) == (told[1]["refreshes"] > 0)
    if told[1]["refreshes"] > 0:
        assert told[1]["interval_max"] >= told[1]["interval_mean"] >= 1.0
        assert 4.0 >= told[1]["staleness_max"] >= told[1]["staleness_mean"] >= 0.0


def test_only_those_with_gradients_are_returned(device):
    p = parameters(device)
    optimizer = handle(device, p)
    assert optimizer.step(p) == []
    assert optimizer.stats()["steps"] == 0
    give_gradients(p)
    assert optimizer.step(p) is None
    p[1].grad = None
    changed = optimizer.step(p)
    assert [id(x) for x in changed] == [id(p[0]), id(p[2])]


def test_gradients_of_another_library():
    """With PyTorch's, in one step: bitwise the same step."""
    pytest.importorskip("numpy")
    p, q = parameters("cpu"), parameters("cpu")
    for mine, other in zip(p, q, strict=True):
        other.data.copy_(mine.data)
    first, second = handle("cpu", p), handle("cpu", q)
    for step in range(3):
        give_gradients(p, step)
        given = [x.grad if i == 1 else x.grad.numpy() for i, x in enumerate(p)]
        assert first.step(p) is None
        assert second.step(q, given) is None
    assert all(torch.equal(a, b) for a, b in zip(p, q, strict=True))


def test_an_allocation_that_fails_leaves_nothing(device):
    def refuse(size):
        raise MemoryError(f"no {size} bytes")

    optimizer = _C.Optimizer(device, refuse)
    p = parameters(device)
    for _ in range(3):
        with pytest.raises(MemoryError, match="bytes"):
            optimizer.add_group({"kind": "adamw"}, p, ["a", "b", "c"], [False] * 3)
    for wrong in (lambda size: None, lambda size: (None, "x"), lambda size: (None, 0)):
        with pytest.raises((TypeError, MemoryError)):
            _C.Optimizer(device, wrong).add_group({"kind": "adamw"}, p, ["a", "b", "c"], [False] * 3)


def test_calls_from_inside_are_refused(device):
    """A function called by the optimizer finds it in use."""
    p = parameters(device)
    optimizer = handle(device, p)
    give_gradients(p)
    seen = []

    def push(name):
        with pytest.raises(RuntimeError, match="in use"):
            optimizer.step(p)
        seen.append(name)

    optimizer.set_range_hook(push, lambda: seen.append(None))
    optimizer.step(p)
    optimizer.set_range_hook(None, None)
    assert "elementwise" in seen
    assert len(seen) == 2 * seen.count(None)


# --- parameters that move


def test_parameters_are_followed(kind, device):
    """To new memory, to each other's, and in a cycle."""
    here, there = parameters(device), parameters(device)
    still, moving = make(kind, here), make(kind, there)
    for step in range(8):
        if step % 4 == 1:
            for p in reversed(there):
                p.data = p.data.clone()
        if step % 4 == 2:
            data = [p.data.clone() for p in there]
            memory = [p.data for p in there]
            for k, p in enumerate(there):
                p.data = memory[(k + 1) % len(there)]
            for p, values in zip(there, data, strict=True):
                p.data.copy_(values)
        run(still, here, step, step + 1)
        run(moving, there, step, step + 1)
    assert_same_bits(copies(here), copies(there))


def test_a_restart_repeats_the_order_of_arrival(kind, device):
    """Parameters added later are separate groups, before and after a restart."""
    params = parameters(device, 5)
    for p in params[3:]:
        p.requires_grad_(False)
    whole = make(kind, params, **({"precondition_frequency": 4} if kind == "shampoo" else {}))
    for step in range(4):
        give_gradients(params[:3], step)
        whole.step()
    params[3].requires_grad_(True)
    give_gradients(params[:4], 4)
    whole.step()
    params[4].requires_grad_(True)
    run(whole, params, 5, 7)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restarted = CLASSES[kind](others)
    restarted.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert [int(restarted.state[p]["counts"][0]) for p in others] == [0, 0, 0, 1, 2]
    run(whole, params, 7, 15)
    run(restarted, others, 7, 15)
    assert_same_bits(copies(params), copies(others))


def test_versions_tell_autograd_what_was_written(device):
    p = parameters(device)
    give_gradients(p)
    p[1].grad = None
    before = [x._version for x in p]
    torchium.optim.SGD(p, lr=0.1).step()
    assert [x._version > v for x, v in zip(p, before, strict=True)] == [True, False, True]


# --- names for a profiler, reports


def test_phases_have_names_in_a_profile(kind, device):
    """tests/optim/test_optim_names.c has all of them."""
    p = [*parameters(device), torch.nn.Parameter(torch.zeros(4, device=device))]
    optimizer = make(kind, p)
    run(optimizer, p, 0, 1)
    with torch.profiler.profile() as profile:
        run(optimizer, p, 1, 7)
    names = {event.key for event in profile.key_averages()}
    assert f"torchium::{kind}/elementwise" in names
    assert any(f"Optimizer.step#{CLASSES[kind].__name__}" in name for name in names)
    run(optimizer, p, 7, 8)


def test_memory_reports(device):
    p = parameters(device, 3, (30, 20))
    optimizer = torchium.optim.Shampoo(p, max_preconditioner_dim=16)
    forecast = optimizer.memory_report()
    run(optimizer, p, 0, 1)
    figures = optimizer.memory_report()
    assert forecast.forecast
    assert not figures.forecast
    recorded = {report["recorded"] for report in (forecast, figures)}
    assert recorded == {0} if device == "cpu" else figures["recorded"] == 0 < forecast["recorded"]
    for report in (forecast, figures):
        assert report["peak"] == sum(report[name] for name in ("state", "scratch", "refresh", "recorded"))
        assert ("recorded" in str(report)) == (report["recorded"] > 0)
    same = set(forecast) - {"recorded", "peak"}
    assert {name: forecast[name] for name in same} == {name: figures[name] for name in same}
    run(optimizer, p, 1, 6)
    assert device == "cpu" or 0 < optimizer.memory_report()["recorded"] <= forecast["recorded"]
    tensors = [t for x in p for name, t in optimizer.state[x].items() if name != "counts"]
    total = sum(t.nbytes for t in tensors)
    assert total <= figures["state"] < total + 256 * len(tensors)
    assert figures["factors"] == 2 * figures["blocks"] == 2 * 3 * 4
    assert f"{figures['state'] / 2**10:.1f} KiB" in str(figures)


def test_a_forecast_allocates_nothing():
    """A model on "meta", far larger than the machine."""
    with torch.device("meta"):
        model = torch.nn.Linear(2**20, 2**20)
    forecast = torchium.optim.AdamW(model.parameters()).memory_report()
    assert forecast["state"] >= 2 * 4 * (2**40 + 2**20)
    assert "MiB" in str(forecast)


# --- _C.Scaler


def test_scaler_refuses():
    scaler = _C.Scaler("cpu")
    with pytest.raises(TypeError):
        scaler.unscale(torch.ones(2))
    with pytest.raises(TypeError):
        scaler.unscale([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="gradients"):
        scaler.update()
