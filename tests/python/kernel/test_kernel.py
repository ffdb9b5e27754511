"""torchium.kernel: one CUDA C source on every device, its arguments, its errors, its cache.

Kernels are compiled into a folder of this run, so that nothing depends on earlier ones.
"""

import ctypes
import pickle
import threading

import numpy
import pytest
import torch
import torchium
from processes import run_python
from torchium import _C

HALVE = """__global__ void halve(float *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 0.5f;
}
"""
AXPY = """__global__ void axpy(double a, const double *x, double *y, long long n)
{
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
        y[i] = a * x[i] + y[i];
}
"""


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHIUM_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="module")
def halve():
    return torchium.kernel(HALVE)


@pytest.fixture(scope="module")
def axpy():
    return torchium.kernel(AXPY, "axpy")


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 257, 10_007])
@pytest.mark.parametrize("grid, block", [(7, 33), ((3,), (64,)), ([2, 1], [32, 1, 1]), (1, 1)])
def test_grids_and_blocks(axpy, device, n, grid, block):
    x, y = (torch.randn(n, dtype=torch.float64, device=device) for _ in range(2))
    expected = torch.addcmul(y, x, torch.full_like(x, -1.25))
    assert axpy(grid, block, (-1.25, x, y, n)) is None
    # One rounding of the product and one of the sum, or a single one if the compiler fuses them.
    assert torch.allclose(y, expected, rtol=1e-14, atol=1e-14)


def test_structs_by_value(device):
    class Line(ctypes.Structure):
        _fields_ = (("slope", ctypes.c_float), ("start", ctypes.c_double), ("count", ctypes.c_int))

    kernel = torchium.kernel(
        """struct line { float slope; double start; int count; };
        __global__ void draw(line of, double *y)
        {
            int i = threadIdx.x;
            if (i < of.count) y[i] = of.start + of.slope * i;
        }"""
    )
    line = Line(0.5, -3.0, 30)
    for given in (line, bytes(line)):
        y = torch.full((32,), torch.nan, dtype=torch.float64, device=device)
        kernel(1, 32, (given, y))
        assert torch.equal(y[:30].cpu(), -3.0 + 0.5 * torch.arange(30, dtype=torch.float64)) and y[30:].isnan().all()
    with pytest.raises(ValueError, match=r"argument 1 \('struct of 24 bytes'\) has 23 bytes, expected 24"):
        kernel(1, 32, (bytes(line)[:-1], y))
    for wrong in ("text", 24, 1.5, None):
        with pytest.raises(TypeError, match=r"argument 1 \('struct of 24 bytes'\) must be bytes or a struct"):
            kernel(1, 32, (wrong, y))


def test_numbers_of_every_type(device):
    kernel = torchium.kernel(
        """#include <cuda_fp16.h>
        #include <cuda_bf16.h>
        __global__ void gather(signed char a, unsigned char b, short c, unsigned short d, int e, unsigned f,
                               long long g, unsigned long long h, bool i, float j, double k, __half l,
                               __nv_bfloat16 m, double *out)
        {
            out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f; out[6] = g; out[7] = h; out[8] = i;
            out[9] = j; out[10] = k; out[11] = __half2float(l); out[12] = __bfloat162float(m);
        }"""
    )
    numbers = (-128, 255, -32768, 65535, -(2**31), 2**32 - 1, -(2**53), 2**53, True, 0.5, 1e300, 0.25, -2.0)
    for kind in (lambda v: v, lambda v: numpy.array(v)[()]):
        out = torch.full((13,), torch.nan, dtype=torch.float64, device=device)
        kernel(1, 1, (*(kind(v) for v in numbers), out))
        assert out.tolist() == [float(v) for v in numbers]
    assert kernel.info(device)["parameters"][-3:] == ["__half", "__nv_bfloat16", "double *"]
    for place, wrong in ((0, 128), (1, -1), (2, 2**15), (3, 2**16), (4, 2**31), (5, -1), (6, 2**63), (7, -1)):
        arguments = [*numbers, out]
        arguments[place] = wrong
        with pytest.raises(ValueError, match=rf"argument {place + 1} \(.*must be between"):
            kernel(1, 1, arguments)
    for value in (torch.inf, -torch.inf, torch.nan):
        kernel(1, 1, (*numbers[:10], value, *numbers[11:], out))
        assert str(out[10].item()) == str(value)


