"""Second-order optimization of neural networks, on GPUs and CPUs.

    import torchium
    optimizer = torchium.optim.Shampoo(model, lr=1e-3)
    optimizer = torchium.create_optimizer("muon", model, lr=0.02)

`torchium.linalg` has matrix functions for PyTorch, NumPy, CuPy and JAX arrays. `torchium.optim`, `torchium.amp`,
`torchium.utils` and `torchium.grad_sample` (GradSampleModule, per_sample_norms, GhostClipping) import PyTorch.
`torchium.kernel` and `torchium.elementwise` compile custom kernels. `python -m torchium` checks the installation.

`import torchium` loads neither PyTorch nor the C library: names are resolved on first use, so `python -m torchium`
works even if the library does not load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchium import amp, grad_sample, integrations, linalg, optim, utils
    from torchium._C import KernelError, NumericError, OutOfMemoryError
    from torchium._C import version as __version__
    from torchium.factory import create_optimizer, list_optimizers
    from torchium.grad_sample import GhostClipping, GradSampleModule, per_sample_norms
    from torchium.kernels import elementwise, kernel
    from torchium.library import (
        get_include,
        get_library_dir,
        include_paths,
        is_available,
        library_paths,
        memory_report,
        stats,
    )

__all__ = [
    "GhostClipping",
    "GradSampleModule",
    "KernelError",
    "NumericError",
    "OutOfMemoryError",
    "__version__",
    "amp",
    "create_optimizer",
    "elementwise",
    "get_include",
    "get_library_dir",
    "grad_sample",
    "include_paths",
    "integrations",
    "is_available",
    "kernel",
    "library_paths",
    "linalg",
    "list_optimizers",
    "memory_report",
    "optim",
    "per_sample_norms",
    "stats",
    "utils",
]

_MODULES = ("amp", "grad_sample", "integrations", "linalg", "optim", "optimizers", "utils")
# The module and attribute of each other name.
_NAMES = {
    "GhostClipping": ("grad_sample", "GhostClipping"),
    "GradSampleModule": ("grad_sample", "GradSampleModule"),
    "KernelError": ("_C", "KernelError"),
    "NumericError": ("_C", "NumericError"),
    "OutOfMemoryError": ("_C", "OutOfMemoryError"),
    "__version__": ("_C", "version"),
    "create_optimizer": ("factory", "create_optimizer"),
    "elementwise": ("kernels", "elementwise"),
    "get_include": ("library", "get_include"),
    "get_library_dir": ("library", "get_library_dir"),
    "include_paths": ("library", "include_paths"),
    "is_available": ("library", "is_available"),
    "kernel": ("kernels", "kernel"),
    "library_paths": ("library", "library_paths"),
    "list_optimizers": ("factory", "list_optimizers"),
    "per_sample_norms": ("grad_sample", "per_sample_norms"),
    "memory_report": ("library", "memory_report"),
    "stats": ("library", "stats"),
}


def __getattr__(name: str) -> Any:
    module, attribute = (name, "") if name in _MODULES else _NAMES.get(name, ("", ""))
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: Any = importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            error.msg = f"torchium.{name} needs PyTorch, which is not installed in this environment: pip install torch"
        raise
    if attribute:
        value = globals()[name] = getattr(value, attribute)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
