"""torchium.elementwise vs PyTorch in float64: broadcasting, types, layouts, gradients."""

import random

import pytest
import torch
import torchium

# One rounding per operation: sums and products of a few numbers near 1 are within these of the float64 result.
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYOUTS = ("contiguous", "channels_last", "transposed", "strided", "expanded", "negated", "offset")


@pytest.fixture(scope="module")
def axpy():
    return torchium.elementwise(
        "T a, T x, T y", "T z", "z = a * x + y", "axpy", derivative=["grad * x", "grad * a", "grad"]
    )


@pytest.fixture(scope="module")
def power():
    return torchium.elementwise(
        "T x, T p", "T y", "y = pow(x, p)", "power", derivative={"x": "p * y / x * grad", "p": "log(x) * y * grad"}
    )


def close(result, expected, dtype=None):
    dtype = dtype or result.dtype
    assert result.dtype == dtype and result.shape == expected.shape
    bound = BOUNDS[dtype]
    assert torch.allclose(result.double().cpu(), expected.double().cpu(), rtol=bound, atol=bound)


def laid_out(x, layout):
    """The same values with another layout."""
    if layout == "channels_last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.dim() > 0:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "negated" and x.is_floating_point():
        return torch._neg_view(-x)
    if layout == "offset":
        return torch.cat([torch.full((1,), torch.nan, dtype=x.dtype, device=x.device), x.flatten()])[1:].view(x.shape)
    return x


def random_shapes(count):
    """Shapes that broadcast together."""
    full = [random.choice((1, 2, 3, 5, 17)) for _ in range(random.randrange(5))]
    if random.random() < 0.1 and full:
        full[random.randrange(len(full))] = 0
    shapes = []
    for _ in range(count):
        shape = [n if random.random() < 0.7 else 1 for n in full]
        shapes.append(shape[random.randrange(len(shape) + 1) :] if random.random() < 0.3 else shape)
    return shapes


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOUNDS)
def test_random_shapes_and_layouts(axpy, device, dtype):
    for _ in range(60):
        wide = [torch.randn(shape, dtype=torch.float64, device=device).to(dtype) for shape in random_shapes(3)]
        a, x, y = (laid_out(t, random.choice(LAYOUTS)) for t in wide)
        expected = wide[0].double() * wide[1].double() + wide[2].double()
        close(axpy(a, x, y), expected, dtype)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 255, 16384, 16385, 100_003])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_sizes(axpy, device, n, dtype):
    a, x, y = (torch.randn(n, device=device).to(dtype) for _ in range(3))
    close(axpy(a, x, y), a.double() * x.double() + y.double(), dtype)
    close(axpy(2, x, 0.5), 2 * x.double() + 0.5, dtype)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_dense_layouts_are_kept(axpy, device, layout):
    x, y = (laid_out(torch.randn(3, 4, 5, 6, device=device), layout) for _ in range(2))
    z = axpy(2.0, x, y)
    assert z.stride() == x.stride() == (2 * x + y).stride()
    close(z, 2 * x.double() + y.double())


def test_numbers_and_zero_dimensions(power, device):
    x = torch.rand(17, 3, device=device) + 0.5
    close(power(x, 0.5), x.double().sqrt())
    close(power(x, 2), x.double() ** 2)
    close(power(x, torch.tensor(2.0)), x.double() ** 2)
    close(power(x, torch.tensor([[3.0]], device=device)), x.double() ** 3)
    zero = power(torch.tensor(4.0, device=device), 0.5)
    assert zero.shape == () and zero.item() == 2.0
    assert power(2.0, torch.tensor(3.0, device=device)).item() == 8.0


def test_names_of_the_generated_text_are_free(device):
    names = ("n", "i", "k", "packs", "step", "first", "end", "at_n", "in_i", "v", "S", "N")
    op = torchium.elementwise(", ".join(f"double {name}" for name in names), "double out", "out = " + " + ".join(names))
    values = [torch.randn(5, dtype=torch.float64, device=device) for _ in names]
    close(op(*values), sum(values))


