"""Shared by tests of torchium.optim: the classes by name, options that exercise every part of them within a few steps,
a small network, and a trial that steps an optimizer and single-parameter optimizers together."""

import copy
import io

import torch
import torchium.optim

torch.set_num_threads(1)  # tensors are small: threads would only synchronize
torch.backends.cudnn.deterministic = True  # runs are compared bitwise

SECOND_ORDER = ["shampoo", "soap", "muon", "normuon", "kl_shampoo"]

# Factors, roots, bases, momenta and moments all in use, refreshed more than once within ten steps.
LIVELY = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "shampoo": {
        "lr": 0.02,
        "eps": 1e-4,
        "precondition_frequency": 3,
        "weight_decay": 0.1,
        "betas": (0.9, 1.0),
        "grafting": "adam",
        "momentum": 0.5,
    },
    "soap": {"lr": 0.01, "precondition_frequency": 2, "weight_decay": 0.1},
    "muon": {"lr": 0.02, "weight_decay": 0.1},
    "lion": {"lr": 0.005, "weight_decay": 0.1},
    "normuon": {"lr": 0.05, "weight_decay": 0.1},
    "kl_shampoo": {"lr": 0.02, "precondition_frequency": 3, "weight_decay": 0.1},
}
# The same for one parameter as for many: roots to rounding, all refreshed at once. Float32 products on a GPU too.
EXACT = {
    "shampoo": {"root_method": "eigen", "stagger": False, "relative_eps": 1e-3, "precision": "highest"},
    "soap": {"stagger": False, "precision": "highest"},
    "muon": {"method": "muon"},
    "normuon": {"method": "muon"},
    "kl_shampoo": {"root_method": "eigen", "stagger": False, "relative_eps": 1e-3, "precision": "highest"},
}
NAMES = ["SGD", "AdamW", "Shampoo", "SOAP", "Muon", "Lion", "NorMuon", "KLShampoo"]
CLASSES = {cls.kind: cls for cls in (getattr(torchium.optim, name) for name in NAMES)}
KINDS = list(CLASSES)


def make(kind, params, **options):
    """The optimizer of that name with the above options, some overridden."""
    return CLASSES[kind](params, **(LIVELY[kind] | options))


def exact(kind, **options):
    """Options under which updating parameters together equals updating each separately, to rounding."""
    return LIVELY[kind] | EXACT.get(kind, {}) | options


class Small(torch.nn.Module):
    """A convolution, matrices, vectors and a scalar; about 400 numbers."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.hidden = torch.nn.Linear(16, 12)
        self.norm = torch.nn.LayerNorm(12)
        self.out = torch.nn.Linear(12, 3, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.out(torch.tanh(self.norm(self.hidden(x)))) * self.scale


def small(device="cpu", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Small().to(device=device, dtype=dtype)


def batch(step, size=8, device="cpu", dtype=torch.float32):
    """The inputs and targets of a step, the same for all callers."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 2, 4, 4, generator=generator).to(device=device, dtype=dtype)
    y = torch.randn(size, 3, generator=generator).to(device=device, dtype=dtype)
    return x, y


def loss_of(model, step, size=8):
    p = next(model.parameters())
    x, y = batch(step, size, p.device, p.dtype)
    return torch.nn.functional.mse_loss(model(x), y)


def train(model, optimizer, steps, first=0):
    """Plain training; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(kind, device, steps=0, **options):
    """A small model and its optimizer, after some steps."""
    model = small(device)
    optimizer = make(kind, model.named_parameters(), **options)
    train(model, optimizer, steps)
    return model, optimizer


def pair(kind, device, steps=0, **options):
    """Two equal pairs of a model and its optimizer."""
    return *trained(kind, device, steps, **options), *trained(kind, device, steps, **options)


def square(device="cpu"):
    """A float64 model whose factors have full rank at the first step, so that SOAP's bases are determined: two runs
    that differ by rounding stay together."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)
    return torch.nn.Sequential(*layers).to(device=device, dtype=torch.float64)


def square_batch(step, device="cpu"):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator, dtype=torch.float64).to(device)


