"""A walk through the matrix functions, in cells (`# %%`) that editors run one by one like those of a notebook.

    python matrix_functions.py                                  # a few seconds

The first half needs NumPy alone; CuPy and JAX arrays work as well. The second half wants PyTorch and is left out
without it.
"""

# ruff: noqa: E402 (a cell imports what it needs)

# %% Symmetric matrices, easy and hard
import numpy as np
from torchium import linalg

random = np.random.default_rng(0)


def positive(n: int, condition: float) -> np.ndarray:
    """A random symmetric matrix with eigenvalues from 1 / condition to 1."""
    q, _ = np.linalg.qr(random.standard_normal((n, n)))
    return (q * np.geomspace(1 / condition, 1, n)) @ q.T


conditions = (1e1, 1e4, 1e7)
a = np.stack([positive(100, c) for c in conditions])
print(f"Three symmetric matrices {a.shape[1:]} in float64, with condition numbers 1e1, 1e4 and 1e7.\n")

# %% Inverse roots and their certificate
# Shampoo multiplies gradients by A^(-1/4). `residual` says for each matrix how far X^4 A is from I, as the library
# itself has checked before it returned: a certificate, not an estimate from the iteration.
x, residual = linalg.inverse_root(a, 4, return_residual=True)
checked = [np.linalg.norm(np.linalg.matrix_power(x[i], 4) @ a[i] - np.eye(100)) / 10 for i in range(3)]
print("X = A^(-1/4), all three in one call:")
for condition, told, seen in zip(conditions, residual, checked, strict=True):
    print(f"  condition {condition:.0e}: residual {told:.1e} told by the library, |X^4 A - I| / sqrt(n) = {seen:.1e}")

# %% Damping
# A factor of few gradients is singular. `relative_eps` adds that share of the largest eigenvalue to the diagonal.
g = random.standard_normal((100, 5))
singular = g @ g.T
x, residual = linalg.inverse_root(singular, 4, relative_eps=1e-6, return_residual=True)
w = np.linalg.eigvalsh(singular)
largest = np.linalg.eigvalsh(x)[-1]
print(f"\nA matrix of rank 5 in 100 dimensions, damped by 1e-6 of its largest eigenvalue {w[-1]:.1f}:")
print(f"  residual {residual:.1e}; its inverse root is at most {largest:.3f} = ({w[-1]:.1f} * 1e-6)^(-1/4)")

# %% Any real power
half = linalg.matrix_power(a[0], 0.5)
print(f"\nA^0.5 times itself differs from A by {np.abs(half @ half - a[0]).max():.1e}.")

# %% Kronecker products that are never formed
# (A x B) vec(X) = vec(A X B'), for X of shape [rows of A, rows of B].
left, right = positive(300, 1e2), positive(200, 1e2)
v = random.standard_normal((300, 200))
y = linalg.kronecker_apply(left, right, v)
print(f"\n(A ⊗ B) X with A {left.shape} and B {right.shape}: the product has {300 * 200:,} rows and would take")
print(f"  {(300 * 200) ** 2 * 8 / 2**30:.0f} GiB; kronecker_apply takes the {y.nbytes / 2**20:.1f} MiB of its result.")
small_a, small_b, small_x = left[:4, :4], right[:3, :3], v[:4, :3]
dense = linalg.kronecker_product(small_a, small_b) @ small_x.reshape(-1)
gap = np.abs(linalg.kronecker_apply(small_a, small_b, small_x).reshape(-1) - dense).max()
print(f"  On 4 x 4 and 3 x 3 matrices, where it can be formed, both ways differ by {gap:.1e}.")

# %% The damped solve of KFAC
# (A + pi sqrt(damping) I)^(-1) X (B + sqrt(damping) / pi I)^(-1), with pi from the traces of A and B.
solved = linalg.kronecker_solve(left, right, v, damping=1e-3)
pi = np.sqrt((np.trace(left) / 300) / (np.trace(right) / 200))
back = (left + pi * np.sqrt(1e-3) * np.eye(300)) @ solved @ (right + np.sqrt(1e-3) / pi * np.eye(200))
print(f"\nkronecker_solve, multiplied back: off by {np.abs(back - v).max():.1e}, with pi = {pi:.3f}.")

