"""What the tests of torchium.optim share: the classes by name, options under which every part of them works within a
few steps, a small network, and a trial that steps an optimizer beside its references on the same gradients.
"""

import copy
import io

import references
import torch
import torchium.optim

torch.set_num_threads(1)  # tensors are small: threads would only wait for each other
torch.backends.cudnn.deterministic = True  # runs are compared to the bit

SECOND_ORDER = ["shampoo", "soap", "muon", "normuon"]

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
}
# As the references have it: roots to rounding, all refreshed at once. Products in float32 on a GPU too.
EXACT = {
    "shampoo": {"root_method": "eigen", "stagger": False, "relative_eps": 1e-3, "precision": "highest"},
    "soap": {"stagger": False, "precision": "highest"},
    "muon": {"method": "muon"},
    "normuon": {"method": "muon"},
}
NOT_FOR_REFERENCE = ("root_method", "stagger", "precision")
NAMES = ["SGD", "AdamW", "Shampoo", "SOAP", "Muon", "Lion", "NorMuon"]
KINDS = [name.lower() for name in NAMES]
CLASSES = {name.lower(): getattr(torchium.optim, name) for name in NAMES}


def make(kind, params, **options):
    """The optimizer of that name with the lively options, some of them changed."""
    return CLASSES[kind](params, **(LIVELY[kind] | options))


def exact(kind, **options):
    """Options under which an optimizer follows its reference to rounding."""
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
    """The inputs and targets of a step: the same for everybody who asks for it."""
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
    """The same twice: a model, its optimizer, its twin, and the twin's."""
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
    """Training on whole batches, or with the gradients of their parts added up."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for x in square_batch(step, next(model.parameters()).device).chunk(parts):
            (model(x).square().mean() / parts).backward()
        optimizer.step()
    return copies(model.parameters())


def assert_close(first, second):
    """To the rounding of float64, enlarged by roots and bases."""
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

OTHER = {"lr": 1e-5, "weight_decay": 0.5}  # what a fresh optimizer has before it is loaded


def through_file(saved, weights_only=True):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def fresh(kind, model, **options):
    """The same model in other memory with an optimizer that has other numbers."""
    twin = copy.deepcopy(model)
    return twin, make(kind, twin.parameters(), **(OTHER | options))


def assert_go_on_alike(model, optimizer, twin, other, steps=7):
    train(model, optimizer, steps, first=100)
    train(twin, other, steps, first=100)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


def tensors_of(optimizer):
    return [s[name] for s in optimizer.state_dict()["state"].values() for name in sorted(s)]


# --- beside the references


def draw(shape, generator):
    """Normal numbers that float32 can hold, whose size falls along the tensor, so that factors have a spectrum."""
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    return x * torch.linspace(1.0, 0.2, x.numel()).reshape(x.shape)


class Trial:
    """Parameters of several shapes, their references, and one optimizer over them."""

    def __init__(self, kind, shapes, device="cpu", dtype=torch.float64, elementwise=(), **options):
        self.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)  # another for each test and run
        self.kind, self.device, self.dtype = kind, device, dtype
        self.params, self.references = [], []
        self.steps = 0
        self.optimizer = CLASSES[kind](self.add(shapes, elementwise, options), **options)

    def add(self, shapes, elementwise, options):
        """New parameters with their references, as param_groups."""
        started = len(self.params)
        known = {k: v for k, v in options.items() if k not in NOT_FOR_REFERENCE}
        for i, shape in enumerate(shapes):
            p = shape if isinstance(shape, torch.Tensor) else 0.5 * draw(shape, self.generator)
            p = p.to(device=self.device, dtype=self.dtype, memory_format=torch.preserve_format)
            self.params.append(torch.nn.Parameter(p))
            self.references.append(references.Reference(self.kind, p, i in elementwise, **known))
        marked = [p for i, p in enumerate(self.params[started:]) if i in elementwise]
        plain = [p for i, p in enumerate(self.params[started:]) if i not in elementwise]
        return [{"params": plain}] + ([{"params": marked, "use_adamw": True}] if marked else [])

    def add_group(self, shapes, **options):
        """A group in the middle of training, whose numbers are those of the first where not given."""
        self.optimizer.add_param_group(self.add(shapes, (), self.references[0].options | options)[0] | options)

    def step(self, missing=()):
        for i, (p, r) in enumerate(zip(self.params, self.references, strict=True)):
            g = draw(p.shape, self.generator)
            p.grad = None if i in missing else g.to(device=self.device, dtype=self.dtype)
            r.step(None if i in missing else g)
        self.optimizer.step()
        self.steps += 1

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def follow(self, **numbers):
        """Changes numbers in all groups and references."""
        for group in self.optimizer.param_groups:
            group.update(numbers)
        for r in self.references:
            r.options.update(numbers)

    def error(self, i):
        """The distance of a parameter from its reference, as a share of the way that has gone. Each step rounds the
        parameter itself, which is much of the way where that is short beside it: so much is taken off."""
        p, r = self.params[i], self.references[i]
        distance = (p.detach().cpu().double() - r.values).norm().item()
        rounding = self.steps * torch.finfo(self.dtype).eps / 2 * r.values.norm().item()
        distance = max(0.0, distance - rounding)
        return distance / r.way if r.way else distance

    def check(self, tolerance):
        for i, p in enumerate(self.params):
            error = self.error(i)
            stats = self.optimizer.stats()
            assert error < tolerance, f"parameter {i} of shape {tuple(p.shape)} is {error:.2g} of its way off; {stats}"
