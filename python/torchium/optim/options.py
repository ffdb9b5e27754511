"""From the numbers of a parameter group to the configuration of the C library, and back from its messages to our
names."""

from __future__ import annotations

import re
from typing import Any

import torch

from torchium import _C
from torchium._messages import shown

__all__ = [
    "ADAMW_NAMES",
    "ADAMW_PART",
    "COMMON",
    "adamw_part",
    "check_config",
    "common_part",
    "lr_for",
    "pair",
    "plain",
    "shown",
]

# Options that all optimizers read from their groups, and those of the second-order ones for the rest of a model.
COMMON = (
    "weight_decay",
    "maximize",
    "nonfinite",
    "master_weights",
    "stochastic_rounding",
    "seed",
    "memory_budget",
)
ADAMW_PART = ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay", "precision")
# What the library calls them, for messages.
ADAMW_NAMES = {
    "scalar_lr": "adamw_lr",
    "scalar_beta1": "adamw_betas[0]",
    "scalar_beta2": "adamw_betas[1]",
    "scalar_eps": "adamw_eps",
    "scalar_weight_decay": "adamw_weight_decay",
}

# The library takes a learning rate of 0 for "as the others"; this one moves nothing.
_STILL = 1e-300


def plain(value: Any) -> Any:
    """The value with tensors read as numbers, which waits for those that are on a GPU."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"a hyper-parameter is a tensor of shape {list(value.shape)}, expected one number")
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value)
    return value


def lr_for(device: torch.device | None, lr: Any) -> tuple[Any, torch.Tensor | None]:
    """The learning rate as a number; or, where it is a tensor on this GPU, 0 and the tensor. Nothing waits for that."""
    if not isinstance(lr, torch.Tensor):
        return lr, None
    if lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {list(lr.shape)}, expected one number")
    if lr.device.type != "cpu" and lr.device == device:
        return 0.0, lr.detach()
    return lr.item(), None


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two numbers."""
    numbers = plain(value)
    if not isinstance(numbers, tuple) or len(numbers) != 2:
        raise ValueError(f"{name} must be two numbers, got {shown(value)}")
    return numbers


def common_part(kind: str, group: dict[str, Any], lr: Any) -> dict[str, Any]:
    """What every configuration has."""
    budget = group["memory_budget"]
    return {
        "kind": kind,
        "lr": lr,
        "weight_decay": plain(group["weight_decay"]),
        "maximize": group["maximize"],
        "nonfinite": group["nonfinite"],
        "master_weights": group["master_weights"],
        "stochastic_rounding": group["stochastic_rounding"],
        "seed": group["seed"],
        "memory_budget": 0 if budget is None else budget,
    }


def adamw_part(group: dict[str, Any], lr: Any) -> dict[str, Any]:
    """What AdamW gets for the parameters that the method itself does not take, and how exact products are. lr = 0 stops
    AdamW too."""
    beta1, beta2 = pair("adamw_betas", group["adamw_betas"])
    own_lr, own_decay = plain(group["adamw_lr"]), plain(group["adamw_weight_decay"])
    lr_on_device = isinstance(group["lr"], torch.Tensor) and group["lr"].device.type != "cpu"
    if own_lr == 0.0 or (own_lr is not None and lr == 0.0 and not lr_on_device):
        own_lr = _STILL
    if own_decay is not None and own_decay == -1.0:  # which the library takes for "as the others"
        raise ValueError("adamw_weight_decay is -1, expected 0 or more")
    return {
        "precision": group["precision"],
        "scalar_lr": 0.0 if own_lr is None else own_lr,
        "scalar_beta1": beta1,
        "scalar_beta2": beta2,
        "scalar_eps": plain(group["adamw_eps"]),
        "scalar_weight_decay": -1.0 if own_decay is None else own_decay,
    }


def check_config(config: dict[str, Any], who: str, names: dict[str, str]) -> None:
    """Refuses what is out of range, by the name that the option has here."""
    try:
        _C.optim_forecast("cpu", config, [])
    except (TypeError, ValueError) as error:
        text = re.sub(r"^tch_\w+: ", "", str(error))
        field = re.match(r"\w+(\[\d\])?", text)
        if field is not None and field.group() in names:
            text = names[field.group()] + text[field.end() :]
        raise type(error)(f"{who}: {text}") from None