# %% The nearest Kronecker product
near_a, near_b = positive(6, 10), positive(5, 10)
noisy = np.kron(near_a, near_b) + 1e-3 * random.standard_normal((30, 30))
found_a, found_b = linalg.nearest_kronecker(noisy, (6, 6), (5, 5))
error = np.linalg.norm(np.kron(found_a, found_b) - np.kron(near_a, near_b)) / np.linalg.norm(noisy)
noise = 1e-3 * 30 / np.linalg.norm(noisy)
print(f"\nFrom A ⊗ B with noise of {noise:.1e} of its size, A ⊗ B is found again up to {error:.1e}.")

# %% Orthogonalization
# Muon replaces the momentum U S V' by something near U V': a few products bring all singular values to about 1.
m = random.standard_normal((200, 100)) @ np.diag(np.geomspace(1e-2, 1, 100))
print("\nSingular values of a 200 x 100 matrix, from smallest to largest:")
s = np.linalg.svd(m, compute_uv=False)
print(f"  as it is, of the largest {s[-1] / s[0]:.3f} to 1.000")
for steps in (3, 5, 7):
    s = np.linalg.svd(linalg.orthogonalize(m, steps=steps), compute_uv=False)
    print(f"  {steps} Newton-Schulz steps    {s[-1]:.3f} to {s[0]:.3f}")

# %% From here on with PyTorch
try:
    import torch
except ImportError:
    raise SystemExit("\nThe rest needs PyTorch, which is not installed.") from None

from torchium.utils.cuda_kernels import CUDAMatrixOps, CUDAMemoryOps, get_optimal_device

device = get_optimal_device()
torch.manual_seed(0)
print(f"\nPyTorch tensors, on {device}:")

# %% Products within a budget of memory
# The product is made in chunks whose scratch stays within the budget; operands in host memory are streamed to a GPU.
p, q = torch.randn(1500, 1000), torch.randn(1000, 1200)
product = CUDAMemoryOps.memory_efficient_matmul(p, q, memory_budget=4 * 2**20)
far = (product - p @ q).abs().max() / (p @ q).abs().max()
print(f"  a product of {tuple(p.shape)} and {tuple(q.shape)} within 4 MiB of scratch: off by {far:.1e} of its largest")

# %% Autograd through a power
# The gradient of trace(A^s) is s A^(s - 1): a formula to compare with.
t = torch.from_numpy(a[0]).to(device).requires_grad_()
CUDAMatrixOps.matrix_sqrt_inv_eigen(t, power=0.5, eps=0.0).diagonal().sum().backward()
formula = 0.5 * CUDAMatrixOps.matrix_sqrt_inv_eigen(t.detach(), power=-0.5, eps=0.0)
print(f"  gradient of trace(A^0.5) against 0.5 A^(-0.5): off by {(t.grad - formula).abs().max():.1e}")

# %% A use of it: find the covariance S of data by descent, as the matrix whose S^(-1/2) makes the data white
float64 = {"dtype": torch.float64, "device": device}
rows = torch.randn(2000, 8, **float64) @ torch.randn(8, 8, **float64)
covariance = rows.T @ rows / len(rows)
factor = torch.eye(8, **float64).requires_grad_()  # S = F F' stays positive
optimizer = torch.optim.LBFGS([factor], max_iter=300, line_search_fn="strong_wolfe")


def color() -> torch.Tensor:
    root = CUDAMatrixOps.inverse_root(factor @ factor.T, 2, relative_eps=1e-12)
    return (root @ covariance @ root - torch.eye(8, **float64)).square().sum()


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = color()
    loss.backward()
    return loss


before = color().item()
optimizer.step(closure)
found = (factor @ factor.T).detach()
print(f"  |S^(-1/2) C S^(-1/2) - I|^2 goes from {before:.0f} to {color().item():.1e} with L-BFGS over S,")
print(f"  which is then the covariance C up to {((found - covariance).norm() / covariance.norm()).item():.1e}")
