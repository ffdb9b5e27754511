"""Learning rate schedules: PyTorch's schedulers, tensor rates, and AdamW's rate, whose ratio to lr is kept. The
references get their group's hyperparameters before every step, and AdamW's expected rate."""

import copy
import itertools

import pytest
import torch
import torchium
from optim_cases import CLASSES, SECOND_ORDER, Trial, assert_same_bits, copies, exact, make, small, through_file, train
from torch.optim import lr_scheduler

SHAPES = [(6, 6), (4, 4), (5,), ()]
CYCLED = {"lr", "betas", "momentum", "weight_decay"}
STEPS = 16
# Exact in binary, so that adamw_lr / lr times lr has no rounding.
LR, ADAMW_LR = 2.0**-6, 2.0**-8
RATIO = ADAMW_LR / LR
# AdamW's share of lr if adamw_lr is not given; NorMuon's lr is AdamW's.
SHARE = {"muon": 0.3}

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(step / 5, 1.0)),  # begins at 0
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], gamma=0.1),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS // 2),  # reaches 0 half-way
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.03, step_size_up=4, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=STEPS + 1),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS, power=2.0),
}


def test_every_scheduler_is_among_them():
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - {"LRScheduler"}


class Scheduled(Trial):
    def __init__(self, kind, device="cpu", **options):
        adamw = {"adamw_lr": ADAMW_LR} if kind in SECOND_ORDER else {}
        super().__init__(kind, SHAPES, device, **exact(kind, **({"lr": LR} | adamw | options)))

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    def step(self, adamw_lr=None):
        """`adamw_lr` is AdamW's expected rate, its ratio times lr if not given."""
        numbers = {name: self.group[name] for name in CYCLED & set(self.group)}
        if self.kind in SECOND_ORDER:
            numbers["adamw_lr"] = float(RATIO * self.group["lr"] if adamw_lr is None else adamw_lr)
        for r in self.references:
            r.options.update(numbers)
        super().step()


@pytest.mark.parametrize(("kind", "name"), zip(itertools.cycle(CLASSES), SCHEDULERS))
def test_schedulers(kind, name, device):
    trial = Scheduled(kind, device)
    scheduler = SCHEDULERS[name](trial.optimizer)
    rates, momenta = set(), set()
    for _ in range(STEPS):
        rates.add(trial.group["lr"])
        momenta.add(trial.group["betas"][0] if "betas" in trial.group else trial.group["momentum"])
        trial.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > (1 if name == "ConstantLR" else 2)
    assert len(momenta) > 3 or name != "OneCycleLR"
    assert trial.group.get("adamw_lr", ADAMW_LR) == ADAMW_LR  # keeps the user's value
    trial.check(1e-10)


@pytest.mark.parametrize(("kind", "at"), zip(itertools.cycle(CLASSES), 2 * [0, 1, 5, 8] + 2 * [5, 8, 0, 1]))
def test_resume(kind, at, device):
    """Bitwise, from any point of a schedule that begins and ends at 0, in an optimizer created with another rate, whose
    scheduler has changed it before loading."""

    def schedule(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 3, max(8 - step, 0) / 5))

    def go(model, optimizer, scheduler, first, steps):
        for step in range(first, first + steps):
            train(model, optimizer, 1, step)
            scheduler.step()

    model = small(device)
    optimizer = make(kind, model.parameters(), lr=LR, **({"adamw_lr": 0.003} if kind in SECOND_ORDER else {}))
    scheduler = schedule(optimizer)
    go(model, optimizer, scheduler, 0, at)
    twin = copy.deepcopy(model)
    other = make(kind, twin.parameters(), lr=0.5)
    after = schedule(other)
    other.load_state_dict(through_file(optimizer.state_dict()))
    after.load_state_dict(scheduler.state_dict())
    for m, o, s in ((model, optimizer, scheduler), (twin, other, after)):
        go(m, o, s, at, 6)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


# --- tensors


