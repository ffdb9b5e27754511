"""Gradients of the matrix functions: by differences in float64, by a second formula for the same derivative, and errors
of functions without one.

Powers and roots require symmetric matrices, so differences are taken through the symmetric part of a free matrix.
"""

import pytest
import torch
import torchium.linalg as linalg
from torchium.utils.cuda_kernels import CUDAMatrixOps, CUDAMemoryOps

gradcheck = torch.autograd.gradcheck
gradgradcheck = torch.autograd.gradgradcheck


def free(*shape, device):
    return torch.randn(*shape, dtype=torch.float64).to(device).requires_grad_()


def symmetric(x):
    return (x + x.mT) / 2


def with_spectrum(values, device):
    """Random eigenvectors; one matrix for each row of values."""
    w = torch.tensor(values, dtype=torch.float64)
    q, _ = torch.linalg.qr(torch.randn(*w.shape, w.shape[-1], dtype=torch.float64))
    return symmetric((q * w.unsqueeze(-2)) @ q.mT).to(device).requires_grad_()


# --- powers and roots


SPECTRA = {
    "apart": [[0.3, 1.0, 2.5, 4.0], [0.2, 0.9, 1.1, 3.0]],
    "equal": [[1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 2.0, 2.0]],
    "nearly equal": [[1.0, 1.0 + 1e-9, 1.0 + 2e-9, 2.0], [0.5, 0.5 + 1e-13, 0.7, 0.7 + 1e-12]],
    "clamped": [[-1.0, -0.4, 0.5, 2.0], [-0.3, -0.3, 0.8, 0.8]],
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_powers_and_roots(device, spectrum):
    a = with_spectrum(SPECTRA[spectrum], device)
    assert gradcheck(lambda x: linalg.matrix_power(symmetric(x), -0.25, 0.1), a)
    if spectrum != "clamped":
        assert gradcheck(lambda x: linalg.inverse_root(symmetric(x), 4, 0.1, method="eigen"), a)
    if spectrum == "apart":
        assert gradcheck(lambda x: linalg.inverse_root(symmetric(x), 3, 0.0, 0.1, method="eigen"), a)


def test_every_method_has_the_same_gradient(device):
    a = with_spectrum([[0.5, 1.0, 2.0, 3.0]], device)
    gradients = []
    for method in ["auto", "eigen", "newton"] + ["rational"] * (device == "cpu"):
        x = linalg.inverse_root(a, 4, relative_eps=0.01, method=method)
        gradients.append(torch.autograd.grad(x.square().sum(), a)[0])
    for each in gradients[1:]:
        assert torch.allclose(each, gradients[0], rtol=1e-6, atol=1e-9)


def test_gradients_in_every_layout(device):
    """Of a view, and with a weight that is one number expanded or transposed."""
    a = with_spectrum([[0.3, 1.0, 2.0]] * 4, device)
    view = torch.stack([a.detach(), a.detach()], -1)[..., 0].requires_grad_()
    weight = torch.randn(4, 3, 3, dtype=torch.float64, device=device)
    for given in (weight.mT.contiguous().mT, weight[:1, :1, :1].expand(4, 3, 3)):
        got = torch.autograd.grad(linalg.matrix_power(view, -0.5, 0.1), view, given)[0]
        expected = torch.autograd.grad(linalg.matrix_power(a, -0.5, 0.1), a, given.contiguous())[0]
        assert torch.allclose(got, expected)


def test_residual_has_no_gradient(device):
    a = with_spectrum([[0.5, 1.0, 2.0]], device)
    x, residual = linalg.inverse_root(a, 2, eps=0.1, return_residual=True)
    assert x.requires_grad and not residual.requires_grad
    x.sum().backward()
    assert a.grad is not None


def test_singular_matrices(device):
    a = torch.zeros(2, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    x = linalg.matrix_power(a, 0.5)
    with pytest.raises(RuntimeError, match="matrix 0 of a is not positive definite"):
        x.sum().backward()


def test_a_tensor_that_was_changed(device):
    a = with_spectrum([[0.5, 1.0, 2.0]], device)
    b = a * 1.0
    x = linalg.matrix_power(b, -0.5, 0.1)
    b.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        x.sum().backward()


def test_powers_are_differentiated_once(device):
    a = with_spectrum([[0.5, 1.0, 2.0]], device)
    for function, name in (
        (lambda x: linalg.matrix_power(x, -0.5, 0.1), "matrix_power"),
        (lambda x: linalg.inverse_root(x, 2, eps=0.1), "inverse_root"),
    ):
        (gradient,) = torch.autograd.grad(function(a).square().sum(), a, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name} can be differentiated once"):
            gradient.sum().backward()


# --- products


def products(device):
    def t(*shape):
        return free(*shape, device=device)

    yield "matmul", linalg.matmul, (t(2, 3), t(3, 4))
    yield "matmul broadcast", linalg.matmul, (t(2, 1, 3, 2), t(4, 2, 3))
    yield "chunked", lambda a, b: CUDAMemoryOps.memory_efficient_matmul(a, b, 1 << 16), (t(5, 2, 3), t(3, 4))
    yield "gram", linalg.gram, (t(2, 3, 4),)
    yield "gram transposed", lambda a: linalg.gram(a, True, 0.5), (t(2, 3, 4),)
    yield "kronecker", CUDAMatrixOps.kronecker_product_approx, (t(2, 3), t(4, 2))
    yield "kronecker broadcast", linalg.kronecker_product, (t(3, 1, 2, 3), t(2, 2, 1))
    yield "kronecker matmul", CUDAMatrixOps.kronecker_matmul, (t(2, 3), t(4, 2), t(6, 2))
    yield "kronecker matmul broadcast", linalg.kronecker_matmul, (t(2, 3), t(3, 1, 2, 2), t(2, 6, 1))
    yield "kronecker apply", linalg.kronecker_apply, (t(2, 3), t(4, 2), t(3, 2))
    yield "kronecker apply broadcast", linalg.kronecker_apply, (t(2, 1, 2, 3), t(1, 2), t(3, 3, 2))


PRODUCTS = [name for name, _, _ in products("cpu")]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(device, name):
    function, inputs = next((f, x) for n, f, x in products(device) if n == name)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)
    for k in range(len(inputs)):
        # One input at a time: unneeded gradients are not computed.
        some = [x.detach().requires_grad_(i == k) for i, x in enumerate(inputs)]
        result = function(*some)
        weight = torch.randn_like(result)
        (alone,) = torch.autograd.grad(result, some[k], weight)
        together = torch.autograd.grad(function(*inputs), inputs, weight)
        assert torch.allclose(alone, together[k])


def test_symmetric_product(device):
    a = with_spectrum([[0.5, 1.0, 2.0]] * 2, device)
    weight = torch.randn(2, 3, 3, dtype=torch.float64, device=device)
    (got,) = torch.autograd.grad(linalg.symmetric_product(a, a), a, weight)
    (expected,) = torch.autograd.grad(a @ a, a, weight)
    assert torch.allclose(got, expected)


# --- refusals


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("eigh", linalg.eigh),
        ("orthogonalize", CUDAMatrixOps.orthogonalize),
        ("kronecker_solve", lambda a: CUDAMatrixOps.kronecker_solve(a.detach(), a.detach(), a, 0.1)),
        ("nearest_kronecker", lambda a: CUDAMatrixOps.nearest_kronecker(a, (2, 2), (2, 2))),
        ("a product with out", lambda a: CUDAMemoryOps.memory_efficient_matmul(a, a, out=torch.empty_like(a))),
    ],
)
def test_functions_without_a_gradient(device, name, function):
    a = torch.eye(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{name} has no gradient, and .* requires one.*detach"):
        function(a)
    with torch.no_grad():
        function(a)
    function(a.detach())


def test_operators_without_a_gradient(device):
    a = torch.eye(4, device=device, requires_grad=True)
    x = torch.ops.torchium.orthogonalize(a, 5, "muon")
    with pytest.raises(RuntimeError, match="orthogonalize has no gradient"):
        x.sum().backward()


def test_forward_mode_is_refused():
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        a = forward.make_dual(torch.eye(3), torch.ones(3, 3))
        with pytest.raises(NotImplementedError, match="a has a tangent"):
            linalg.matrix_power(a, -0.5, 0.1)
        linalg.matrix_power(torch.eye(3), -0.5, 0.1)
    with pytest.raises(NotImplementedError, match="a has a tangent"):
        torch.func.jvp(lambda x: linalg.matmul(x, x), (torch.eye(3),), (torch.ones(3, 3),))


# --- transforms


def test_vmap(device):
    a = with_spectrum([[0.5, 1.0, 2.0]] * 4, device).detach()
    b = torch.randn(3, 5, dtype=torch.float64, device=device)
    mapped = torch.vmap(lambda x: linalg.matrix_power(x, -0.5, 0.1))(a)
    assert torch.allclose(mapped, linalg.matrix_power(a, -0.5, 0.1))
    assert torch.allclose(torch.vmap(linalg.matmul, (0, None))(a, b), a @ b)
    assert torch.allclose(torch.vmap(linalg.matmul, (1, None), 1)(a.transpose(0, 1), b), (a @ b).transpose(0, 1))
    root, residual = torch.vmap(lambda x: linalg.inverse_root(x, 2, eps=0.1, return_residual=True))(a)
    assert root.shape == (4, 3, 3) and residual.shape == (4,)
    # With its own leading dimensions, and one of the two not mapped over.
    c = torch.randn(2, 3, 3, dtype=torch.float64, device=device)
    assert torch.allclose(torch.vmap(linalg.matmul, (0, None))(a, c), a.unsqueeze(1) @ c)
    applied = torch.vmap(linalg.kronecker_apply, (None, 0, None))(c, a, c)
    assert torch.allclose(applied, c @ c @ a.unsqueeze(1).mT)


def test_functional_gradients(device):
    a = with_spectrum([[0.5, 1.0, 2.0]] * 4, device)

    def loss(x):
        return linalg.matrix_power(x, -0.5, 0.1).square().sum()

    (expected,) = torch.autograd.grad(loss(a), a)
    assert torch.allclose(torch.func.grad(loss)(a.detach()), expected)
    assert torch.allclose(torch.vmap(torch.func.grad(loss))(a.detach()), expected)
    summed = torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(a.detach())
    assert torch.allclose(summed, expected)
    b = free(3, 2, device=device)
    jacobian = torch.func.jacrev(lambda x: linalg.kronecker_matmul(x, x, b.detach()[:1]))
    x = free(2, 1, device=device).detach()
    assert torch.allclose(jacobian(x), torch.func.jacrev(lambda x: torch.kron(x, x) @ b.detach()[:1])(x))
    with pytest.raises(RuntimeError, match="matrix_power can be differentiated once"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(a.detach())
