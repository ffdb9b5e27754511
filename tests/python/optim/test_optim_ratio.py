"""The learning rate of AdamW's part, which keeps its ratio to lr: under every scheduler of PyTorch, per group, through
rates of 0, and across checkpoints. What AdamW is left with is compared with torch.optim.AdamW at ratio times lr.
"""

import copy
import io

import pytest
import torch
import torchium
from optim_cases import SECOND_ORDER, assert_same_bits, copies, make
from torch.optim import lr_scheduler

STEPS = 16
# Exact in binary, so that adamw_lr / lr times lr has one rounding: none.
LR, ADAMW_LR = 2.0**-6, 2.0**-8
RATIO = ADAMW_LR / LR
# What AdamW gets of lr where adamw_lr is not given; NorMuon's lr is AdamW's.
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
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS // 2),  # reaches 0 half-way
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.03, step_size_up=4, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=STEPS + 1, cycle_momentum=False),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS, power=2.0),
}


def test_every_scheduler_is_among_them():
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - {"LRScheduler"}


def parameters(device="cpu", seed=0):
    """A matrix, and what AdamW gets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 4), (5,), ()]
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(device)) for s in shapes]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)


def adamw_beside(params):
    """torch.optim.AdamW on copies of what AdamW gets."""
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params if p.ndim < 2]
    return torch.optim.AdamW(twins, lr=1.0, weight_decay=0.1)


class Pair:
    """An optimizer with its parameters, and AdamW of PyTorch beside it for those that are no matrices."""

    def __init__(self, kind, device="cpu", lr=LR, **options):
        self.params = parameters(device)
        self.optimizer = make(kind, self.params, **({"lr": lr, "adamw_lr": ADAMW_LR} | options))
        self.group = self.optimizer.param_groups[0]
        self.beside = adamw_beside(self.params)
        self.steps = 0

    def step(self, adamw_lr):
        """One step of both; `adamw_lr` is what AdamW should get."""
        give_gradients(self.params, self.steps)
        vectors = [p for p in self.params if p.ndim < 2]
        for twin, p in zip(self.beside.param_groups[0]["params"], vectors, strict=True):
            twin.grad = p.grad.clone()
        self.beside.param_groups[0]["lr"] = float(adamw_lr)
        self.optimizer.step()
        self.beside.step()
        self.steps += 1

    def check(self):
        vectors = [p for p in self.params if p.ndim < 2]
        for twin, p in zip(self.beside.param_groups[0]["params"], vectors, strict=True):
            torch.testing.assert_close(p, twin, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_schedulers(kind, name, device):
    pair = Pair(kind, device)
    scheduler = SCHEDULERS[name](pair.optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(pair.group["lr"])
        pair.step(RATIO * pair.group["lr"])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 2 or name == "ConstantLR"
    assert pair.group["adamw_lr"] == ADAMW_LR  # stays what the user has set
    pair.check()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_bits_of_a_rate_set_by_hand(name):
    """Ratio times lr is what the steps get, to the bit: as if somebody wrote both rates before every step."""
    (scheduled, by_hand) = (Pair("muon"), Pair("muon"))
    scheduler = SCHEDULERS[name](scheduled.optimizer)
    for _ in range(STEPS):
        lr = scheduled.group["lr"]
        by_hand.group.update(lr=lr, adamw_lr=RATIO * lr)
        for pair in (scheduled, by_hand):
            pair.step(RATIO * lr)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert_same_bits(copies(scheduled.params), copies(by_hand.params))


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_every_group_has_its_own(kind):
    params, others = parameters(), parameters(seed=1)
    optimizer = make(
        kind,
        [{"params": params, "adamw_lr": ADAMW_LR}, {"params": others, "lr": 2 * LR, "adamw_lr": LR / 16}],
        lr=LR,
    )
    late = parameters(seed=2)
    beside = [adamw_beside(params), adamw_beside(others), adamw_beside(late)]
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    ratios = [RATIO, 1 / 32, 4.0]
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": late, "lr": LR, "adamw_lr": 4 * LR})
            optimizer.param_groups[2]["initial_lr"] = LR
            scheduler.base_lrs.append(LR)
        for group, twin, ratio in zip(optimizer.param_groups, beside, ratios, strict=False):
            give_gradients(group["params"], step)
            for q, p in zip(twin.param_groups[0]["params"], [p for p in group["params"] if p.ndim < 2], strict=True):
                q.grad = p.grad.clone()
            twin.param_groups[0]["lr"] = ratio * group["lr"]
            twin.step()
        optimizer.step()
        scheduler.step()
    for group, twin in zip(optimizer.param_groups, beside, strict=True):
        for q, p in zip(twin.param_groups[0]["params"], [p for p in group["params"] if p.ndim < 2], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_setting_it_fixes_a_new_ratio(kind):
    pair = Pair(kind)
    pair.group["lr"] = LR / 2
    pair.step(ADAMW_LR / 2)
    pair.group["adamw_lr"] = LR / 16  # an eighth of lr as it is now
    pair.step(LR / 16)
    pair.group["lr"] = LR
    pair.step(LR / 8)
    pair.group["adamw_lr"] = None
    pair.step(SHARE.get(kind, 1.0) * LR)
    pair.group["adamw_lr"] = 0.0
    pair.step(0.0)
    pair.check()


def test_setting_it_before_the_first_step():
    pair = Pair("muon")
    pair.group["adamw_lr"] = LR / 2
    pair.step(LR / 2)
    pair.group["lr"] = LR / 2
    pair.step(LR / 4)
    pair.check()


def test_setting_it_at_a_rate_of_zero():
    """Goes with the lr that the schedule starts from, or with the one of before."""
    pair = Pair("muon")
    lr_scheduler.LambdaLR(pair.optimizer, lambda step: 0.0)
    assert pair.group["lr"] == 0.0
    pair.group["adamw_lr"] = LR / 2
    pair.step(0.0)
    pair.group["lr"] = LR / 2
    pair.step(LR / 4)
    pair.check()


def test_a_refused_rate_leaves_the_ratio():
    pair = Pair("muon")
    pair.step(ADAMW_LR)
    pair.group["lr"] = LR / 2
    pair.group["adamw_lr"] = -1.0
    give_gradients(pair.params, 9)
    with pytest.raises(ValueError, match="adamw_lr is -1"):
        pair.optimizer.step()
    pair.group["adamw_lr"] = ADAMW_LR
    pair.step(ADAMW_LR / 2)
    pair.check()


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_a_rate_of_zero_at_construction(kind):
    """No ratio can be kept: nothing moves while lr is 0, and adamw_lr stays as it is afterwards."""
    pair = Pair(kind, lr=0.0)
    before = copies(pair.params)
    pair.step(0.0)
    assert_same_bits(before, copies(pair.params))
    for lr in (LR / 64, LR, 0.0, LR / 2):
        pair.group["lr"] = lr
        pair.step(ADAMW_LR if lr else 0.0)
    pair.check()


def test_initial_lr_stands_for_a_rate_of_zero():
    params = parameters()
    optimizer = make("muon", [{"params": params, "initial_lr": LR}], lr=0.0, adamw_lr=ADAMW_LR)
    twin = make("muon", parameters(), lr=LR, adamw_lr=ADAMW_LR)
    for lr in (0.0, LR / 4, LR):
        for o in (optimizer, twin):
            o.param_groups[0]["lr"] = lr
            give_gradients(o.param_groups[0]["params"], 0)
            o.step()
    assert_same_bits(copies(params), copies(twin.param_groups[0]["params"]))


@pytest.mark.parametrize("where", ["cpu", "parameters"])
@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_tensors(kind, where, device):
    lr = torch.tensor(LR, dtype=torch.float64, device=device if where == "parameters" else "cpu")
    pair = Pair(kind, device, lr=lr)
    for factor in (1.0, 0.5, 0.0, 0.25):
        lr.fill_(LR * factor)
        pair.step(ADAMW_LR * factor)
    pair.check()


# --- a rate that is not given

# Where lr is on Muon's scale AdamW gets a share of it; where it is on AdamW's, all.
NOT_GIVEN = [
    ("muon", None, 0.3),
    ("muon", "original", 0.3),
    ("muon", "match_rms_adamw", 1.0),
    ("normuon", "original", 0.3),
    ("normuon", "match_rms_adamw", 1.0),
]


@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR"])
@pytest.mark.parametrize(("kind", "adjust", "share"), NOT_GIVEN)
def test_a_share_of_lr(kind, adjust, share, name, device):
    pair = Pair(kind, device, adamw_lr=None, adjust_lr_fn=adjust)
    scheduler = SCHEDULERS[name](pair.optimizer)
    for _ in range(STEPS):
        (told,) = {row.lr for row in pair.optimizer.summary() if row.method == "AdamW"}
        assert told == pytest.approx(share * pair.group["lr"], rel=1e-14)
        pair.step(share * pair.group["lr"])
        scheduler.step()
    assert pair.group["adamw_lr"] is None
    pair.check()


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("kind", ["muon", "normuon"])
def test_the_share_is_the_library_s(kind, adjust, monkeypatch):
    """Bitwise what the library does where it is told no rate at all."""
    asked = make(kind, parameters(), lr=LR, adjust_lr_fn=adjust)
    told = make(kind, parameters(), lr=LR, adjust_lr_fn=adjust)
    for optimizer in (asked, told):
        if optimizer is told:
            monkeypatch.setattr("torchium.optim.base.keep_ratio", lambda config, group, share: None)
        give_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
    assert_same_bits(copies(asked.param_groups[0]["params"]), copies(told.param_groups[0]["params"]))


@pytest.mark.parametrize("where", ["number", "cpu", "parameters"])
def test_a_share_of_an_lr_that_begins_at_zero(where, device):
    lr = 0.0
    if where != "number":
        lr = torch.tensor(0.0, dtype=torch.float64, device=device if where == "parameters" else "cpu")
    pair = Pair("muon", device, lr=lr, adamw_lr=None)
    for rate in (0.0, LR, LR / 4, 0.0, LR / 2):
        if where == "number":
            pair.group["lr"] = rate
        else:
            lr.fill_(rate)
        pair.step(0.3 * rate)
    pair.check()


def test_lr_of_a_group_for_adamw_is_all_its_own():
    """As with `use_muon=False`: whoever gives a group of embeddings an lr means AdamW's."""
    pair = Pair("muon", adamw_lr=None)
    late = parameters(seed=1)[1:]
    pair.optimizer.add_param_group({"params": late, "use_adamw": True, "lr": LR / 8})
    assert {row.lr for row in pair.optimizer.summary() if row.method == "AdamW"} == {0.3 * LR, LR / 8}
    beside = adamw_beside(late)
    for factor in (1.0, 0.5):
        pair.optimizer.param_groups[1]["lr"] = beside.param_groups[0]["lr"] = factor * LR / 8
        give_gradients(late, 0)
        for twin, p in zip(beside.param_groups[0]["params"], late, strict=True):
            twin.grad = p.grad.clone()
        pair.step(0.3 * LR)
        beside.step()
    pair.check()
    for twin, p in zip(beside.param_groups[0]["params"], late, strict=True):
        torch.testing.assert_close(p, twin, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("note", [True, False])
def test_a_share_in_a_state_dict(note):
    """One of an earlier version, which has no note, was saved where AdamW got all of lr: it goes on so."""
    pair = Pair("muon", adamw_lr=None)
    pair.step(0.3 * LR)
    saved = through_a_file(pair.optimizer.state_dict())
    if not note:
        del saved["param_groups"][0]["adamw_lr_base"]
    pair.optimizer.load_state_dict(saved)
    for lr in (LR, LR / 2):
        pair.optimizer.param_groups[0]["lr"] = lr
        pair.step(0.3 * lr if note else lr)
    pair.check()


def test_a_share_for_a_state_dict_of_torch():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    params = parameters()[:1]
    theirs = torch.optim.Muon(params, lr=LR)
    give_gradients(params, 0)
    theirs.step()
    ours = torchium.optim.Muon([("weight", params[0])], lr=0.5, use_adamw=("nothing",))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["adamw_lr_base"] == (None, None)


# --- checkpoints


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go(optimizer, scheduler, first, steps):
    for step in range(first, first + steps):
        give_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("at", [0, 1, 5, 8])
@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_resume(kind, at):
    """To the bit, from anywhere in a schedule that begins at 0 and ends there, in an optimizer that was made with
    another rate and whose scheduler has moved it before anything is loaded."""

    def schedule(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 3, max(8 - step, 0) / 5))

    optimizer = make(kind, parameters(), lr=LR, adamw_lr=0.003)
    scheduler = schedule(optimizer)
    go(optimizer, scheduler, 0, at)
    other = make(kind, [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]], lr=0.5)
    after = schedule(other)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    after.load_state_dict(scheduler.state_dict())
    for o, s in ((optimizer, scheduler), (other, after)):
        go(o, s, at, 6)
    assert_same_bits(copies(optimizer.param_groups[0]["params"]), copies(other.param_groups[0]["params"]))


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_state_dict_of_before(scheduled):
    """One without the note: adamw_lr goes with the lr that the schedule started from."""
    pair = Pair("soap")
    if scheduled:
        lr_scheduler.ConstantLR(pair.optimizer, factor=0.25)
    pair.step(RATIO * pair.group["lr"])
    saved = copy.deepcopy(pair.optimizer.state_dict())
    del saved["param_groups"][0]["adamw_lr_base"]
    pair.optimizer.load_state_dict(saved)
    for lr in (pair.optimizer.param_groups[0]["lr"], LR / 2, LR):
        pair.optimizer.param_groups[0]["lr"] = lr
        pair.step(RATIO * lr)
    pair.check()


def test_pickles_and_copies():
    pair = Pair("shampoo")
    pair.group["lr"] = 0.0
    pair.step(0.0)
    other = copy.deepcopy(pair.optimizer)
    for optimizer in (pair.optimizer, other):
        optimizer.param_groups[0]["lr"] = LR / 2
        give_gradients(optimizer.param_groups[0]["params"], 1)
        optimizer.step()
    assert_same_bits(copies(pair.params), copies(other.param_groups[0]["params"]))


def test_only_groups_with_a_rate_of_their_own_keep_a_note():
    """So that state_dicts without one are what they were."""
    assert "adamw_lr_base" not in make("soap", parameters()).state_dict()["param_groups"][0]
    assert make("muon", parameters()).state_dict()["param_groups"][0]["adamw_lr_base"] == (None, None)
    assert "adamw_lr_base" not in make("adamw", parameters()).state_dict()["param_groups"][0]
    assert make("muon", parameters(), lr=LR, adamw_lr=0.5).param_groups[0]["adamw_lr_base"] == (0.5, LR)
