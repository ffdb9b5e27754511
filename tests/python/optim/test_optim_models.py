"""Optimizers created from a model: which parameters get AdamW and why, on common models; groups in other
implementations' format; and the warning for embeddings passed as parameters."""

import copy
import warnings

import pytest
import torch
import torchium
from models import GPT2, Llama, MetaLlama, ResNet, ViT
from optim_cases import CLASSES, SECOND_ORDER, assert_same_bits, copies, make
from torch import nn

# The matrices that get AdamW, and why. All other matrices get the optimizer's own method.
CHOSEN = {
    GPT2: {"transformer.wte.weight": "embedding and output layer", "transformer.wpe.weight": "embedding"},
    Llama: {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output layer"},
    MetaLlama: {"tok_embeddings.weight": "embedding", "output.weight": "output layer"},
    ViT: {"encoder.pos_embedding": "token or position", "heads.head.weight": "output layer"},
    ResNet: {"fc.weight": "output layer"},
}


def methods_of(optimizer):
    """(method, reason) of every parameter, by name."""
    return {name: (row.method, row.reason) for row in optimizer.summary() for name in row.names}


def is_matrix(parameter):
    return sum(size > 1 for size in parameter.shape) > 1


@pytest.mark.parametrize("kind", SECOND_ORDER)
@pytest.mark.parametrize("model", CHOSEN)
def test_models(model, kind):
    made = model()
    optimizer = CLASSES[kind](made, lr=0.01)
    expected = {
        name: ("AdamW", CHOSEN[model].get(name, "vector or scalar"))
        if name in CHOSEN[model] or not is_matrix(p)
        else (CLASSES[kind].__name__, "matrix")
        for name, p in made.named_parameters()
    }
    assert methods_of(optimizer) == expected
    by_name = torchium.optim.create_optimizer(kind, made, lr=0.01)
    assert methods_of(by_name) == expected
    given = sorted(id(p) for group in optimizer.param_groups for p in group["params"])
    assert given == sorted(map(id, made.parameters()))


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_steps_are_those_of_groups_made_by_hand(kind):
    """And the summary is right: the state of a matrix with AdamW has moments, and nothing else."""
    torch.manual_seed(0)
    model = GPT2(words=40, positions=8, width=16, layers=1)
    twin = copy.deepcopy(model)
    chosen = [twin.lm_head.weight, twin.transformer.wpe.weight]
    rest = [p for p in twin.parameters() if all(p is not c for c in chosen)]
    optimizer = make(kind, model, adamw_lr=0.003)
    beside = make(kind, [{"params": rest}, {"params": chosen, "use_adamw": True}], adamw_lr=0.003)
    for step in range(4):
        words = torch.randint(40, (3, 8), generator=torch.Generator().manual_seed(step))
        for m, o in ((model, optimizer), (twin, beside)):
            o.zero_grad()
            nn.functional.cross_entropy(m(words).flatten(0, 1), words.roll(-1, 1).flatten()).backward()
            o.step()
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))
    methods = methods_of(optimizer)
    for name, p in model.named_parameters():
        moments = {"step", "counts", "exp_avg", "exp_avg_sq"}
        assert (methods[name][0] == "AdamW") == (set(optimizer.state[p]) == moments), name


def test_subclasses_and_classes_of_ones_own():
    class Table(nn.Embedding):
        pass

    class VocabParallelEmbedding(nn.Module):  # not an nn.Embedding
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(9, 4))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = Table(7, 4)
            self.words = VocabParallelEmbedding()
            self.bag = nn.EmbeddingBag(5, 4)
            self.norm = nn.LayerNorm((3, 4))
            self.hidden = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

    methods = methods_of(torchium.optim.Muon(Model()))
    embeddings = {"table.weight", "words.weight", "bag.weight"}
    assert {n for n, m in methods.items() if m == ("AdamW", "embedding")} == embeddings
    assert methods["norm.weight"] == methods["norm.bias"] == ("AdamW", "norm")
    assert methods["hidden.weight"] == ("Muon", "matrix")


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ([("embedding", nn.Embedding(50, 8)), ("a", nn.Linear(8, 50)), ("b", nn.Linear(50, 50))], "b"),
        ([("lm_head", nn.Linear(8, 50)), ("body", nn.Linear(8, 8))], "lm_head"),
        ([("head", nn.Linear(8, 50)), ("body", nn.Linear(8, 8))], "body"),
        ([("body", nn.Linear(8, 8)), ("classifier", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))], "classifier.1"),
        ([("0", nn.Linear(8, 8)), ("1", nn.Linear(8, 3))], "1"),
        ([("0", nn.Linear(8, 8)), ("1", nn.BatchNorm1d(8))], None),
    ],
    ids=["rows", "lm_head anywhere", "head not the last", "in a Sequential", "plain", "the only matrix"],
)
def test_heads(layers, head):
    model = nn.Module()
    for name, module in layers:
        model.add_module(name, module)
    methods = methods_of(torchium.optim.Muon(model))
    found = [name for name, (_, reason) in methods.items() if reason == "output layer"]
    assert found == ([f"{head}.weight"] if head else [])