@pytest.mark.parametrize(
    "dtype, c", [(torch.bool, "bool"), (torch.int16, "short"), (torch.complex64, "float2"), (torch.float64, "void")]
)
def test_arrays_of_every_type(device, dtype, c):
    size = torch.empty((), dtype=dtype).element_size()
    kernel = torchium.kernel(
        f"""__global__ void copy(const {c} *x, {c} *y)
        {{
            int first = threadIdx.x * {size};
            for (int k = first; k < first + {size}; k++) ((char *)y)[k] = ((char *)x)[k];
        }}"""
    )
    x = torch.randint(0, 2, (17,), device=device).to(dtype)
    y = torch.zeros_like(x)
    kernel(1, 17, (x, y))
    assert torch.equal(x, y)


def test_null_pointers(device):
    kernel = torchium.kernel(
        "__global__ void maybe(const float *bias, float *x) { x[threadIdx.x] += bias ? bias[threadIdx.x] : 1.f; }"
    )
    x = torch.zeros(8, device=device)
    kernel(1, 8, (None, x))
    kernel(1, 8, (torch.arange(8.0, device=device), x))
    assert torch.equal(x.cpu(), 1 + torch.arange(8.0))


def test_numpy_arrays(halve, axpy):
    x = numpy.random.randn(100).astype("float32")
    expected = x * numpy.float32(0.5)
    halve(1, 128, (x, 100))
    assert (x == expected).all()
    x.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match=r"argument 1 \('float \*'\)"):
        halve(1, 128, (x, 100))
    y = numpy.zeros(5)
    fixed = numpy.arange(5.0)
    fixed.flags.writeable = False
    try:
        axpy(1, 8, (2.0, fixed, y, 5))
    except TypeError:
        return  # NumPy before 2.1 exports no read-only arrays
    assert (y == 2 * fixed).all()


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_file_and_what_it_includes(tmp_path, device):
    (tmp_path / "near.h").write_text("#define FACTOR 3\n")
    far = tmp_path / "far"
    far.mkdir()
    (far / "far.h").write_text("#define ADD 1\n")
    file = tmp_path / "two words.cu"
    file.write_text(
        '#include "near.h"\n#include "far.h"\n'
        "__global__ void map(int *x) { x[threadIdx.x] = FACTOR * x[threadIdx.x] + ADD + EXTRA; }\n"
    )
    for source in (file, str(file)):
        kernel = torchium.kernel(source, options=["-DEXTRA=10"], include_dirs=[far])
        x = torch.arange(8, dtype=torch.int32, device=device)
        kernel(1, 8, (x,))
        assert x.tolist() == [3 * i + 11 for i in range(8)]


@pytest.mark.parametrize(
    "source, name",
    [
        ("// __global__ void not_me(int *x);\n" + HALVE, "halve"),
        ("__global__ void __launch_bounds__(256, 2) fast(float *x) {}", "fast"),
        ('extern "C" __global__ void\nnext_line (float *x) {}', "next_line"),
        ("__global__ void twice(int *);\n__global__ void twice(int *x) { *x *= 2; }", "twice"),
        ('#define TEXT "__global__ void no("\n__global__ void yes(int *x) {}', "yes"),
        ("__launch_bounds__(64) __global__ void before(int *x) {}", "before"),
        ("__global__ void __launch_bounds__((BLOCK(2)) * 4) nested(int *x) {}", "nested"),
        ("#define K __global__\nK void\nmacro(int (*x)[3], int y = (1)) { f(1); }", "macro"),
        ("template <int n> struct S {}; __global__ void plain(S<1> x) {}", "plain"),
        ("__global__ void real(int *x) { g<1>(x); }\n/* __global__ void no(int *x) {} */", "real"),
        ("char c = '\"'; int n = 1'000; __global__ void quoted(int *x) {} // don't", "quoted"),
        ('const char *s = R"x(" __global__ void no(int) )" )x"; __global__ void raw(int *x) {}', "raw"),
    ],
)
def test_the_name_is_found(source, name):
    assert torchium.kernel(source).name == name


