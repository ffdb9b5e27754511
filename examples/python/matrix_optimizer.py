"""An optimizer written in Python, with a custom CUDA kernel inside: Shampoo on torchium.optim.MatrixOptimizer.

    python matrix_optimizer.py                                  # a few seconds
    python matrix_optimizer.py --steps 1000 --device cpu

The class has what is Shampoo's: two factors for each matrix, their inverse roots, the direction. The base class brings
the rest: all matrices of a shape at once, AdamW for biases, schedules, mixed precision, skipped steps, checkpoints. The
roots are computed by the kernel below, on a GPU or on the CPU, and by the library where that cannot be compiled.
"""

import argparse
import copy

import torch
import torchium
from torch import nn
from torchium import linalg

# Newton's iteration for A^(-1/root), A with eigenvalues in (0, 1]. Each block of threads has one matrix.
NEWTON = """
__device__ void multiply(const float *a, const float *b, float *c, int n)
{
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        float sum = 0;
        for (int k = 0; k < n; k++) sum += a[e / n * n + k] * b[k * n + e % n];
        c[e] = sum;
    }
    __syncthreads();
}

__global__ void newton(const float *factors, float *roots, float *scratch, int n, int root)
{
    const int size = n * n;
    const float *a = factors + (long long)blockIdx.x * size, start = 0.5f * (root + 1);
    float *x = scratch + (long long)blockIdx.x * 4 * size, *m = x + size, *t = m + size, *other = t + size, *swap;
    float *result = roots + (long long)blockIdx.x * size, *spare = result;
    for (int e = threadIdx.x; e < size; e += blockDim.x) {
        m[e] = start * a[e];                                        // its eigenvalues go to 1
        x[e] = e / n == e % n ? powf(start, 1.0f / root) : 0.0f;    // goes to the root
    }
    __syncthreads();
    for (int step = 0; step < 48; step++) {
        for (int e = threadIdx.x; e < size; e += blockDim.x) t[e] = ((e / n == e % n) * (root + 1) - m[e]) / root;
        __syncthreads();
        multiply(x, t, spare, n);
        swap = x, x = spare, spare = swap;
        for (int i = 0; i < root; i++) {
            multiply(t, m, other, n);
            swap = m, m = other, other = swap;
        }
    }
    for (int e = threadIdx.x; e < size && x != result; e += blockDim.x) result[e] = x[e];
}
"""


class OptimizedShampoo(torchium.optim.MatrixOptimizer):
    """Shampoo with a custom kernel for the roots, and the length of the gradient for its steps."""

    def __init__(self, params, lr=0.1, beta2=0.95, eps=1e-4, update_freq=10, kernel=NEWTON, **options):
        super().__init__(params, lr, beta2=beta2, eps=eps, update_freq=update_freq, **options)
        self.kernel, self.reason = torchium.kernel(kernel, "newton"), ""

    def init_state(self, gradients, group):
        state = {}
        for side, n in (("left", gradients.shape[1]), ("right", gradients.shape[2])):
            identity = torch.eye(n, dtype=gradients.dtype, device=gradients.device).expand(len(gradients), n, n)
            state |= {side: torch.zeros_like(identity), f"{side}_root": identity}
        return state

    def direction(self, gradients, state, group):
        for side in ("left", "right"):
            gram = linalg.gram(gradients, transpose=side == "right")
            state[side].lerp_(gram, 1 - group["beta2"])
            if group["step"] % group["update_freq"] == 0:
                state[f"{side}_root"] = self.inverse_root(state[side], group["eps"])
        turned = linalg.kronecker_apply(state["left_root"], state["right_root"], gradients)
        norms = [matrices.flatten(1).norm(dim=1)[:, None, None] for matrices in (gradients, turned)]
        return turned * (norms[0] / norms[1].clamp_min(1e-12))

    def inverse_root(self, factors, eps):
        """(F + eps |F| I)^(-1/4): by the kernel, or by the library where that cannot be compiled."""
        batch, n, _ = factors.shape
        norm = factors.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-30)
        damped = (factors / norm + eps * torch.eye(n, device=factors.device)) / (1 + eps)
        if not self.reason:
            try:
                roots, scratch = torch.empty_like(damped), damped.new_empty(batch, 4, n, n)
                self.kernel(batch, 256, (damped, roots, scratch, n, 4))
                return roots * ((1 + eps) * norm) ** -0.25
            except torchium.KernelError as error:
                self.reason = str(error)
        return linalg.inverse_root(damped, 4) * ((1 + eps) * norm) ** -0.25


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    """Learns sin(3 x) + y² from random points, with a learning rate that falls to 0."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    points = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        x = (4 * torch.rand(256, 2, generator=points) - 2).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x)[:, 0], torch.sin(3 * x[:, 0]) + x[:, 1] ** 2)
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--device", default="cuda" if torchium.is_available("cuda") else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(args.device)

    plain, ours, broken = (copy.deepcopy(start) for _ in range(3))
    loss = train(plain, torch.optim.SGD(plain.parameters(), args.lr), args.steps, args.device)
    print(f"SGD                    loss {loss:.6f} after {args.steps} steps on {args.device}")

    optimizer = OptimizedShampoo(ours.parameters(), args.lr, adamw_lr=0.1 * args.lr)
    loss = train(ours, optimizer, args.steps, args.device)
    print(f"Shampoo with a kernel  loss {loss:.6f}, in use: {not optimizer.reason}")

    source = NEWTON.replace("n * n", "rows * n")
    optimizer = OptimizedShampoo(broken.parameters(), args.lr, adamw_lr=0.1 * args.lr, kernel=source)
    loss = train(broken, optimizer, args.steps, args.device)
    print(f"with the library       loss {loss:.6f}, since the kernel does not compile:")
    print(next(line for line in optimizer.reason.splitlines() if "rows" in line))


if __name__ == "__main__":
    main()