def test_patterns_choose_more():
    methods = methods_of(torchium.optim.Muon(Llama(), use_adamw=("*.down_proj.*",)))
    assert methods["model.layers.0.mlp.down_proj.weight"] == ("AdamW", "use_adamw")
    assert methods["lm_head.weight"] == ("AdamW", "output layer")
    assert methods["model.layers.1.mlp.up_proj.weight"] == ("Muon", "matrix")
    everything = methods_of(torchium.optim.Muon(Llama(), use_adamw=True))
    assert {method for method, _ in everything.values()} == {"AdamW"}
    by_name = methods_of(torchium.create_optimizer("muon", Llama(), use_adamw=("down_proj",)))
    assert by_name == methods


def test_the_rest_of_a_summary():
    model = ResNet()
    model.conv1.weight.requires_grad_(False)
    summary = torchium.optim.SOAP(model, max_preconditioner_dim=2).summary()
    assert methods_of(torchium.optim.SOAP(model))["conv1.weight"] == ("nothing", "frozen")
    assert {row.method for row in summary} == {"nothing", "AdamW"}  # nothing fits into two
    (row,) = [row for row in torchium.optim.Shampoo(ResNet()).summary() if row.reason == "output layer"]
    assert row == ("AdamW", "output layer", ("fc.weight",), 80, 3e-3)
    bare = torchium.optim.Shampoo(list(ResNet().parameters()), precondition_1d=True).summary()
    assert {row.method for row in bare} == {"Shampoo"}
    assert bare[0].names[0] == "parameter 0 of group 0"


def test_a_printed_summary():
    text = str(torchium.optim.Muon(GPT2()).summary())
    assert text.splitlines() == [
        "method  reason                         lr  tensors  elements",
        "AdamW   vector or scalar            0.006       18     1,792  "
        "transformer.h.0.ln_1.weight, ..., transformer.ln_f.bias",
        "Muon    matrix                       0.02        8    98,304  "
        "transformer.h.0.attn.c_attn.weight, ..., transformer.h.1.mlp.2.weight",
        "AdamW   embedding and output layer  0.006        1    16,384  transformer.wte.weight",
        "AdamW   embedding                   0.006        1    16,384  transformer.wpe.weight",
    ]


def test_an_empty_model():
    with pytest.raises(ValueError, match="Muon: params is a 'Identity' without parameters"):
        torchium.optim.Muon(nn.Identity())


def test_one_parameter_that_is_one_matrix_of_many():
    """A model of embeddings only has one group."""
    (group,) = torchium.optim.Muon(nn.Sequential(nn.Embedding(5, 4))).param_groups
    assert group["use_adamw"] is True and group["param_names"] == ["0.weight"]


# --- groups as others write them


def parameter(*shape):
    return nn.Parameter(torch.ones(shape))


