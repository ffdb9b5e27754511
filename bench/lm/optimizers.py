"""The optimizers compared by bench/train_lm.py: PyTorch's AdamW, ours, and other implementations that can be imported.

A maker gets the matrices of the blocks, the rest (embedding, head, vectors) and a learning rate for each. AdamW updates
the rest in every run. All implementations of a method use the same learning rates. Ours have the defaults of their
classes, except that Muon matches the RMS of AdamW's updates.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import peers
import torch
from peers import BETAS, DECAY

PERIOD = 10  # interval of refreshes that are not adaptive


def adamw_groups(matrices, rest, rates):
    """No weight decay for vectors and the embedding."""
    return [
        {"params": matrices, "lr": rates[0], "weight_decay": DECAY},
        {"params": rest, "lr": rates[1], "weight_decay": 0.0},
    ]


def torch_adamw(matrices, rest, rates):
    return torch.optim.AdamW(adamw_groups(matrices, rest, rates), betas=BETAS, fused=True)


@dataclass(frozen=True)
class Ours:
    """Makes one of our optimizers, which update the rest by AdamW themselves; a weight decay is for the matrices."""

    kind: str
    options: dict

    def __call__(self, matrices, rest, rates):
        import torchium

        first, second = adamw_groups(matrices, rest, rates)
        first["weight_decay"] = self.options.get("weight_decay", DECAY)
        groups = [first, second if self.kind == "AdamW" else second | {"use_adamw": True, "adamw_betas": BETAS}]
        return getattr(torchium.optim, self.kind)(groups, **self.options)


def ours(kind, **options):
    return Ours(kind, options)


MUON = {"adjust_lr_fn": "match_rms_adamw"}


class Together:
    """A peer's optimizer for the matrices, and AdamW for the rest."""

    def __init__(self, first, rest, rate):
        adamw = torch.optim.AdamW(rest, lr=rate, betas=BETAS, weight_decay=0.0, fused=True)
        self.parts = (first, adamw)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def with_adamw(make, **options):
    """A peer's optimizer for the matrices, and AdamW for the rest."""
    return lambda matrices, rest, rates: Together(make(matrices, PERIOD, lr=rates[0], **options), rest, rates[1])


def torch_muon(matrices, period, lr):
    return torch.optim.Muon(matrices, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")


@dataclass(frozen=True)
class Entry:
    label: str
    make: Callable
    method: str  # determines the learning rates
    needs: str = "torchium"

    @property
    def ours(self):
        return self.needs == "torchium"

    def found(self):
        if self.needs == "torch.optim.Muon":
            return hasattr(torch.optim, "Muon")
        return importlib.util.find_spec(self.needs) is not None


BASELINE = "torch-adamw"
ENTRIES = {
    BASELINE: Entry("torch AdamW, fused", torch_adamw, "adamw", "torch"),
    "adamw": Entry("AdamW", ours("AdamW", betas=BETAS), "adamw"),
    "muon": Entry("Muon", ours("Muon", **MUON), "muon"),
    "muon-of-torch": Entry("Muon, method 'muon'", ours("Muon", method="muon", **MUON), "muon"),
    "normuon": Entry("NorMuon", ours("NorMuon"), "normuon"),
    "shampoo": Entry("Shampoo", ours("Shampoo"), "shampoo"),
    "shampoo-period": Entry(
        f"Shampoo, roots every {PERIOD} steps", ours("Shampoo", precondition_frequency=PERIOD), "shampoo"
    ),
    "kl_shampoo": Entry("KL-Shampoo", ours("KLShampoo"), "kl_shampoo"),
    "soap": Entry("SOAP", ours("SOAP"), "soap"),
    "soap-period": Entry(f"SOAP, bases every {PERIOD} steps", ours("SOAP", precondition_frequency=PERIOD), "soap"),
    "torch-muon": Entry("torch.optim.Muon", with_adamw(torch_muon), "muon", "torch.optim.Muon"),
    "dion-muon": Entry("Dion's Muon", with_adamw(peers.dion_muon, adjust_lr="rms_norm"), "muon", "dion"),
    "vyas-soap": Entry(f"nikhilvyas/SOAP, every {PERIOD} steps", with_adamw(peers.vyas_soap), "soap", "soap"),
    "heavyball-soap": Entry(
        f"HeavyBall's SOAP, every {PERIOD} steps", with_adamw(peers.heavyball_soap), "soap", "heavyball"
    ),
    "meta-shampoo": Entry(
        f"Meta's Shampoo, blocks of 1024, every {PERIOD} steps",
        with_adamw(peers.meta_shampoo),
        "shampoo",
        "distributed_shampoo",
    ),
}


@dataclass(frozen=True)
class Method:
    """The grids of learning rates for the matrices and the rest, the entry that is swept, and the rates without a
    sweep."""

    matrices: tuple
    rest: tuple
    by: str
    rates: tuple


METHODS = {
    "adamw": Method((25e-5, 5e-4, 1e-3), (2e-3, 6e-3), BASELINE, (5e-4, 6e-3)),
    "muon": Method((3e-3, 6e-3, 12e-3), (2e-3, 6e-3), "muon", (12e-3, 6e-3)),
    "normuon": Method((6e-3, 12e-3, 24e-3), (2e-3, 6e-3), "normuon", (12e-3, 6e-3)),
    "shampoo": Method((2e-3, 4e-3, 8e-3), (2e-3, 6e-3), "shampoo", (4e-3, 6e-3)),
    "kl_shampoo": Method((2e-3, 4e-3, 8e-3), (2e-3, 6e-3), "kl_shampoo", (4e-3, 6e-3)),
    "soap": Method((1e-3, 2e-3, 4e-3), (2e-3, 6e-3), "soap", (2e-3, 6e-3)),
}


def chosen(words):
    """The entries named by `words` (names, `ours`, `peers` and `all`, separated by commas), and the unknown words."""
    sets = {
        "all": list(ENTRIES),
        "ours": [name for name, entry in ENTRIES.items() if entry.ours],
        "peers": [name for name, entry in ENTRIES.items() if not entry.ours],
    }
    names, unknown = [], []
    for word in words.split(","):
        (names if word in sets or word in ENTRIES else unknown).extend(sets.get(word, [word]))
    return list(dict.fromkeys(names)), unknown