def train_square(model, optimizer, steps, first=0, parts=1):
    """Training on whole batches, or with gradient accumulation over parts."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for x in square_batch(step, next(model.parameters()).device).chunk(parts):
            (model(x).square().mean() / parts).backward()
        optimizer.step()
    return copies(model.parameters())


def assert_close(first, second):
    """float64 rounding, magnified by roots and bases."""
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=1e-9, atol=1e-9)


def copies(tensors):
    return [t.detach().clone() for t in tensors]


def assert_same_bits(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.dtype == b.dtype, f"tensor {i}: {a.dtype} and {b.dtype}"
        assert torch.equal(a, b), f"tensor {i} differs by {(a.double() - b.double()).abs().max().item():.3g}"


# --- copies

OTHER = {"lr": 1e-5, "weight_decay": 0.5}  # a new optimizer's entries before loading


def through_file(saved, weights_only=True):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def fresh(kind, model, **options):
    """The same model in other memory with an optimizer that has other hyperparameters."""
    twin = copy.deepcopy(model)
    return twin, make(kind, twin.parameters(), **(OTHER | options))


def assert_go_on_alike(model, optimizer, twin, other, steps=7):
    train(model, optimizer, steps, first=100)
    train(twin, other, steps, first=100)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


def tensors_of(optimizer):
    return [s[name] for s in optimizer.state_dict()["state"].values() for name in sorted(s)]


# --- beside optimizers of one parameter


def draw(shape, generator):
    """Normal numbers exact in float32, with decreasing magnitude along the tensor, so that factors have a spectrum."""
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    return x * torch.linspace(1.0, 0.2, x.numel()).reshape(x.shape)


class Reference:
    """A copy of a parameter in its own optimizer, torchium's AdamW for what AdamW updates, with every hyperparameter
    set before each step. C tests compare the steps of each method with float64 references. `way` is the length of all
    steps."""

    def __init__(self, kind, parameter, **options):
        self.kind, self.options, self.way = kind, options, 0.0
        self.by_adamw = kind in SECOND_ORDER and (parameter.ndim < 2 or not parameter.numel())
        self.values = torch.nn.Parameter(parameter.detach().clone())
        self.optimizer = CLASSES["adamw" if self.by_adamw else kind]([self.values], **self.numbers())

    def numbers(self):
        o = self.options
        if not self.by_adamw:
            return {k: float(v) if k == "lr" else v for k, v in o.items() if not k.startswith("adamw_")}
        lr, decay = o.get("adamw_lr"), o.get("adamw_weight_decay")
        if lr is None:  # a share of an lr on Muon's scale
            adjust = o.get("adjust_lr_fn", None if self.kind == "muon" else "match_rms_adamw")
            lr = (1.0 if adjust == "match_rms_adamw" else 0.3) * float(o["lr"])
        return {"lr": lr, "weight_decay": o.get("weight_decay", 0.0) if decay is None else decay}

    def step(self, gradient):
        before = self.values.detach().clone()
        self.optimizer.param_groups[0].update(self.numbers())
        self.values.grad = gradient.clone()
        self.optimizer.step()
        self.way += (self.values.detach() - before).norm().item()


class Trial:
    """Parameters of several shapes in float64, their references, and one optimizer over them."""

    def __init__(self, kind, shapes, device="cpu", **options):
        self.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)  # another for each test and run
        self.kind, self.device = kind, device
        self.params, self.references = [], []
        self.optimizer = CLASSES[kind]([self.add(shapes, options)], **options)

    def add(self, shapes, options):
        """New parameters with their references, as a group."""
        added = [torch.nn.Parameter(0.5 * draw(shape, self.generator).double().to(self.device)) for shape in shapes]
        self.params += added
        self.references += [Reference(self.kind, p, **options) for p in added]
        return {"params": added}

    def add_group(self, shapes, **options):
        """A group added during training, with the first one's hyperparameters unless given."""
        self.optimizer.add_param_group(self.add(shapes, self.references[0].options | options) | options)

    def step(self, missing=()):
        for i, (p, r) in enumerate(zip(self.params, self.references, strict=True)):
            g = draw(p.shape, self.generator).to(p)
            p.grad = None if i in missing else g
            if i not in missing:
                r.step(g)
        self.optimizer.step()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def follow(self, **numbers):
        """Changes hyperparameters in all groups and references."""
        for group in self.optimizer.param_groups:
            group.update(numbers)
        for r in self.references:
            r.options.update(numbers)

    def check(self, tolerance):
        """The distance of each parameter from its reference, relative to the path."""
        for i, (p, r) in enumerate(zip(self.params, self.references, strict=True)):
            error = (p - r.values).norm().item() / (r.way or 1.0)
            stats = self.optimizer.stats()
            assert error < tolerance, f"parameter {i} of shape {tuple(p.shape)} is {error:.2g} of its way off; {stats}"
