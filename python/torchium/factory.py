"""Optimizers by name, for configuration files and command lines. For a model, create_optimizer makes the usual
parameter groups: AdamW for embeddings and output layers, optionally no weight decay for vectors."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import torch

    from torchium.optim import (
        KFAC,
        SGD,
        SOAP,
        AdamW,
        KLShampoo,
        Lion,
        Muon,
        NaturalGradient,
        NorMuon,
        Shampoo,
        TorchiumOptimizer,
    )

# Name and class of torchium.optim.
_CLASSES = {
    "adamw": "AdamW",
    "kfac": "KFAC",
    "kl_shampoo": "KLShampoo",
    "lion": "Lion",
    "muon": "Muon",
    "natural": "NaturalGradient",
    "normuon": "NorMuon",
    "sgd": "SGD",
    "shampoo": "Shampoo",
    "soap": "SOAP",
}
_ALIASES = {"naturalgradient": "natural", "natural_gradient": "natural", "klshampoo": "kl_shampoo"}
# Not listed: a class with different defaults.
_VARIANTS = {"cudashampoo": "CUDAShampoo"}
# Constructed from the model, whose layers they observe.
_OF_MODEL = ("kfac", "natural")
# These update all parameters elementwise.
_FIRST_ORDER = ("adamw", "lion", "sgd")


def list_optimizers(pattern: str = "") -> list[str]:
    """The names create_optimizer knows, sorted.

    Args:
        pattern: only those that match it, in any case, as "s*".
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be a str, got {type(pattern).__name__!r}")
    return sorted(fnmatch.filter(_CLASSES, pattern.lower() or "*"))


@overload
def create_optimizer(name: Literal["adamw"], params_or_model: Any, **options: Any) -> AdamW: ...


@overload
def create_optimizer(name: Literal["kfac"], params_or_model: Any, **options: Any) -> KFAC: ...


@overload
def create_optimizer(name: Literal["kl_shampoo"], params_or_model: Any, **options: Any) -> KLShampoo: ...


@overload
def create_optimizer(name: Literal["lion"], params_or_model: Any, **options: Any) -> Lion: ...


@overload
def create_optimizer(name: Literal["muon"], params_or_model: Any, **options: Any) -> Muon: ...


@overload
def create_optimizer(name: Literal["natural"], params_or_model: Any, **options: Any) -> NaturalGradient: ...


@overload
def create_optimizer(name: Literal["normuon"], params_or_model: Any, **options: Any) -> NorMuon: ...


@overload
def create_optimizer(name: Literal["sgd"], params_or_model: Any, **options: Any) -> SGD: ...


@overload
def create_optimizer(name: Literal["shampoo"], params_or_model: Any, **options: Any) -> Shampoo: ...


@overload
def create_optimizer(name: Literal["soap"], params_or_model: Any, **options: Any) -> SOAP: ...


@overload
def create_optimizer(name: str, params_or_model: Any, **options: Any) -> TorchiumOptimizer: ...


def create_optimizer(
    name: str,
    params_or_model: Any,
    *,
    use_adamw: str | type | Iterable[str | type] = (),
    no_decay_1d: bool = False,
    **options: Any,
) -> Any:
    """Creates an optimizer of torchium.optim by name, ignoring case: "shampoo", "kl_shampoo", "soap", "muon",
    "normuon", "kfac", "natural", "adamw", "lion", "sgd".

    Args:
        name: of the optimizer.
        params_or_model: a model, or parameters or groups, which "kfac" and "natural" do not accept. Embeddings and
            output layers of a model get AdamW, as shown by `optimizer.summary()`.
        use_adamw: for a model, further matrices that get AdamW: module classes, or patterns that match, ignoring case,
            the name of a parameter, the name of its module ("transformer.wte"), the last part of that ("wte") or the
            module's class ("Embedding").
        no_decay_1d: for a model, no weight decay for parameters with fewer than two dimensions.
        options: arguments of the optimizer, such as lr and weight_decay.

    Examples:
        >>> optimizer = torchium.create_optimizer("muon", model, lr=0.02, no_decay_1d=True)
    """
    key = _known_name(name)
    patterns = _as_patterns(use_adamw)
    optim = importlib.import_module("torchium.optim")
    make = getattr(optim, _CLASSES.get(key) or _VARIANTS[key])
    if key in _OF_MODEL:
        if patterns or no_decay_1d:
            raise ValueError(f"use_adamw and no_decay_1d mean nothing to {key!r}, which has one group")
        return make(params_or_model, **options)
    if not _is_model(params_or_model):
        if patterns or no_decay_1d:
            raise ValueError("use_adamw and no_decay_1d need a model; parameter groups set their options themselves")
        return make(params_or_model, **options)
    if key in _FIRST_ORDER:
        groups = _grouped(params_or_model, _matching(params_or_model, patterns), bool(no_decay_1d))
        return make([_group(*kind, parameters, key) for kind, parameters in groups.items()], **options)
    reasons = _reasons(params_or_model, patterns)
    groups = _grouped(params_or_model, set(reasons), bool(no_decay_1d))
    optimizer = make([_group(*kind, parameters, key) for kind, parameters in groups.items()], **options)
    optimizer._reasons = reasons
    return optimizer


