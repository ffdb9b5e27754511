"""Constructor errors: out-of-range numbers, arguments of wrong types, invalid lists of parameters, complex and integer
parameters. Each error names the argument and shows its value."""

import warnings

import pytest
import torch
import torchium.optim
from optim_cases import CLASSES, SECOND_ORDER, assert_same_bits, copies, train, trained
from torchium import _C


def matrix():
    return torch.nn.Parameter(torch.randn(4, 3))


# --- lists of parameters


def test_lists_that_are_refused(kind):
    p = matrix()
    with pytest.raises(ValueError, match="empty"):
        CLASSES[kind]([])
    with pytest.raises(TypeError, match="iterable"):
        CLASSES[kind](p)
    with pytest.raises(ValueError, match="more than one"):
        CLASSES[kind]([{"params": [p]}, {"params": [p]}])
    with pytest.raises(TypeError):
        CLASSES[kind]([{"params": {matrix(), matrix()}}])
    with pytest.raises(TypeError):
        CLASSES[kind]([3.0])
    with pytest.raises(ValueError, match="leaf"):
        CLASSES[kind]([p * 2])


# params, the exception, and the advice in its message.
NO_PARAMETERS = [
    (lambda model: iter(()), ValueError, r"generator is used up after one pass.*list\(model\.parameters\(\)\)"),
    (lambda model: model.parameters, TypeError, r"call it: model\.parameters\(\)"),
    (lambda model: [{"params": model.named_parameters}], TypeError, r"call it: model\.named_parameters\(\)"),
    (lambda model: None, TypeError, r"params is None.*give model\.parameters\(\)"),
    (lambda model: [{"params": model}], TypeError, r"type Linear.*give model\.parameters\(\)"),
]


@pytest.mark.parametrize(("params", "error", "text"), NO_PARAMETERS)
def test_what_to_give_instead_of_no_parameters(kind, params, error, text):
    with pytest.raises(error, match=text):
        CLASSES[kind](params(torch.nn.Linear(3, 2)))


# The class, another class's or a misspelt argument, and its name here.
OTHER_NAMES = [
    ("shampoo", "update_freq", "precondition_frequency"),
    ("soap", "max_precond_dim", "max_preconditioner_dim"),
    ("soap", "correct_bias", "use_bias_correction"),
    ("adamw", "learning_rate", "lr"),
    ("sgd", "momentun", "momentum"),
    ("muon", "betas", "adamw_betas"),
    ("lion", "weigth_decay", "weight_decay"),
    ("normuon", "Beta2", "beta2"),
]


@pytest.mark.parametrize(("kind", "name", "here"), OTHER_NAMES)
def test_arguments_and_options_by_another_name(kind, name, here):
    """Constructors reject them; in a group, where users have their own keys, a warning names the option, once and at
    the caller's line."""
    who = CLASSES[kind].__name__
    with pytest.raises(TypeError, match=rf"{who}\(\) got .* '{name}': {who} calls it '{here}'"):
        CLASSES[kind]([matrix()], **{name: 0.5})
    with pytest.warns(UserWarning, match=rf"{who}: a group has '{name}', .* use {here}$") as told:
        CLASSES[kind]([{"params": [matrix()], name: 0.5}, {"params": [matrix()], name: 0.5}])
    assert [warning.filename for warning in told] == [__file__]


