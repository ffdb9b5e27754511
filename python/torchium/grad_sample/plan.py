"""Divides a model into parts: layers, for which the library has a rule, and units, modules with their own parameters
but without a rule, including their submodules. Unsupported parts are reported by name before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from torchium._watch.layers import Part, bag_layer_of, kind_of, layer_of

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Plan:
    """The parts of a model, and the names of their parameters."""

    def __init__(self, model: nn.Module, strict: bool = True) -> None:
        check_model(model)
        self.strict = strict
        self.has_bags = any(isinstance(m, nn.EmbeddingBag) for m in model.modules())
        self.parts = list(_parts(model, rounds_products()))
        self.mixing = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
        if strict:
            self.refuse()
        else:
            self.parts = [part for part in self.parts if why_not(part) is None and not mixes(part.module)]
            self.mixing = []
        self.names = {p: name for name, p in model.named_parameters()}
        self.owners: dict[nn.Parameter, list[Part]] = {}
        for part in self.parts:
            for p in part.module.parameters(recurse=part.description is None):
                self.owners.setdefault(p, []).append(part)

    def name(self, parameter: torch.Tensor) -> str:
        return self.names.get(parameter, "a parameter given to functional_call")

    def refuse(self) -> None:
        """Raises for the first part without per-sample gradients."""
        self.check_mixing()
        for part in self.parts:
            reason = why_not(part)
            if reason is not None:
                raise NotImplementedError(f"{part.title} {reason}")

    def check_mixing(self) -> None:
        """Checked before every pass, since batch norm may switch to training mode at any time."""
        for name, module in self.mixing:
            if mixes(module):
                raise NotImplementedError(
                    f"{name or 'the model'} ({type(module).__name__}) uses statistics of the whole batch, so that a "
                    "single sample has no gradient of its own: use GroupNorm instead, or call eval() on it"
                )


def rounds_products() -> bool:
    """Whether PyTorch's float32 products on a GPU may use TF32: then norms may as well."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # from PyTorch 2.9 on
    if precision is not None:  # if it was set by this name, reading the older one fails
        return precision == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


def mixes(module: nn.Module) -> bool:
    """Whether it uses batch statistics."""
    return isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise NotImplementedError(f"model is a {type(model).__name__}: give its .module")
    if hasattr(model, "_orig_mod"):
        raise NotImplementedError("model was compiled by torch.compile: give the model it was made from")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise NotImplementedError(f"{name or 'model'} is a TorchScript module, which cannot be inspected")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise NotImplementedError(f"{name} has no shape yet: run the model once before")


def why_not(part: Part) -> str | None:
    """Why a part is unsupported, as the end of a sentence that begins with its name."""
    module = part.module
    trainable = part.trainable()
    if not trainable:
        return None
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "keeps running statistics of the whole batch: make it with track_running_stats=False"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
        return "scales gradients by how often a token occurs in the whole batch: make it with scale_grad_by_freq=False"
    inner = _renormalizes(part)
    if inner is not None:
        return (
            f"is run sample by sample, and {inner} inside it changes its weight as it runs: make it with max_norm=None"
        )
    for name, p in trainable.items():
        if p.dtype not in _DTYPES:
            return f"has a parameter {name} of dtype {p.dtype}, expected float16, bfloat16, float32 or float64"
    return None


def _renormalizes(part: Part) -> str | None:
    """The name of an embedding with max_norm in a module without a rule: each sample would modify its weight."""
    if part.description is not None:
        return None
    for name, module in part.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            return f"{name or 'it'} ({type(module).__name__})"
    return None


# --- dividing a model -------------------------------------------------------------------------------------------------


def _parts(model: nn.Module, rounded: bool) -> Iterator[Part]:
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[Part]:
        if module in seen:
            return
        seen.add(module)
        kind = None if _has_another_forward(module) else kind_of(module)
        bag = None if _has_another_forward(module) else bag_layer_of(module)
        if kind is not None:
            yield Part(name, module, kind, layer_of(module, rounded))
        elif bag is not None:
            yield Part(name, module, "embedding", bag)
        elif _is_unit(module):
            seen.update(module.modules())
            yield Part(name, module, "unit", None)
        else:
            for child, inner in module.named_children():
                yield from visit(f"{name}.{child}" if name else child, inner)

    yield from visit("", model)


def _has_another_forward(module: nn.Module) -> bool:
    """Whether the user replaced the forward of this module."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _is_unit(module: nn.Module) -> bool:
    """Whether its forward uses trainable parameters, its own or those of submodules that it does not call."""
    if isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
        return any(p.requires_grad for p in module.parameters())
    return any(p.requires_grad for p in module.parameters(recurse=False))