def class_of(kind: Any) -> str:
    """The name of the class of a kind of optimizer."""
    return _CLASSES.get(kind, repr(kind))


def _known_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__!r}")
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in _CLASSES and key not in _VARIANTS:
        close = difflib.get_close_matches(key, _CLASSES, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"name is {name!r}, expected one of {', '.join(list_optimizers())}{hint}")
    return key


def _as_patterns(use_adamw: Any) -> list[str | type]:
    if isinstance(use_adamw, (str, type)):
        use_adamw = (use_adamw,)
    try:
        patterns = list(use_adamw)
    except TypeError:
        raise TypeError(f"use_adamw must be patterns or classes, got {type(use_adamw).__name__!r}") from None
    for pattern in patterns:
        if not isinstance(pattern, (str, type)):
            raise TypeError(f"use_adamw must hold str or classes of modules, got {type(pattern).__name__!r}")
    return patterns


def _is_model(value: Any) -> bool:
    from torch.nn import Module

    return isinstance(value, Module)


def _reasons(model: torch.nn.Module, patterns: list[str | type]) -> dict[torch.Tensor, str]:
    """The parameters that get AdamW by the rules for models or by a pattern, with the reason."""
    from torchium.optim._model.choose import reasons_of

    return {**dict.fromkeys(_matching(model, patterns), "use_adamw"), **reasons_of(model)}


def _grouped(
    model: torch.nn.Module, chosen: set[torch.nn.Parameter], no_decay_1d: bool
) -> dict[tuple[bool, bool], list[tuple[str, torch.nn.Parameter]]]:
    """Named parameters by (with AdamW, without decay), in the model's order. A shared parameter counts once."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if not names:
        raise ValueError(f"params_or_model is a {type(model).__name__!r} without parameters")
    groups: dict[tuple[bool, bool], list[tuple[str, torch.nn.Parameter]]] = {}
    for parameter, name in names.items():
        kind = (parameter in chosen, no_decay_1d and parameter.ndim < 2)
        groups.setdefault(kind, []).append((name, parameter))
    return groups


def _matching(model: torch.nn.Module, patterns: list[str | type]) -> set[torch.nn.Parameter]:
    """The parameters that match any of the patterns. A pattern without a match is an error: it is probably misspelt."""
    owned = [
        (parameter, f"{path}.{own}".lstrip("."), path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    chosen = set()
    for pattern in patterns:
        found = {parameter for parameter, *owner in owned if _matches(pattern, *owner)}
        if not found:
            raise ValueError(f"use_adamw: {pattern!r} matches no parameter of {type(model).__name__!r}")
        chosen |= found
    return chosen


def _matches(pattern: str | type, parameter_name: str, module_name: str, module: torch.nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    words = (parameter_name, module_name, module_name.rpartition(".")[2], type(module).__name__)
    return any(fnmatch.fnmatchcase(word.lower(), pattern.lower()) for word in words)


def _group(
    with_adamw: bool, without_decay: bool, parameters: list[tuple[str, torch.nn.Parameter]], key: str
) -> dict[str, Any]:
    group: dict[str, Any] = {"params": parameters}
    if with_adamw and key not in _FIRST_ORDER:
        group["use_adamw"] = True
    if without_decay:
        group["weight_decay"] = 0.0
        if key not in _FIRST_ORDER:
            group["adamw_weight_decay"] = 0.0
    return group
