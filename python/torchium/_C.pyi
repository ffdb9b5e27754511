"""Bindings of libtorchium. Private: the public names are in torchium, torchium.linalg, torchium.optim.

Arrays support DLPack: torch tensors (including parameters that require gradients), NumPy, CuPy, JAX. An output is
written in place, must be writable and must not overlap an input. A call runs on the device of its arrays, on a GPU on
`stream`, by default the current stream of their library. For torch tensors an output may be None: then a contiguous one
is allocated and returned (in eigh both, if w is None).
"""

from collections.abc import Callable, Sequence
from typing import Any

Array = Any
Maybe = Array | None
Stream = int | None
Role = bool | tuple[bool, int, bytes]

version: str

class NumericError(RuntimeError):
    """A matrix that is not finite, not symmetric or not positive definite, overflow, or no convergence."""

class KernelError(RuntimeError):
    """A kernel that cannot be compiled, with the compiler's message, or no compiler."""

class OutOfMemoryError(MemoryError):
    """The device or the host has not enough memory for the call."""

def library_path() -> str:
    """The file of libtorchium."""

def library_time() -> int:
    """Nanoseconds spent in the library's matrix functions in this thread, excluding Python."""

# --- devices and memory -----------------------------------------------------------------------------------------------

def device_count(kind: str) -> int: ...
def devices() -> list[dict[str, Any]]:
    """For each usable device: device, name, features, total_memory, free_memory, capability, processors."""

def backends() -> list[dict[str, Any]]:
    """For each backend: name, available, devices, library, details, and the reason if it cannot be used."""

def memory_info(device: str) -> dict[str, int]:
    """total and free of the device; allocated, reserved, peak, requests, misses of the idle pools of these
    functions."""

def trim_pool(device: str, keep: int = 0) -> None: ...
def synchronize(device: str) -> None: ...
def set_num_threads(count: int) -> None: ...
def get_num_threads() -> int: ...

class Memory:
    """A zero-filled tensor from the pool, for from_dlpack of any library."""

    def __init__(
        self, shape: Sequence[int], dtype: str, device: str, channels_last: bool = False, stream: Stream = None
    ) -> None: ...
    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# --- dispatch of calls with PyTorch tensors ---------------------------------------------------------------------------

def set_listeners(
    types: tuple[type, ...],
    calls: tuple[tuple[Callable[[], Any], Any], ...],
    attributes: tuple[tuple[Any, str, Any], ...],
    is_recorded: Callable[[], bool],
) -> None:
    """Sets the checks of `recorded`, with their results in the ordinary case. Only the first call has an effect."""

def recorded(*tensors: Any) -> bool | None:
    """Whether autograd records a call with these tensors; None if it must use the operator."""

# --- matrix functions, one for each of linalg.h -----------------------------------------------------------------------

def matmul(a: Array, b: Array, out: Maybe, stream: Stream = None) -> Maybe: ...
def matmul_chunked(
    a: Array, b: Array, memory_budget: int, out: Maybe, device: str | None = None, stream: Stream = None
) -> Maybe: ...
def symmetric_product(a: Array, b: Array, out: Maybe, stream: Stream = None) -> Maybe: ...
def gram(a: Array, transpose: bool, alpha: float, out: Maybe, stream: Stream = None) -> Maybe: ...
def eigh(a: Array, w: Maybe, v: Maybe, report: Maybe = None, stream: Stream = None) -> Any: ...
def matrix_power(
    a: Array, power: float, eps: float, out: Maybe, report: Maybe = None, stream: Stream = None
) -> Maybe: ...
def matrix_power_backward(
    a: Array, power: float, eps: float, grad: Array, out: Maybe, report: Maybe = None, stream: Stream = None
) -> Maybe: ...
def inverse_root(
    a: Array,
    root: int,
    eps: float,
    relative_eps: float,
    method: str,
    tolerance: float,
    out: Maybe,
    residual: Maybe = None,
    report: Maybe = None,
    stream: Stream = None,
) -> Maybe: ...
def inverse_root_backward(
    a: Array,
    root: int,
    eps: float,
    relative_eps: float,
    grad: Array,
    out: Maybe,
    report: Maybe = None,
    stream: Stream = None,
) -> Maybe: ...
def orthogonalize(a: Array, steps: int, method: str, out: Maybe, stream: Stream = None) -> Maybe: ...
def kronecker_product(a: Array, b: Array, out: Maybe, stream: Stream = None) -> Maybe: ...
def kronecker_matmul(a: Array, b: Array, x: Array, out: Maybe, stream: Stream = None) -> Maybe: ...
def kronecker_apply(a: Array, b: Array, x: Array, out: Maybe, stream: Stream = None) -> Maybe: ...
def kronecker_solve(
    a: Array, b: Array, x: Array, damping: float, out: Maybe, report: Maybe = None, stream: Stream = None
) -> Maybe: ...
def nearest_kronecker(
    m: Array, a: Array | tuple[int, int], b: Array | tuple[int, int], error: Maybe, stream: Stream = None
) -> tuple[Array, Array] | None:
    """If a and b are shapes of one matrix each, allocates and returns them."""

