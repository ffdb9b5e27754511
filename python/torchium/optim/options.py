"""Options of optimizers. An option is in the signature of its class, which users read, and a row of the class's
`_options`; defaults of groups, detection of changed groups, the configuration for the C library, and names in its
messages are derived from the rows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchium._functions.ops import is_hollow
from torchium._messages import shown

from .arguments import GROUPED_C_NAMES, GROUPED_DEFAULTS, grouped_options

__all__ = [
    "ADAMW",
    "COMMON",
    "Option",
    "Options",
    "adamw_rate",
    "begin_share",
    "drift",
    "dtype_name",
    "has_ratio",
    "hint_for",
    "keep_lr",
    "keep_ratio",
    "lr_for",
    "number",
    "or_else",
    "pair",
    "period",
    "plain",
    "same",
    "shown",
    "unexpected",
]

# The library interprets a learning rate of 0 as "the default"; this one changes nothing.
_STILL = 1e-300
# The longest interval of adaptive refreshes.
_MOST_GAP = 100


# --- values -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value with tensors as numbers, which synchronizes if they are on a GPU."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or is_hollow(value):
            why = f"of shape {list(value.shape)}" if value.numel() != 1 else "without storage"
            raise ValueError(f"a hyperparameter is a tensor {why}, expected one number")
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value)
    return value


def lr_for(device: torch.device | None, lr: Any) -> tuple[Any, torch.Tensor | None]:
    """The learning rate as a number, or 0 and the tensor if it is a tensor on this GPU, without synchronization."""
    if not isinstance(lr, torch.Tensor):
        return lr, None
    if lr.numel() != 1 or is_hollow(lr):
        why = f"of shape {list(lr.shape)}" if lr.numel() != 1 else "without storage"
        raise ValueError(f"lr is a tensor {why}, expected one number")
    if lr.device.type != "cpu" and lr.device == device:
        return 0.0, lr.detach()
    return lr.item(), None


# Conversions get the option's name, for messages, and the group's value.


def as_given(name: str, value: Any) -> Any:
    return value


def number(name: str, value: Any) -> Any:
    return plain(value)


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two numbers."""
    numbers = plain(value)
    if not isinstance(numbers, tuple) or len(numbers) != 2:
        raise ValueError(f"{name} must be two numbers, got {shown(value)}")
    return numbers


def or_else(default: Any) -> Callable[[str, Any], Any]:
    """For an option that may be None: the library's value for it."""
    return lambda name, value: default if value is None else value


def period(name: str, value: Any) -> Any:
    """Steps between refreshes; None leaves them to need, and is the most steps then."""
    return _MOST_GAP if value is None else plain(value)


def drift(default: float) -> Callable[[str, Any], Any]:
    """How far a root or basis may be off; None is the default where the period is None, too, and 0 otherwise, which
    :meth:`Options.config` finds out."""
    return lambda name, value: _ByNeed(default) if value is None else plain(value)


class _ByNeed(float):
    """A default of refresh_drift, which a period that is given overrides."""


