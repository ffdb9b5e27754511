"""A user's program for type checkers, not run; see test_types.py."""

from typing import assert_type

import torch
import torchium
from torch import nn
from torchium.optim import KFAC, SOAP, AdamW, AdamWArguments, KFACPreconditioner, MatrixOptimizer, Muon, Shampoo


class Orthogonal(MatrixOptimizer):
    def direction(
        self, gradients: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, object]
    ) -> torch.Tensor:
        return torchium.linalg.orthogonalize(gradients)


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    optimizer = Shampoo(
        model,
        lr=1e-3,
        precondition_frequency=10,
        grafting="adam",
        adamw=AdamWArguments(lr=3e-4),
        memory={"state_dtype": "bfloat16"},
        stagger=False,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
    assert_type(optimizer.step(lambda: 0.5), float)
    print(optimizer.summary(), optimizer.stats()["steps"], optimizer.memory_report()["state"])
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.stats()["worst_residual"]


def make(model: nn.Module) -> list[torch.optim.Optimizer]:
    assert_type(torchium.create_optimizer("soap", model), SOAP)
    assert_type(torchium.create_optimizer("muon", model, lr=0.02), Muon)
    named: torch.optim.Optimizer = torchium.create_optimizer("Sh" + "ampoo", model)
    kfac = KFACPreconditioner(model, lr=0.1, compute_method="ekfac")
    kfac.step()
    return [named, KFAC(model, method="inverse"), AdamW(model.parameters(), fused=True), Orthogonal(model, lr=0.02)]


def functions(matrix: torch.Tensor) -> torch.Tensor:
    root = torchium.linalg.inverse_root(matrix @ matrix.T, 4)
    assert_type(root, torch.Tensor)
    return torchium.linalg.orthogonalize(root)
