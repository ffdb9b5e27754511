"""Short float64 references of the optimizers for one parameter, a matrix by rows or what AdamW gets, with the names and
defaults of torchium.optim. They follow docs/python/optimizers.md with dense matrices; no code of the library.

The options that they know are those of the tests in Python: the tests in C compare every option, shape and layout.
`options` may be changed between steps, as a param_group may.
"""

import math
from collections import defaultdict

import torch

BASIS_SHIFT = 1e-7  # of its trace, added to a factor while a basis follows it: docs/numerics/soap-basis.md
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SECOND_ORDER = ("shampoo", "soap", "muon", "normuon")
ADAMW_PART = {"adamw_lr": None, "adamw_betas": (0.9, 0.999), "adamw_eps": 1e-8, "adamw_weight_decay": None}
DEFAULTS = {
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False,
              "amsgrad": False},
    "shampoo": {
        "lr": 1e-3, "eps": 1e-12, "relative_eps": 1e-6, "precondition_frequency": None,
        "weight_decay": 0.0, "betas": (0.9, 0.95),
        "weight_decay_type": "decoupled", "max_preconditioner_dim": 1024, "start_preconditioning_step": -1,
        "use_bias_correction": True, "grafting": "adam", "grafting_beta2": 0.999, "grafting_eps": 1e-8, "momentum": 0.0,
        "nesterov": False, "exponent_override": 0, "merge_dims": True, "precondition_1d": False, "maximize": False,
    },
    "soap": {
        "lr": 3e-3, "betas": (0.95, 0.95), "shampoo_beta": -1, "eps": 1e-8, "weight_decay": 0.01,
        "weight_decay_type": "decoupled", "precondition_frequency": None, "max_preconditioner_dim": 10000,
        "merge_dims": False, "precondition_1d": False, "normalize_grads": False, "use_bias_correction": True,
        "maximize": False,
    },
    "muon": {
        "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": None, "eps": 1e-7,
        "ns_steps": 3, "adjust_lr_fn": None, "method": "minimax", "maximize": False,
    },
    "normuon": {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95, "nesterov": True, "ns_coefficients": None,
        "eps": 1e-8, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw", "method": "minimax", "maximize": False,
    },
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
}  # fmt: skip


class Reference:
    """`values` is the parameter, which it copies, in float64 on the CPU; `way` the length of all steps."""

    def __init__(self, kind, parameter, elementwise=False, **options):
        self.options = DEFAULTS[kind] | (ADAMW_PART if kind in SECOND_ORDER else {}) | options
        self.values = parameter.detach().to("cpu", torch.float64, copy=True)
        other = kind in SECOND_ORDER and (elementwise or parameter.ndim < 2 or not parameter.numel())
        self.update = adamw_part if other else UPDATES[kind]
        self.state, self.steps, self.way = defaultdict(float), 0, 0.0

    def step(self, gradient):
        if gradient is None:
            return
        self.steps += 1
        g = gradient.detach().to("cpu", torch.float64)
        g = -g if self.options["maximize"] else g
        after = self.update(self.options, self.state, self.steps, self.values, g)
        self.way += (after - self.values).norm().item()
        self.values = after


# One step: the options, the state, the number of the step, the parameter and its gradient.


def adam(s, k, p, g, lr, betas, eps, decay):
    beta1, beta2 = betas
    m = s["m"] = beta1 * s["m"] + (1 - beta1) * g
    v = s["v"] = beta2 * s["v"] + (1 - beta2) * g * g
    return p * (1 - lr * decay) - lr * (m / (1 - beta1**k)) / ((v / (1 - beta2**k)).sqrt() + eps)


def adamw(o, s, k, p, g):
    return adam(s, k, p, g, float(o["lr"]), o["betas"], o["eps"], o["weight_decay"])


def adamw_part(o, s, k, p, g):
    """What AdamW gets: of an lr on Muon's scale a share."""
    share = 1.0 if o.get("adjust_lr_fn", "match_rms_adamw") == "match_rms_adamw" else 0.3
    lr = share * float(o["lr"]) if o["adamw_lr"] is None else o["adamw_lr"]
    decay = o["weight_decay"] if o["adamw_weight_decay"] is None else o["adamw_weight_decay"]
    return adam(s, k, p, g, lr, o["adamw_betas"], o["adamw_eps"], decay)


def sgd(o, s, k, p, g):
    d = g + o["weight_decay"] * p
    b = s["buffer"] = o["momentum"] * s["buffer"] + (1 - o["dampening"] if k > 1 else 1) * d
    return p - float(o["lr"]) * b