# --- per-sample gradients, one for each of grad.h ---------------------------------------------------------------------

class Layer:
    """A tch_layer without its scale, which is an argument of each call: a kind ("linear", "conv", "embedding",
    "layer_norm", "rms_norm", "group_norm") and its options. The length of `kernel` is the number of dimensions of a
    convolution."""

    def __init__(
        self,
        kind: str,
        *,
        rounded: bool = True,
        kernel: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
        padding: str = "zeros",
        groups: int = 1,
        rows: int = 0,
        padding_index: int = -1,
        normalized: int = 1,
        eps: float = 1e-5,
    ) -> None: ...

# `parts` is 1 for the weight, 2 for the bias, 3 for both. Numbers of samples (norms, weights, dots) are float64 [B].

def grad_samples(
    layer: Layer,
    input: Array,
    output_gradient: Array,
    weight: Maybe,
    bias: Maybe,
    scale: float = 1.0,
    stream: Stream = None,
) -> None: ...
def grad_norms(
    layer: Layer,
    input: Array,
    output_gradient: Array,
    parts: int,
    accumulate: bool,
    norms: Array,
    scale: float = 1.0,
    stream: Stream = None,
) -> None: ...
def grad_weighted_sum(
    layer: Layer,
    input: Array,
    output_gradient: Array,
    weights: Maybe,
    beta: float,
    weight: Maybe,
    bias: Maybe,
    scale: float = 1.0,
    stream: Stream = None,
) -> None: ...
def grad_gram(
    layer: Layer,
    input: Array,
    output_gradient: Array,
    parts: int,
    accumulate: bool,
    gram: Array,
    scale: float = 1.0,
    stream: Stream = None,
) -> None: ...
def grad_dots(
    layer: Layer,
    input: Array,
    output_gradient: Array,
    weight: Maybe,
    bias: Maybe,
    accumulate: bool,
    dots: Array,
    scale: float = 1.0,
    stream: Stream = None,
) -> None: ...
def grad_tied_norms(
    layer: Layer,
    tokens: Array,
    embedding_gradient: Array,
    linear_input: Array,
    linear_gradient: Array,
    norms: Array,
    scale: float = 1.0,
    stream: Stream = None,
) -> None: ...
def grad_clip_weights(norms: Array, max_norm: float, weights: Array, stream: Stream = None) -> None: ...
def grad_natural_weights(
    gram: Array, rhs: Maybe, damping: float, weights: Array, report: Maybe, stream: Stream = None
) -> None: ...

# --- optimizers -------------------------------------------------------------------------------------------------------

def optim_forecast(
    device: str,
    config: dict[str, Any],
    parameters: list[tuple[Sequence[int], str, Role]],
    group: tuple[Any, ...] | None = None,
    placements: tuple[Any, ...] | None = None,
) -> dict[str, int]:
    """Memory of an optimizer for parameters given as (shape, dtype, role); with a group, of this rank's part."""

