"""What the tests of KFAC and of the natural gradient share: small models, and references in plain float64 PyTorch that
look at one sample after the other.
"""

import copy
import itertools
import math

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)  # tensors are small: threads would only wait for each other
torch.backends.cudnn.allow_tf32 = False  # convolutions of the models are compared in float32


def mlp(device="cpu", dtype=torch.float64, bias=True, sizes=(5, 7, 4, 3)):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device=device, dtype=dtype)


class Convolutions(nn.Module):
    """Groups, dilation, stride, 'same' and circular padding, in one to three dimensions."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv1d(4, 6, 3, padding="same", groups=2)
        self.two = nn.Conv2d(1, 3, (2, 3), stride=(1, 2), dilation=(2, 1), padding=1, padding_mode="circular")
        self.three = nn.Conv3d(1, 2, 2, stride=2, bias=False)
        self.out = nn.Linear(2 * 1 * 2 * 2, 3)

    def forward(self, x):  # x is (B, 4, 8)
        x = torch.tanh(self.one(x)).unsqueeze(1)  # (B, 1, 6, 8)
        x = torch.tanh(self.two(x)).unsqueeze(1)  # (B, 1, 3, 6, 4)
        x = torch.tanh(self.three(x))  # (B, 2, 1, 3, 2)
        return self.out(x[..., :2, :].flatten(1))


METHODS = ["eigen", "inverse", "ekfac"]
mse = functional.mse_loss


def batch(model, size, step=0):
    p = next(model.parameters())
    generator = torch.Generator().manual_seed(1000 * step + size)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x.to(p.device, p.dtype), y.to(p.device, p.dtype)


def train(model, optimizer, steps, first=0, size=8):
    for step in range(first, first + steps):
        x, y = batch(model, size, step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def draw(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(device=device, dtype=dtype)


def twin(model):
    """The same numbers in float64 on the CPU, without anybody's hooks."""
    other = copy.deepcopy(model)
    for module in other.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return other.double().cpu()


def sample_gradients(model, loss_of, x, y):
    """{name: [B, *shape]}: the gradient of each sample's own loss, by one backward pass for each."""
    rows = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        model.zero_grad(set_to_none=True)
        loss_of(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    model.zero_grad(set_to_none=True)
    return {name: torch.stack(g) for name, g in rows.items()}


def natural_gradient(rows, damping):
    """(J'J/m + damping I)^-1 (mean of the rows), by a dense solve over all parameters at once."""
    j = torch.cat([g.flatten(1) for g in rows.values()], 1)
    m, p = j.shape
    solved = torch.linalg.solve(j.T @ j / m + damping * torch.eye(p, dtype=j.dtype), j.mean(0))
    parts = solved.split([g[0].numel() for g in rows.values()])
    return {name: part.reshape(g.shape[1:]) for (name, g), part in zip(rows.items(), parts, strict=True)}


def assert_close(actual, expected, tolerance, what=""):
    """By the norm of the difference as a share of the norm."""
    error = (actual.detach().double().cpu() - expected).norm() / expected.norm().clamp_min(1e-300)
    assert error < tolerance, f"{what} is off by {error:.2g}, allowed {tolerance:.2g}"


class KfacReference:
    """KFAC of the linear layers of a Sequential, as the definitions have it: factors from the inputs and output
    per-sample gradients, each with its own forward and backward pass."""

    def __init__(self, model, method, damping, decay, kl_clip, lr, cov=1, inv=1, momentum=0.0, weight_decay=0.0):
        self.model = twin(model)
        self.linear = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        self.method, self.damping, self.decay, self.kl_clip, self.lr = method, damping, decay, kl_clip, lr
        self.cov, self.inv, self.steps = cov, inv, 0
        self.a = [None] * len(self.linear)
        self.g = [None] * len(self.linear)
        self.weight = 0.0  # that the averages have seen
        self.solve = [None] * len(self.linear)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)

    def samples(self, x, y, loss_of):
        """For each layer the rows a (with a 1 for the bias) and g of all samples."""
        seen = [([], []) for _ in self.linear]
        for i in range(len(x)):
            handles = []
            for k, m in enumerate(self.linear):

                def hook(module, args, output, k=k):
                    one = [torch.ones(1)] if module.bias is not None else []
                    seen[k][0].append(torch.cat([args[0].detach()[0], *one]))
                    output.register_hook(lambda g, k=k: seen[k][1].append(g.detach()[0].clone()))

                handles.append(m.register_forward_hook(hook))
            loss_of(self.model(x[i : i + 1]), y[i : i + 1]).backward()
            for handle in handles:
                handle.remove()
        self.model.zero_grad(set_to_none=True)
        return [(torch.stack(a), torch.stack(g)) for a, g in seen]

    def observe(self, x, y, loss_of):
        seen = self.samples(x, y, loss_of)
        keep = self.decay * self.weight
        self.weight = keep + 1 - self.decay
        for k, (a, g) in enumerate(seen):
            first, second = a.T @ a / len(a), g.T @ g / len(g)
            for old, new, place in ((self.a, first, k), (self.g, second, k)):
                old[place] = new if old[place] is None else (keep * old[place] + (1 - self.decay) * new) / self.weight
            if self.method == "ekfac" and self.solve[k] is not None:
                basis_a, basis_g, scales = self.solve[k]
                squares = ((g @ basis_g).unsqueeze(2) * (a @ basis_a).unsqueeze(1)).square().mean(0)
                self.solve[k] = basis_a, basis_g, self.decay * scales + (1 - self.decay) * squares

    def refresh(self):
        for k in range(len(self.linear)):
            a, g = self.a[k], self.g[k]
            if self.method == "inverse":
                pi = math.sqrt((a.trace() / len(a)) / (g.trace() / len(g)))
                root = math.sqrt(self.damping)
                damped_a = a + pi * root * torch.eye(len(a), dtype=a.dtype)
                damped_g = g + root / pi * torch.eye(len(g), dtype=g.dtype)
                self.solve[k] = torch.linalg.inv(damped_a), torch.linalg.inv(damped_g)
            else:
                (la, qa), (lg, qg) = torch.linalg.eigh(a), torch.linalg.eigh(g)
                self.solve[k] = qa, qg, lg.clamp_min(0)[:, None] * la.clamp_min(0)[None, :]

    def turned(self, k, grad):
        if self.method == "inverse":
            inverse_a, inverse_g = self.solve[k]
            return inverse_g @ grad @ inverse_a
        qa, qg, values = self.solve[k]
        return qg @ ((qg.T @ grad @ qa) / (values + self.damping)) @ qa.T

    def precondition(self):
        pairs = []
        for k, m in enumerate(self.linear):
            parts = [m.weight.grad] + ([m.bias.grad[:, None]] if m.bias is not None else [])
            grad = torch.cat(parts, 1)
            pairs.append((m, grad, self.turned(k, grad)))
        scale = 1.0
        if self.kl_clip:
            total = self.lr**2 * sum((new * old).sum() for _, old, new in pairs).abs()
            scale = min(1.0, math.sqrt(self.kl_clip / total))
        for m, _, new in pairs:
            m.weight.grad = scale * new[:, : m.in_features]
            if m.bias is not None:
                m.bias.grad = scale * new[:, m.in_features]

    def step(self, x, y, loss_of):
        """`loss_of` is a mean over samples."""
        if self.steps % self.cov == 0:
            self.observe(x, y, loss_of)
        if self.steps % self.inv == 0:
            self.refresh()
        loss_of(self.model(x), y).backward()
        self.precondition()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