def test_preamble_and_options(device):
    op = torchium.elementwise(
        "float x",
        "float y",
        "y = cube(x) + SHIFT",
        preamble="__device__ float cube(float x) { return x * x * x; }",
        options=["-DSHIFT=1"],
    )
    x = torch.randn(100, device=device)
    close(op(x), x.double() ** 3 + 1)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
)
@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("form", ["array", "zero", "number"])
def test_promotion_is_pytorchs(axpy, device, dtype, other, form):
    x = torch.randint(1, 4, (5,), device=device).to(dtype)
    y = torch.ones(5 if form == "array" else (), device=device).to(other)
    y = y.item() if form == "number" else y
    expected = x + y
    z = axpy(1, x, y)
    assert z.dtype == expected.dtype and torch.equal(z, expected)


def test_declared_types_are_kept(device):
    op = torchium.elementwise("half h, bfloat16 b, int i, long l, double d", "double y", "y = d + l + i + h + b")
    types = (torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.float64)
    good = [torch.full((4,), 2, dtype=dtype, device=device) for dtype in types]
    assert op(*good).tolist() == [10.0] * 4
    assert op(*good[:2], 2, 2**40, 1.5).tolist() == [7.5 + 2**40] * 4
    for i, name in enumerate("hbild"):
        wrong = list(good)
        wrong[i] = wrong[i].to(torch.float32)
        with pytest.raises(TypeError, match=rf"{name} has dtype torch.float32, expected {types[i]}"):
            op(*wrong)
    with pytest.raises(TypeError, match="i must be a tensor or an integer"):
        op(*good[:2], 2.0, 2, 2)
    with pytest.raises(ValueError, match=f"i is {2**31}, which does not fit in int"):
        op(*good[:2], 2**31, 2, 2)


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("negated", "expanded")])
def test_out(axpy, device, layout):
    x, y = torch.randn(3, 4, 5, 6, device=device), torch.randn(5, 6, device=device)
    out = laid_out(torch.full((3, 4, 5, 6), torch.nan, device=device), layout)
    version, strides = out._version, out.stride()
    assert axpy(2.0, x, y, out=out) is out
    close(out, 2 * x.double() + y.double())
    assert out._version > version and out.stride() == strides


def test_out_that_overlaps_an_input(axpy, device):
    memory = torch.randn(1001, device=device)
    x, out = memory[:-1], memory[1:]
    expected = 2 * x.double() + 1
    axpy(2.0, x, 1.0, out=out)
    close(out, expected)
    square = torch.randn(30, 30, device=device)
    expected = 2 * square.t().double() + 1
    axpy(2.0, square.t(), 1.0, out=square)
    close(square, expected)
    x, y = torch.randn(1000, device=device), torch.randn(1000, device=device)
    expected = 2 * x.double() + y.double()
    axpy(2.0, x, y, out=y)
    close(y, expected)
    one = torch.full((100,), 3.0, device=device)
    axpy(one[50], one, 0.0, out=one)
    assert one.tolist() == [9.0] * 100