@pytest.mark.parametrize(
    "source, message",
    [
        (HALVE + AXPY, "name is needed: the source has the kernels axpy, halve"),
        ("template <typename S> __global__ void scale(S *x) {}", "scale is a template.*'scale<float>'"),
        ("template <typename S> static __global__ void scale(S *x) {}", "scale is a template"),
        ("template <> __global__ void scale<1>(int *x) {}", "name is needed: the source has no kernel"),
        ("// __global__", "name is needed: the source has no kernel"),
    ],
)
def test_the_name_is_needed(source, message):
    with pytest.raises(ValueError, match=message):
        torchium.kernel(source)


def test_wrong_sources(tmp_path):
    with pytest.raises(ValueError, match="no __global__ function"):
        torchium.kernel("void halve(float *x) {}")
    with pytest.raises(FileNotFoundError):
        torchium.kernel(tmp_path / "absent.cu")
    with pytest.raises(FileNotFoundError):
        torchium.kernel("absent.cu")
    for wrong in (None, 3, b"__global__ void f() {}", ["__global__"]):
        with pytest.raises(TypeError, match="source must be"):
            torchium.kernel(wrong)
    for keywords in ({"name": 3}, {"options": "-DX"}, {"options": [3]}, {"include_dirs": "x"}, {"cache": 1}):
        with pytest.raises(TypeError, match=next(iter(keywords))):
            torchium.kernel(HALVE, **keywords)


def test_errors_have_the_users_lines(device, tmp_path):
    source = HALVE.replace("x[i] *= 0.5f", "x[i] *= undefined_thing")
    with pytest.raises(torchium.KernelError, match=r"(?s)4.*undefined_thing") as caught:
        torchium.kernel(source).compile(device)
    assert isinstance(caught.value, RuntimeError)
    file = tmp_path / "wrong.cu"
    file.write_text("\n\n" + source)
    with pytest.raises(torchium.KernelError, match=r"(?s)wrong\.cu.*6.*undefined_thing"):
        torchium.kernel(file).compile(device)
    with pytest.raises((torchium.KernelError, ValueError), match="absent"):
        torchium.kernel(HALVE, "absent").compile(device)
    with pytest.raises(ValueError, match="-fplugin=x"):
        torchium.kernel(HALVE, options=["-fplugin=x"]).compile(device)


# --- arguments --------------------------------------------------------------------------------------------------------