def lion(o, s, k, p, g):
    (beta1, beta2), lr, m = o["betas"], float(o["lr"]), s["m"]
    s["m"] = beta2 * m + (1 - beta2) * g
    return p * (1 - lr * o["weight_decay"]) - lr * (beta1 * m + (1 - beta1) * g).sign()


def shampoo(o, s, k, p, g):
    """With Adam's grafting."""
    lr, (beta1, beta2), beta3 = float(o["lr"]), o["betas"], o["grafting_beta2"]
    weight, keep = (1.0, 1.0) if beta2 == 1 else ((1 - beta2) / (1 - beta2**k), 1 - (1 - beta2) / (1 - beta2**k))
    for side, x in ((0, g), (1, g.mT)):
        s[side] = weight * x @ x.mT + keep * s[side]
        if (k - 1) % o["precondition_frequency"] == 0:
            w, v = torch.linalg.eigh(s[side])
            damping = max(o["eps"], o["relative_eps"] * w[-1].item())
            s[side, "root"] = v * (w.clamp(min=0) + damping) ** -0.25 @ v.mT
    m = s["m"] = beta1 * s["m"] + (1 - beta1) * g
    v = s["v"] = beta3 * s["v"] + (1 - beta3) * g * g
    f = m / (1 - beta1**k)
    grafted = f / ((v / (1 - beta3**k)).sqrt() + o["grafting_eps"])
    d = s[0, "root"] @ f @ s[1, "root"]
    b = s["buffer"] = o["momentum"] * s["buffer"] + d * (grafted.norm() / d.norm())
    return p * (1 - lr * o["weight_decay"]) - lr * b


def soap(o, s, k, p, g):
    """The first gradient only makes the bases. Later ones are one orthogonal iteration, whose columns and second
    moments are first ordered by their share of the factor."""
    lr, (beta1, beta2) = float(o["lr"]), o["betas"]
    if k > 1:
        left, right = s[0, "basis"], s[1, "basis"]
        m = s["m"] = beta1 * s["m"] + (1 - beta1) * g
        v = s["v"] = beta2 * s["v"] + (1 - beta2) * (left.mT @ g @ right).square()
        d = left @ ((left.mT @ m @ right) / (v.sqrt() + o["eps"])) @ right.mT
        p = p * (1 - lr * o["weight_decay"]) - lr * math.sqrt(1 - beta2 ** (k - 1)) / (1 - beta1 ** (k - 1)) * d
    beta = beta2 if o["shampoo_beta"] < 0 else o["shampoo_beta"]
    for side, x in ((0, g), (1, g.mT)):
        c = s[side] = (1 - beta) * x @ x.mT + beta * s[side]
        if k == 1:
            s[side, "basis"] = torch.linalg.eigh(c)[1].flip(1)
        elif (k - 1) % o["precondition_frequency"] == 0:
            q = s[side, "basis"]
            product = c @ q + BASIS_SHIFT * c.trace() * q
            order = (q * product).sum(0).argsort(descending=True, stable=True)
            s["v"] = s["v"].index_select(side, order)
            s[side, "basis"] = torch.linalg.qr(product[:, order])[0]
    return p


def polar(o, s, g):
    """The momentum orthogonalized by the polynomial of method="muon", and the adjusted learning rate's factor."""
    assert o["method"] == "muon"
    momentum, (m, n) = o["momentum"], g.shape
    b = s["buffer"] = momentum * s["buffer"] + (1 - momentum) * g
    x = momentum * b + (1 - momentum) * g
    x = (x.mT if m > n else x) / max(x.norm().item(), o["eps"])
    for _ in range(5):
        gram = x @ x.mT
        x = MUON_COEFFICIENTS[0] * x + (MUON_COEFFICIENTS[1] * gram + MUON_COEFFICIENTS[2] * gram @ gram) @ x
    adjust = 0.2 * math.sqrt(max(m, n)) if o["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, m / n))
    return (x.mT if m > n else x), adjust


def muon(o, s, k, p, g):
    x, adjust = polar(o, s, g)
    return p * (1 - float(o["lr"]) * o["weight_decay"]) - float(o["lr"]) * adjust * x


def normuon(o, s, k, p, g):
    x, adjust = polar(o, s, g)
    v = s["v"] = o["beta2"] * s["v"] + (1 - o["beta2"]) * x.square().mean(1, keepdim=True)
    d = x / (v.sqrt() + o["eps"])
    lr = float(o["lr"])
    return p * (1 - lr * o["weight_decay"]) - lr * adjust * math.sqrt(min(g.shape)) / d.norm() * d


UPDATES = {f.__name__: f for f in (sgd, adamw, lion, shampoo, soap, muon, normuon)}
