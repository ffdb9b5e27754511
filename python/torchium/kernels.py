"""Custom kernels: CUDA C source, compiled by NVRTC for a GPU and by the system's C++ compiler for the CPU.

`elementwise` (torchium._functions.elementwise) is built on `kernel`. This module does not import PyTorch: kernels also
accept NumPy, CuPy and JAX arrays. A source is compiled on first use on a device, and cached on disk.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchium import _C
from torchium._C import KernelError
from torchium._messages import shown
from torchium.library import _device_name, is_available

if TYPE_CHECKING:
    from torchium._functions.elementwise import Elementwise

__all__ = ["Kernel", "KernelError", "elementwise", "kernel"]

# Comments and literals; unterminated ones extend to the end. An apostrophe after a digit is part of a number.
_COMMENT = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|\b(?:u8|[uUL])?R"(?P<raw>[^()\\\s]{0,16})\(.*?(?:\)(?P=raw)"|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'?""",
    re.DOTALL,
)
_TOKEN = re.compile(_COMMENT.pattern + r"|(?P<code>\w+|\S)", re.DOTALL)

# The number of forks. A child recompiles, since compiled kernels belong to the parent's threads.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Kernel:
    """`torchium.kernel`: a kernel from CUDA C source, for GPUs and CPUs. A call launches it on the device of its
    arrays.

    Args:
        source: the text, or the path of a file: a str that ends in ".cu", or a Path.
        name: of the `__global__` function; for a template with its arguments, "scale<float, 4>". Optional if the source
            has a single kernel that is not a template.
        options: for both compilers: -DNAME=VALUE, -UNAME, -IFOLDER, -std=c++17, --use_fast_math, -O3.
        include_dirs: folders for `#include "..."`, in addition to that of the file.
        cache: whether to cache compiled code on disk.

    Examples:
        >>> halve = torchium.kernel("__global__ void halve(float *x, int n) { int i = blockIdx.x * blockDim.x + ...; }")
        >>> halve((n + 255) // 256, 256, (x, n))  # x.is_cuda: on its GPU; otherwise on the CPU
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        name: str | None = None,
        options: Sequence[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        cache: bool = True,
    ) -> None:
        text, self._path = _read(source)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__!r}")
        if not isinstance(cache, bool):
            raise TypeError(f"cache must be True or False, got {shown(cache)}")
        self.name = _only_kernel(text) if name is None else name
        self._source = None if self._path is not None else text
        self._options = _texts("options", options)
        self._include_dirs = tuple(os.fspath(f) for f in _texts("include_dirs", include_dirs, os.PathLike))
        self._cache = cache
        self._compiled: dict[tuple[str, int], _C.Kernel] = {}
        self._written: tuple[int, ...] = ()  # places of the pointers that are not const
        self._lock = threading.Lock()

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        stream: Any = None,
        *,
        allow_strided: bool = False,
    ) -> None:
        """Launches the kernel.

        Args:
            grid: blocks, a number or up to three.
            block: threads of a block, a number or up to three.
            args: one object per parameter: an array for a pointer (None for NULL), a Python or NumPy number, a ctypes
                or NumPy struct or bytes for a struct. They are checked before the launch.
            shared_mem: bytes of dynamic shared memory.
            stream: a torch or CuPy stream, or its handle; None for the current stream of the arrays' library.
            allow_strided: accept noncontiguous arrays, which the kernel must handle.

        Tensors that require gradients are only accepted for `const` pointers, unless gradients are disabled. On a GPU
        the launch is asynchronous.
        """
        if type(args) is not tuple:
            args = _as_tuple(args)
        number = None if stream is None else _stream_number(stream)
        self._on(_device_of(args)).launch(grid, block, args, shared_mem, number, allow_strided)
        for i in self._written:
            if hasattr(args[i], "is_cuda"):  # a PyTorch tensor
                _count_write(args[i])

    def compile(self, device: Any = None) -> Kernel:
        """Compiles for a device ahead of the first launch, and returns the kernel.

        Args:
            device: None for the GPU if there is one, else the CPU.
        """
        self._on(_full_name(device))
        return self

    def info(self, device: Any = None) -> dict[str, Any]:
        """Properties of the compiled kernel: parameters (as C types), registers, shared_bytes and local_bytes,
        max_threads, suggested_threads and suggested_blocks, from_cache.

        Args:
            device: as for `compile`.
        """
        name = _full_name(device)
        compiled = self._on(name)
        return {"name": self.name, "device": name, "parameters": compiled.parameters(), **compiled.info()}

    def suggest(self, n: int, device: Any = None) -> tuple[int, int]:
        """Grid and block for one thread per element, with the block size of the highest occupancy.

        Args:
            n: the number of elements.
            device: as for `compile`.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be an int, got {type(n).__name__!r}")
        if n < 0:
            raise ValueError(f"n is {n}, expected 0 or more")
        threads = self._on(_full_name(device)).info()["suggested_threads"]
        return -(-n // threads), threads

    def _on(self, device: str) -> _C.Kernel:
        place = (device, _forks)
        compiled = self._compiled.get(place)
        if compiled is None:
            with self._lock:
                compiled = self._compiled.get(place) or _C.Kernel(
                    device, self._source, self._path, self.name, self._options, self._include_dirs, self._cache
                )
                self._compiled[place] = compiled
                self._written = tuple(
                    i for i, type in enumerate(compiled.parameters()) if type.endswith("*") and type[:6] != "const "
                )
        return compiled

    def __reduce__(self) -> tuple[Any, ...]:
        source = self._source if self._path is None else Path(self._path)
        return Kernel, (source, self.name, self._options, self._include_dirs, self._cache)

    def __repr__(self) -> str:
        return f"<torchium.Kernel {self.name!r}>"


kernel = Kernel


def elementwise(
    inputs: str,
    outputs: str,
    operation: str,
    name: str | None = None,
    derivative: Any = None,
    options: Sequence[str] = (),
    preamble: str = "",
) -> Elementwise:
    """Compiles an elementwise function of tensors, for GPUs and CPUs.

    Args:
        inputs: types and names, as in "float x, float p": float, double, int, long, half, bfloat16, or T, the promoted
            type of all inputs of type T. half and bfloat16 are computed as float.
        outputs: types and names of the results, likewise.
        operation: statements in CUDA C that set the outputs.
        name: of the kernel, for profilers.
        derivative: the gradient of each input by name, as an expression of the inputs, the outputs and `grad`, the
            gradient of the output (grad_NAME if there are several); or a sequence with one per input.
        options: as for `torchium.kernel`.
        preamble: text before the kernel: functions, constants, #include.

    Examples:
        >>> gradients = {"x": "p * pow(x, p - 1) * grad"}
        >>> power = torchium.elementwise("T x, T p", "T y", "y = pow(x, p)", derivative=gradients)
        >>> y = power(x, 0.5)  # broadcasts; power(x, 0.5, out=y) writes to an existing tensor
        >>> y.sum().backward()
    """
    from torchium._functions.elementwise import Elementwise

    return Elementwise(inputs, outputs, operation, name, derivative, options, preamble)


# --- the source -------------------------------------------------------------------------------------------------------


def _read(source: Any) -> tuple[str, str | None]:
    """The text, and its path or None."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be CUDA C source or the path of a .cu file, got {type(source).__name__!r}")
    if isinstance(source, os.PathLike) or source.endswith(".cu"):
        path = os.path.abspath(os.fspath(source))
        if not isinstance(path, str):
            raise TypeError("source must be a str path, got bytes")
        return Path(path).read_text(encoding="utf-8", errors="replace"), path
    if "__global__" not in source:
        raise ValueError("source has no __global__ function, and is not a path that ends in .cu")
    return source, None


def _words(text: str) -> Iterator[str]:
    """Words and single characters, without comments, literals and arguments of __launch_bounds__."""
    last, bounds = "", 0  # parentheses that are open
    for match in _TOKEN.finditer(text):
        if (word := match["code"]) is None:
            continue
        if bounds or (word == "(" and last == "__launch_bounds__"):
            bounds += (word == "(") - (word == ")")
        elif word != "__launch_bounds__":
            yield word
        last = word


def _only_kernel(text: str) -> str:
    """The name of the single kernel of a source: the word before the first parenthesis after __global__."""
    names, templates = set(), set()
    last, is_kernel, is_template = "", False, False
    for token in _words(text):
        if token == "__global__":
            is_kernel, token = True, ""
        elif is_kernel and token in ";{}()":
            if token == "(" and last.isidentifier():
                (templates if is_template else names).add(last)
            is_kernel = False
        if token in (";", "{", "}"):
            is_template = False
        elif token == "<" and last == "template":
            is_template = True
        last = token
    names |= templates
    if len(names) != 1:
        what = "no kernel that could be found" if not names else f"the kernels {', '.join(sorted(names))}"
        raise ValueError(f"name is needed: the source has {what}")
    name = names.pop()
    if templates:
        raise ValueError(f"name is needed: {name} is a template, so give its arguments too, as in '{name}<float>'")
    return name


def _texts(name: str, values: Any, *kinds: type) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of str, got {type(values).__name__!r}")
    for i, value in enumerate(values):
        if not isinstance(value, (str, *kinds)):
            raise TypeError(f"{name}[{i}] must be a str, got {type(value).__name__!r}")
    return tuple(values)


# --- devices and streams ----------------------------------------------------------------------------------------------


def _full_name(device: Any) -> str:
    if device is None:
        device = "cuda" if is_available("cuda") else "cpu"
    name = _device_name(device)
    return {"cuda": "cuda:0", "cpu:0": "cpu"}.get(name, name)


def _device_of(args: tuple[Any, ...]) -> str:
    """The device of the first array. The launch checks the others."""
    for a in args:
        if (on_gpu := getattr(a, "is_cuda", None)) is not None:  # PyTorch's, without a call
            return f"cuda:{a.get_device()}" if on_gpu else _cpu_only(a)
        if (ask := getattr(a, "__dlpack_device__", None)) is not None:
            kind, index = ask()
            return f"cuda:{int(index)}" if int(kind) in (2, 13) else "cpu"
    raise ValueError("args has no array, so the device to run on is unknown")


def _cpu_only(tensor: Any) -> str:
    if not tensor.is_cpu:
        raise ValueError(f"a kernel runs on the CPU or a CUDA device, got a tensor on {tensor.device}")
    return "cpu"


def _stream_number(stream: Any) -> int:
    for attribute in ("cuda_stream", "ptr"):  # PyTorch's name, CuPy's
        if (number := getattr(stream, attribute, None)) is not None:
            return number
    return stream


def _count_write(tensor: Any) -> None:
    """Marks the tensor as modified in place for autograd."""
    sys.modules["torch"].autograd.graph.increment_version(tensor)


def _as_tuple(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, list):
        raise TypeError(
            f"args must be a tuple or a list, with an object for each parameter; got {type(args).__name__!r}"
        )
    return tuple(args)
