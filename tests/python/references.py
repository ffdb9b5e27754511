"""Plain float64 references of the optimizers, one object for one parameter, with the names and defaults of
torchium.optim.

They follow the formulas of docs/optimizers.md with dense matrices and torch.linalg, and share no code with the library.
A parameter is seen as the library sees it: dimensions of size 1 dropped, the others in the order of memory, cut into
blocks where the method cuts. `options` may be changed between steps, as a param_group may.
"""

import itertools
import math

import torch
from torch import Tensor

MOST_DIMENSIONS = 4
BASIS_SHIFT = 1e-7  # of its trace, added to a factor while a basis follows it: docs/numerics/soap-basis.md
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = [
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
    (1.875, -1.25, 0.375),
]
LONG_STEPS = [  # top, u0, u1, f0, f1, t0, t1, t2: docs/numerics/orthogonalization.md
    (1.0, 0.1741972, -1.073597, -0.008994106, 0.004077704, 0.274108, 0.0, 60242.94),
    (2.00185, 0.1917662, -1.103001, -0.01043446, 0.006585975, 1.025102, 0.0, 30596.31),
    (1.71889, 0.3180031, -1.235464, None, None, 1.9062, -1.078413, 40.38145),
]

DEFAULTS = {
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
    "adamw": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
    },
    "shampoo": {
        "lr": 1e-3,
        "eps": 1e-12,
        "relative_eps": 1e-6,
        "update_freq": 100,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "weight_decay_type": "decoupled",
        "max_preconditioner_dim": 1024,
        "start_preconditioning_step": -1,
        "use_bias_correction": True,
        "grafting": "adam",
        "grafting_beta2": 0.999,
        "grafting_eps": 1e-8,
        "momentum": 0.0,
        "nesterov": False,
        "exponent_override": 0,
        "merge_dims": True,
        "precondition_1d": False,
        "maximize": False,
    },
    "soap": {
        "lr": 3e-3,
        "betas": (0.95, 0.95),
        "shampoo_beta": -1,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "weight_decay_type": "decoupled",
        "precondition_frequency": 10,
        "max_precond_dim": 10000,
        "merge_dims": False,
        "precondition_1d": False,
        "normalize_grads": False,
        "correct_bias": True,
        "maximize": False,
    },
    "muon": {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": None,
        "eps": 1e-7,
        "ns_steps": 3,
        "adjust_lr_fn": None,
        "method": "minimax",
        "maximize": False,
    },
    "normuon": {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "beta2": 0.95,
        "nesterov": True,
        "ns_coefficients": None,
        "eps": 1e-8,
        "ns_steps": 3,
        "adjust_lr_fn": "match_rms_adamw",
        "method": "minimax",
        "maximize": False,
    },
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
}
SECOND_ORDER = ("shampoo", "soap", "muon", "normuon")
ADAMW_PART = {"adamw_lr": None, "adamw_betas": (0.9, 0.999), "adamw_eps": 1e-8, "adamw_weight_decay": None}


def reference(kind: str, parameter: Tensor, elementwise: bool = False, **options):
    """The reference for one parameter, which it copies, on the CPU."""
    made = CLASSES[kind](parameter.cpu(), elementwise, **options)
    made.narrow = parameter.is_cuda and parameter.dtype != torch.float64
    return made


# --- a parameter as dimensions in the order of memory


def memory_order(x: Tensor) -> list[int]:
    """All dimensions, the slowest in memory first. Those of size 1 and equal strides stay where they are."""
    return sorted(range(x.ndim), key=lambda d: -x.stride(d) if x.shape[d] > 1 else 0)


def merge_neighbors(dims: list[int], most: int) -> list[int]:
    """From the innermost dimension outwards, never down to a vector."""
    merged: list[int] = []
    for i, size in reversed(list(enumerate(dims))):
        leaves_vector = i == 0 and len(merged) == 1
        if merged and size * merged[0] <= most and not leaves_vector:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return merged