def same_items(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists contain the same objects."""

class Optimizer:
    """One tch_optimizer: all parameters of one device. A `config` has the fields of tch_optim_config by name,
    enumerations as strings; "kind" is required, others have the kind's defaults. `allocate(bytes)` returns (owner,
    address): device memory for state that lives as long as the owner."""

    def __init__(
        self,
        device: str,
        allocate: Callable[[int], tuple[Any, int]] | None = None,
        group: tuple[str, int, int, Callable[[str, int, int, Any, int], None]] | None = None,
    ) -> None:
        """A `group` (name, rank, size, collective) shards the optimizer. The collective is called with "all_gather",
        "all_to_all" or "reduce_max", the send and receive addresses, the bytes, the four lists of offsets and bytes, or
        the number of int32, and the stream."""

    def add_group(
        self,
        config: dict[str, Any],
        parameters: list[Array],
        names: list[str],
        roles: list[Role],
        stream: Stream = None,
        placements: tuple[Any, ...] | None = None,
    ) -> int:
        """A role is whether the parameter is elementwise, or (elementwise, batch_dims, cuts), those as int64 in bytes.
        `placements` of a sharded optimizer: for each parameter None if it is replicated, or (shape, shards), with
        shards (rank, start, size, offset in that rank's tensor)."""

    def set_config(self, group: int, config: dict[str, Any]) -> None: ...
    def set_lr(self, group: int, lr: float) -> None: ...
    def set_lr_tensor(self, group: int, lr: Maybe) -> None: ...
    def step(
        self,
        parameters: list[Array],
        gradients: list[Maybe] | None = None,
        grad_scale: Maybe = None,
        found_inf: Maybe = None,
        stream: Stream = None,
    ) -> int | list[Array] | None:
        """Parameters of all groups in order, with the given gradients or those in `.grad`. Returns None if all had one,
        else the list of those that had one; an empty list means that nothing was done. Parameters may have moved in
        memory; if one has changed shape, dtype, layout or device, returns its number, and nothing has changed."""

    def states(self) -> list[tuple[str, int, Memory]]:
        """(name without the parameter's, parameter, view) of each tensor; the views keep the memory alive."""

    def get_counts(self, number: int) -> list[int]: ...
    def set_counts(self, number: int, counts: Sequence[int]) -> None: ...
    def tiles(self) -> list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """The tiles, equal on all ranks: (parameter, number, owner, dims of the parameter, start, size)."""

    def memory(self) -> dict[str, int]: ...
    def stats(self) -> dict[str, float]: ...
    def set_range_hook(self, push: Callable[[str], object] | None, pop: Callable[[], object] | None) -> None: ...

# --- curvature --------------------------------------------------------------------------------------------------------

def kfac_forecast(config: dict[str, Any], layers: list[tuple[Layer, int, int, bool, str]]) -> int:
    """Bytes of state of a Kfac."""

class Kfac:
    """One tch_kfac: the layers of a model on one device, as (layer, inputs, outputs, bias, name). A `config` has the
    fields of tch_kfac_config by name, enumerations as strings; others have the defaults. `allocate` and `group` as for
    Optimizer."""

    def __init__(
        self,
        device: str,
        config: dict[str, Any],
        layers: list[tuple[Layer, int, int, bool, str]],
        allocate: Callable[[int], tuple[Any, int]] | None = None,
        group: tuple[str, int, int, Callable[[str, int, int, Any, int], None]] | None = None,
    ) -> None: ...
    def observe(
        self,
        layer: int,
        input: Array,
        output_gradient: Array,
        scale: float,
        grad_scale: Maybe = None,
        stream: Stream = None,
    ) -> None: ...
    def refresh(self) -> None: ...
    def precondition(self, lr: float, gradients: list[Maybe], stream: Stream = None) -> None:
        """Preconditions in place the gradients of weight and bias of each layer; None for missing ones."""

    def set_config(self, config: dict[str, Any]) -> None: ...
    def states(self) -> list[tuple[str, int, Memory]]:
        """(name without the layer's, layer, view) of each tensor; the views keep the memory alive."""

    def get_counts(self, number: int) -> list[int]: ...
    def set_counts(self, number: int, counts: Sequence[int]) -> None: ...
    def stats(self) -> dict[str, float]: ...

# --- loss scaling -----------------------------------------------------------------------------------------------------

class Scaler:
    """One tch_scaler: the scale, the growth tracker and the flag of the iteration, on one device. `scale` and
    `found_inf` are views that may be written to."""

    def __init__(self, device: str) -> None: ...
    def scale(self) -> Memory: ...
    def found_inf(self) -> Memory: ...
    def unscale(self, gradients: list[Maybe], divide: bool = True) -> None:
        """Divides by the scale and checks for infinities in one pass; only checks if divide is False."""

    def update(self) -> None:
        """Ends the iteration: adjusts the scale and clears the flag."""

# --- custom kernels ---------------------------------------------------------------------------------------------

class Kernel:
    """One tch_kernel with its context, compiled at construction from `source` or, if that is None, from the file
    `path`."""

    def __init__(
        self,
        device: str,
        source: str | None,
        path: str | None,
        name: str,
        options: Sequence[str],
        includes: Sequence[str],
        cache: bool,
    ) -> None: ...
    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: tuple[Any, ...],
        shared_mem: int = 0,
        stream: Stream = None,
        allow_strided: bool = False,
    ) -> None: ...
    def parameters(self) -> list[str]: ...
    def info(self) -> dict[str, Any]:
        """registers, shared_bytes, local_bytes, max_threads, suggested_threads, suggested_blocks, from_cache."""

class Elementwise:
    """The fast path of torchium.elementwise, with a kernel whose parameters are the number of elements, the number of
    16-byte packs, `inputs` inputs and the outputs, each allocated like the first tensor with `keywords` of
    torch.empty_like, or None."""

    def __init__(
        self, kernel: Kernel, inputs: int, keywords: tuple[Any, ...], width: int, threads: int, blocks: int, grain: int
    ) -> None: ...
    def run(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """The result, or a tuple of several; None if the call needs the general path."""

def kernel_cache_folder() -> str:
    """The folder of compiled kernels. Raises OSError if none can be used."""
