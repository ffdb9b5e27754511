"""The C library: paths, available devices, memory pools. Does not import PyTorch; devices are "cpu", "cuda", "cuda:1"
or a torch.device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchium import _C

if TYPE_CHECKING:
    from torchium.optim import TorchiumOptimizer


def get_include() -> str:
    """The folder to give to a C compiler with -I, so that `#include <torchium/torchium.h>` is found.

    cc program.c $(python -c "import torchium as t; print(f'-I{t.get_include()} -L{t.get_library_dir()}')") -ltorchium
    """
    # Next to this file in a build tree, next to the library's folder once installed.
    places = [Path(__file__).parent / "include", Path(get_library_dir()).parent / "include"]
    for place in places:
        if (place / "torchium" / "torchium.h").is_file():
            return str(place)
    raise RuntimeError(
        f"the headers of Torchium are in neither of {', '.join(map(str, places))}; install the package again"
    )


def get_library_dir() -> str:
    """The folder of libtorchium, for -L and -Wl,-rpath; contains cmake and pkgconfig files."""
    return str(Path(_C.library_path()).resolve().parent)


def include_paths() -> list[str]:
    """`get_include()` in a list, as torch.utils.cpp_extension takes it.

    extra_include_paths=torchium.include_paths()
    """
    return [get_include()]


def library_paths() -> list[str]:
    """`get_library_dir()` in a list, for the linker of a C++ extension, with `-ltorchium`.

    extra_ldflags=[*(f"-L{p}" for p in torchium.library_paths()), "-ltorchium"]
    """
    return [get_library_dir()]


def is_available(device: Any = "cuda") -> bool:
    """Whether the library can use a device. `python -m torchium` shows why not.

    Args:
        device: "cpu", "cuda", "cuda:1", or a torch.device.
    """
    name = _device_name(device)
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not index.isdecimal()):
        raise ValueError(f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:N'")
    return int(index or 0) < _C.device_count(kind)


def _device_name(device: Any) -> str:
    # By the type's name, to avoid importing PyTorch.
    kind = type(device)
    if isinstance(device, str) or (kind.__module__, kind.__name__) == ("torch", "device"):
        return str(device)
    raise TypeError(f"device must be a str or a torch.device, got {kind.__name__!r}")


def _usable_devices() -> list[str]:
    return [f"{kind}:{i}" if kind == "cuda" else kind for kind in ("cpu", "cuda") for i in range(_C.device_count(kind))]


def memory_report(optimizer: TorchiumOptimizer | None = None, *, device: Any = None) -> dict[str, Any]:
    """The memory of an optimizer in bytes, or without one of the library's pools on each device.

    Args:
        optimizer: one of torchium.optim, for its `memory_report()`: a forecast before its first step.
        device: without an optimizer, the device of a single pool; None for all, by name. A pool has total, free,
            allocated, reserved, peak and so on.

    Examples:
        >>> torchium.memory_report(device="cuda")["peak"]
    """
    if optimizer is not None:
        return _method(optimizer, "memory_report")()
    if device is not None:
        return _C.memory_info(_device_name(device))
    return {name: _C.memory_info(name) for name in _usable_devices()}


def stats(optimizer: TorchiumOptimizer | None = None) -> dict[str, float]:
    """A flat dict of numbers for a logger.

    Args:
        optimizer: one of torchium.optim, for its `stats()`; None for the pools, as "cpu/allocated", "cuda:0/peak".
    """
    if optimizer is not None:
        return _method(optimizer, "stats")()
    return {f"{name}/{what}": float(value) for name, pool in memory_report().items() for what, value in pool.items()}


def _method(optimizer: Any, name: str) -> Any:
    method = getattr(optimizer, name, None)
    if isinstance(optimizer, type) or not callable(method):
        raise TypeError(
            f"optimizer must be one of torchium.optim, got {type(optimizer).__name__!r}: it has no {name}()"
        )
    return method