def test_wrong_out(axpy, device):
    x = torch.ones(2, 3, device=device)
    wrong = [
        (TypeError, "out must be a tensor for each output", 3),
        (TypeError, "out must be a tensor for each output", (x, x)),
        (TypeError, "out for z must be a tensor", [3]),
        (TypeError, "out for z has dtype torch.float64, expected torch.float32", x.double()),
        (ValueError, r"out for z has shape \(3,\), expected \(2, 3\)", torch.ones(3, device=device)),
        (RuntimeError, "out for z requires a gradient", x.clone().requires_grad_()),
        (RuntimeError, "single memory location", torch.ones(3, device=device).expand(2, 3)),
    ]
    for kind, message, out in wrong:
        with pytest.raises(kind, match=message):
            axpy(1.0, x, 0.0, out=out)
    two = torchium.elementwise("float x", "float y, float z", "y = x; z = -x")
    memory = torch.zeros(3, device=device)
    with pytest.raises(ValueError, match="overlap"):
        two(torch.ones(2, device=device), out=(memory[:2], memory[1:]))
    y, z = torch.zeros(2, device=device), torch.zeros(2, 2, device=device)[:, 1]
    two(torch.ones(2, device=device), out=(y, z))
    assert y.tolist() == [1.0, 1.0] and z.tolist() == [-1.0, -1.0]


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [((4, 3), (4, 3)), ((4, 1), (3,)), ((), (2, 2)), ((2, 1, 3), (4, 1)), ((0, 3), (3,))]
)
def test_gradcheck(power, axpy, device, shapes):
    x, p = (torch.rand(s, dtype=torch.float64, device=device).add_(0.5).requires_grad_() for s in shapes)
    assert torch.autograd.gradcheck(power, (x, p))
    assert torch.autograd.gradcheck(axpy, (x, p, x.detach().clone().requires_grad_()))
    assert torch.autograd.gradcheck(lambda p: power(1.5, p), (p,))


def test_gradients_with_several_outputs(device):
    op = torchium.elementwise(
        "double x, double y",
        "double s, int sign, double d",
        "s = x * y; sign = x > y; d = x - y",
        derivative={"x": "grad_s * y + grad_d", "y": "grad_s * x - grad_d"},
    )
    x, y = (torch.randn(6, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    s, sign, d = op(x, y)
    assert not sign.requires_grad
    (3 * s + d * d).sum().backward()
    assert torch.allclose(x.grad, 3 * y + 2 * d) and torch.allclose(y.grad, 3 * x - 2 * d)


def test_gradients_that_are_not_there(device):
    x = torch.ones(3, device=device, requires_grad=True)
    plain = torchium.elementwise("float x", "float y", "y = 2 * x", "twice")
    with pytest.raises(RuntimeError, match="x requires a gradient, and twice has no derivative for it"):
        plain(x)
    with torch.no_grad():
        assert plain(x).tolist() == [2.0] * 3
    half = torchium.elementwise("float x, float y", "float z", "z = x * y", derivative={"x": "grad * y"})
    assert half(x, x.detach()).requires_grad
    with pytest.raises(RuntimeError, match="y requires a gradient"):
        half(x, x)
    with pytest.raises(RuntimeError, match="out cannot be given"):
        half(x, x.detach(), out=torch.empty(3, device=device))
    grad = torch.autograd.grad(half(x, x.detach()).sum(), x, create_graph=True)[0]
    assert grad.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("", "float y", "y = 1"), "inputs has '', expected a type and a name"),
        (("float", "float y", "y = 1"), "inputs has 'float', expected"),
        (("float x y", "float y", "y = 1"), "inputs has 'float x y', expected"),
        (("float *x", "float y", "y = 1"), r"inputs has the name '\*x'"),
        (("float x,", "float y", "y = 1"), "inputs has ''"),
        (("string x", "float y", "y = 1"), "inputs has the type 'string'"),
        (("float x", "", "y = 1"), "outputs has ''"),
        (("float x", "float x", "x = 1"), "'x' is declared twice"),
        (("float T", "float y", "y = 1"), "'T' is not free"),
        (("float tch_x", "float y", "y = 1"), "'tch_x' is not free"),
        (("float x__", "float y", "y = 1"), "'x__' is not free"),
        (("float x;int(y)", "float y", "y = 1"), "inputs has the name 'x;int"),
        (("float x\n#define x", "float y", "y = 1"), "inputs has"),
        (("float ä", "float y", "y = 1"), "inputs has the name 'ä'"),
        (("float x", "T y", "y = 1"), "outputs has type T, which no input has"),
        (("float x", "float y", "y = 1", "a b"), "name is 'a b'"),
        (("float x", "float y", "y = 1", "$(touch x)"), "name is"),
        (("float x", "float y", "y = 1", None, {"z": "1"}), "an entry for 'z', which is not an input"),
        (("float x, float y", "float z", "z = 1", None, "grad"), "derivative has 1 entries, expected one for each"),
    ],
)
def test_wrong_declarations(arguments, message):
    with pytest.raises(ValueError, match=message):
        torchium.elementwise(*arguments)


