"""The layers that KFAC preconditions, and their factors in the C library.

There is one C object per device, created with the first batch. After the model has moved, or a parameter was frozen, a
new one takes over the state that still fits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchium import _C
from torchium._functions.ops import is_hollow
from torchium._messages import shown
from torchium._watch.layers import Part, kind_of, layer_of

from .._engine.engine import allocate_state, stream_on
from .._engine.state import MOST_STEPS, check_counts
from .._shared.group import Group, make_group, ranks_of
from .._shared.sharding import arrived, is_sharded, local_part, local_tensor, whole_tensor

__all__ = ["COUNTS", "FACTORS", "Factors", "find_layers"]

COUNTS = "counts"
FACTORS = ("input_factor", "output_factor")
_COUNTED = 4


# --- which layers -----------------------------------------------------------------------------------------------------


def find_layers(model: nn.Module, skip: str | Iterable[str] | None, rounded: bool) -> tuple[list[Part], dict[str, str]]:
    """The linear and convolution layers, and for every other trainable module the reason why it is excluded."""
    trainable = [
        (name or type(module).__name__, module)
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    patterns = _patterns(skip, trainable)
    owners = Counter(id(p) for _, module in trainable for p in module.parameters(recurse=False))
    layers, left_out = [], {}
    for name, module in trainable:
        reason = _why_not(name, module, patterns, owners)
        if reason is None:
            layers.append(Part(name, module, kind_of(module), layer_of(module, rounded)))
        else:
            left_out[name] = reason
    return layers, left_out


def _patterns(skip: Any, modules: list[tuple[str, nn.Module]]) -> list[str]:
    """A pattern without a match is an error: it is probably misspelt."""
    patterns = [skip] if isinstance(skip, str) else list(skip or ())
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"skip_layers must hold patterns, got an object of type {type(pattern).__name__}")
        try:
            found = any(_fits(pattern, name, module) for name, module in modules)
        except re.error as error:
            raise ValueError(f"skip_layers: {pattern!r} is not a valid regular expression: {error}") from None
        if not found:
            raise ValueError(f"skip_layers: {pattern!r} matches no trainable layer's name or class")
    return patterns


def _fits(pattern: str, name: str, module: nn.Module) -> bool:
    return bool(re.search(pattern, name) or re.search(pattern, type(module).__name__))


def _why_not(name: str, module: nn.Module, patterns: list[str], owners: Counter[int]) -> str | None:
    if any(_fits(pattern, name, module) for pattern in patterns):
        return "skipped"
    if kind_of(module) not in ("linear", "conv"):
        return f"{type(module).__name__} is neither a plain linear nor a plain convolution layer"
    if not module.weight.requires_grad:
        return "its weight is frozen"
    if any(owners[id(p)] > 1 for p in module.parameters(recurse=False)):
        return "it shares a parameter with another layer"
    return None


# --- their factors ----------------------------------------------------------------------------------------------------


class _Weights:
    """The parameters of a layer. For sharded ones (fully_shard), the module has unsharded parameters during forward and
    backward: this returns those it had at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharded = {name: p for name, p in module.named_parameters(recurse=False) if is_sharded(p)}

    def weight(self) -> torch.Tensor:
        return self._sharded.get("weight", self._module.weight)

    def bias(self) -> torch.Tensor | None:
        bias = self._sharded.get("bias", self._module.bias)
        return bias if bias is not None and bias.requires_grad else None

    def signature(self) -> tuple[Any, ...]:
        """The key of a C object."""
        weight = self.weight()
        return weight.device, weight.dtype, tuple(weight.shape), self.bias() is not None