def wrong_launches(x):
    good = (x, 4)
    return [
        (TypeError, r"halve has 2 parameters, got 1 arguments", (1, 4, (x,)), {}),
        (TypeError, r"halve has 2 parameters, got 3 arguments", (1, 4, (x, 4, 4)), {}),
        (TypeError, r"args must be a tuple or a list", (1, 4, x), {}),
        (TypeError, r"args must be a tuple or a list", (1, 4, None), {}),
        (TypeError, r"argument 2 \('int'\) must be an integer", (1, 4, (x, 4.0)), {}),
        (TypeError, r"argument 2 \('int'\) must be an integer", (1, 4, (x, None)), {}),
        (TypeError, r"argument 2 \('int'\) must be a number", (1, 4, (x, torch.tensor(4))), {}),
        (ValueError, r"argument 2 \('int'\) must be between", (1, 4, (x, 2**31)), {}),
        (TypeError, r"argument 1 \('float \*'\) points to another type", (1, 4, (x.double(), 4)), {}),
        (ValueError, r"argument 1 \('float \*'\) is not contiguous", (1, 4, (x.reshape(2, 2).t(), 4)), {}),
        (ValueError, r"argument 1 \('float \*'\) is not contiguous", (1, 4, (x[::2], 2)), {}),
        (TypeError, r"grid must be an integer", (1.0, 4, good), {}),
        (TypeError, r"grid must be an integer", (None, 4, good), {}),
        (ValueError, r"grid must have 1 to 3 numbers, got 4", ((1, 1, 1, 1), 4, good), {}),
        (ValueError, r"grid must have 1 to 3 numbers, got 0", ((), 4, good), {}),
        (TypeError, r"block\[1\] must be an integer", (1, (4, "1"), good), {}),
        (ValueError, r"block", (1, 1025, good), {}),
        (TypeError, r"shared_mem must be an integer", (1, 4, good), {"shared_mem": 1.5}),
        (TypeError, r"allow_strided must be True or False", (1, 4, good), {"allow_strided": 1}),
        (TypeError, r"stream must be an integer", (1, 4, good), {"stream": "main"}),
        (ValueError, r"args has no array", (1, 4, (None, 4)), {}),
    ]


@pytest.mark.parametrize("case", range(len(wrong_launches(torch.zeros(4)))))
def test_wrong_launches(halve, device, case):
    x = torch.ones(4, device=device)
    kind, message, arguments, keywords = wrong_launches(x)[case]
    with pytest.raises(kind, match=message):
        halve(*arguments, **keywords)
    assert x.tolist() == [1.0] * 4


def test_what_is_no_array(axpy, device):
    y = torch.ones(4, dtype=torch.float64, device=device)
    for wrong in ([1.0], 1.0, "x", object()):
        with pytest.raises(TypeError, match=r"argument 2 \('const double \*'\) .*is not an array"):
            axpy(1, 4, (1.0, wrong, y, 4))
    assert y.tolist() == [1.0] * 4


def test_streams_are_for_gpus(halve):
    with pytest.raises(ValueError, match="stream was given for a kernel on the CPU"):
        halve(1, 4, (torch.ones(4), 4), stream=1)


def test_strides_where_they_are_allowed(device, halve):
    x = torch.ones(8, device=device)
    halve(1, 4, (x[1::2], 4), allow_strided=True)
    assert x.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0]