def test_wrong_types_of_declarations():
    good = {"inputs": "float x", "outputs": "float y", "operation": "y = x"}
    for name, value in (("inputs", 3), ("outputs", None), ("operation", b"y = x"), ("name", 3), ("preamble", 3)):
        with pytest.raises(TypeError, match=f"{name} must be a str"):
            torchium.elementwise(**(good | {name: value}))
    for derivative in (3, {"x": 3}):
        with pytest.raises(TypeError, match="derivative"):
            torchium.elementwise(**good, derivative=derivative)


def test_wrong_inputs(axpy, device):
    x = torch.ones(3, device=device)
    wrong = [
        (TypeError, r"axpy takes 3 inputs \(a, x, y\), got 2", (x, x)),
        (TypeError, "needs a tensor among its inputs", (1.0, 2.0, 3.0)),
        (TypeError, "y must be a tensor or a number, got 'str'", (x, x, "3")),
        (TypeError, "y must be a tensor or a number, got 'NoneType'", (x, x, None)),
        (TypeError, "y must be a tensor or a number, got 'list'", (x, x, [1.0])),
        (TypeError, "y must be a tensor or a number, got 'complex'", (x, x, 1j)),
        (TypeError, "T would be torch.uint8", (x.byte(), x.byte(), x.byte())),
        (TypeError, "T would be torch.complex64", (x, x, x.to(torch.complex64))),
        (TypeError, "must be a dense tensor", (x, x, x.to_sparse())),
        (RuntimeError, "[Ss]hape", (x, x, torch.ones(4, device=device))),
        (ValueError, "on meta", (x.to("meta"), 1.0, 1.0)),
        (ValueError, "y is on meta, expected", (x, x, x.to("meta"))),
    ]
    for kind, message, inputs in wrong:
        with pytest.raises(kind, match=message):
            axpy(*inputs)


def test_errors_of_the_compiler_have_the_operations_lines(device):
    x = torch.ones(3, device=device)
    with pytest.raises(torchium.KernelError, match=r"(?s)operation.*2.*undefined_thing"):
        torchium.elementwise("float x", "float y", "float z = x;\ny = undefined_thing(z)")(x)
    with pytest.raises(torchium.KernelError, match=r"(?s)preamble.*3.*absent"):
        torchium.elementwise("float x", "float y", "y = x", preamble="\n\nstatic const int broken = absent;")(x)
    with pytest.raises(ValueError, match="null character"):
        torchium.elementwise("float x", "float y", "y = x;\0")(x)


# --- the short way ----------------------------------------------------------------------------------------------------
# A second call of a signature goes through _C.Elementwise, which must do exactly what the first one did, or leave it.


def test_second_calls(device):
    axpy = torchium.elementwise("T a, T x, T y", "T z", "z = a * x + y", "axpy")
    for dtype in (torch.float32, torch.float16, torch.int32, torch.float32):
        for n in (5, 1000, 100_003):
            x, y = (torch.randint(-9, 9, (n,), device=device).to(dtype) for _ in range(2))
            for a in (2, 2.5 if dtype.is_floating_point else 3, True, torch.tensor(2, dtype=dtype, device=device)):
                expected = torch.add(y, a * x)
                for out in (None, torch.empty_like(x)):
                    z = axpy(a, x, y, out=out)
                    assert z.dtype == dtype and torch.equal(z, expected) and (out is None or z is out)
    assert len(axpy._short) == 3