def dtype_name(name: str, value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _adamw_lr(name: str, value: Any) -> Any:
    lr = plain(value)
    return 0.0 if lr is None else _STILL if lr == 0.0 else lr


def _adamw_weight_decay(name: str, value: Any) -> Any:
    decay = plain(value)
    if decay is not None and decay == -1.0:  # the library's value for "the default"
        raise ValueError(f"{name} is -1, expected 0 or more")
    return -1.0 if decay is None else decay


# --- names that are meant for options ---------------------------------------------------------------------------------

# Names of options in other implementations.
_SYNONYMS = (
    {"lr", "learning_rate"},
    {"eps", "epsilon"},
    {"weight_decay", "wd"},
    {"update_freq", "precondition_frequency"},
    {"max_preconditioner_dim", "max_precond_dim"},
    {"factor_update_steps", "TCov"},
    {"inv_update_steps", "TInv"},
    {"use_bias_correction", "correct_bias", "bias_correction"},
    {"betas", "adamw_betas"},
    {"ns_steps", "backend_steps", "newton_schulz_steps"},
)


def hint_for(name: str, known: Iterable[str]) -> str | None:
    """The option that a name probably means: an alias, or a similar spelling."""
    known = list(known)
    for names in _SYNONYMS:
        for other in known:
            if name in names and other in names:
                return other
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return close[0] if close and f"_{close[0]}_" not in f"_{name}_" else None  # max_momentum is not a misspelt momentum


def unexpected(who: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an unknown keyword of a constructor."""
    meant = hint_for(name, known)
    return TypeError(f"{who}() got an unexpected argument {name!r}" + (f": {who} calls it {meant!r}" if meant else ""))


# --- options ----------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """An option of a class: its name, the library's name, and the conversion of its value."""

    name: str
    c_name: str | tuple[str, ...] | None  # several for a value of several numbers; None: not an option of the library
    convert: Callable[[str, Any], Any] = as_given
    whole: bool = False  # must be the same in all groups
    default: Any = None  # if neither the constructor nor a group of arguments has one


def same(
    *names: str, convert: Callable[[str, Any], Any] = as_given, whole: bool = False, struct: str = "", **defaults: Any
) -> Any:
    """Options with the library's names, in this struct of its configuration or in that of a group of arguments; those
    with a default are keywords."""
    prefix = struct and f"{struct}."
    rows = {**dict.fromkeys(names), **defaults}
    return tuple(
        Option(name, GROUPED_C_NAMES.get(name, prefix + name), convert, whole, default)
        for name, default in rows.items()
    )


# Options of all optimizers. The learning rate is passed separately, since it may be a tensor on the device.
COMMON = (
    *(Option(name, None) for name in ("lr", "foreach", "fused")),
    *(Option(name, None, default=False) for name in ("capturable", "differentiable")),
    *same("weight_decay", convert=number),
    *same("master_weights", "stochastic_rounding", maximize=False, weight_decay_type="decoupled"),
    *same("state_dtype", convert=dtype_name),
    *same("nonfinite", "seed", whole=True),
    *same("memory_budget", convert=or_else(0), whole=True),
)
# Options of second-order optimizers for AdamW, and the precision of products.
ADAMW = (
    *same("adamw_lr", convert=_adamw_lr),
    Option("adamw_betas", ("adamw.beta1", "adamw.beta2"), pair),
    *same("adamw_eps", convert=number),
    *same("adamw_weight_decay", convert=_adamw_weight_decay),
    *same("precision", "world_invariant"),
    Option("use_adamw", None),
)


class Options:
    """All options of a class."""

    def __init__(self, *options: Option) -> None:
        self._options = {option.name: option for option in options}
        read = [(name, c_name, convert) for name, c_name, convert, *_ in self if c_name is not None]
        self._given = [(name, c_name) for name, c_name, convert in read if convert is as_given]
        self._converted = [row for row in read if row[2] is not as_given]
        # The library's options of a group, and those common to all groups.
        self.names = [name for name, *_ in read]
        self.whole = [option.name for option in options if option.whole]

    def __iter__(self) -> Iterator[Option]:
        return iter(self._options.values())

    def defaults(self, who: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of groups from a constructor's arguments: its own, the groups of arguments, further keywords."""
        plain_ones = {name: value for name, value in arguments.items() if name in self._options}
        grouped, further = grouped_options(who, self._options, arguments), arguments.get("options") or {}
        for name in further:
            if name not in self._options:
                raise unexpected(who, name, [*self._options, "adamw", "memory", "numerics"])
            if name in grouped:
                raise TypeError(f"{who}() got {name!r} twice: by itself and in a group of arguments")
        rest = {option.name: GROUPED_DEFAULTS.get(option.name, option.default) for option in self}
        return plain_ones | {name: value for name, value in rest.items() if name not in plain_ones} | grouped | further

    def config(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's options for the library."""
        config = {c_name: group[name] for name, c_name in self._given}
        for name, c_name, convert in self._converted:
            value = convert(name, group[name])
            if type(c_name) is tuple:
                config.update(zip(c_name, value, strict=True))
            else:
                config[c_name] = value
        if type(config.get("shampoo.refresh_drift")) is _ByNeed and group["precondition_frequency"] is not None:
            config["shampoo.refresh_drift"] = 0.0
        return config

    def check(self, ask: Callable[[], Any], who: str) -> None:
        """Validates by the library, and reports errors with the names of the options here."""
        try:
            ask()
        except (TypeError, ValueError) as error:
            text = re.sub(r"^tch_\w+: ", "", str(error))
            field = re.match(r"[\w.]*", text).group()
            raise type(error)(f"{who}: {self._titles().get(field, field)}{text[len(field) :]}") from None

    def _titles(self) -> dict[str, str]:
        """Translates the library's names."""
        titles = {}
        for option in self._options.values():
            if isinstance(option.c_name, tuple):
                titles.update({c_name: f"{option.name}[{i}]" for i, c_name in enumerate(option.c_name)})
            elif option.c_name is not None:
                titles[option.c_name] = option.name
        return titles


# --- the learning rate of AdamW's part --------------------------------------------------------------------------------

# In a group with an adamw_lr: the adamw_lr last set, and the lr it refers to. AdamW's learning rate is their ratio
# times lr, so that it follows schedulers. In a group without one, if the class has a rule for AdamW's share of lr:
# None, and the share, None for the rule's. Without this note the share is 1.
_BASE = "adamw_lr_base"


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and value >= 0.0


def _base_lr(*candidates: Any) -> float:
    """The first nonzero candidate for the ratio; otherwise 0."""
    return next((float(lr) for lr in map(plain, candidates) if _is_rate(lr) and lr > 0.0), 0.0)


def begin_share(group: dict[str, Any], share: float | None) -> None:
    """For a new group: without an adamw_lr, AdamW's share follows the rule, if there is one."""
    if share is not None and group["adamw_lr"] is None:
        group.setdefault(_BASE, (None, None))


def keep_lr(group: dict[str, Any]) -> None:
    """For a group whose lr is AdamW's: the share is 1 unless an adamw_lr is set."""
    group.setdefault(_BASE, (None, 1.0))


def _share_of(group: dict[str, Any], share: float) -> float:
    """AdamW's share of lr in a group without an adamw_lr, which may have been removed."""
    known, kept = group.get(_BASE, (None, 1.0))
    if known is not None:
        group[_BASE], kept = (None, None), None
    return share if kept is None else kept


def _fix_ratio(group: dict[str, Any], *candidates: Any) -> float:
    """The lr that the group's adamw_lr refers to: the first nonzero candidate, for a new adamw_lr."""
    rate, (known, base) = plain(group["adamw_lr"]), group.get(_BASE, (None, 0.0))
    if rate != known and _is_rate(rate):
        base = _base_lr(*candidates, 0.0 if known is None else base)
        group[_BASE] = (rate, base)
    return base


def keep_ratio(config: dict[str, Any], group: dict[str, Any], share: float | None) -> None:
    """Adds the reference lr of adamw_lr to a configuration. A new adamw_lr refers to the current lr, or if that is 0,
    as at the beginning of a warm-up, to the schedule's initial one. If both are 0, adamw_lr is constant. `share`: the
    rule's, for a group whose adamw_lr is None."""
    if group.get("adamw_lr") is not None:
        base = _fix_ratio(group, group["lr"], group.get("initial_lr"))
        config["adamw.base_lr"] = base or config["lr"]
    elif share is not None:
        config["adamw.lr"], config["adamw.base_lr"] = _share_of(group, share), 1.0
    else:
        group.pop(_BASE, None)


def has_ratio(group: dict[str, Any]) -> bool:
    """Whether the library can change lr without a new configuration."""
    rate, base = group.get(_BASE, (None, None))
    return rate is None or base > 0.0


def adamw_rate(config: Mapping[str, Any]) -> float:
    """AdamW's learning rate of a configuration, as in the library."""
    lr, own, base = config["lr"], config["adamw.lr"], config.get("adamw.base_lr", 0.0)
    if own == 0.0 or lr == 0.0:
        return lr
    return 0.0 if own == _STILL else own * (lr / base if base > 0.0 else 1.0)
