"""Kernels of the user's in optimizers: the same training as by the built-in where they do the same, the built-in itself
where they cannot be used, and everything else an optimizer does with them in it.
"""

import copy
import pickle
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torchium  # noqa: E402
from optim_cases import (  # noqa: E402
    KINDS,
    LIVELY,
    assert_same_bits,
    copies,
    make,
    small,
    through_file,
    train,
)
from torchium.optim import SGD, AdamW, Shampoo, StepKernel  # noqa: E402

ADAMW = """
__device__ void own_adamw(tch_element &e, const tch_numbers &k)
{
    e.m = k.beta1 * e.m + k.one_minus_beta1 * e.g;
    e.v = k.beta2 * e.v + k.one_minus_beta2 * e.g * e.g;
    e.p -= k.lr * (e.m / k.correction1 / (sqrt(e.v / k.correction2) + k.eps) + k.weight_decay * e.p);
}
"""
LION = """
__device__ void lion(tch_element &e, const tch_numbers &k)
{
    tch_real u = (tch_real)0.9 * e.m + (tch_real)0.1 * e.g;
    e.p -= k.lr * ((u > 0) - (u < 0) + k.weight_decay * e.p);
    e.m = k.momentum * e.m + (1 - k.momentum) * e.g;
}
"""
# Newton's iteration for the power -1/root of a matrix with eigenvalues in (0, 1]; X and M commute, and M goes to I.
NEWTON = """
template <typename T> __device__ void multiply(const T *a, const T *b, T *c, int n)
{
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        T sum = 0;
        for (int k = 0; k < n; k++) sum += a[e / n * n + k] * b[k * n + e % n];
        c[e] = sum;
    }
    __syncthreads();
}

template <typename T> __global__ void newton(const T *factors, T *roots, T *scratch, int n, int root)
{
    const int size = n * n;
    const T *a = factors + (long long)blockIdx.x * size, start = T(0.5) * (root + 1);
    T *x = scratch + (long long)blockIdx.x * 4 * size, *m = x + size, *t = m + size, *other = t + size, *swap;
    T *result = roots + (long long)blockIdx.x * size, *spare = result;
    for (int e = threadIdx.x; e < size; e += blockDim.x) {
        m[e] = start * a[e];
        x[e] = e / n == e % n ? pow(start, T(1) / root) : T(0);
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
BROKEN = {
    "does not compile": ("__device__ void f(tch_element &e, const tch_numbers &k) { e.p = undefined_thing; }", 0.0),
    "other parameters": ("__device__ void f(tch_element &e) { e.p = 0; }", 0.0),
    "not a number": ("__device__ void f(tch_element &e, const tch_numbers &k) { e.p = sqrt(-1 - e.p * e.p); }", 0.0),
    "another update": ("__device__ void f(tch_element &e, const tch_numbers &k) { e.p -= k.lr * e.g; }", 1e-3),
}


def newton(dtype="float", **options):
    return StepKernel(NEWTON, f"newton<{dtype}>", **options)


def trained(optimizer_of, device, steps=8, dtype=torch.float32, model_of=small):
    """The parameters after some steps, and the optimizer."""
    model = model_of(device, dtype)
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer, steps)
    return copies(model.parameters()), optimizer


def adamw(params, **options):
    return AdamW(params, **(LIVELY["adamw"] | options))


def difference(first, second):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(first, second, strict=True))


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, options, bound",
    [
        # Eight steps of at most lr each, in which an operation rounds differently now and then.
        (torch.float32, {}, 1e-6),
        (torch.float64, {}, 1e-14),
        (torch.bfloat16, {"master_weights": True}, 2**-8),  # one rounding of a parameter near 1 may fall otherwise
        (torch.float32, {"maximize": True}, 1e-6),
    ],
)
def test_adamw_of_ones_own_is_adamw(device, dtype, options, bound):
    kernel = StepKernel(ADAMW, tolerance=1e-4)
    expected, _ = trained(lambda p: adamw(p, **options), device, dtype=dtype)
    start = copies(small(device, dtype).parameters())
    found, optimizer = trained(lambda p: adamw(p, update_kernel=kernel, **options), device, dtype=dtype)
    report = optimizer.stats()["kernels"]["update"]
    assert report["in_use"] and report["left"] == 0, report["reason"]
    assert report["reason"] == ""
    assert report["served"] == len(expected) and report["launches"] >= 8 and report["worst"] <= 1e-4
    assert difference(start, found) > 10 * bound
    assert difference(expected, found) <= bound


def test_another_rule(device):
    """Lion, which the library does not have, beside the same in float64."""
    shapes = [(3, 5), (17,), (), (1025,)]
    params = [torch.randn(s, device=device).requires_grad_() for s in shapes]
    expected = [p.detach().double() for p in params]
    means = [torch.zeros_like(p) for p in expected]
    optimizer = SGD(params, lr=0.01, momentum=0.99, weight_decay=0.1, update_kernel=LION)
    for _ in range(5):
        for p, q, m in zip(params, expected, means, strict=True):
            p.grad = torch.randn_like(p)
            u = 0.9 * m + 0.1 * p.grad.double()
            q -= 0.01 * (u.sign() + 0.1 * q)
            m.mul_(0.99).add_(p.grad.double(), alpha=0.01)
        optimizer.step()
    assert optimizer.stats()["kernels"]["update"]["in_use"]
    assert difference(params, expected) <= 1e-5  # a few roundings of numbers below 4 in each of five steps


@pytest.mark.parametrize("kind", ["shampoo", "soap", "muon", "normuon"])
def test_the_adamw_of_other_optimizers(kind, device):
    """With gradients that do not depend on the parameters matrices stay the same to the bit."""
    shapes = [(12, 7), (33,), (), (9, 9)]
    gradients = [[torch.randn(s, device=device) for s in shapes] for _ in range(4)]
    results = []
    for options in ({}, {"update_kernel": StepKernel(ADAMW, tolerance=1e-4)}):
        params = [torch.ones(s, device=device).requires_grad_() for s in shapes]
        optimizer = make(kind, params, **options)
        for step in gradients:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            optimizer.step()
        results.append(copies(params))
    report = optimizer.stats()["kernels"]["update"]
    assert report["in_use"] and report["served"] == 2 and report["left"] == 0
    for shape, expected, found in zip(shapes, *results, strict=True):
        if len(shape) == 2:
            assert_same_bits([expected], [found])
        else:
            assert difference([expected], [found]) <= 1e-6


def test_scaled_gradients_and_skipped_steps(device):
    p, q = (torch.linspace(-1, 1, 33, device=device).requires_grad_() for _ in range(2))
    own, built_in = adamw([p], update_kernel=StepKernel(ADAMW, tolerance=1e-4)), adamw([q])
    for value in (1.0, torch.inf, -2.0):
        for x, optimizer in ((p, own), (q, built_in)):
            x.grad = torch.full_like(x, value * 1024)
            optimizer.grad_scale = torch.tensor(1024.0, device=device)
            optimizer.found_inf = torch.tensor(float(value == torch.inf), device=device)
            before = x.detach().clone()
            optimizer.step()
            assert torch.equal(before, x) == (value == torch.inf)
    assert own.stats()["skipped"] == 1 and difference([p], [q]) <= 1e-6


# --- roots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, name", [(torch.float32, "float"), (torch.float64, "double")])
def test_roots_of_ones_own(device, dtype, name):
    options = {"lr": 0.02, "update_freq": 2, "relative_eps": 1e-3, "root_tolerance": 1e-4, "precision": "highest"}
    expected, _ = trained(lambda p: Shampoo(p, **options), device, dtype=dtype)
    found, optimizer = trained(lambda p: Shampoo(p, root_kernel=newton(name), **options), device, dtype=dtype)
    stats = optimizer.stats()
    report = stats["kernels"]["root"]
    assert report["in_use"], report["reason"]
    assert report["left"] == 0 and report["refused"] == 0 and report["launches"] > 0
    assert report["served"] == optimizer.memory_report()["factors"] and report["worst"] <= 1e-4
    assert stats["worst_residual"] <= 1e-4 and stats["failed"] == 0
    # Eight steps of 0.02 in directions that two roots, each wrong by at most 1e-4 on either side, have made.
    assert difference(expected, found) <= 8 * 0.02 * 4e-4 * 10


def test_roots_of_the_other_type_stay_built_in(device):
    expected, _ = trained(lambda p: make("shampoo", p), device, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="the built-in is used"):
        found, optimizer = trained(
            lambda p: make("shampoo", p, root_kernel=newton("float")), device, dtype=torch.float64
        )
    report = optimizer.stats()["kernels"]["root"]
    assert not report["in_use"] and report["served"] == 0 and report["left"] > 0 and report["reason"]
    assert_same_bits(expected, found)


def test_larger_factors_are_left(device):
    kernel = newton(max_size=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was asked for
        _, optimizer = trained(lambda p: make("shampoo", p, relative_eps=1e-3, root_kernel=kernel), device, 3)
    report = optimizer.stats()["kernels"]["root"]
    assert report["in_use"] and report["served"] > 0 and report["left"] > 0


def test_a_kernel_of_torchium_kernel_is_one_of_roots():
    made = torchium.kernel(NEWTON, "newton<float>")
    _, optimizer = trained(lambda p: make("shampoo", p, relative_eps=1e-3, root_kernel=made), "cpu", 3)
    assert optimizer.stats()["kernels"]["root"]["in_use"]


# --- kernels that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BROKEN)
def test_the_built_in_takes_over(device, case):
    source, tolerance = BROKEN[case]
    kernel = StepKernel(source, "f", tolerance=tolerance)
    expected, _ = trained(adamw, device)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found, optimizer = trained(lambda p: adamw(p, update_kernel=kernel), device)
    assert_same_bits(expected, found)
    report = optimizer.stats()["kernels"]["update"]
    assert not report["in_use"] and report["served"] == 0 and report["launches"] == 0
    if case == "does not compile":
        assert "undefined_thing" in report["reason"]
    told = [w for w in heard if w.category is RuntimeWarning]
    assert len(told) == 1 and report["reason"] in str(told[0].message) and Path(told[0].filename).name != "base.py"


def test_roots_that_are_wrong(device):
    source = """__global__ void same(const float *factors, float *roots, float *scratch, int n, int root)
    {
        for (int e = threadIdx.x; e < n * n; e += blockDim.x)
            roots[(long long)blockIdx.x * n * n + e] = factors[(long long)blockIdx.x * n * n + e];
    }"""
    expected, _ = trained(lambda p: make("shampoo", p), device)
    with pytest.warns(RuntimeWarning, match="instead of 'same' for 'root'"):
        found, optimizer = trained(lambda p: make("shampoo", p, root_kernel=source), device)
    assert not optimizer.stats()["kernels"]["root"]["in_use"]
    assert_same_bits(expected, found)


# --- wrong calls ------------------------------------------------------------------------------------------------------


def test_wrong_kernels():
    p = [torch.zeros(3, requires_grad=True)]
    wrong = [
        (ValueError, "source has no __global__ or __device__ function", "e.p = 0"),
        (ValueError, "name is needed: the source has no function of a 'tch_element &'", "__device__ int f() {}"),
        (ValueError, "name is needed: the source has the functions lion, own_adamw", LION + ADAMW),
        (TypeError, "the kernel for 'update' must be", 3),
        (TypeError, "the kernel for 'update' must be", b"__device__"),
        (FileNotFoundError, "absent.cu", "absent.cu"),
    ]
    for kind, message, given in wrong:
        with pytest.raises(kind, match=message):
            AdamW(p, update_kernel=given)
        with pytest.raises(kind, match=message):
            AdamW(p).set_kernel("update", given)
    options = [
        (TypeError, "name must be a str", {"name": 3}),
        (TypeError, "options must be a sequence of str", {"options": "-DX"}),
        (TypeError, r"include_dirs\[0\] must be a str", {"include_dirs": [3]}),
        (TypeError, "tolerance must be a number", {"tolerance": "1"}),
        (ValueError, "tolerance is -1.0, expected a finite number", {"tolerance": -1}),
        (ValueError, "tolerance is nan", {"tolerance": float("nan")}),
        (TypeError, "max_size must be an int", {"max_size": 1.0}),
        (ValueError, "threads is -1", {"threads": -1}),
        (TypeError, "cache must be True or False", {"cache": 1}),
    ]
    for kind, message, given in options:
        with pytest.raises(kind, match=message):
            StepKernel(ADAMW, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_parts(kind):
    optimizer = make(kind, [torch.zeros(3, requires_grad=True)])
    for part in ("roots", None, 3, *([] if kind == "shampoo" else ["root"])):
        with pytest.raises(ValueError, match=r"part is .*, expected .*'update'"):
            optimizer.set_kernel(part, ADAMW)
    assert "kernels" not in optimizer.stats()


def test_a_call_that_is_refused_changes_nothing(device):
    """An option that no compiler gets, which only the library knows."""
    model = small(device)
    optimizer = adamw(model.parameters(), update_kernel=StepKernel(ADAMW, tolerance=1e-4))
    train(model, optimizer, 2)
    before = optimizer.stats()["kernels"]
    with pytest.raises(ValueError, match=r"options\[0\]"):
        optimizer.set_kernel("update", StepKernel(ADAMW, options=["-fplugin=x"]))
    with pytest.raises(ValueError, match="they are for roots"):
        optimizer.set_kernel("update", StepKernel(ADAMW, threads=32))
    assert optimizer.stats()["kernels"] == before
    other = adamw(small(device).parameters(), update_kernel=StepKernel(ADAMW, options=["-fplugin=x"]))
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"options\[0\]"):
        other.step()


# --- in the life of an optimizer --------------------------------------------------------------------------------------


def test_a_kernel_comes_and_goes(device):
    """A tolerance of 0 lets any update pass: with one that moves nothing it is seen when it is in use."""
    still = "__device__ void still(tch_element &e, const tch_numbers &k) { e.m = e.m; }"
    model = small(device)
    optimizer = adamw(model.parameters())
    train(model, optimizer, 2)
    before = copies(model.parameters())
    optimizer.set_kernel("update", still)
    train(model, optimizer, 2)
    assert_same_bits(before, copies(model.parameters()))
    assert optimizer.stats()["kernels"]["update"]["launches"] >= 2
    optimizer.set_kernel("update", None)
    assert "kernels" not in optimizer.stats()
    train(model, optimizer, 1)
    assert difference(before, copies(model.parameters())) > 1e-4


def test_before_the_first_step():
    optimizer = adamw([torch.zeros(3, requires_grad=True)], update_kernel=ADAMW)
    report = optimizer.stats()["kernels"]["update"]
    assert not report["in_use"] and report["reason"] == "no step has been taken yet"


def test_nothing_to_do():
    """A kernel that no parameter needs is no reason for a warning."""
    matrix, vector = torch.ones(3, 4, requires_grad=True), torch.ones(3, requires_grad=True)
    for p in (matrix, vector):
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p, part, kernel in ((matrix, "update", StepKernel(ADAMW)), (vector, "root", newton())):
            optimizer = Shampoo([p], **{f"{part}_kernel": kernel})
            optimizer.step()
            report = optimizer.stats()["kernels"][part]
            assert not report["in_use"] and report["served"] == report["left"] == 0 and report["reason"]


def test_warnings_as_errors_change_nothing(device):
    model = small(device)
    optimizer = adamw(model.parameters(), update_kernel=StepKernel(ADAMW, tolerance=1e-4))
    train(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="instead of 'f'"):
            optimizer.set_kernel("update", StepKernel(BROKEN["does not compile"][0], "f"))
    report = optimizer.stats()["kernels"]["update"]
    assert report["in_use"] and report["left"] == 0


def test_groups_that_come_later(device):
    model, extra = small(device), torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = adamw(model.parameters(), update_kernel=StepKernel(ADAMW, tolerance=1e-4))
    train(model, optimizer, 2)
    served = optimizer.stats()["kernels"]["update"]["served"]
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    optimizer.zero_grad()
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    report = optimizer.stats()["kernels"]["update"]
    assert report["served"] == served + 1 and report["left"] == 0
    assert torch.allclose(extra, torch.full_like(extra, 1 - 0.5 * (1 + 0.1)))


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "state_dict"])
def test_copies_go_on_alike(device, way):
    kernels = {"update_kernel": StepKernel(ADAMW, tolerance=1e-4), "root_kernel": newton()}
    model = small(device)
    optimizer = make("shampoo", model.parameters(), relative_eps=1e-3, **kernels)
    train(model, optimizer, 5)
    if way == "state_dict":
        twin = copy.deepcopy(model)
        other = make("shampoo", twin.parameters(), relative_eps=1e-3, **kernels)
        saved = through_file(optimizer.state_dict())
        assert "kernels" not in str(sorted(saved["param_groups"][0]))
        other.load_state_dict(saved)
    elif way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 4, first=5)
    train(twin, other, 4, first=5)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))
    reports = other.stats()["kernels"]
    assert reports["update"]["in_use"] and reports["root"]["in_use"], reports


def test_pickles_without_kernels():
    """Of optimizers from before there were any."""
    model = small()
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    state = optimizer.__getstate__()
    del state["_kernels"]
    other = AdamW.__new__(AdamW)
    other.__setstate__(state)
    train(model, other, 1)
    assert "kernels" not in other.stats()


def test_a_file_with_an_include(device, tmp_path):
    (tmp_path / "update.h").write_text(ADAMW)
    (tmp_path / "update.cu").write_text('#include "update.h"\n')
    for source in (tmp_path / "update.cu", str(tmp_path / "update.cu")):
        kernel = StepKernel(source, "own_adamw", tolerance=1e-4)
        expected, _ = trained(adamw, device, 2)
        found, optimizer = trained(lambda p, k=kernel: adamw(p, update_kernel=k), device, 2)
        assert optimizer.stats()["kernels"]["update"]["in_use"]
        assert difference(expected, found) <= 1e-6
    assert pickle.loads(pickle.dumps(kernel)) == kernel and repr(kernel) == "<torchium.optim.StepKernel 'own_adamw'>"


def test_its_name_of_before():
    """It shared that with what torchium.kernel returns. Pickles have it by its module."""
    with pytest.warns(DeprecationWarning, match=r"torchium\.optim\.Kernel is called torchium\.optim\.StepKernel now"):
        assert torchium.optim.Kernel is StepKernel
    assert torchium.optim.kernel.Kernel is StepKernel
    with pytest.raises(AttributeError, match="has no attribute 'Kernels'"):
        torchium.optim.Kernels  # noqa: B018


def test_create_optimizer_takes_kernels():
    model = small()
    optimizer = torchium.create_optimizer("adamw", model, update_kernel=ADAMW)
    train(model, optimizer, 1)
    assert optimizer.stats()["kernels"]["update"]["in_use"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "shampoo"])
def test_in_a_cuda_graph(kind, device):
    if device == "cpu":
        pytest.skip("wants a GPU")
    options = {"update_kernel": StepKernel(ADAMW, tolerance=1e-4)}
    if kind == "shampoo":
        options |= {"root_kernel": newton(), "relative_eps": 1e-3, "update_freq": 1}
    results = []
    for captured in (False, True):
        generator = torch.Generator(device).manual_seed(5)
        params = [torch.zeros(s, device=device).requires_grad_() for s in ((45, 30), (77,), (33, 33))]
        for p in params:
            p.data.normal_(generator=generator)
            p.grad = torch.zeros_like(p)
        optimizer = make(kind, params, **options)
        go, graph = optimizer.step, torch.cuda.CUDAGraph()
        for step in range(7):
            for p in params:
                p.grad.normal_(generator=generator)
            if captured and step == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    optimizer.step()
                go = graph.replay
            go()
        results.append(copies(params))
        assert all(report["in_use"] for report in optimizer.stats()["kernels"].values())
    assert_same_bits(*results)


@pytest.mark.gpu
def test_groups_on_several_devices(device):
    if device == "cpu":
        pytest.skip("wants a GPU")
    params = [torch.ones(n, device=d).requires_grad_() for n, d in ((3, "cpu"), (5, device))]
    optimizer = adamw(params, update_kernel=StepKernel(ADAMW, tolerance=1e-4))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    report = optimizer.stats()["kernels"]["update"]
    assert report["in_use"] and report["served"] == 2 and report["left"] == 0
    assert torch.allclose(params[0][:3], params[1][:3].cpu(), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:AdamW. the built-in is used")
def test_moments_in_less_memory_stay_with_the_built_in(device):
    """The kernel gets what keeps float32; the rest goes the built-in's way, to the bit, and the reason is given."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(80, 64).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = AdamW(models[0].parameters(), state_dtype="int8", update_kernel=ADAMW)
    plain = AdamW(models[1].parameters(), state_dtype="int8")
    for _ in range(3):
        x = torch.randn(7, 80, device=device)
        for model, optimizer in zip(models, (ours, plain), strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.bias.grad = torch.full_like(model.bias, 0.1)
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
    told = ours.stats()["kernels"]["update"]
    assert (told["served"], told["left"]) == (1, 1)
    assert "state_dtype" in told["reason"]
    assert_same_bits([models[0].weight], [models[1].weight])
    torch.testing.assert_close(models[0].bias, models[1].bias)
