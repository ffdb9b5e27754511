"""AdamW, SGD and Muon vs torch.optim's own, and every option of every class by its effect. C tests compare every
option, shape, type and layout with float64 references."""

import copy

import pytest
import torch
import torch.optim._muon as torch_muon
from optim_cases import CLASSES, Trial, assert_same_bits, copies, draw, exact

# --- options

# An option, a value other than that of `exact`, and the library's names of it if they differ.
BOTH = [("lr", 0.03), ("weight_decay", 0.5), ("weight_decay_type", "cautious"), ("maximize", True)]
ADAMW = [("adamw_lr", 0.5), ("adamw_betas", (0.5, 0.6)), ("adamw_eps", 0.1), ("adamw_weight_decay", 0.7)]
MUON = [("momentum", 0.5), ("nesterov", False), ("ns_steps", 7), ("ns_coefficients", (2.0, -1.5, 0.5)), ("eps", 30.0)]
OPTIONS = {
    "sgd": [("momentum", 0.5), ("dampening", 0.3), ("nesterov", True)],
    "adamw": [("betas", (0.5, 0.6)), ("eps", 0.1), ("amsgrad", True)],
    "shampoo": [
        *[("betas", (0.5, 0.6)), ("eps", 0.5), ("relative_eps", 0.5), ("precondition_frequency", 2)],
        *[("weight_decay_type", "l2"), ("max_preconditioner_dim", 3), ("precondition_1d", True), ("merge_dims", False)],
        *[("start_preconditioning_step", 3), ("use_bias_correction", False), ("grafting_beta2", 0.5)],
        *[("grafting_eps", 0.5), ("momentum", 0.2), ("nesterov", True), ("exponent_override", 3)],
        *[("grafting", None), ("grafting", "sgd"), ("grafting", "adagrad"), ("grafting", "rmsprop"), *ADAMW],
    ],
    "soap": [
        *[("betas", (0.5, 0.6)), ("shampoo_beta", 0.3), ("eps", 0.5), ("precondition_frequency", 3)],
        *[("weight_decay_type", "l2"), ("max_preconditioner_dim", 4), ("merge_dims", True), ("precondition_1d", True)],
        *[
            ("normalize_grads", True),
            ("orthogonalize", True),
            ("constant_norm", True),
            ("use_bias_correction", False),
            *ADAMW,
        ],
    ],
    "muon": [*MUON, ("constant_norm", True), ("adjust_lr_fn", "match_rms_adamw"), ("method", "polar_express"), *ADAMW],
    "lion": [("betas", (0.5, 0.6))],
    "kl_shampoo": [
        *[("betas", (0.5, 0.6)), ("eps", 0.5), ("relative_eps", 0.5), ("precondition_frequency", 2)],
        *[("weight_decay_type", "l2"), ("max_preconditioner_dim", 3), ("precondition_1d", True), ("merge_dims", False)],
        *[("use_bias_correction", False), *ADAMW],
    ],
    "normuon": [*MUON, ("adjust_lr_fn", "original"), ("method", "polar_express"), ("beta2", 0.5), *ADAMW],
}
OPTIONS = [(kind, *row) for kind in OPTIONS for row in OPTIONS[kind] + BOTH]


def stepped(kind, name, value, device, where):
    """Parameters after five steps with an option given to the constructor, to a group, or not at all."""
    torch.manual_seed(1)
    given = {name: value}
    params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in [(6, 6), (4, 3, 2), (5,)]]
    groups = [{"params": params, **(given if where == "group" else {})}]
    optimizer = CLASSES[kind](groups, **exact(kind, **(given if where == "constructor" else {})))
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, device=device)
        optimizer.step()
    return optimizer, copies(params)


@pytest.mark.filterwarnings("ignore:.*ns_steps is")
@pytest.mark.parametrize(("kind", "name", "value"), OPTIONS)
def test_every_option_has_its_effect(kind, name, value, device):
    """The library gets the value, whether from the constructor or a group, and steps change."""
    optimizer, params = stepped(kind, name, value, device, "constructor")
    config = optimizer._config(optimizer.param_groups[0], optimizer.param_groups[0]["lr"])
    (fields,) = (option.c_name for option in optimizer._options if option.name == name)
    if name.endswith("betas"):
        assert tuple(config[field] for field in fields) == value
    else:
        assert config[fields or name] == ("none" if value is None else value)
    in_group, same = stepped(kind, name, value, device, "group")
    assert in_group.param_groups[0][name] == optimizer.param_groups[0][name]
    assert_same_bits(params, same)
    assert not all(map(torch.equal, params, stepped(kind, name, value, device, None)[1]))


