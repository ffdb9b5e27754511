"""Learning-rate schedules as PyTorch makes them, and learning rates that are tensors. The references take the numbers
of their group before every step, so that they see what the schedule has written there.
"""

import copy

import pytest
import torch
from optim_cases import CLASSES, KINDS, Trial, assert_same_bits, copies, exact, make, small, train
from torch.optim import lr_scheduler

SHAPES = [(6, 6), (4, 3, 2), (5,), ()]
CYCLED = {"lr", "betas", "momentum", "weight_decay"}
STEPS = 20

SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=4, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=STEPS),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "WarmUp": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
}


def take_numbers(trial):
    group = trial.optimizer.param_groups[0]
    for r in trial.references:
        r.options.update({k: group[k] for k in CYCLED & set(group) & set(r.options)})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_schedules(kind, schedule, device):
    trial = Trial(kind, SHAPES, device, **exact(kind))
    scheduler = SCHEDULES[schedule](trial.optimizer)
    rates = set()
    for _ in range(STEPS - 1):
        take_numbers(trial)
        trial.step()
        scheduler.step()
        rates.add(trial.optimizer.param_groups[0]["lr"])
    assert len(rates) > 3
    trial.check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_one_cycle_moves_the_momentum(kind, device):
    """It writes betas or momentum, whichever the class has; the trajectory above shows that they arrive."""
    trial = Trial(kind, SHAPES, device, **exact(kind))
    scheduler = SCHEDULES["OneCycleLR"](trial.optimizer)
    seen = set()
    for _ in range(STEPS - 1):
        trial.step()
        scheduler.step()
        group = trial.optimizer.param_groups[0]
        seen.add(group["betas"][0] if "betas" in group else group["momentum"])
    assert len(seen) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_plateau(kind, device):
    trial = Trial(kind, SHAPES, device, **exact(kind))
    scheduler = lr_scheduler.ReduceLROnPlateau(trial.optimizer, factor=0.5, patience=2)
    first = trial.optimizer.param_groups[0]["lr"]
    for _ in range(STEPS):
        take_numbers(trial)
        trial.step()
        scheduler.step(1.0)
    assert trial.optimizer.param_groups[0]["lr"] < first / 8
    trial.check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_schedule_resumes_with_the_optimizer(kind, device):
    def pair(model):
        optimizer = make(kind, model.parameters())
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)

    def go(model, optimizer, scheduler, first, steps):
        for step in range(first, first + steps):
            train(model, optimizer, 1, step)
            scheduler.step()

    model = small(device)
    optimizer, scheduler = pair(model)
    go(model, optimizer, scheduler, 0, 5)
    other = small(device, seed=1)
    optimizer2, scheduler2 = pair(other)
    other.load_state_dict(model.state_dict())
    optimizer2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler2.load_state_dict(scheduler.state_dict())
    go(model, optimizer, scheduler, 5, 5)
    go(other, optimizer2, scheduler2, 5, 5)
    assert_same_bits(copies(model.parameters()), copies(other.parameters()))


# --- tensors


@pytest.mark.parametrize("where", ["cpu", "parameters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_learning_rates(kind, dtype, where, device):
    """A 0-d tensor, on the CPU or beside the parameters, changed in place between steps."""
    lr = torch.tensor(0.01, dtype=dtype, device=device if where == "parameters" else "cpu")
    trial = Trial(kind, SHAPES, device, **exact(kind, lr=lr))
    assert trial.optimizer.param_groups[0]["lr"] is lr
    for step in range(12):
        if step in (4, 8):
            lr.mul_(0.5)
        trial.step()
    trial.check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_over_a_tensor(kind, device):
    lr = torch.tensor(0.01, dtype=torch.float64)
    trial = Trial(kind, SHAPES, device, **exact(kind, lr=lr))
    scheduler = lr_scheduler.StepLR(trial.optimizer, step_size=3, gamma=0.5)
    for _ in range(10):
        take_numbers(trial)
        trial.step()
        scheduler.step()
    assert float(trial.optimizer.param_groups[0]["lr"]) == 0.01 / 8
    trial.check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_number_and_tensor_may_change_places(kind, device):
    trial = Trial(kind, SHAPES, device, **exact(kind)).run(3)
    for lr in (torch.tensor(0.004, dtype=torch.float64, device=device), 0.02, torch.tensor(0.001, dtype=torch.float64)):
        trial.follow(lr=lr)
        trial.run(3)
    trial.check(1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_as_tensors(kind, device):
    numbers = {"weight_decay": torch.tensor(0.25, dtype=torch.float64)}
    if kind in ("adamw", "shampoo", "soap", "lion"):
        numbers["betas"] = tuple(torch.tensor(b, dtype=torch.float64) for b in (0.75, 0.875))
    else:
        numbers["momentum"] = torch.tensor(0.5, dtype=torch.float64)
    plain = {k: tuple(map(float, v)) if isinstance(v, tuple) else float(v) for k, v in numbers.items()}
    results = []
    for options in (numbers, plain):
        model = small(device)
        train(model, CLASSES[kind](model.parameters(), **exact(kind, **options)), 5)
        results.append(copies(model.parameters()))
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_lr_zero_moves_nothing(kind, device):
    model = small(device)
    optimizer = make(kind, model.parameters(), lr=0.0)
    before = copies(model.parameters())
    train(model, optimizer, 3)
    assert_same_bits(before, copies(model.parameters()))