def test_short_and_other_calls_in_turns(device):
    axpy = torchium.elementwise("T a, T x, T y", "T z", "z = a * x + y", "axpy", derivative={"x": "grad * a"})
    x, y = (torch.randn(6, 8, device=device) for _ in range(2))
    others = [
        (2.0, x.t(), y.t()),
        (2.0, x[:, ::2], y[:, ::2]),
        (2.0, x, y[0]),
        (2.0, x[:0], y[:0]),
        (2.0, x.double(), y),
        (2.0, torch._neg_view(x), y),
        (torch.randn(6, 8, device=device), x, y),
    ]
    for a, p, q in others:
        close(axpy(2.0, x, y), 2 * x.double() + y.double())
        assert torch.allclose(axpy(a, p, q).double(), a * p.double() + q.double(), rtol=1e-6, atol=1e-6)
    for wrong in ((2.0, x), (2.0, x, y, y), (2.0, x, "y"), (None, x, y)):
        with pytest.raises(TypeError):
            axpy(*wrong)
    p = x.clone().requires_grad_()
    axpy(2.0, p, y).sum().backward()
    assert torch.equal(p.grad, torch.full_like(p, 2.0))
    with torch.no_grad():
        assert not axpy(2.0, p, y).requires_grad


def test_numbers_that_tell_what_t_is(device):
    """If all inputs of type T are numbers, an int and a float mean different kernels."""
    scaled = torchium.elementwise("T a, float x", "T y", "y = a * (T)x", "scaled")
    x = torch.full((5,), 3.5, device=device)
    for _ in range(3):
        assert scaled(2, x).tolist() == [6] * 5 and scaled(2, x).dtype == torch.int64
        assert scaled(2.0, x).tolist() == [7.0] * 5 and scaled(2.0, x).dtype == torch.float32


def test_several_outputs(device):
    op = torchium.elementwise(
        "float x, float y",
        "float larger, int which, double both",
        """which = x < y;   // a comment at an end of a line
           larger = which ? y : x;
           both = (double)x + y""",
    )
    for shapes in (((33, 1), (7,)), ((1000,), (1000,)), ((1000,), (1000,))):  # the last is a second call
        x, y = (torch.randn(shape, device=device) for shape in shapes)
        larger, which, both = op(x, y)
        assert torch.equal(larger, torch.maximum(x, y))
        assert which.dtype == torch.int32 and torch.equal(which, (x < y).int())
        assert both.dtype == torch.float64 and torch.equal(both, x.double() + y.double())
    out = x, torch.empty_like(which), torch.empty_like(both)  # one replaces an input
    versions = [t._version for t in out]
    assert op(x, y, out=out) == out
    assert all(torch.equal(a, b) for a, b in zip(out, (larger, which, both), strict=True))
    assert all(t._version > before for t, before in zip(out, versions, strict=True))
    memory = torch.empty(1001, device=device)
    with pytest.raises(ValueError, match="overlap"):
        op(memory[1:], y, out=(memory[1:], memory[:-1].view(torch.int32), both))


# --- around it --------------------------------------------------------------------------------------------------------


def test_torch_compile_leaves_it_alone(axpy, device):
    torch._dynamo.reset()
    x = torch.randn(100, device=device)
    compiled = torch.compile(lambda x: axpy(2.0, x + 1, x) * 3, backend="eager")
    assert torch.allclose(compiled(x), 3 * (2 * (x + 1) + x), rtol=1e-6)


@pytest.mark.gpu
def test_graphs(axpy, gpu):
    x, y = torch.randn(1000, device=gpu), torch.zeros(1000, device=gpu)
    axpy(1.0, x, y, out=torch.empty_like(y))  # compiled ahead
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        axpy(1.0, x, y, out=y)
        z = axpy(2.0, y, x[:, None].t())
    y.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    close(y, 3 * x.double())
    close(z, (7 * x.double())[None])
