"""libtorchium, as the package sees it. Private: the public names are in torchium, torchium.linalg, torchium.optim.

Arrays are anything that speaks DLPack: torch tensors (parameters that require gradients included), NumPy, CuPy, JAX.
An output is written in place, must be writable and must not overlap an input. The device of a call is that of its
arrays; a call on a GPU is queued on the stream its arrays' library is working on, and `stream` says another one.
For torch tensors a result may be None: then it is made, contiguous, and returned (in eigh both, where w is None).
"""

from collections.abc import Callable, Sequence
from typing import Any

Array = Any
Maybe = Array | None
Stream = int | None
Role = bool | tuple[bool, int, bytes]

version: str

class NumericError(RuntimeError):
    """Numbers that do not allow it: not finite, not symmetric, not positive definite, no convergence."""

class KernelError(RuntimeError):
    """A kernel that cannot be compiled: what the compiler says of it, or that there is none."""

class OutOfMemoryError(MemoryError):
    """The device or the host has not enough memory for the call."""

def library_path() -> str:
    """The file of libtorchium."""

def library_time() -> int:
    """Nanoseconds this thread has spent inside matrix functions of the library: the rest of a call is Python's."""

# --- devices and memory -----------------------------------------------------------------------------------------------

def device_count(kind: str) -> int: ...
def devices() -> list[dict[str, Any]]:
    """Of each usable device: device, name, features, total_memory, free_memory, capability, processors."""

def backends() -> list[dict[str, Any]]:
    """Of each backend: name, available, devices, library, details, and the reason where it cannot be used."""

def memory_info(device: str) -> dict[str, int]:
    """total and free of the device; allocated, reserved, peak, requests, misses of the pools that calls here use, those
    at work in another thread left out."""

def trim_pool(device: str, keep: int = 0) -> None: ...
def synchronize(device: str) -> None: ...
def set_num_threads(count: int) -> None: ...
def get_num_threads() -> int: ...

class Memory:
    """A zero-filled tensor in memory of the pool, for from_dlpack of any library, given back after its last user."""

    def __init__(
        self, shape: Sequence[int], dtype: str, device: str, channels_last: bool = False, stream: Stream = None
    ) -> None: ...
    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# --- which way a call with PyTorch tensors goes -----------------------------------------------------------------------

def set_listeners(
    types: tuple[type, ...],
    calls: tuple[tuple[Callable[[], Any], Any], ...],
    attributes: tuple[tuple[Any, str, Any], ...],
    is_recorded: Callable[[], bool],
) -> None:
    """What `recorded` asks, with the answers that mean that nobody listens. Only the first call counts."""

def recorded(*tensors: Any) -> bool | None:
    """Whether autograd records a call with these tensors; None where it must go through its operator."""

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
    """Where a and b are given as the shapes of one matrix of each, they are made, and returned."""

# --- gradients of samples, one for each of grad.h ---------------------------------------------------------------------

class Layer:
    """A tch_layer without its scale, which is an argument of each call: a kind ("linear", "conv", "embedding",
    "layer_norm", "rms_norm", "group_norm") and the options it has. A convolution has as many dimensions as `kernel` has
    numbers."""

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
    device: str, config: dict[str, Any], parameters: list[tuple[Sequence[int], str, Role]]
) -> dict[str, int]:
    """What an optimizer would take: parameters as (shape, dtype, role)."""

def same_items(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects."""

class Optimizer:
    """One tch_optimizer: all parameters of one device. A `config` has the fields of tch_optim_config by name,
    enumerations as their words; "kind" must be there, missing ones have the kind's defaults. `allocate(bytes)` returns
    (owner, address): memory on the device that becomes part of the state's and lives as long as the owner."""

    def __init__(
        self,
        device: str,
        allocate: Callable[[int], tuple[Any, int]] | None = None,
        group: tuple[str, int, int, Callable[[str, int, int, Any, int], None]] | None = None,
    ) -> None:
        """A `group` is (name, rank, size, collective): the optimizer is shared by its ranks. The collective is called
        with "all_gather", "all_to_all" or "reduce_max", the addresses to send from and receive at, the bytes, the four
        lists of offsets and bytes, or the number of int32, and the stream."""

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
        `placements`, of a shared optimizer: for each parameter None, where every rank has all of it, or (shape,
        shards), a shard being (rank, start, size, offset in that rank's tensor)."""

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
        """Parameters of all groups in order, with these gradients or with those in their attribute `grad`. None where
        all had one, else the list of those that had: nothing is done where that is empty. Parameters whose memory has
        moved are followed; the number of one that is another tensor now (shape, dtype, layout, device) is returned, and
        nothing has changed."""

    def states(self) -> list[tuple[str, int, Memory]]:
        """(name without its parameter's, parameter, view) of each tensor; the views keep the memory alive."""

    def get_counts(self, number: int) -> list[int]: ...
    def set_counts(self, number: int, counts: Sequence[int]) -> None: ...
    def tiles(self) -> list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """What the ranks of a group divide, on every rank alike: (parameter, number, owner, dims of the parameter,
        start, size) of each tile."""

    def memory(self) -> dict[str, int]: ...
    def stats(self) -> dict[str, float]: ...
    def set_range_hook(self, push: Callable[[str], object] | None, pop: Callable[[], object] | None) -> None: ...

# --- curvature --------------------------------------------------------------------------------------------------------

def kfac_forecast(config: dict[str, Any], layers: list[tuple[Layer, int, int, bool, str]]) -> int:
    """Bytes of state that a Kfac would take."""

class Kfac:
    """One tch_kfac: the layers of a model on one device, as (layer, inputs, outputs, bias, name). A `config` has the
    fields of tch_kfac_config by name, enumerations as their words; missing ones have the defaults. `allocate` and
    `group` as for Optimizer."""

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
        """In place: the gradients of weight and bias of each layer in turn, None for those there are not."""

    def set_config(self, config: dict[str, Any]) -> None: ...
    def states(self) -> list[tuple[str, int, Memory]]:
        """(name without its layer's, layer, view) of each tensor; the views keep the memory alive."""

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
        """Divides by the scale and checks for infinities in one pass; only checks where divide is False."""

    def update(self) -> None:
        """Ends the iteration: adjusts the scale and clears the flag."""

# --- custom kernels ---------------------------------------------------------------------------------------------

class Kernel:
    """One tch_kernel, compiled when it is made, of `source` or, where that is None, of the file `path`; with a context
    of its own."""

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
    """The short way through a call of torchium.elementwise, with a kernel whose parameters are the number of elements,
    the number of packs of 16 bytes, `inputs` inputs and the outputs, each made like the first tensor with `keywords` of
    torch.empty_like, or None."""

    def __init__(
        self, kernel: Kernel, inputs: int, keywords: tuple[Any, ...], width: int, threads: int, blocks: int, grain: int
    ) -> None: ...
    def run(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """The result, or a tuple of several; None where the call is of another kind."""

def kernel_cache_folder() -> str:
    """Where compiled kernels are kept. An OSError where there is no folder that can be used."""
