"""An optimizer whose update is a custom kernel: AdamW, written in four lines of C.

    python custom_kernel.py                                        # a few seconds
    python custom_kernel.py --steps 1000 --device cpu

`torchium.elementwise` makes one kernel of the whole update, so that every number is read once and written once. The
same network is trained by torch.optim.AdamW from the same start, and at the end the two sets of weights are compared.
"""

import argparse
import copy
import sys

import torch
import torchium
from torch import nn

# p is the weight, g its gradient, m and v the running means of g and g². fix1 and fix2 are 1 - beta^step.
update = torchium.elementwise(
    "float p, float g, float m, float v, "
    "float lr, float beta1, float beta2, float eps, float decay, float fix1, float fix2",
    "float p_next, float m_next, float v_next",
    """
    m_next = m + (1 - beta1) * (g - m);
    v_next = beta2 * v + (1 - beta2) * g * g;
    p_next = p * (1 - lr * decay);
    p_next -= lr / fix1 * m_next / (sqrtf(v_next) / sqrtf(fix2) + eps);
    """,
    name="adamw",
)


class OwnAdamW(torch.optim.Optimizer):
    """AdamW: p -= lr (m / fix1 / (√(v / fix2) + ε) + λ p), m and v the running means of the gradient and its square."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                fixes = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                m, v = state["m"], state["v"]
                numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], *fixes)
                update(p, p.grad, m, v, *numbers, out=(p, m, v))  # each output takes the place of an input
        return loss


def bar(step: int, steps: int, loss: float) -> None:
    """Progress on a terminal, and nothing elsewhere."""
    if sys.stderr.isatty():
        done = 30 * step // steps
        print(f"\r[{'#' * done}{'.' * (30 - done)}] {step}/{steps}  loss {loss:.4f}", end="", file=sys.stderr)
        if step == steps:
            print(file=sys.stderr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    """Learns sin(3 x) + y² from random points."""
    points = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        x = (4 * torch.rand(256, 2, generator=points) - 2).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x)[:, 0], torch.sin(3 * x[:, 0]) + x[:, 1] ** 2)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps:
            bar(step, steps, loss.item())
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torchium.is_available("cuda") else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)
    models = []
    for name, kind in (("torch.optim.AdamW", torch.optim.AdamW), ("own kernel", OwnAdamW)):
        model = copy.deepcopy(start)
        loss = train(model, kind(model.parameters(), lr=args.lr), args.steps, args.device)
        print(f"{name:<18} loss {loss:.6f} after {args.steps} steps on {args.device}")
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    print(f"largest difference of a weight: {(models[0] - models[1]).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
