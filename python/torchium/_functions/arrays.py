"""The matrix functions for arrays of libraries other than PyTorch. Each kind of array defines how results are allocated
and which stream is used; the functions are written once. No library is imported here: an array as an argument proves
that it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torchium import _C
from torchium._functions import shapes

Array = Any


class Arrays:
    """A kind of array: what differs between libraries, and the functions of torchium.linalg."""

    name = ""

    def accepts(self, x: Any) -> bool:
        raise NotImplementedError

    def empty(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Any:
        """An allocation on the device of `like` that the C library can write to."""
        raise NotImplementedError

    def result(self, out: Any) -> Array:
        """Converts what `empty` allocated, after it was written."""
        return out

    def expand(self, x: Array, shape: Sequence[int]) -> Array:
        """A broadcast view."""
        raise NotImplementedError

    def stream(self, like: Array) -> int | None:
        """The CUDA stream of this library's work; None if DLPack passes it, or there is none."""
        return None

    def check(self, **arrays: Array) -> None:
        """Checks that all arguments are arrays of this kind with one dtype."""
        first_name, first = next(iter(arrays.items()))
        for name, x in arrays.items():
            if not self.accepts(x):
                raise TypeError(f"{name} must be a {self.name} array like {first_name}, got {type(x).__name__}")
            if x.dtype != first.dtype:
                raise TypeError(f"{name} has dtype {x.dtype}, expected {first.dtype} like {first_name}")

    def spread(self, shape: Sequence[int], *arrays: Array, whole: bool = False) -> list[Array]:
        """Matrices with the leading dimensions of `shape`, or single ones unless `whole`."""
        leading = tuple(shape[:-2])
        fitting = (leading,) if whole else (leading, ())
        return [x if x.shape[:-2] in fitting else self.expand(x, (*leading, *x.shape[-2:])) for x in arrays]

    def matrix_power(self, a: Array, power: float, eps: float = 0.0) -> Array:
        self.check(a=a)
        out = self.empty(a.shape, a)
        _C.matrix_power(a, power, eps, out, None, self.stream(a))
        return self.result(out)

    def inverse_root(
        self, a: Array, root: int, eps: float, relative_eps: float, method: str, tolerance: float, return_residual: bool
    ) -> Any:
        self.check(a=a)
        out = self.empty(a.shape, a)
        residual = self.empty(shapes.square("a", a.shape)[0], a, "float64") if return_residual else None
        _C.inverse_root(a, root, eps, relative_eps, method, tolerance, out, residual, None, self.stream(a))
        return (self.result(out), self.result(residual)) if return_residual else self.result(out)

    def eigh(self, a: Array) -> tuple[Array, Array]:
        self.check(a=a)
        leading, n = shapes.square("a", a.shape)
        w, v = self.empty((*leading, n), a), self.empty(a.shape, a)
        _C.eigh(a, w, v, None, self.stream(a))
        return self.result(w), self.result(v)

    def matmul(self, a: Array, b: Array) -> Array:
        self.check(a=a, b=b)
        out = self.empty(shapes.matmul(a.shape, b.shape), a)
        _C.matmul(a, b, out, self.stream(a))
        return self.result(out)

    def gram(self, a: Array, transpose: bool = False, alpha: float = 1.0) -> Array:
        self.check(a=a)
        out = self.empty(shapes.gram(a.shape, transpose), a)
        _C.gram(a, bool(transpose), alpha, out, self.stream(a))
        return self.result(out)

    def symmetric_product(self, a: Array, b: Array) -> Array:
        self.check(a=a, b=b)
        out = self.empty(a.shape, a)
        _C.symmetric_product(a, b, out, self.stream(a))
        return self.result(out)

    def orthogonalize(self, a: Array, steps: int = 5, method: str = "polar_express") -> Array:
        self.check(a=a)
        out = self.empty(a.shape, a)
        _C.orthogonalize(a, steps, method, out, self.stream(a))
        return self.result(out)

    def kronecker_product(self, a: Array, b: Array) -> Array:
        self.check(a=a, b=b)
        shape = shapes.kronecker_product(a.shape, b.shape)
        out = self.empty(shape, a)
        _C.kronecker_product(*self.spread(shape, a, b), out, self.stream(a))
        return self.result(out)

    def kronecker_matmul(self, a: Array, b: Array, x: Array) -> Array:
        return self._kronecker(_C.kronecker_matmul, shapes.kronecker_matmul, a, b, x)

    def kronecker_apply(self, a: Array, b: Array, x: Array) -> Array:
        return self._kronecker(_C.kronecker_apply, shapes.kronecker_apply, a, b, x)

    def _kronecker(self, function: Any, shape_of: Any, a: Array, b: Array, x: Array) -> Array:
        self.check(a=a, b=b, x=x)
        shape = shape_of(a.shape, b.shape, x.shape)
        out = self.empty(shape, x)
        function(*self.spread(shape, a, b), *self.spread(shape, x, whole=True), out, self.stream(x))
        return self.result(out)

    def kronecker_solve(self, a: Array, b: Array, x: Array, damping: float) -> Array:
        self.check(a=a, b=b, x=x)
        shape = shapes.kronecker_solve(a.shape, b.shape, x.shape)
        out = self.empty(shape, x)
        _C.kronecker_solve(*self.spread(shape, a, b, x, whole=True), damping, out, None, self.stream(x))
        return self.result(out)

    def nearest_kronecker(
        self, m: Array, shape_a: Sequence[int], shape_b: Sequence[int], return_error: bool = False
    ) -> tuple[Array, ...]:
        self.check(m=m)
        first, second, leading = shapes.nearest_kronecker(m.shape, shape_a, shape_b)
        a, b = self.empty(first, m), self.empty(second, m)
        error = self.empty(leading, m, "float64") if return_error else None
        _C.nearest_kronecker(m, a, b, error, self.stream(m))
        results = [a, b, error] if return_error else [a, b]
        return tuple(self.result(each) for each in results)


