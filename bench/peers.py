"""Other optimizers, if they can be imported or are in a folder of --peer-path or TORCHIUM_PEERS
(facebookresearch/optimizers, nikhilvyas/SOAP, HomebrewML/HeavyBall, microsoft/dion, NVIDIA-NeMo/Emerging-Optimizers,
bitsandbytes), and plain PyTorch versions of Shampoo and SOAP. A maker takes parameters with gradients, and the refresh
interval."""

import importlib.util

import torch

BETAS, DECAY = (0.9, 0.95), 0.1


def found(module):
    return importlib.util.find_spec(module) is not None


def blocks_of(parameters, most):
    """(index, rows, columns) of every block of at most `most` rows and columns."""
    for index, p in enumerate(parameters):
        if p.ndim == 2:
            for i in range(0, p.shape[0], most):
                for j in range(0, p.shape[1], most):
                    yield index, slice(i, min(i + most, p.shape[0])), slice(j, min(j + most, p.shape[1]))


class PlainShampoo:
    """Plain Shampoo in PyTorch: block by block, roots by eigendecomposition."""

    def __init__(self, parameters, period, most=1024, lr=0.01, eps=1e-6):
        self.parameters, self.gradients = [p.data for p in parameters], [p.grad for p in parameters]
        self.period, self.lr, self.eps, self.t = period, lr, eps, 0
        self.blocks = []
        for index, rows, columns in blocks_of(self.parameters, most):
            sizes, device = self.parameters[index][rows, columns].shape, self.parameters[index].device
            factors = [torch.zeros(k, k, device=device) for k in sizes]
            self.blocks.append((index, rows, columns, factors, [torch.eye(k, device=device) for k in sizes]))
        self.filtered = [torch.zeros_like(p) for p in self.parameters]

    def _root(self, a):
        w, v = torch.linalg.eigh(a)
        return (v * (w.clamp_min(0) + self.eps * w[-1]).pow(-0.25)) @ v.T

    def step(self):
        self.t += 1
        correction = 1 - 0.9**self.t
        for p, g, f in zip(self.parameters, self.gradients, self.filtered, strict=True):
            f.lerp_(g, 0.1)
            if p.ndim != 2:
                p.add_(f, alpha=-self.lr / correction)
        for index, rows, columns, factors, roots in self.blocks:
            g, f = self.gradients[index][rows, columns], self.filtered[index][rows, columns]
            factors[0].addmm_(g, g.T)
            factors[1].addmm_(g.T, g)
            if self.t % self.period == 0:
                roots[:] = [self._root(c) for c in factors]
            d = roots[0] @ (f / correction) @ roots[1]
            self.parameters[index][rows, columns].sub_(d, alpha=self.lr)


class PlainSoap:
    """SOAP as published: projections by products, the basis by one orthogonal iteration with QR at every step."""

    def __init__(self, parameters, period, most=1024, lr=3e-3):
        self.parameters, self.gradients, self.lr = [p.data for p in parameters], [p.grad for p in parameters], lr
        self.blocks = []
        for index, rows, columns in blocks_of(self.parameters, most):
            g = self.gradients[index][rows, columns]
            factors = [g @ g.T, g.T @ g]
            bases = [torch.linalg.eigh(c)[1].flip(1) for c in factors]
            self.blocks.append((index, rows, columns, factors, bases, torch.zeros_like(g), torch.zeros_like(g)))

    def step(self):
        for index, rows, columns, factors, bases, m, v in self.blocks:
            g = self.gradients[index][rows, columns]
            m.lerp_(g, 0.05)
            v.lerp_((bases[0].T @ g @ bases[1]).square(), 0.05)
            n = bases[0].T @ m @ bases[1] / (v.sqrt() + 1e-8)
            self.parameters[index][rows, columns].sub_(bases[0] @ n @ bases[1].T, alpha=self.lr)
            factors[0].lerp_(g @ g.T, 0.05)
            factors[1].lerp_(g.T @ g, 0.05)
            for k in range(2):
                order = (bases[k].T @ factors[k] @ bases[k]).diagonal().argsort(descending=True)
                v.copy_(v.index_select(k, order))
                bases[k] = torch.linalg.qr(factors[k] @ bases[k][:, order])[0]


def meta_shampoo(parameters, period, lr=1e-3):
    import distributed_shampoo as meta

    options = {"lr": lr, "betas": BETAS, "epsilon": 1e-12, "weight_decay": DECAY, "max_preconditioner_dim": 1024}
    grafting = meta.AdamPreconditionerConfig(beta2=BETAS[1], epsilon=1e-8)
    return meta.DistributedShampoo(parameters, precondition_frequency=period, grafting_config=grafting, **options)


def vyas_soap(parameters, period, lr=1e-3):
    from soap import SOAP

    return SOAP(parameters, lr=lr, precondition_frequency=period, weight_decay=DECAY)


def heavyball_soap(parameters, period, lr=1e-3):
    import heavyball

    heavyball.utils.compile_mode = None  # compiling takes minutes, and autotuning more
    options = {"max_precond_dim": 10000, "merge_dims": False, "use_precond_schedule": False, "weight_decay": DECAY}
    return heavyball.SOAP(parameters, lr=lr, betas=(0.95, 0.95), precondition_frequency=period, **options)


def emerging_soap(parameters, period):
    from emerging_optimizers.legacy_soap.soap import SOAP

    return SOAP(parameters, lr=1e-3, weight_decay=DECAY)


def dion_muon(parameters, period, lr=1e-3, **options):
    from dion import Muon

    return Muon(parameters, lr=lr, mu=0.95, nesterov=True, weight_decay=DECAY, **options)


def emerging_muon(parameters, period):
    from emerging_optimizers.orthogonalized_optimizers.muon import Muon

    return Muon(parameters, lr=1e-3, weight_decay=DECAY, nesterov=True)


def adamw_8bit(parameters, period):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-3)


def of_torch(name, **options):
    return lambda parameters, period: getattr(torch.optim, name)(parameters, **options)


# A peer's name in the table, the module it needs, and its maker.
PEERS = {
    "torch fused": ("torch", of_torch("AdamW", lr=1e-3, fused=True)),
    "torch foreach": ("torch", of_torch("AdamW", lr=1e-3, foreach=True)),
    "torch Muon": ("torch", of_torch("Muon", lr=1e-3, weight_decay=DECAY)),
    "plain PyTorch Shampoo": ("torch", PlainShampoo),
    "plain PyTorch SOAP": ("torch", PlainSoap),
    "Meta": ("distributed_shampoo", meta_shampoo),
    "nikhilvyas": ("soap", vyas_soap),
    "HeavyBall": ("heavyball", heavyball_soap),
    "Emerging-Optimizers SOAP": ("emerging_optimizers", emerging_soap),
    "Emerging-Optimizers Muon": ("emerging_optimizers", emerging_muon),
    "Dion": ("dion", dion_muon),
    "bitsandbytes, 8 bits": ("bitsandbytes", adamw_8bit),
}