@pytest.mark.parametrize(("kind", "name", "value"), OPTIONS)
def test_an_option_changed_later_is_followed_or_refused(kind, name, value, device):
    """Never ignored: an option that cannot change raises an error that names it at the next step, and restoring it
    continues."""
    trial = Trial(kind, [(6, 6), (5,), (5, 5)], device, **exact(kind)).run(3)
    kept, before = copy.deepcopy(trial.references), copies(trial.params)
    params, twin = copy.deepcopy((trial.params, trial.optimizer))
    undo = trial.optimizer.param_groups[0][name]
    trial.optimizer.param_groups[0][name] = value
    try:
        trial.step()
        for _ in range(4):
            for p, q in zip(trial.params, params, strict=True):
                q.grad = p.grad.clone()
            twin.step()
            trial.step()
        assert not all(map(torch.equal, copies(trial.params), copies(params)))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        assert name in str(error)
        assert_same_bits(before, copies(trial.params))
        trial.references, trial.optimizer.param_groups[0][name] = kept, undo
        trial.run(4).check(1e-10)


# --- beside torch.optim


TORCH = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1}),
    ("sgd", {"maximize": True, "momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1}),
    ("adamw", {}),
    ("adamw", {"amsgrad": True, "maximize": True, "weight_decay": 0.3, "betas": (0.8, 0.6), "eps": 1e-2}),
]


def beside_torch(theirs, ours, dtype, shapes, device):
    """The largest difference relative to the path of torch's parameter, after 25 steps of both."""
    generator = torch.Generator().manual_seed(3)
    first = [torch.nn.Parameter(draw(s, generator).to(device=device, dtype=dtype)) for s in shapes]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    theirs, ours = theirs(first), ours(second)
    ways = [0.0] * len(first)
    for _ in range(25):
        before = copies(first)
        for p, q in zip(first, second, strict=True):
            p.grad = draw(p.shape, generator).to(device=device, dtype=dtype)
            q.grad = p.grad.clone()
        theirs.step()
        ours.step()
        ways = [w + (p.detach() - b).norm().item() for w, p, b in zip(ways, first, before, strict=True)]
    stats = ours.stats()
    assert (stats["steps"], stats["skipped"]) == (25, 0)
    pairs = zip(first, second, ways, strict=True)
    return max((p.detach() - q.detach()).norm().item() / w for p, q, w in pairs if p.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("kind", "options"), TORCH)
def test_is_torch_optim_to_rounding(kind, options, dtype, device):
    """A dozen roundings per step, in different orders, carried on by the moving averages."""
    options = {"lr": 0.05} | options
    theirs = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    both = lambda p: theirs(p, **options), lambda p: CLASSES[kind](p, **options)
    shapes = [(37,), (13, 9), (17, 61), (3, 4, 5), (), (0, 4), (5, 3, 2, 2)]
    assert beside_torch(*both, dtype, shapes, device) < 100 * torch.finfo(dtype).eps / 2


def exact_orthogonalize(grad, coefficients, steps, eps):
    """torch.optim.Muon's iteration without its rounding to bfloat16."""
    a, b, c = coefficients
    x = grad.mT if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if grad.size(0) > grad.size(1) else x


TORCH_MUON = [
    {},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5, "nesterov": False, "momentum": 0.6},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "eps": 30.0},
]


@pytest.mark.parametrize("options", TORCH_MUON)
def test_muon_is_torch_optim_muon(options, device, monkeypatch):
    options = {"lr": 0.01} | options
    both = (lambda p: torch.optim.Muon(p, **options), lambda p: CLASSES["muon"](p, method="muon", **options))
    shapes = [(13, 9), (17, 61), (64, 33), (5, 40)]
    rounded = beside_torch(*both, torch.float32, shapes, device)
    assert rounded < (0.01 if device == "cpu" else 0.02)  # torch rounds to bfloat16, on a GPU both do
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", exact_orthogonalize)
    assert beside_torch(*both, torch.float64, shapes, device) < 1e-9