def test_keys_of_groups_that_are_no_options(kind):
    of_others = ("name", "names", "group_name", "initial_lr", "lr_mult", "lr_scale", "layer_scale", "max_momentum", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CLASSES[kind]([{"params": [matrix()], "weight_decay_mult": 0.5, **dict.fromkeys(of_others, 0.5)}])
    if kind not in ("muon", "normuon"):
        what = "use_adamw=True" if kind in SECOND_ORDER else "Muon"
        with pytest.warns(UserWarning, match=f"'use_muon', which {CLASSES[kind].__name__} does not read: use {what}"):
            CLASSES[kind]([{"params": [matrix()], "use_muon": False}])


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_patterns_without_a_match_are_told(kind):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    text = r"use_adamw has '\*embd\*', which matches none of 3 names such as '0\.weight'"
    with pytest.warns(UserWarning, match=text) as told:
        CLASSES[kind](model.named_parameters(), use_adamw=("*embd*", "0.*"))
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(UserWarning, match="none of 3 names"):
        CLASSES[kind]([{"params": model.named_parameters(), "use_adamw": "*embd*"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CLASSES[kind](model, use_adamw="0.*")  # already chosen by the rules for models


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_in_a_group_is_refused(kind):
    p = matrix()
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError):
        CLASSES[kind]([p, p]).step()


# --- numbers


NAN, INF = float("nan"), float("inf")
# Options and invalid values, one of whose numbers the message must show. C tests have every bound.
WRONG = {
    "sgd": {"lr": [-0.5, NAN], "weight_decay": [-2]},
    "adamw": {"lr": [INF], "betas": [(-0.25, 0.9), (0.9,)], "weight_decay_type": ["none"]},
    "shampoo": {
        **{"precondition_frequency": [-3], "betas": [(0.9, 1.5)], "grafting": ["adamm"], "root_method": ["magic"]},
        **{"exponent_override": [5], "precision": ["lowest"], "nonfinite": ["panic"], "adamw_betas": [(1.0, 0.9)]},
    },
    "soap": {"shampoo_beta": [1.5]},
    "muon": {"ns_steps": [101], "adjust_lr_fn": ["sqrt"], "method": ["magic"], "ns_coefficients": [(1.0, 2.0)]},
    "normuon": {"beta2": [-0.5]},
    "lion": {"betas": [0.9]},
}
WRONG = [(kind, name, value) for kind in WRONG for name, values in WRONG[kind].items() for value in values]


def wrong_parts(value):
    """Out-of-range numbers of a pair, as messages show them; all if none is."""
    parts = value if isinstance(value, tuple) else (value,)
    bad = [x for x in parts if not isinstance(x, str) and not 0 <= x < 1] if len(parts) == 2 else []
    return {form(x) for x in bad or parts for form in (str, lambda x: x if isinstance(x, str) else f"{x:g}")}


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_numbers_out_of_range_are_refused(kind, name, value):
    """With the argument's name and value in the message; also in a group."""
    with pytest.raises(ValueError, match=name) as error:
        CLASSES[kind]([matrix()], **{name: value})
    assert any(part in str(error.value) for part in wrong_parts(value))
    with pytest.raises(ValueError, match=name):
        CLASSES[kind]([{"params": [matrix()], name: value}])
    optimizer = CLASSES[kind]([matrix()])
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": [matrix()], name: value})
    assert len(optimizer.param_groups) == 1


def test_a_number_set_out_of_range_later_is_refused_at_the_step(kind, device):
    model, optimizer = trained(kind, device, 2)
    optimizer.param_groups[0]["lr"] = -1.0
    before = copies(model.parameters())
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert_same_bits(before, copies(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, 1)


def test_arguments_of_the_wrong_kind_are_refused(kind):
    for options in ({"lr": "fast"}, {"lr": None}, {"weight_decay": [1, 2]}, {"lr": 1j}):
        with pytest.raises((TypeError, ValueError)):
            CLASSES[kind]([matrix()], **options)
    with pytest.raises(TypeError, match="learning_rate"):
        CLASSES[kind]([matrix()], learning_rate=0.1)
    with pytest.raises(ValueError):
        CLASSES[kind]([matrix()], lr=torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        ("shampoo", {"stagger": "no"}, TypeError, "stagger must be True or False, got an object of type str"),
        ("sgd", {"maximize": None}, TypeError, "maximize must be True or False, got an object of type NoneType"),
        (
            "shampoo",
            {"precondition_frequency": True},
            TypeError,
            "precondition_frequency .*must be an integer, got True",
        ),
        ("soap", {"max_preconditioner_dim": False}, TypeError, "max_preconditioner_dim must be an integer, got False"),
        ("soap", {"orthogonalize": True, "normalize_grads": True}, ValueError, "normalize_grads is 1, expected 0 if"),
        ("normuon", {"constant_norm": True}, TypeError, "unexpected argument 'constant_norm'"),
        ("lion", {"seed": True}, TypeError, "seed must be an integer, got True"),
        ("adamw", {"amsgrad": True, "state_dtype": "int8"}, ValueError, "state_dtype is int8, expected float32 with"),
        ("adamw", {"amsgrad": True, "state_dtype": torch.bfloat16}, ValueError, "state_dtype is bfloat16, expected"),
    ],
)
def test_messages_have_the_words_of_the_caller(kind, options, error, text):
    with pytest.raises(error, match=text):
        CLASSES[kind]([matrix()], **options)


def test_nesterov_without_momentum_is_refused_as_torch_does():
    for options in ({}, {"momentum": 0.9, "dampening": 0.5}):
        with pytest.raises(ValueError, match=r"[Nn]esterov"):
            torchium.optim.SGD([matrix()], lr=0.1, nesterov=True, **options)


def test_switches_of_torch(kind):
    """Equivalent types are accepted, others raise an error that names the argument."""
    for switches in ({"foreach": False}, {"foreach": True}, {"fused": True}, {"foreach": None, "fused": None}):
        CLASSES[kind]([matrix()], **switches)
    CLASSES[kind]([matrix()], differentiable=False)
    with pytest.raises(NotImplementedError, match="differentiable"):
        CLASSES[kind]([matrix()], differentiable=True)
    if kind != "sgd":
        CLASSES[kind]([matrix()], capturable=True)


def test_complex_parameters_are_refused_by_name(kind):
    p = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises((TypeError, RuntimeError, ValueError), match="complex"):
        CLASSES[kind]([p]).step()
    with pytest.raises((TypeError, RuntimeError, ValueError), match=r"layer\.weight"):
        CLASSES[kind]([("layer.weight", p)]).step()


def test_integer_parameters_are_refused(kind):
    p = torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match="int64"):
        optimizer = CLASSES[kind]([p])
        p.grad = torch.ones_like(p)
        optimizer.step()


@pytest.mark.parametrize("group", [torch.Tensor, 1 + 2j, iter([])])
def test_a_process_group_that_is_none_is_named(group):
    """PyTorch looks it up among its groups, and raises a KeyError."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with pytest.raises(TypeError, match=r"process_group must be a group of torch\.distributed that is in use, got"):
        torchium.optim.AdamW([parameter], lr=0.1, process_group=group).step()


@pytest.mark.parametrize("given", [[(1,)], [()], [("a", matrix()), matrix()], [("a", matrix(), 3)]])
def test_tuples_that_are_no_pairs_are_named(given):
    with pytest.raises(TypeError, match="pairs of a name and a parameter"):
        torchium.optim.Muon(given, lr=0.1)


def hollow(*shape):
    """A tensor whose storage was shrunk: PyTorch itself crashes when reading or printing it."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_tensors_without_memory_are_not_read():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"factor_dtype must be .* got an object of type Tensor"):
        torchium.optim.KFAC(model, factor_dtype=hollow(3, 3))
    with pytest.raises(ValueError, match="a hyperparameter is a tensor without storage"):
        optimizer = torchium.optim.AdamW(model.parameters(), lr=0.1, eps=hollow())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(TypeError, match="power must be a number, got a tensor without storage"):
        _C.matrix_power(torch.eye(3), hollow(), 0.0, torch.empty(3, 3), None)


def test_parameters_without_a_gradient_of_their_own():
    optimizer = _C.Optimizer("cpu")
    optimizer.add_group({"kind": "sgd"}, [torch.ones(2)], ["a"], [False])
    with pytest.raises(TypeError, match=r"parameters\[0\] has no attribute 'grad'"):
        optimizer.step([[1.0, 2.0]])
