"""The parts of a model: the only conversion from modules of torch.nn to the library's description of a layer.

Only modules with the class's own forward and an ordinary weight parameter have a description: not subclasses that
compute something else, nor computed weights (parametrize, weight_norm).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from torchium import _C

__all__ = ["Part", "bag_layer_of", "describe", "has_batch", "kind_of", "layer_of"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_RMS_NORM = getattr(nn, "RMSNorm", None)  # from PyTorch 2.4 on

_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    **dict.fromkeys(_CONVOLUTIONS, "conv"),
    nn.Embedding: "embedding",
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    **dict.fromkeys(_INSTANCE_NORMS, "group_norm"),
}
if _RMS_NORM is not None:
    _KINDS[_RMS_NORM] = "rms_norm"


@dataclass(frozen=True, eq=False)
class Part:
    """A module of a model: a layer, with the library's description, or a unit, with None."""

    name: str
    module: nn.Module
    kind: str
    description: _C.Layer | None

    @property
    def title(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"

    def trainable(self) -> dict[str, nn.Parameter]:
        """Its parameters that require gradients now, by their names in it."""
        if self.description is None:
            return {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        own = self.module._parameters
        return {name: own[name] for name in ("weight", "bias") if own.get(name) is not None and own[name].requires_grad}


def kind_of(module: nn.Module) -> str | None:
    """'linear', 'conv', 'embedding', 'layer_norm', 'rms_norm' or 'group_norm'; None for anything else."""
    for cls, kind in _KINDS.items():
        if isinstance(module, cls):
            return kind if type(module).forward is cls.forward and _is_plain(module) else None
    return None


def _is_plain(module: nn.Module) -> bool:
    """Whether `weight` and `bias` are the module's only parameters, and the weight is initialized."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or nn.parameter.is_lazy(weight) or not own.keys() <= {"weight", "bias"}:
        return False
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return not module.scale_grad_by_freq  # which counts tokens over the whole batch
    if isinstance(module, _InstanceNorm):
        return not module.track_running_stats
    return True


def layer_of(module: nn.Module, rounded: bool = True) -> _C.Layer | None:
    """The library's description of a layer, or None.

    `rounded`: on a GPU with TF32, whether norms, Gram matrices and curvature may round float32 operands to 11 bits.
    """
    kind = kind_of(module)
    if kind is None:
        return None
    return _C.Layer(kind, rounded=rounded, **describe(module, kind))


def bag_layer_of(module: nn.Module) -> _C.Layer | None:
    """An embedding bag as an embedding, whose positions the caller makes from the bags; None for others."""
    if not isinstance(module, nn.EmbeddingBag) or type(module).forward is not nn.EmbeddingBag.forward:
        return None
    return _C.Layer("embedding", **describe(module, "embedding")) if _is_plain(module) else None


def describe(module: nn.Module, kind: str) -> dict[str, object]:
    """The options of a kind of layer, by their names in tch_layer."""
    if kind == "conv":
        return _describe_convolution(module)
    if kind == "embedding":
        padding = module.padding_idx
        return {"rows": module.num_embeddings, "padding_index": -1 if padding is None else padding}
    if kind == "group_norm":
        groups = module.num_features if isinstance(module, _InstanceNorm) else module.num_groups
        return {"groups": groups, "eps": module.eps}
    if kind in ("layer_norm", "rms_norm"):
        return {"normalized": len(module.normalized_shape), "eps": _eps(module)}
    return {}


def _eps(module: nn.Module) -> float:
    """RMSNorm's default is that of the type it computes in, float32 for half precision."""
    if module.eps is not None:
        return module.eps
    return torch.finfo(torch.float64 if module.weight.dtype == torch.float64 else torch.float32).eps


def _describe_convolution(module: _ConvNd) -> dict[str, object]:
    before, after = _padding(module)
    return {
        "kernel": tuple(module.kernel_size),
        "stride": tuple(module.stride),
        "dilation": tuple(module.dilation),
        "before": before,
        "after": after,
        "padding": module.padding_mode,
        "groups": module.groups,
    }


def _padding(module: _ConvNd) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding at the beginning and end of each dimension. 'same' puts an odd element at the end."""
    if module.padding == "valid":
        return (0,) * len(module.kernel_size), (0,) * len(module.kernel_size)
    if module.padding != "same":
        return tuple(module.padding), tuple(module.padding)
    whole = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    before = tuple(w // 2 for w in whole)
    return before, tuple(w - b for w, b in zip(whole, before, strict=True))


def has_batch(module: nn.Module, kind: str, x: torch.Tensor) -> bool:
    """Whether an input has the batch dimension; PyTorch accepts single samples too."""
    if kind == "conv":
        return x.ndim == len(module.kernel_size) + 2
    if kind == "embedding":
        return x.ndim >= 1
    if kind == "group_norm" and isinstance(module, _INSTANCE_NORMS):
        return x.ndim == _INSTANCE_NORMS.index(next(c for c in _INSTANCE_NORMS if isinstance(module, c))) + 3
    if kind in ("layer_norm", "rms_norm"):
        return x.ndim > len(module.normalized_shape)
    return x.ndim >= 2