class NumpyArrays(Arrays):
    name = "NumPy"

    def __init__(self) -> None:
        self.numpy = sys.modules["numpy"]

    def accepts(self, x: Any) -> bool:
        return isinstance(x, self.numpy.ndarray)

    def check(self, **arrays: Array) -> None:
        super().check(**arrays)
        name, x = next(iter(arrays.items()))
        if x.dtype.char in "efd":  # float16, float32, float64; all arguments have one dtype
            return
        if x.dtype.name == "bfloat16":  # ml_dtypes: NumPy has no DLPack code for its dtypes
            raise TypeError(
                f"{name} has dtype bfloat16, which NumPy cannot hand over by DLPack; use astype('float32'), "
                "or a torch or JAX array"
            )
        raise TypeError(f"{name} has dtype {x.dtype.name}, expected float16, float32 or float64")

    def empty(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Any:
        return self.numpy.empty(tuple(shape), dtype or like.dtype)

    def expand(self, x: Array, shape: Sequence[int]) -> Array:
        # broadcast_to gives a read-only view, which NumPy before 2.1 does not export.
        strides = self.numpy.broadcast_to(x, shape).strides
        return self.numpy.lib.stride_tricks.as_strided(x, shape, strides)


class CupyArrays(Arrays):
    name = "CuPy"

    def __init__(self) -> None:
        self.cupy = sys.modules["cupy"]

    def accepts(self, x: Any) -> bool:
        return isinstance(x, self.cupy.ndarray)

    def empty(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Any:
        with like.device:
            return self.cupy.empty(tuple(shape), dtype or like.dtype)

    def expand(self, x: Array, shape: Sequence[int]) -> Array:
        return self.cupy.broadcast_to(x, shape)

    def stream(self, like: Array) -> int | None:
        with like.device:
            return self.cupy.cuda.get_current_stream().ptr


class JaxArrays(Arrays):
    """JAX arrays are immutable: results are written to memory of ours, which then becomes an array."""

    name = "JAX"

    def __init__(self) -> None:
        import jax
        import jax.dlpack

        self.jax = jax

    def accepts(self, x: Any) -> bool:
        return isinstance(x, self.jax.Array)

    def check(self, **arrays: Array) -> None:
        super().check(**arrays)
        for name, x in arrays.items():
            if isinstance(x, self.jax.core.Tracer):
                raise TypeError(
                    f"{name} is being traced by JAX (jit, grad or vmap), and has no numbers yet; call the function "
                    "outside of it, or through jax.pure_callback"
                )
            x.block_until_ready()

    def empty(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Any:
        kind, index = like.__dlpack_device__()
        device = "cpu" if kind == 1 else f"cuda:{index}"
        return _C.Memory(tuple(shape), dtype or str(like.dtype), device)

    def result(self, out: Any) -> Array:
        return self.jax.dlpack.from_dlpack(out)

    def expand(self, x: Array, shape: Sequence[int]) -> Array:
        return self.jax.numpy.broadcast_to(x, shape)


_KINDS: dict[str, type[Arrays]] = {"numpy": NumpyArrays, "cupy": CupyArrays, "jax": JaxArrays, "jaxlib": JaxArrays}
_made: dict[type[Arrays], Arrays] = {}


def arrays_of(name: str, x: Any) -> Arrays:
    """The kind of an argument, by the module of its class or of a base class."""
    for cls in type(x).__mro__:
        kind = _KINDS.get(cls.__module__.partition(".")[0])
        if kind is not None:
            home = _made.get(kind) or _made.setdefault(kind, kind())
            if home.accepts(x):
                return home
    raise TypeError(
        f"{name} must be a torch tensor or a NumPy, CuPy or JAX array, got {type(x).__name__}; "
        "numpy.asarray makes an array of a list"
    )
