"""Kernels of the user's for parts of a step: what is asked for, and the words for what became of it."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchium import kernels
from torchium._messages import shown

__all__ = ["StepKernel", "arguments_of", "as_kernel", "report_of"]

_UPDATE = re.compile(r"\b([A-Za-z_]\w*)\s*\(\s*tch_element\s*&")


@dataclasses.dataclass(frozen=True)
class StepKernel:
    """A custom kernel for a part of an optimizer's step, in CUDA C for GPUs and the CPU alike.

    `update_kernel` is a function for one element, which the library calls for all elements of all parameters:

        __device__ void my_update(tch_element &e, const tch_numbers &k)

    with e.p the parameter, e.g its gradient, e.m, e.v and e.vmax the state, all of type `tch_real`; and k.lr, k.beta1,
    k.beta2, k.one_minus_beta1, k.one_minus_beta2, k.eps, k.weight_decay, k.momentum, k.dampening, k.step,
    k.correction1 and k.correction2 (1 - beta^step).

    `root_kernel`, of Shampoo, writes the power -1/root of a symmetric matrix, one for each block of threads:

        __global__ void my_root(const float *factors, float *roots, float *scratch, int n, int root)

    Args:
        source: the text, or the path of a file: a str that ends in ".cu", or a Path.
        name: of the function; it may be left out where the source has one of its kind.
        options: for both compilers, as for `torchium.kernel`.
        include_dirs: where `#include "..."` is looked for, as for `torchium.kernel`.
        tolerance: of an update the largest difference to the built-in that its check allows, relative to what an update
            changes, or 0 for an update that is meant to be another one; of roots the error, or 0 for `root_tolerance`.
        max_size: of roots; larger factors are left to the built-in. 0: none are.
        threads: of roots: threads of a block, 0 for 256.
        shared_mem: of roots: bytes of dynamic shared memory.
        cache: whether compiled code is looked for, and kept, on disk.

    Examples:
        >>> source = '''
        ... __device__ void sign(tch_element &e, const tch_numbers &k) { e.p -= k.lr * ((e.g > 0) - (e.g < 0)); }
        ... '''
        >>> optimizer = torchium.optim.SGD(model.parameters(), lr=1e-3, update_kernel=source)
        >>> optimizer.step()
    """

    source: str | os.PathLike[str]
    name: str | None = None
    options: Sequence[str] = ()
    include_dirs: Sequence[str | os.PathLike[str]] = ()
    tolerance: float = 0.0
    max_size: int = 0
    threads: int = 0
    shared_mem: int = 0
    cache: bool = True

    def __post_init__(self) -> None:
        text, path = kernels._read(self.source, ("__global__", "__device__"))
        self._set("source", text if path is None else Path(path))
        self._set("name", _only_function(text) if self.name is None else self.name)
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a str, got {type(self.name).__name__!r}")
        self._set("options", kernels._texts("options", self.options))
        folders = kernels._texts("include_dirs", self.include_dirs, os.PathLike)
        self._set("include_dirs", tuple(os.fspath(folder) for folder in folders))
        self._set("tolerance", _tolerance(self.tolerance))
        for name in ("max_size", "threads", "shared_mem"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.cache, bool):
            raise TypeError(f"cache must be True or False, got {shown(self.cache)}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<torchium.optim.StepKernel {self.name!r}>"


Kernel = StepKernel  # the name that pickles of earlier versions have


def arguments_of(kernel: StepKernel) -> tuple[Any, ...]:
    """Those of _C.Optimizer.set_kernel after the part."""
    where = (None, str(kernel.source)) if isinstance(kernel.source, Path) else (kernel.source, None)
    numbers = (kernel.tolerance, kernel.max_size, kernel.threads, kernel.shared_mem)
    return *where, kernel.name, kernel.options, kernel.include_dirs, kernel.cache, *numbers


def as_kernel(part: str, value: Any) -> StepKernel:
    """What was given for a part: a StepKernel, its source alone, or what torchium.kernel returned."""
    if isinstance(value, StepKernel):
        return value
    if isinstance(value, kernels.Kernel):
        _, (source, name, options, folders, cache) = value.__reduce__()
        return StepKernel(source, name, options, folders, cache=cache)
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"the kernel for {part!r} must be a torchium.optim.StepKernel, CUDA C source or the path of a .cu file, "
            f"got an object of type {type(value).__name__!r}"
        )
    return StepKernel(value)


def report_of(infos: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What became of a kernel on each device, as one."""
    infos = list(infos)
    if not infos:
        return {"in_use": False, "reason": "no step has been taken yet", **dict.fromkeys(_COUNTED, 0), "worst": 0.0}
    reasons = {device: info["reason"] for device, info in infos if info["reason"]}
    several = len(infos) > 1
    return {
        "in_use": any(info["in_use"] for _, info in infos),
        "reason": "; ".join(f"{device}: {reason}" if several else reason for device, reason in reasons.items()),
        **{name: sum(info[name] for _, info in infos) for name in _COUNTED},
        "worst": max(info["worst"] for _, info in infos),
    }


_COUNTED = ("served", "left", "launches", "refused")


def _only_function(text: str) -> str:
    """The name of the one kernel, or else of the one function of an element."""
    if "__global__" in text:
        return kernels._only_kernel(text)
    names = sorted(set(_UPDATE.findall(kernels._COMMENT.sub(" ", text))))
    if len(names) != 1:
        what = f"the functions {', '.join(names)}" if names else "no function of a 'tch_element &' that could be found"
        raise ValueError(f"name is needed: the source has {what}")
    return names[0]


def _tolerance(value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"tolerance must be a number, got {type(value).__name__!r}")
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"tolerance is {number}, expected a finite number, 0 or more")
    return number


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__!r}")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