def merge_smallest(dims: list[int]) -> list[int]:
    """Down to four: the neighbors with the smallest product become one."""
    dims = list(dims)
    while len(dims) > MOST_DIMENSIONS:
        k = min(range(len(dims) - 1), key=lambda i: dims[i] * dims[i + 1])
        dims[k : k + 2] = [dims[k] * dims[k + 1]]
    return dims


def blocks_of(dims: list[int], width: int | None) -> list[tuple[slice, ...]]:
    if width is None:
        return [tuple(slice(0, n) for n in dims)]
    cuts = [[slice(at, min(at + width, n)) for at in range(0, n, width)] for n in dims]
    return list(itertools.product(*cuts))


# --- products along one dimension


def unfold(x: Tensor, k: int) -> Tensor:
    return x.movedim(k, 0).reshape(x.shape[k], -1)


def multiply(m: Tensor, x: Tensor, k: int) -> Tensor:
    """m times x along dimension k."""
    return torch.tensordot(m, x, dims=([1], [k])).movedim(0, k)


class Reference:
    """`values` is the parameter in float64, of its shape. A subclass says what one block does."""

    kind = ""

    def __init__(self, parameter: Tensor, elementwise: bool = False, **options):
        known = DEFAULTS[self.kind] | (ADAMW_PART if self.kind in SECOND_ORDER else {})
        unknown = set(options) - set(known)
        if unknown:
            raise TypeError(f"{self.kind} has no option {sorted(unknown)}")
        self.options = known | options
        self.values = parameter.detach().to(torch.float64).clone()
        self.narrow = False
        self.open = torch.zeros(parameter.shape, dtype=torch.bool)  # elements that rounding decides
        self.order = memory_order(parameter)
        self.steps = 0
        self.way = 0.0
        dims = [parameter.shape[d] for d in self.order if parameter.shape[d] != 1]
        self.adamw = self.kind in SECOND_ORDER and (elementwise or not parameter.numel() or not self.takes(dims))
        self.dims = list(self.values.shape) if self.adamw or self.kind not in SECOND_ORDER else self.view(dims)
        width = None if self.adamw else self.width()
        self.blocks = [{"at": at} for at in blocks_of(self.dims, width)]

    def takes(self, dims: list[int]) -> bool:
        return len(dims) >= 2

    def view(self, dims: list[int]) -> list[int]:
        return dims

    def width(self) -> int | None:
        return None

    def update(self, block: dict, p: Tensor, g: Tensor) -> Tensor:
        raise NotImplementedError

    def _forward(self, x: Tensor) -> Tensor:
        plain = self.adamw or self.kind not in SECOND_ORDER
        return (x if plain else x.permute(self.order).reshape(self.dims)).clone()

    def _backward(self, x: Tensor) -> Tensor:
        if self.adamw or self.kind not in SECOND_ORDER:
            return x
        inverse = [self.order.index(d) for d in range(len(self.order))]
        return x.reshape([self.values.shape[d] for d in self.order]).permute(inverse).contiguous()

    def step(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        self.steps += 1
        g = self._forward(gradient.detach().to(torch.float64))
        g = -g if self.options["maximize"] else g
        p = self._forward(self.values)
        for block in self.blocks:
            at = block["at"]
            update = self.adamw_update if self.adamw else self.update
            p[at] = update(block, p[at].clone(), g[at].clone())
        after = self._backward(p)
        self.way += (after - self.values).norm().item()
        self.values = after

    def adamw_update(self, block: dict, p: Tensor, g: Tensor) -> Tensor:
        o = self.options
        share = 0.3 if o.get("adjust_lr_fn", "match_rms_adamw") != "match_rms_adamw" else 1.0
        lr = share * float(o["lr"]) if o["adamw_lr"] is None else o["adamw_lr"]
        decay = o["weight_decay"] if o["adamw_weight_decay"] is None else o["adamw_weight_decay"]
        l2 = o.get("weight_decay_type") == "l2"
        return adam(block, self.steps, p, g, float(lr), o["adamw_betas"], o["adamw_eps"], decay, l2, False)


def adam(block, steps, p, g, lr, betas, eps, decay, l2, amsgrad):
    beta1, beta2 = betas
    if l2:
        g = g + decay * p
    else:
        p = p * (1 - lr * decay)
    m = block["m"] = beta1 * block.get("m", 0.0) + (1 - beta1) * g
    v = block["v"] = beta2 * block.get("v", 0.0) + (1 - beta2) * g * g
    if amsgrad:
        v = block["largest"] = torch.maximum(block.get("largest", torch.zeros_like(v)), v)
    corrected = m / (1 - beta1**steps)
    return p - lr * corrected / ((v / (1 - beta2**steps)).sqrt() + eps)


class AdamW(Reference):
    kind = "adamw"

    def update(self, block, p, g):
        o = self.options
        numbers = (float(o["lr"]), o["betas"], o["eps"], o["weight_decay"], False, o["amsgrad"])
        return adam(block, self.steps, p, g, *numbers)


class SGD(Reference):
    kind = "sgd"

    def update(self, block, p, g):
        o = self.options
        d = g + o["weight_decay"] * p
        if o["momentum"]:
            before = block.get("buffer")
            b = block["buffer"] = d if before is None else o["momentum"] * before + (1 - o["dampening"]) * d
            d = d + o["momentum"] * b if o["nesterov"] else b
        return p - float(o["lr"]) * d


class Lion(Reference):
    kind = "lion"

    def update(self, block, p, g):
        """Where the two parts of c cancel down to the rounding of float32, its sign may be any."""
        o = self.options
        (beta1, beta2), m = o["betas"], block.get("m", torch.zeros_like(g))
        c = beta1 * m + (1 - beta1) * g
        self.open |= c.abs() <= 1e-6 * (beta1 * m.abs() + (1 - beta1) * g.abs())
        block["m"] = beta2 * m + (1 - beta2) * g
        return p * (1 - float(o["lr"]) * o["weight_decay"]) - float(o["lr"]) * c.sign()


class Shampoo(Reference):
    kind = "shampoo"

    def takes(self, dims):
        return len(dims) >= (1 if self.options["precondition_1d"] else 2)

    def view(self, dims):
        if self.options["merge_dims"]:
            dims = merge_neighbors(dims, self.options["max_preconditioner_dim"])
        return merge_smallest(dims)

    def width(self):
        return self.options["max_preconditioner_dim"]

    def update(self, block, p, g):
        o = self.options
        lr, decay, beta1 = float(o["lr"]), o["weight_decay"], o["betas"][0]
        l2 = o["weight_decay_type"] == "l2"
        g = g + decay * p if l2 else g
        self.accumulate(block, g)
        self.refresh(block)
        f = g
        if beta1:
            m = block["m"] = beta1 * block.get("m", 0.0) + (1 - beta1) * g
            f = m / (1 - beta1**self.steps) if o["use_bias_correction"] else m
        d = self.direction(block, g, f)
        if o["momentum"]:
            b = block["buffer"] = o["momentum"] * block.get("buffer", 0.0) + d
            d = d + o["momentum"] * b if o["nesterov"] else b
        return (p if l2 else p * (1 - lr * decay)) - lr * d

    def accumulate(self, block, g):
        beta2 = self.options["betas"][1]
        weight = keep = 1.0
        if beta2 != 1:
            corrects = self.options["use_bias_correction"]
            weight = (1 - beta2) / (1 - beta2**self.steps) if corrects else 1 - beta2
            keep = 1 - weight if corrects else beta2
        for k in range(g.ndim):
            x = unfold(g, k)
            block["factor", k] = weight * x @ x.mT + keep * block.get(("factor", k), 0.0)

    def first_refresh(self) -> int:
        return max(self.options["start_preconditioning_step"], 1)

    def refresh(self, block):
        since = self.steps - self.first_refresh()
        if since < 0 or since % self.options["update_freq"]:
            return
        order = block["order"] = sum(1 for key in block if key[0] == "factor")
        root = self.options["exponent_override"] or 2 * order
        for k in range(order):
            w, v = torch.linalg.eigh(block["factor", k])
            damping = max(self.options["eps"], self.options["relative_eps"] * w[-1].item())
            block["root", k] = v * (w.clamp(min=0) + damping) ** (-1 / root) @ v.mT

    def graft(self, block, g, f):
        """The step that the grafted method would take."""
        o = self.options
        kind, beta2 = o["grafting"], o["grafting_beta2"]
        if kind in (None, "sgd"):
            return f
        before = block.get("v", 0.0)
        v = block["v"] = before + g * g if kind == "adagrad" else beta2 * before + (1 - beta2) * g * g
        corrected = v / (1 - beta2**self.steps) if kind == "adam" else v
        return f / (corrected.sqrt() + o["grafting_eps"])

    def direction(self, block, g, f):
        grafted = self.graft(block, g, f)
        if self.steps < self.first_refresh():
            return grafted
        d = f
        for k in range(f.ndim):
            d = multiply(block["root", k], d, k)
        if self.options["grafting"] is None or not d.norm():
            return d
        return d * (grafted.norm() / d.norm())


class SOAP(Reference):
    kind = "soap"

    def takes(self, dims):
        fits = any(n <= self.options["max_precond_dim"] for n in dims)
        return fits and len(dims) >= (1 if self.options["precondition_1d"] else 2)

    def view(self, dims):
        if self.options["merge_dims"]:
            dims = merge_neighbors(dims, self.options["max_precond_dim"])
        return merge_smallest(dims)

    def update(self, block, p, g):
        o = self.options
        lr, decay = float(o["lr"]), o["weight_decay"]
        l2 = o["weight_decay_type"] == "l2"
        g = g + decay * p if l2 else g
        if self.steps > 1:  # the first gradient only makes the bases
            d = self.direction(block, g)
            p = (p if l2 else p * (1 - lr * decay)) - lr * d
        self.update_bases(block, g)
        return p

    def turn(self, block, x, back):
        for k in range(x.ndim):
            if ("basis", k) in block:
                q = block["basis", k]
                x = multiply(q if back else q.mT, x, k)
        return x

    def direction(self, block, g):
        beta1, beta2 = self.options["betas"]
        moments = self.steps - 1
        m = block["m"] = beta1 * block.get("m", 0.0) + (1 - beta1) * g
        turned = self.turn(block, g, False)
        v = block["v"] = beta2 * block.get("v", torch.zeros_like(g)) + (1 - beta2) * turned * turned
        d = self.turn(block, m, False) / (v.sqrt() + self.options["eps"])
        if self.options["correct_bias"]:
            d = d * (math.sqrt(1 - beta2**moments) / (1 - beta1**moments))
        d = self.turn(block, d, True)
        if self.options["normalize_grads"] and d.norm():
            d = d * (math.sqrt(d.numel()) / d.norm())
        return d

    def update_bases(self, block, g):
        beta = self.options["shampoo_beta"]
        beta = self.options["betas"][1] if beta < 0 else beta
        for k in range(g.ndim):
            if g.shape[k] > self.options["max_precond_dim"]:
                continue
            x = unfold(g, k)
            c = block["factor", k] = (1 - beta) * x @ x.mT + beta * block.get(("factor", k), 0.0)
            if self.steps == 1:
                block["basis", k] = torch.linalg.eigh(c)[1].flip(1)
            elif (self.steps - 1) % self.options["precondition_frequency"] == 0:
                self.track(block, k, c)

    def track(self, block, k, c):
        """One orthogonal iteration, columns and second moments first ordered by their share of the factor."""
        q = block["basis", k]
        product = c @ q + BASIS_SHIFT * c.trace() * q
        order = (q * product).sum(0).argsort(descending=True, stable=True)
        block["v"] = block["v"].index_select(k, order)
        block["basis", k] = torch.linalg.qr(product[:, order])[0]


def long_step(x, top, u0, u1, f0, f1, t0, t1, t2):
    """A polynomial of degree 17, or of 9 where there is no f."""
    y = x @ x.mT / top**2
    one = torch.eye(len(y), dtype=y.dtype, device=y.device)
    a = y @ y + u1 * y + u0 * one
    if f0 is not None:
        a = a @ a + f1 * y + f0 * one
    return (t2 * a @ a + t1 * y + t0 * one) @ x / top


class Muon(Reference):
    kind = "muon"

    def __init__(self, parameter: Tensor, elementwise: bool = False, **options):
        if "method" not in options and ("ns_steps" in options or options.get("ns_coefficients")):
            options["method"] = "polar_express"
        if options.get("method", "minimax") != "minimax":
            options.setdefault("ns_steps", 5)
        super().__init__(parameter, elementwise, **options)

    def view(self, dims):
        return [dims[0], math.prod(dims[1:])]

    def update(self, block, p, g):
        o = self.options
        lr, momentum = float(o["lr"]), o["momentum"]
        b = block["buffer"] = momentum * block.get("buffer", 0.0) + (1 - momentum) * g
        u = momentum * b + (1 - momentum) * g if o["nesterov"] else b
        d = self.orthogonalize(u) * self.adjust()
        return p * (1 - lr * o["weight_decay"]) - lr * d

    def adjust(self) -> float:
        """By the parameter's own shape, in whatever order it lies in memory."""
        m = next(n for n in self.values.shape if n != 1)
        n = self.values.numel() // m
        if self.options["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(m, n))
        return math.sqrt(max(1, m / n))

    def plan(self):
        """Method and number of steps. In bfloat16, which is what a GPU takes for small matrices, long steps do not
        hold: Polar Express has two more in their place."""
        o = self.options
        method, steps = "muon" if o["ns_coefficients"] else o["method"], o["ns_steps"]
        return ("polar_express", steps + 2) if method == "minimax" and self.narrow else (method, steps)

    def coefficients(self, method: str, step: int):
        if method == "muon":
            return self.options["ns_coefficients"] or MUON_COEFFICIENTS
        if step >= 5 or method == "minimax":
            return POLAR_EXPRESS[5]
        return tuple(c / 1.01 ** (2 * i + 1) for i, c in enumerate(POLAR_EXPRESS[step]))

    def orthogonalize(self, x):
        tall = x.shape[0] > x.shape[1]
        x = x.mT if tall else x
        x = x / max(x.norm().item(), self.options["eps"])
        method, steps = self.plan()
        for step in range(steps):
            if method == "minimax" and step < len(LONG_STEPS):
                x = long_step(x, *LONG_STEPS[step])
                continue
            a, b, c = self.coefficients(method, step)
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if tall else x


class NorMuon(Muon):
    kind = "normuon"

    def update(self, block, p, g):
        """Rows are those of the parameter's shape: of a matrix that lies by columns, the columns of memory."""
        o = self.options
        lr, momentum, beta2 = float(o["lr"]), o["momentum"], o["beta2"]
        b = block["buffer"] = momentum * block.get("buffer", 0.0) + (1 - momentum) * g
        d = self.orthogonalize(momentum * b + (1 - momentum) * g if o["nesterov"] else b)
        sides = [d for d, n in enumerate(self.values.shape) if n > 1]
        along = 0 if len(sides) == 2 and [d for d in self.order if d in sides] != sides else 1
        v = block["v"] = beta2 * block.get("v", 0.0) + (1 - beta2) * d.square().mean(along, keepdim=True)
        d = d / (v.sqrt() + o["eps"])
        m = next(n for n in self.values.shape if n != 1)
        length = self.adjust() * math.sqrt(min(m, self.values.numel() // m))
        return p * (1 - lr * o["weight_decay"]) - (lr * length / d.norm() * d if d.norm() else 0.0)


CLASSES = {c.kind: c for c in (SGD, AdamW, Shampoo, SOAP, Muon, Lion, NorMuon)}