def test_tensors_that_require_gradients(halve, axpy, device):
    x = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"argument 1 \('float \*'\) requires a gradient"):
        halve(1, 4, (x, 4))
    with torch.no_grad():
        halve(1, 4, (x, 4))
    assert x.tolist() == [0.5] * 4
    weight = torch.ones(4, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.zeros_like(weight, requires_grad=False)
    axpy(1, 4, (3.0, weight, y, 4))
    assert y.tolist() == [3.0] * 4


def test_writes_are_counted(halve, axpy, device):
    x = torch.ones(4, device=device, requires_grad=True)
    y = x.exp()
    halve(1, 4, (y.detach(), 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    read, written = (torch.ones(4, dtype=torch.float64, device=device) for _ in range(2))
    axpy(1, 4, (1.0, read, written, 4))
    assert (read._version, written._version) == (0, 1)


@pytest.mark.gpu
def test_arrays_on_two_devices(axpy, gpu):
    x, y = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64, device=gpu)
    for pair in ((x, y), (y, x)):
        with pytest.raises(ValueError, match=r"argument \d .* is on .*, expected .*: all arrays of a launch"):
            axpy(1, 4, (1.0, *pair, 4))


# --- the object -------------------------------------------------------------------------------------------------------


def test_info_and_suggestions(halve, device):
    assert halve.compile(device) is halve
    info = halve.info(device)
    assert info["name"] == "halve" and info["device"] == ("cpu" if device == "cpu" else "cuda:0")
    assert info["parameters"] == ["float *", "int"]
    assert 1 <= info["suggested_threads"] <= info["max_threads"] <= 1024 and info["suggested_blocks"] >= 1
    assert (info["registers"] > 0) == (device != "cpu")
    for n in (0, 1, 1000, 10**10):
        grid, block = halve.suggest(n, device)
        assert block == info["suggested_threads"] and (grid - 1) * block < max(n, 1) and grid * block >= n
    with pytest.raises(ValueError, match="n is -1"):
        halve.suggest(-1)
    for wrong in (1.0, True, None):
        with pytest.raises(TypeError, match="n must be an int"):
            halve.suggest(wrong)
    for wrong in ("tpu", "cuda:x", "cuda:-1"):
        with pytest.raises(ValueError):
            halve.compile(wrong)
    with pytest.raises(TypeError):
        halve.compile(3)
    with pytest.raises(RuntimeError):
        halve.compile("cuda:99")


def test_pickled_and_copied(halve, tmp_path):
    file = tmp_path / "halve.cu"
    file.write_text(HALVE)
    for kernel in (halve, torchium.kernel(file)):
        again = pickle.loads(pickle.dumps(kernel))
        x = torch.ones(4)
        again(1, 4, (x, 4))
        assert x.tolist() == [0.5] * 4 and again.name == "halve"


def test_many_threads_at_once(device):
    kernel = torchium.kernel(AXPY.replace("axpy", "axpy_of_threads"))
    x = torch.ones(1000, dtype=torch.float64, device=device)
    results = [torch.zeros_like(x) for _ in range(8)]
    failures = []

    def work(y):
        try:
            for _ in range(50):
                kernel(4, 64, (1.0, x, y, 1000))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(y,)) for y in results]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert all(torch.equal(y, 50 * x) for y in results)


def test_an_array_that_launches_the_kernel_itself(halve):
    class Nested:
        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **keywords):
            halve(1, 4, (self.array, 4))
            return self.array.__dlpack__(**keywords)

    x = numpy.ones(4, dtype="float32")
    halve(1, 4, (Nested(x), 4))
    assert x.tolist() == [0.25] * 4


def test_children_of_a_fork(halve):
    """In a process without other threads: the effect of a fork on PyTorch's is not tested."""
    program = f"""
import os, torch, torchium
torch.set_num_threads(1)
kernel = torchium.kernel({HALVE!r})
x = torch.ones(4)
kernel(1, 4, (x, 4))
child = os.fork()
kernel(1, 4, (x, 4))
assert x.tolist() == [0.25] * 4
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run_python("-c", program)


@pytest.mark.gpu
def test_streams_and_graphs(halve, gpu):
    x = torch.full((4096,), 1024.0, device=gpu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        halve(16, 256, (x, 4096))
    halve(16, 256, (x, 4096), stream=stream)
    torch.cuda.current_stream().wait_stream(stream)
    halve(16, 256, (x, 4096))
    assert x.tolist() == [128.0] * 4096
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        halve(16, 256, (x, 4096))
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [16.0] * 4096


# --- the cache --------------------------------------------------------------------------------------------------------


def test_cache(tmp_path, monkeypatch, device):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TORCHIUM_CACHE", str(tmp_path))
    monkeypatch.delenv("CPATH", raising=False)  # such compilers are not cached
    assert _C.kernel_cache_folder() == str(tmp_path)
    source = HALVE.replace("halve", "halve_for_the_cache")
    for options, cached in (({"cache": False}, False), ({}, False), ({}, True), ({"options": ["-DX"]}, False)):
        assert torchium.kernel(source, **options).info(device)["from_cache"] == cached
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match=r"others may write to .* chmod go-w"):
        _C.kernel_cache_folder()