def test_use_muon():
    """Like the original Muon, whose groups have AdamW's hyperparameters by AdamW's names."""
    matrix, head, vector = parameter(4, 4), parameter(9, 4), parameter(4)
    optimizer = torchium.optim.Muon(
        [
            {"params": [matrix], "use_muon": True, "lr": 0.02, "momentum": 0.9},
            {"params": [head, vector], "use_muon": False, "lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-10},
        ],
        adamw_lr=0.5,
        adamw_weight_decay=0.25,
    )
    muon, adamw = optimizer.param_groups
    assert muon["use_muon"] is True and muon["momentum"] == 0.9 and muon["use_adamw"] is False
    assert adamw["use_muon"] is False and adamw["use_adamw"] is True
    assert adamw["adamw_betas"] == (0.8, 0.95) and adamw["adamw_eps"] == 1e-10 and "betas" not in adamw
    assert adamw["adamw_lr"] is None and adamw["lr"] == 3e-4 and adamw["adamw_weight_decay"] == 0.25
    rates = [(row.method, row.reason, row.lr) for row in optimizer.summary()]
    assert rates == [("Muon", "matrix", 0.02), ("AdamW", "use_adamw", 3e-4)]
    # AdamW's own steps:
    twins = [nn.Parameter(p.detach().clone()) for p in (head, vector)]
    beside = torch.optim.AdamW(twins, lr=3e-4, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.25)
    for step in range(3):
        for p, q in zip((head, vector), twins, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        optimizer.step()
        beside.step()
    for p, q in zip((head, vector), twins, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_algorithm(kind):
    groups = [
        {"params": [parameter(4, 4)], "algorithm": kind},
        {"params": [parameter(5, 4)], "algorithm": "adamw", "lr": 1e-3, "betas": (0.5, 0.6), "weight_decay": 0.0},
    ]
    optimizer = make(kind, groups, adamw_weight_decay=0.5)
    assert [row.method for row in optimizer.summary()] == [CLASSES[kind].__name__, "AdamW"]
    adamw = optimizer.param_groups[1]
    assert adamw["adamw_betas"] == (0.5, 0.6) and adamw["adamw_weight_decay"] is None and adamw["weight_decay"] == 0.0
    again = make(kind, [{"params": g["params"]} for g in optimizer.param_groups])
    again.load_state_dict(optimizer.state_dict())
    assert [row.method for row in again.summary()] == [CLASSES[kind].__name__, "AdamW"]


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({"algorithm": "lion"}, ValueError, r"Muon: algorithm is 'lion' in a group, expected 'muon' or 'adamw'"),
        ({"use_muon": 1}, TypeError, "use_muon must be True or False, got 1"),
        ({"use_muon": True, "algorithm": "adamw"}, ValueError, "contradict each other"),
        ({"use_muon": True, "use_adamw": True}, ValueError, "contradict each other"),
    ],
)
def test_groups_that_cannot_be(group, error, message):
    with pytest.raises(error, match=message):
        torchium.optim.Muon([{"params": [parameter(3, 3)], **group}])


# --- the warning


@pytest.mark.parametrize("cls", [torchium.optim.Muon, torchium.optim.SOAP])
def test_matrices_that_keep_a_norm_of_zero_are_noticed(cls):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    for layer in (model[1], model[2]):
        torch.nn.init.zeros_(layer.weight)
    with pytest.warns(UserWarning, match=r"'1\.weight' is zero, and constant_norm keeps it zero") as seen:
        cls(model, constant_norm=True)
    assert len(seen) == 1  # the output layer gets AdamW
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(model)


def test_a_vocabulary_among_parameters_is_noticed_once():
    model = nn.ModuleDict({"wte": nn.Embedding(10_001, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 10_001)})
    with pytest.warns(UserWarning, match=r"Muon: 'wte\.weight' is 10001 by 8.*Muon\(model, \.\.\.\)") as caught:
        optimizer = torchium.optim.Muon(model.named_parameters())
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the user's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [("late", parameter(10_001, 8))]})


def test_a_group_without_names_is_added():
    optimizer = torchium.optim.Muon(nn.Linear(3, 3))
    optimizer.add_param_group({"params": parameter(4, 4), "lr": 0.1})
    assert "parameter 0 of group" in str(optimizer.summary())


def test_vectors_alone_are_noticed():
    """As FSDP1 gives them."""
    with pytest.warns(UserWarning, match="Muon was given no matrix.*FSDP1") as caught:
        torchium.optim.Muon([parameter(7), parameter(0)])
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize(
    "make_groups",
    [
        lambda: [{"params": [parameter(7)]}, {"params": [parameter(3, 3)]}],
        lambda: [{"params": [parameter(7)], "use_adamw": True}],
        lambda: nn.Sequential(nn.Embedding(10_001, 8)),
        lambda: [{"params": [parameter(10_001, 8)], "use_adamw": True}],
        lambda: [{"params": [parameter(10_001, 8)], "use_muon": False}],
        lambda: [parameter(10_000, 8), parameter(10_001, 1300), parameter(10_001), parameter(10_001, 1, 8)],
        lambda: [parameter(10_001, 8).requires_grad_(False)],
    ],
    ids=["a matrix", "asked", "model", "use_adamw", "use_muon", "other shapes", "frozen"],
)
def test_no_warning(make_groups):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchium.optim.Muon(make_groups())
