"""Per-sample gradients of EmbeddingBag, and of embeddings with max_norm, vs a loop over single bags by autograd."""

import copy

import grad_cases as cases
import pytest
import torch
import torchium
from torch import nn

ROWS, WIDTH = 12, 5
LENGTHS = (3, 0, 1, 7, 0)  # of bags with offsets


def bagged(**options):
    """A model with bags, whose head is an ordinary layer."""
    bag, head = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, 3)
    return cases.Parts(lambda m, *inputs: torch.tanh(m.head(m.bag(*inputs))), bag=bag, head=head)


def flat_batch(device, weighted=False, last=False, lengths=LENGTHS):
    """Tokens of all bags, their offsets, and weights or None."""
    lengths_of = torch.tensor(lengths, dtype=torch.int64)
    ends = lengths_of.cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]) if last else ends - lengths_of
    tokens = torch.randint(ROWS, (sum(lengths),))
    weights = torch.randn(sum(lengths), dtype=torch.float64) if weighted else None
    return tuple(None if t is None else t.to(device) for t in (tokens, offsets, weights))


def single_bags(tokens, offsets, weights, last):
    """The arguments of a call for each single bag."""
    starts = offsets.tolist() if not last else offsets.tolist()[:-1]
    ends = offsets.tolist()[1:] + ([] if last else [len(tokens)])
    for start, end in zip(starts, ends, strict=True):
        alone = torch.tensor([0, end - start] if last else [0], device=tokens.device)
        yield tokens[start:end], alone, None if weights is None else weights[start:end]


def reference(model, bags, y):
    """On the CPU: PyTorch's renormalization of no rows fails on a GPU."""
    bags = [[None if a is None else a.cpu() for a in arguments] for arguments in bags]
    expected = cases.reference(copy.deepcopy(model).cpu(), None, y.cpu(), bags)
    return {name: g.to(y.device) for name, g in expected.items()}


OPTIONS = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum with padding": {"mode": "sum", "padding_idx": 3},
    "mean with padding": {"mode": "mean", "padding_idx": 0},
    "max with padding": {"mode": "max", "padding_idx": -1},
    "sum, last offset": {"mode": "sum", "include_last_offset": True},
    "mean, last offset": {"mode": "mean", "include_last_offset": True, "padding_idx": 3},
    "max, last offset": {"mode": "max", "include_last_offset": True},
    "sum, renormalized": {"mode": "sum", "max_norm": 0.8},
    "max, renormalized": {"mode": "max", "max_norm": 0.8},
}


WEIGHTED = [{"mode": "sum", "include_last_offset": last, "padding_idx": p} for last in (False, True) for p in (None, 4)]


@pytest.mark.parametrize(
    ("options", "weighted"), [(o, False) for o in OPTIONS.values()] + [(o, True) for o in WEIGHTED]
)
def test_bags_by_offsets(options, weighted, device):
    model = bagged(**options).double().to(device)
    last = options.get("include_last_offset", False)
    batch = flat_batch(device, weighted, last)
    y = torch.randn(len(LENGTHS), 3, dtype=torch.float64, device=device)
    cases.check_all(model, reference(model, single_bags(*batch, last), y), batch, y)


def test_weights_have_their_gradient(device):
    model = bagged(mode="sum").double().to(device)
    tokens, offsets, weights = flat_batch(device, weighted=True)
    weights.requires_grad_()
    model(tokens, offsets, weights).sum().backward()
    expected, weights.grad = weights.grad, None
    torchium.GradSampleModule(model)(tokens, offsets, weights).sum().backward()
    assert cases.error(weights.grad, expected) < cases.BOUND64


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bags_of_one_length(options, device):
    model = bagged(**options).double().to(device)
    tokens = torch.randint(ROWS, (4, 6), device=device)
    tokens[1] = options.get("padding_idx", 2) % ROWS  # only padding, or one token repeated
    y = torch.randn(4, 3, dtype=torch.float64, device=device)
    expected = reference(model, [(tokens[i : i + 1],) for i in range(4)], y)
    cases.check_all(model, expected, (tokens,), y)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("lengths", [(0, 0), (4,), ()])
def test_few_bags(mode, lengths, device):
    model = bagged(mode=mode).double().to(device)
    tokens, offsets, _ = flat_batch(device, lengths=lengths)
    wrapped = torchium.GradSampleModule(model, loss_reduction="sum")
    output = wrapped(tokens, offsets)
    assert output.shape == (len(lengths), 3)
    output.sum().backward()
    for p in model.parameters():
        assert p.grad_sample.shape == (len(lengths), *p.shape)
        assert cases.error(p.grad_sample.sum(0), p.grad) < cases.BOUND64


def test_a_bag_tied_to_a_head(device):
    bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
    head = cases.with_weight(nn.Linear(WIDTH, ROWS, bias=False), bag.weight)
    model = cases.Parts(lambda m, *inputs: m.head(torch.tanh(m.bag(*inputs))), bag=bag, head=head).double().to(device)
    tokens, offsets, _ = flat_batch(device)
    y = torch.randn(len(LENGTHS), ROWS, dtype=torch.float64, device=device)
    expected = reference(model, single_bags(tokens, offsets, None, False), y)
    cases.check_all(model, expected, (tokens, offsets), y)


def test_a_frozen_bag(device):
    model = bagged(mode="sum").double().to(device)
    model.bag.weight.requires_grad_(False)
    tokens, offsets, _ = flat_batch(device)
    wrapped = torchium.GradSampleModule(model)
    wrapped(tokens, offsets).sum().backward()
    assert model.bag.weight.grad_sample is None
    assert model.head.weight.grad_sample.shape == (len(LENGTHS), 3, WIDTH)


@pytest.mark.parametrize("way", [torchium.GradSampleModule, torchium.per_sample_norms])
def test_bags_that_are_refused(way):
    with pytest.raises(NotImplementedError, match=r"bag \(EmbeddingBag\).*scale_grad_by_freq=False"):
        way(bagged(mode="sum", scale_grad_by_freq=True))


# --- rows of at most a given norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_renormalized_rows(norm_type, device):
    """Rows in use are renormalized in the forward pass; everything else is the same."""
    model = nn.Embedding(7, 4, max_norm=0.5, norm_type=norm_type).double().to(device)
    x = torch.randint(5, (3, 6), device=device)
    y = torch.randn(3, 6, 4, dtype=torch.float64, device=device)
    plain = copy.deepcopy(model)
    plain(x)
    cases.check_all(model, cases.reference(model, x, y), (x,), y)
    assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize("way", [torchium.GradSampleModule, torchium.per_sample_norms])
def test_renormalized_rows_without_a_rule(way):
    scaled = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))
    scaled.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"0 \(Sequential\).*0 \(Embedding\).*max_norm=None"):
        way(nn.Sequential(scaled))