class Factors:
    """The factors of all layers. A configuration has the fields of tch_kfac_config by name."""

    def __init__(self, layers: list[Part], dtype: torch.dtype | None, process_group: Any = None) -> None:
        self._layers = layers
        self._weights = [_Weights(layer.module) for layer in layers]
        self._process_group = process_group  # whose ranks divide the refreshes
        self._groups: dict[torch.device, Group] = {}
        self._dtype = dtype
        self._config: dict[str, Any] = {}
        self._signature: list[Any] | None = None
        self._engines: dict[torch.device, _C.Kfac] = {}
        self._members: dict[torch.device, list[int]] = {}  # the layers of each, by number
        self._places: dict[Part, tuple[torch.device, int]] = {}

    def configure(self, config: dict[str, Any]) -> None:
        """Numbers that may change between steps; the others are fixed."""
        if config != self._config:
            for device, engine in self._engines.items():
                engine.set_config(config | {"factor_dtype": self._dtype_on(device)})
            self._config = config

    # --- making

    def made(self) -> bool:
        return bool(self._engines)

    def settle(self) -> None:
        """Creates the C objects, or replaces them if the layers have changed."""
        signature = [weights.signature() for weights in self._weights]
        if signature == self._signature:
            return
        before = self.state() if self._engines else {}
        self._make(signature)
        if before:
            self.restore({name: saved for name, saved in before.items() if self._fit(name, saved)})

    def _make(self, signature: list[Any]) -> None:
        members: dict[torch.device, list[int]] = {}
        places = {}
        for k, layer in enumerate(self._layers):
            device = self._weights[k].weight().device
            numbers = members.setdefault(device, [])
            places[layer] = (device, len(numbers))
            numbers.append(k)
        self._members, self._places = members, places
        self._engines = {
            device: _C.Kfac(
                str(device),
                self._config | {"factor_dtype": self._dtype_on(device)},
                [self._entry(k) for k in numbers],
                functools.partial(allocate_state, device),
                self._group_on(device, numbers),
            )
            for device, numbers in members.items()
        }
        self._signature = signature

    def _group_on(self, device: torch.device, numbers: list[int]) -> tuple[Any, ...] | None:
        weight = self._weights[numbers[0]].weight()
        if not ranks_of(weight, self._process_group):
            return None
        if device not in self._groups:
            self._groups[device] = make_group(weight, self._process_group, device)
        return self._groups[device].arguments()

    def sharded(self) -> bool:
        return any(is_sharded(weights.weight()) for weights in self._weights)

    def groups(self) -> list[Group]:
        """Groups whose ranks divide the layers of a device."""
        return list(self._groups.values()) if self._engines else []

    def _dtype_on(self, device: torch.device) -> str:
        """float32, or float64 for a device with a float64 layer."""
        if self._dtype is not None:
            return str(self._dtype).removeprefix("torch.")
        weights = [each.weight() for each in self._weights]
        wide = any(w.dtype == torch.float64 and w.device == device for w in weights)
        return "float64" if wide else "float32"

    def _entry(self, k: int) -> tuple[Any, int, int, bool, str]:
        layer = self._layers[k]
        shape = self._weights[k].weight().shape
        return (
            layer.description,
            math.prod(shape[1:]),
            shape[0],
            self._weights[k].bias() is not None,
            f"{k}.{layer.name}".encode()[:180].decode(errors="ignore"),
        )

    def forecast(self) -> int:
        """Bytes of state; before allocation, for one process with all layers."""
        if self._groups:
            return sum(view.nbytes for views in self.views().values() for view in views.values())
        on = [weights.weight().device for weights in self._weights]
        total = 0
        for device in set(on):
            entries = [self._entry(k) for k in range(len(self._layers)) if on[k] == device]
            total += _C.kfac_forecast(self._config | {"factor_dtype": self._dtype_on(device)}, entries)
        return total

    # --- a step

    def have_gradients(self) -> bool:
        return any(weights.weight().grad is not None for weights in self._weights)

    def observe(self, layer: Part, x: torch.Tensor, gradient: torch.Tensor, scale: float, loss_scale: Any) -> None:
        if is_sharded(x) or is_sharded(gradient):
            raise TypeError(
                f"KFAC: the input or output of layer {layer.name!r} is a DTensor: tensor parallelism has divided the "
                "layer, and factors are of whole ones. skip_layers leaves it out"
            )
        device, number = self._places[layer]
        x, gradient = arrived(x), arrived(gradient)
        if loss_scale is not None and loss_scale.device != device:
            loss_scale = loss_scale.to(device, non_blocking=True)
        self._engines[device].observe(number, x, gradient, scale, loss_scale, stream_on(device))

    def refresh(self) -> None:
        for engine in self._engines.values():
            engine.refresh()

    def precondition(self, lr: float) -> None:
        """Gradients of layers are processed unsharded: every rank gathers sharded ones and keeps its shard of the
        result."""
        for device, engine in self._engines.items():
            gradients: list[torch.Tensor | None] = []
            for k in self._members[device]:
                bias = self._weights[k].bias()
                gradients += [self._weights[k].weight().grad, None if bias is None else bias.grad]
            whole = [None if gradient is None else whole_tensor(gradient) for gradient in gradients]
            engine.precondition(lr, whole, stream_on(device))
            for gradient, result in zip(gradients, whole, strict=True):
                if is_sharded(gradient):
                    local_tensor(gradient).copy_(local_part(result, gradient))

    # --- state

    def views(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state's tensors by layer: views of the C objects' memory."""
        found: dict[str, dict[str, torch.Tensor]] = {layer.name: {} for layer in self._layers}
        for device, engine in self._engines.items():
            for name, number, memory in engine.states():
                layer = self._layers[self._members[device][number]]
                found[layer.name][name] = torch.from_dlpack(memory)
        return found

    def state(self) -> dict[str, dict[str, Any]]:
        """Tensors by layer, and `counts`."""
        saved: dict[str, dict[str, Any]] = dict(self.views())
        for layer, (device, number) in self._places.items():
            saved[layer.name][COUNTS] = self._engines[device].get_counts(number)
        return saved

    def consolidate(self, to: int, averaged: bool) -> dict[str, dict[str, Any]] | None:
        """The state of all layers in host memory on rank `to`, None on the others. Factors are the mean over the ranks
        that average them, else those of the layer's owner, as are inverses and bases."""
        mine = {
            name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in saved.items()}
            for name, saved in (self.state() if self._engines else {}).items()
        }
        for group in self.groups():
            flat = {
                f"{name}/{key}": torch.as_tensor(value, device="cpu")
                for name, saved in mine.items()
                for key, value in saved.items()
            }
            every: list[dict[str, torch.Tensor]] = [{} for _ in group.ranks]
            for rank, label, value in group.gather(flat, to):
                every[rank][label] = value
            if group.is_at(to):
                layers = [_by_layer(part) for part in every]
                mine = {name: _merged([part[name] for part in layers], averaged) for name in mine}
        return None if self.groups() and not self.groups()[0].is_at(to) else mine

    def agreed(self, size: int, averaged: bool) -> dict[str, dict[str, Any]]:
        """The state of this process, with factors and counts that are equal on all `size` processes, as by
        `consolidate`. A collective."""
        import torch.distributed as dist

        saved = self.state()
        for values in saved.values():
            mine = torch.tensor([len(values), *values[COUNTS]], device=values[FACTORS[0]].device)
            every = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(every, mine, group=self._process_group)
            owner = max(range(size), key=lambda rank, every=every: int(every[rank][0]))
            values[COUNTS] = every[owner][1:].tolist()
            for key in FACTORS:
                parts = [torch.empty_like(values[key]) for _ in range(size)]
                dist.all_gather(parts, values[key], group=self._process_group)
                if not all(torch.equal(part, values[key]) for part in parts):
                    values[key] = _one_factor(parts, owner, averaged)
        return saved

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """After an error inside, the previous C objects are restored."""
        before = self._signature, self._engines, self._members, self._places
        try:
            yield
        except BaseException:
            self._signature, self._engines, self._members, self._places = before
            raise

    def forget(self) -> None:
        """Returns to the state before the first batch."""
        self._signature, self._engines, self._members, self._places = None, {}, {}, {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Rejects state that `restore` could not write."""
        names = {layer.name for layer in self._layers}
        if saved.keys() != names:
            missing, strange = (sorted(map(shown, keys)) for keys in (names - saved.keys(), saved.keys() - names))
            raise ValueError(
                f"the state is of other layers: {', '.join(missing) or 'none'} missing, "
                f"{', '.join(strange) or 'none'} unknown"
            )
        views = self.views()
        for name in names:
            self._check(name, views[name], saved[name])

    def _check(self, name: str, views: Mapping[str, torch.Tensor], saved: Any) -> None:
        known = isinstance(saved, Mapping) and saved.keys() >= {*views, COUNTS}
        if not known or (saved.keys() != {*views, COUNTS} and not self._groups):  # a full state has more than a shard
            raise ValueError(f"the state of layer {name!r} must have {sorted(views)} and {COUNTS!r}")
        for key, view in views.items():
            value = saved[key]
            if not isinstance(value, torch.Tensor) or value.shape != view.shape:
                got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"the state {key!r} of layer {name!r} is {got}, expected shape {list(view.shape)}")
            if not value.is_floating_point() or value.layout != torch.strided or value.is_meta or is_hollow(value):
                raise ValueError(
                    f"the state {key!r} of layer {name!r} is a tensor of {value.dtype} with layout {value.layout} on "
                    f"{value.device}, expected floating-point numbers in memory"
                )
        _check_counts(name, saved[COUNTS])

    def _fit(self, name: str, saved: Mapping[str, Any]) -> bool:
        views = self.views()[name]
        return all(key in saved and saved[key].shape == view.shape for key, view in views.items())

    def restore(self, saved: Mapping[str, Any]) -> None:
        views = self.views()
        for layer, (device, number) in self._places.items():
            if layer.name in saved:
                for key, view in views[layer.name].items():
                    view.copy_(saved[layer.name][key])
                self._engines[device].set_counts(number, [int(n) for n in saved[layer.name][COUNTS]])

    def stats(self) -> dict[str, float]:
        parts = [engine.stats() for engine in self._engines.values()]
        total = {
            name: sum(part[name] for part in parts) for name in ("observations", "refreshes", "failed", "rejected")
        }
        total["worst_residual"] = max((part["worst_residual"] for part in parts), default=0.0)
        total["scale"] = min((part["scale"] for part in parts), default=1.0)
        return total


def _by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """The `state` of a rank, from the tensors it sent."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        found[name][key] = tensor.tolist() if key == COUNTS else tensor
    return found


def _merged(parts: list[dict[str, Any]], averaged: bool) -> dict[str, Any]:
    """Merges the state of one layer from all ranks."""
    owner = max(range(len(parts)), key=lambda rank: len(parts[rank]))  # with EKFAC, all have equally much
    merged = dict(parts[owner])
    for key in FACTORS:
        merged[key] = _one_factor([part[key] for part in parts], owner, averaged)
    return merged


def _one_factor(values: list[torch.Tensor], owner: int, averaged: bool) -> torch.Tensor:
    """The value of the layer's owner, or the mean; the mean of equal values may round."""
    if averaged and not all(torch.equal(value, values[0]) for value in values):
        return torch.stack(values).mean(0)
    return values[owner]


def _check_counts(name: str, counts: Any) -> None:
    """[updates of the factors, observations in the current step, refreshes, updates of the scales]; an observation
    begins an update."""
    counts = counts.tolist() if isinstance(counts, torch.Tensor) else counts
    if not isinstance(counts, (list, tuple)) or len(counts) != _COUNTED:
        raise ValueError(f"the state 'counts' of layer {name!r} must be a list of {_COUNTED} numbers")
    check_counts(f"the state 'counts' of layer {name!r}", counts, [MOST_STEPS] * _COUNTED)
    if counts[1] > 0 and counts[0] == 0:
        raise ValueError(f"the state 'counts' of layer {name!r} has {counts[1]} observations that belong to no update")