@pytest.mark.parametrize("where", ["cpu", "parameters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_learning_rates(kind, dtype, where, device):
    """A 0-d tensor, on the CPU or on the parameters' device, changed in place between steps, as schedulers do; then a
    number instead, and another tensor."""
    lr = torch.tensor(LR, dtype=dtype, device=device if where == "parameters" else "cpu")
    trial = Scheduled(kind, device, lr=lr)
    assert trial.group["lr"] is lr
    for factor in (1.0, 1.0, 0.5, 0.0, 0.25, 0.25):
        lr.fill_(LR * factor)
        trial.step()
    for other in (LR / 2, torch.tensor(LR / 4, dtype=torch.float64, device=lr.device), LR):
        trial.group["lr"] = other
        trial.step()
    trial.check(1e-10)


def test_other_numbers_as_tensors(kind, device):
    numbers = {"weight_decay": torch.tensor(0.25, dtype=torch.float64)}
    if kind in ("adamw", "shampoo", "soap", "lion", "kl_shampoo"):
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


# --- the ratio of adamw_lr to lr

# A trial's options; then for each step the group's settings, and AdamW's expected rate, None for its share of lr.
RATIOS = {
    "a new ratio": (
        {},
        [
            *[({"lr": LR / 2}, ADAMW_LR / 2), ({"adamw_lr": LR / 16}, LR / 16), ({"lr": LR}, LR / 8)],
            *[({"adamw_lr": None}, None), ({"adamw_lr": 0.0}, 0.0)],
        ],
    ),
    "before the first step": ({}, [({"adamw_lr": LR / 2}, LR / 2), ({"lr": LR / 2}, LR / 4)]),
    "at a rate of 0": ({}, [({"initial_lr": LR, "lr": 0.0, "adamw_lr": LR / 2}, 0.0), ({"lr": LR / 2}, LR / 4)]),
    "0 at construction: no ratio can be kept": (
        {"lr": 0.0},
        [({}, 0.0), *[({"lr": lr}, ADAMW_LR if lr else 0.0) for lr in (LR / 64, LR, 0.0, LR / 2)]],
    ),
    "not given, from 0": ({"lr": 0.0, "adamw_lr": None}, [({"lr": lr}, None) for lr in (0.0, LR, LR / 4, 0.0, LR / 2)]),
}


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_ratios(kind, name, device):
    options, steps = RATIOS[name]
    trial = Scheduled(kind, device, **options)
    for numbers, adamw_lr in steps:
        trial.group.update(numbers)
        trial.step(SHARE.get(kind, 1.0) * trial.group["lr"] if adamw_lr is None else adamw_lr)
    trial.check(1e-10)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_every_group_has_its_own(kind):
    """Also one added late."""
    trial = Trial(kind, SHAPES, **exact(kind, lr=LR, adamw_lr=ADAMW_LR))
    trial.add_group(SHAPES, lr=2 * LR, adamw_lr=LR / 16)
    scheduler = lr_scheduler.ExponentialLR(trial.optimizer, 0.5)
    for step in range(6):
        if step == 3:
            trial.add_group(SHAPES, lr=LR, adamw_lr=4 * LR)
            trial.optimizer.param_groups[2]["initial_lr"] = LR
            scheduler.base_lrs.append(LR)
        rates = [
            (group["lr"], ratio * group["lr"])
            for group, ratio in zip(trial.optimizer.param_groups, (RATIO, 1 / 32, 4.0), strict=False)
        ]
        for i, r in enumerate(trial.references):
            r.options.update(zip(("lr", "adamw_lr"), rates[i // len(SHAPES)], strict=True))
        trial.step()
        scheduler.step()
    trial.check(1e-10)


def test_a_refused_rate_leaves_the_ratio():
    trial = Scheduled("muon")
    trial.step()
    trial.group.update(lr=LR / 2, adamw_lr=-1.0)
    with pytest.raises(ValueError, match="adamw_lr is -1"):
        trial.optimizer.step()
    trial.group["adamw_lr"] = ADAMW_LR
    trial.step(ADAMW_LR / 2)
    trial.check(1e-10)


# If lr is on Muon's scale AdamW gets a share of it; if on AdamW's, all.
NOT_GIVEN = [
    ("muon", None, 0.3),
    ("muon", "original", 0.3),
    ("muon", "match_rms_adamw", 1.0),
    ("normuon", "original", 0.3),
    ("normuon", "match_rms_adamw", 1.0),
]


@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR"])
@pytest.mark.parametrize(("kind", "adjust", "share"), NOT_GIVEN)
def test_a_share_of_lr(kind, adjust, share, name, device):
    trial = Scheduled(kind, device, adamw_lr=None, adjust_lr_fn=adjust)
    scheduler = SCHEDULERS[name](trial.optimizer)
    for _ in range(STEPS):
        (told,) = {row.lr for row in trial.optimizer.summary() if row.method == "AdamW"}
        assert told == pytest.approx(share * trial.group["lr"], rel=1e-14)
        trial.step(share * trial.group["lr"])
        scheduler.step()
    assert trial.group["adamw_lr"] is None
    trial.check(1e-10)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("kind", ["muon", "normuon"])
def test_the_share_is_the_library_s(kind, adjust, monkeypatch):
    """Bitwise equal to the library without an explicit rate."""
    models = [small(), small()]
    for model in models:
        if model is models[1]:
            monkeypatch.setattr("torchium.optim.base.keep_ratio", lambda config, group, share: None)
        train(model, make(kind, model.parameters(), lr=LR, adjust_lr_fn=adjust), 1)
    assert_same_bits(*(copies(model.parameters()) for model in models))


def test_lr_of_a_group_for_adamw_is_all_its_own():
    """As with `use_muon=False`: an lr for a group of embeddings is AdamW's."""
    trial = Trial("muon", SHAPES, **exact("muon", lr=LR))
    trial.optimizer.add_param_group(trial.add(SHAPES[2:], {"adamw_lr": LR / 8}) | {"use_adamw": True, "lr": LR / 8})
    assert {row.lr for row in trial.optimizer.summary() if row.method == "AdamW"} == {0.3 * LR, LR / 8}
    for factor in (1.0, 0.5):
        trial.optimizer.param_groups[1]["lr"] = factor * LR / 8
        for r in trial.references[len(SHAPES) :]:
            r.options.update(adamw_lr=factor * LR / 8, weight_decay=trial.optimizer.param_groups[1]["weight_decay"])
        trial.step()
    trial.check(1e-10)


# --- state_dicts


def test_a_share_in_a_state_dict():
    trial = Scheduled("muon", adamw_lr=None)
    trial.step(0.3 * LR)
    saved = through_file(trial.optimizer.state_dict())
    trial.optimizer.load_state_dict(saved)
    for lr in (LR, LR / 2):
        trial.group["lr"] = lr
        trial.step(0.3 * lr)
    trial.check(1e-10)


def test_a_share_for_a_state_dict_of_torch():
    layer = torch.nn.Linear(4, 6, bias=False)
    theirs = torch.optim.Muon(layer.parameters(), lr=LR)
    layer(torch.ones(3, 4)).sum().backward()
    theirs.step()
    ours = torchium.optim.Muon([("weight", layer.weight)], lr=0.5, use_adamw=("nothing",))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["adamw_lr_base"] == (None, None)


def test_only_groups_with_a_rate_of_their_own_keep_a_note():
    """So that state_dicts without one are unchanged."""

    def noted(kind, **options):
        return make(kind, small().parameters(), **options).state_dict()["param_groups"][0].get("adamw_lr_base")

    assert noted("soap") is None and noted("adamw") is None and noted("muon") == (None, None)
    assert noted("muon", lr=LR, adamw_lr=0.5) == (0.5, LR)


@pytest.mark.parametrize("event", ["a rate ten times higher", "gradients 100 times larger", "a layer that wakes up"])
@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_training_recovers(kind, event):
    """After 150 steps; a stale root or basis must not make a step that training does not recover from."""
    first, middle, last = (torch.nn.Linear(*sizes) for sizes in ((16, 32), (32, 32), (32, 8)))
    net = torch.nn.Sequential(first, torch.nn.Tanh(), middle, torch.nn.Tanh(), last)
    target = torch.randn(16, 8) / 4
    optimizer = CLASSES[kind](list(net.parameters()), lr=3e-3)
    losses = []
    for step in range(250):
        x = torch.randn(64, 16)
        loss = torch.nn.functional.mse_loss(net(x), torch.tanh(x @ target))
        optimizer.zero_grad()
        loss.backward()
        if event.startswith("a layer") and step < 150:
            middle.weight.grad.zero_()
        if event.startswith("gradients") and step == 150:
            for p in net.parameters():
                p.grad *= 100
        optimizer.param_groups[0]["lr"] = 3e-2 if event.startswith("a rate") and 150 <= step < 170 else 3e-3
        optimizer.step()
        losses.append(loss.item())
    before, after, final = torch.tensor(losses[130:150]), torch.tensor(losses[150:]), torch.tensor(losses[-20:])
    assert after.max() < 3 * before.mean() and final.mean() < before.mean()
