"""Constructors: the number of arguments, groups of arguments, models, and repr."""

import inspect

import pytest
import torch
import torchium.optim
from optim_cases import CLASSES, make
from torch import nn
from torchium.optim import KFAC, SOAP, AdamWArguments, KFACPreconditioner, MemoryArguments, NumericsArguments, Shampoo

OF_MODELS = {"kfac": KFAC, "natural": torchium.optim.NaturalGradient}
FIRST_ORDER = ("adamw", "lion", "sgd")


def parameter(*shape):
    return nn.Parameter(torch.ones(shape or (4, 3)))


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))


@pytest.mark.parametrize(
    "cls", [*CLASSES.values(), *OF_MODELS.values(), KFACPreconditioner, torchium.optim.CUDAShampoo]
)
def test_at_most_eighteen_arguments(cls):
    assert len(inspect.signature(cls).parameters) <= 18


def test_groups_of_arguments_are_keys_of_groups():
    """Dataclass, dictionary and flat keywords are equivalent."""
    flat = {
        **{"adamw_lr": 0.5, "adamw_betas": (0.1, 0.2), "adamw_eps": 0.3, "adamw_weight_decay": 0.4, "use_adamw": True},
        **{"state_dtype": "int8", "packed_factors": True, "root_dtype": "bfloat16", "master_weights": True, "seed": 7},
        **{"memory_budget": 2**30, "precision": "highest", "relative_eps": 1e-3, "root_tolerance": 1e-4},
        **{"root_method": "eigen", "nonfinite": "raise", "world_invariant": True},
    }
    adamw = {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3, "weight_decay": 0.4, "params": True}
    memory = {"state_dtype": "int8", "packed_factors": True, "root_dtype": "bfloat16", "master_weights": True}
    memory |= {"seed": 7, "budget": 2**30}
    numerics = {"precision": "highest", "damping": 1e-3, "tolerance": 1e-4, "method": "eigen", "nonfinite": "raise"}
    numerics |= {"world_invariant": True}
    classes = AdamWArguments(**adamw), MemoryArguments(**memory), NumericsArguments(**numerics)
    made = [
        Shampoo([parameter()], **flat),
        Shampoo([parameter()], adamw=adamw, memory=memory, numerics=numerics),
        Shampoo([parameter()], **dict(zip(("adamw", "memory", "numerics"), classes, strict=True))),
    ]
    for optimizer in made:
        assert flat.items() <= optimizer.param_groups[0].items()
        assert optimizer.defaults == made[0].defaults


@pytest.mark.parametrize("kind", CLASSES)
def test_groups_of_arguments_without_values_change_nothing(kind):
    usual = make(kind, [parameter()]).defaults
    groups = {"memory": MemoryArguments(), "numerics": {}}
    groups |= {} if kind in FIRST_ORDER else {"adamw": AdamWArguments()}
    assert make(kind, [parameter()], **groups).defaults == usual


REFUSED = [
    (SOAP, {"memory": {"bytes": 1}}, r"SOAP: memory has 'bytes', expected some of state_dtype, "),
    (SOAP, {"numerics": {"damping": 0.1}}, r"SOAP: numerics has 'damping', which SOAP does not use"),
    (
        SOAP,
        {"memory": MemoryArguments(root_dtype="bfloat16")},
        r"SOAP: memory has 'root_dtype', which SOAP does not use",
    ),
    (SOAP, {"adamw": 0.1}, r"SOAP: adamw must be AdamWArguments or a dictionary of its arguments, got 'float'"),
    (SOAP, {"adamw": {"lr": 0.1}, "adamw_lr": 0.2}, r"SOAP\(\) got 'adamw_lr' twice"),
    (torchium.optim.Lion, {"adamw": {"lr": 0.1}}, r"Lion\(\) got an unexpected argument 'adamw'"),
    (torchium.optim.Muon, {"memori": {}}, r"Muon\(\) got an unexpected argument 'memori': Muon calls it 'memory'"),
]


@pytest.mark.parametrize(("cls", "arguments", "text"), REFUSED)
def test_groups_of_arguments_that_cannot_be(cls, arguments, text):
    with pytest.raises(TypeError, match=text):
        cls([parameter()], **arguments)


def test_kfac_names_an_unknown_argument():
    with pytest.raises(
        TypeError, match=r"KFAC\(\) got an unexpected argument 'TCov': KFAC calls it 'factor_update_steps'"
    ):
        KFAC(model(), TCov=3)


@pytest.mark.parametrize("kind", [*CLASSES, *OF_MODELS])
def test_a_model_and_what_is_printed(kind):
    """Every optimizer takes a model, has a summary, and prints it with non-default options."""
    made = (CLASSES | OF_MODELS)[kind](model(), weight_decay=0.125)
    names = [name for row in made.summary() for name in row.names]
    assert sorted(names) == sorted(name for name, _ in model().named_parameters())
    lines = repr(made).splitlines()
    assert lines[0] == f"{type(made).__name__}(weight_decay=0.125)" and len(lines) <= 12
    assert lines[1].split() == ["method", "reason", "lr", "tensors", "elements"]


def test_layers_and_other_parameters_of_kfac():
    network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    network[0].requires_grad_(False)
    rows = {(row.method, row.reason): row.names for row in KFAC(network).summary()}
    assert rows["KFAC", "layer"] == ("2.weight", "2.bias") and rows["nothing", "frozen"] == ("0.weight", "0.bias")
    assert rows["SGD", "other parameter"] == ("1.weight", "1.bias")


def test_a_printed_optimizer_is_short():
    groups = [{"params": [parameter()], "lr": 0.1 * k} for k in range(1, 30)]
    every = {
        "max_preconditioner_dim": 77,
        "momentum": 0.5,
        "grafting": None,
        "nesterov": True,
        "seed": 5,
        "stagger": False,
    }
    lines = repr(Shampoo(groups, betas=(0.25, 0.5), weight_decay=0.125, exponent_override=3, **every)).splitlines()
    assert len(lines) <= 12 and lines[-1] == "... 22 more rows" and all(len(line) <= 120 for line in lines)


def test_the_learning_rate_of_muon():
    assert {row.lr for row in torchium.optim.Muon(model()).summary()} == {0.02, 0.006}


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [("shampoo", "update_freq", "precondition_frequency"), ("soap", "max_precond_dim", "max_preconditioner_dim"),
     ("soap", "correct_bias", "use_bias_correction")],
)  # fmt: skip
def test_a_state_with_earlier_names_loads(kind, before, now):
    options = {now: False if now == "use_bias_correction" else 5}
    state = make(kind, [parameter()], **options).state_dict()
    state["param_groups"][0][before] = state["param_groups"][0].pop(now)
    fresh = make(kind, [parameter()])
    fresh.load_state_dict(state)
    assert fresh.param_groups[0][now] == options[now] and before not in fresh.param_groups[0]


def test_the_names_of_another_module():
    import torchium.optimizers

    assert torchium.optimizers.get_available_optimizers() == torchium.list_optimizers()
    for name in torchium.optim.__all__:
        assert getattr(torchium.optimizers, name) is getattr(torchium.optim, name)
