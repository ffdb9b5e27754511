"""The interface to torch.optim: groups, hooks, closures, state_dict. The C library performs the step.

Parameters join the engine of their device with the first gradient, all that require one at once, or later with their
first gradient. `self.state` contains views of the engines' memory. When an engine no longer fits (a model was moved, an
option that determines memory was changed) it is replaced by a new one with the state of `self.state`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import itertools
import operator
import re
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, overload

import torch

from torchium import _C
from torchium._functions.transforms import untraced
from torchium.factory import class_of

from ._engine import state as saved_state
from ._engine.engine import Engine, Members, profiler_enabled
from ._engine.matrices import Role, roles_of
from ._engine.placement import Arrival, Engines, Group, Home, labels_of, placed, put_back
from ._engine.report import MemoryReport, Method, Summary, UpdateMeter, device_of_forecast, engine_stats, rates_of
from ._shared.agreement import BEGIN, STEP, TAKE, Sharing
from ._shared.consolidate import asked_by_checkpoint, consolidate, in_tiles, is_divided, to_be_loaded
from ._shared.flat import fill_gradients, flat_of, whole_shape
from ._shared.group import CHAINED, JOINT, meeting
from ._shared.group import Group as SharedGroup
from ._shared.sharding import local_tensor
from ._shared.tiles import untiled
from .arguments import GROUPED_DEFAULTS
from .options import Options, adamw_rate, begin_share, has_ratio, hint_for, keep_ratio, lr_for, plain, shown

__all__ = ["TorchiumOptimizer", "is_trained", "outside"]

_Loss = TypeVar("_Loss")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_TO = {"whole": None, "first": 0}  # the rank that has the full state
# Keys of parameter groups in saved states of earlier versions.
_RENAMED = {
    "update_freq": "precondition_frequency",
    "max_precond_dim": "max_preconditioner_dim",
    "correct_bias": "use_bias_correction",
    "TCov": "factor_update_steps",
    "TInv": "inv_update_steps",
}

_increment_version = torch.autograd.graph.increment_version


def _takes_many() -> bool:
    try:
        _increment_version([])
    except (AttributeError, RuntimeError, TypeError):  # which one differs between versions
        return False
    return True


def _increment_versions(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        _increment_version(parameter)


# Marks parameters as modified for autograd.
_mark_changed: Callable[[list[torch.Tensor]], None] = _increment_version if _takes_many() else _increment_versions

# Global step hooks; if this version of PyTorch keeps them elsewhere, assume that there are some.
try:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    _HOOKS_OF_ALL: tuple[Any, ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
except ImportError:
    _HOOKS_OF_ALL = (True,)


def outside() -> int:
    """The stacklevel of the first caller outside of Torchium and PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torchium", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def is_trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _has_blocks(config: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, role: Role) -> bool:
    described = [(shape, str(dtype).removeprefix("torch."), role)]
    return bool(_C.optim_forecast("cpu", config, described)["blocks"] > 0)


def _documented(cls: type) -> str | None:
    """The class's docstring, with the shared arguments of TorchiumOptimizer added."""
    text = inspect.cleandoc(cls.__doc__ or "") + "\n"
    section = re.search(r"^Args:\n(?:    .*\n)+", text, re.MULTILINE)
    if not section:
        return cls.__doc__
    common = f"{inspect.getdoc(TorchiumOptimizer)}\n"
    missing = [
        f"    {name}: {words}".replace("\n  ", "\n        ")
        for name, words in re.findall(r"^- `(\w+)`: (.*\n(?:  .*\n?)*)", common, re.MULTILINE)
        if name in inspect.signature(cls.__init__).parameters and f"\n    {name}: " not in section[0]
    ]
    return text[: section.end()] + "".join(missing) + text[section.end() :]


class _Shielded:
    """Saved state that torch.optim's load_state_dict must not cast to the type of the parameter."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _shield(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The last hook before loading: checks the state_dict, and shields its state."""
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise ValueError("a state_dict must have 'state', a dictionary, and 'param_groups', a list")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise ValueError("each of a state_dict's 'param_groups' must be a dictionary with 'params', a list")
    kinds, who = saved_state.kinds_of(state_dict, optimizer._kinds_are_guessed), type(optimizer).__name__
    if kinds and optimizer.kind not in kinds:
        others = " or ".join(sorted(class_of(kind) for kind in kinds))
        raise ValueError(
            f"{who}: the state_dict is of {others}, which {who} cannot load. To start fresh, create a new "
            "optimizer without loading a state_dict, and pass options such as lr to its constructor"
        )
    return {**state_dict, "state": {key: _Shielded(value) for key, value in state.items()}}


class TorchiumOptimizer(Sharing):
    """Base class of all optimizers of torchium.optim; not for direct use.

    In addition to the interface of torch.optim.Optimizer they have `summary()`, `memory_report()` and `stats()`.

    Shared arguments:

    - `adamw`: an `AdamWArguments`, or a dictionary of its arguments: hyperparameters of AdamW for vectors, scalars and
      the parameters that `params` names.
    - `memory`: a `MemoryArguments`, or a dictionary of its arguments: dtype of the state, packed factors, master
      weights, stochastic rounding, scratch.
    - `numerics`: a `NumericsArguments`, or a dictionary of its arguments: precision, damping, accuracy of roots,
      non-finite gradients.
    - `process_group`: the torch.distributed group whose ranks have the same parameters and gradients, as under
      DistributedDataParallel, to divide work and state among them. DTensors need none.
    - `options`: any key of a parameter group as a keyword, such as `adamw_lr`; `maximize`; and `fused=True`: the step
      does the unscaling and skipping of a GradScaler. `foreach` and `capturable` are accepted for compatibility.

    Parameter groups may have `batch_dims` and `cuts` for parameters that contain several matrices: experts [E, m, n]
    with `batch_dims=1`, fused Q, K and V with `cuts=(d, d, d)`, heads with `cuts=head_dim`.
    """

    kind: ClassVar[str] = ""
    _kinds_are_guessed: ClassVar[bool] = True  # where a state_dict does not say of which kind it is
    _options: ClassVar[Options] = Options()
    _resolved: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # what groups have for defaults of None
    _update: UpdateMeter | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls):
            cls.__doc__ = _documented(cls)

    def __init__(self, params: Any, arguments: dict[str, Any]) -> None:
        """`arguments` are the locals() of a subclass's constructor; names that are not options are ignored."""
        if not self.kind or not isinstance(arguments, dict):
            raise TypeError(
                "TorchiumOptimizer is an abstract base class; use Shampoo, AdamW or another class of torchium.optim"
            )
        self._forget_engines()
        self._told: set[str] = set()  # keys of groups that were warned of
        self._process_group = arguments.get("process_group")
        if isinstance(params, torch.nn.Module):
            params = self._groups_of(params)
        given, params = params, self._listed(params)
        if not isinstance(params, torch.Tensor) and not params:
            used = "" if isinstance(given, (list, tuple)) else ": a generator is used up after one pass"
            what = "give list(model.parameters()), or call model.parameters() again"
            raise ValueError(f"{type(self).__name__}: params is an empty parameter list{used}; {what}")
        super().__init__(params, self._defaults_of(arguments))
        self._warn_of_patterns(self.defaults.get("use_adamw"), self.param_groups)
        self._take_fused()

    def _take_fused(self) -> None:
        """With fused=True the step unscales and skips, as PyTorch's fused optimizers do. Frameworks refuse to clip such
        gradients, which are still scaled."""
        self._step_supports_amp_scaling = bool(self.defaults.get("fused"))

    def _defaults_of(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._options.defaults(type(self).__name__, arguments)

    def _groups_of(self, model: torch.nn.Module) -> list[Group]:
        """The parameters of a model, by name."""
        named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
        if not named:
            raise ValueError(f"{type(self).__name__}: params is a {type(model).__name__!r} without parameters")
        return [{"params": named}]

    def _config(self, group: Group, lr: float) -> dict[str, Any]:
        """The library's configuration for a group, with this learning rate."""
        config = {"kind": self.kind, "lr": lr, **self._options.config(group)}
        keep_ratio(config, group, self._adamw_share(group))
        return config

    def _adamw_share(self, group: Group) -> float | None:
        """The default of adamw_lr relative to lr; None means lr."""
        return None

    def _check_config(self, config: dict[str, Any]) -> None:
        self._options.check(lambda: _C.optim_forecast("cpu", config, []), type(self).__name__)

    # --- groups

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, also during training.

        Args:
            param_group: a dictionary with 'params' and options; others have the defaults.
        """
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise ValueError(f"{type(self).__name__}: a group must have 'params', its parameters")
            self._unwrap_names(param_group)
            if any("param_names" in group for group in self.param_groups):  # PyTorch requires names for all or none
                count = 1 if isinstance(param_group["params"], torch.Tensor) else len(param_group["params"])
                unnamed = [f"parameter {i} of group {len(self.param_groups)}" for i in range(count)]
                param_group.setdefault("param_names", unnamed)
            self._warn_of_unknown(param_group)
            self._warn_of_patterns(param_group.get("use_adamw"), [param_group])
        super().add_param_group(param_group)
        begin_share(self.param_groups[-1], self._adamw_share(self.param_groups[-1]))
        try:
            self._check_group(len(self.param_groups) - 1, self.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise

    def _warn_of_unknown(self, group: Group) -> None:
        """Warns once of each key that is probably a misspelt option; other keys may belong to frameworks."""
        who, options = type(self).__name__, [option.name for option in self._options]
        for key in group:
            what = hint_for(key, options) if isinstance(key, str) and key not in options else None
            if key == "use_muon" and self.kind not in ("muon", "normuon"):
                what = "use_adamw=True for a group of AdamW's" if "use_adamw" in options else "Muon for such groups"
            if what and key not in self._told:
                self._told.add(key)
                text = f"{who}: a group has {key!r}, which {who} does not read: use {what}"
                warnings.warn(text, UserWarning, stacklevel=outside())

    def _warn_of_patterns(self, chosen: Any, groups: list[Group]) -> None:
        """Warns of patterns of use_adamw without a match, which are probably misspelt."""
        patterns = [chosen] if isinstance(chosen, str) else chosen if isinstance(chosen, (tuple, list)) else ()
        names = [name for group in groups for name in group.get("param_names") or () if isinstance(name, str)]
        for pattern in patterns if names else ():
            if isinstance(pattern, str) and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                text = f"use_adamw has {pattern!r}, which matches none of {len(names)} names such as {names[0]!r}"
                warnings.warn(f"{type(self).__name__}: {text}", UserWarning, stacklevel=outside())

    def _listed(self, params: Any) -> Any:
        """Parameters as a list; an error if they are not iterable."""
        if isinstance(params, (torch.Tensor, dict, set)):  # which PyTorch refuses, or takes
            return params
        if isinstance(params, Iterable):
            return list(params)
        called = callable(params) and not isinstance(params, torch.nn.Module)
        what = f"call it: model.{getattr(params, '__name__', 'parameters')}()" if called else "give model.parameters()"
        raise TypeError(f"{type(self).__name__}: params is {shown(params)}, which is not iterable; {what}")

    def _unwrap_names(self, group: Group) -> None:
        """(name, parameter) pairs, which PyTorch takes apart from 2.6 on."""
        params = self._listed(group["params"])
        if isinstance(params, (torch.Tensor, set)):
            return
        group["params"] = params
        if params and all(isinstance(item, tuple) and len(item) == 2 for item in params):
            group["param_names"] = [name for name, _ in params]
            group["params"] = [parameter for _, parameter in params]
        elif any(isinstance(item, tuple) for item in params):
            raise TypeError("params holds tuples that are not pairs of a name and a parameter, or not only such pairs")

    def _check_group(self, index: int, groups: list[Group]) -> None:
        group, who = groups[index], type(self).__name__
        if group.get("differentiable"):
            raise NotImplementedError(f"{who}: differentiable=True is not supported, autograd does not record steps")
        if len({id(p) for p in group["params"]}) != len(group["params"]):
            raise ValueError(f"{who}: a parameter is in group {index} more than once")
        self._check_config(self._config(group, lr_for(None, group["lr"])[0]))
        for name in self._options.whole:
            if group.get(name) != groups[0].get(name):
                raise ValueError(
                    f"{who}: {name} is {shown(group[name])} in group {index}, expected {shown(groups[0][name])} as in "
                    "group 0: it applies to the whole optimizer"
                )
        self._roles(groups, index)
        required = [position for position, parameter in enumerate(group["params"]) if parameter.requires_grad]
        self._check_parameters(groups, index, required)

    def _check_parameters(self, groups: list[Group], index: int, positions: list[int]) -> None:
        who = type(self).__name__
        for position in positions:
            parameter = groups[index]["params"][position]
            if parameter.dtype in _DTYPES and parameter.layout is torch.strided:
                continue
            label = labels_of(groups)[index][position]
            raise TypeError(
                f"{who}: {label!r} is {parameter.dtype} with layout {parameter.layout}, expected float32, float64, "
                "float16 or bfloat16 with layout torch.strided"
            )

    def _elementwise(self, group: Group, index: int) -> list[bool]:
        """Which parameters of a group get AdamW regardless of shape: all, none, or those whose names match."""
        chosen, who = group.get("use_adamw", False), type(self).__name__
        if isinstance(chosen, bool):
            return [chosen] * len(group["params"])
        patterns = [chosen] if isinstance(chosen, str) else chosen
        if not isinstance(patterns, (tuple, list)) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"{who}: use_adamw must be True, False or patterns of names, got {shown(chosen)}")
        if not group.get("param_names"):
            raise ValueError(
                f"{who}: use_adamw is {shown(chosen)}, but the parameters of group {index} have no names; give "
                "model.named_parameters()"
            )
        return [any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in group["param_names"]]

    def _roles(self, groups: list[Group], index: int) -> list[Role]:
        """How each parameter of a group is treated: see the options `use_adamw`, `batch_dims` and `cuts`."""
        group = groups[index]
        elementwise = self._elementwise(group, index)
        return roles_of(group, elementwise, labels_of(groups)[index], group["params"], type(self).__name__)

    # --- engines

    def _forget_engines(self) -> None:
        self._engines: Engines = {}
        self._consolidated: dict[Any, Any] | None = None  # the whole state, until the next step
        self._awaited: list[torch.Tensor] = []  # of a state that PyTorch is about to load
        self._forget_sharing()
        self._option_values = operator.itemgetter(*self._options.names)  # of a group, which every step compares
        self._outside: list[torch.Tensor] = []  # parameters that have no place in an engine
        self._flats: list[torch.Tensor] = []  # those that FSDP1 has flattened
        self._seen: list[list[torch.Tensor]] = []  # the parameters of each group at the last check

    def _give_up_engines(self) -> None:
        """Keeps their counts; the next step creates new ones."""
        self._collect_counts()
        self._forget_engines()

    def _groups_changed(self) -> bool:
        groups = self.param_groups
        unlike = (not _C.same_items(seen, group["params"]) for seen, group in zip(self._seen, groups, strict=True))
        return len(self._seen) != len(groups) or any(unlike)

    def _look_at_groups(self) -> None:
        """Records the parameters. Drops engines with a parameter that was removed or moved to another group."""
        index_of = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        for engine in self._engines.values():
            if any(index_of.get(id(p)) != members.index for members in engine.groups for p in members.parameters):
                self._give_up_engines()
                break
        inside = placed(self._engines)
        self._seen = [list(group["params"]) for group in self.param_groups]
        self._outside = [p for params in self._seen for p in params if id(p) not in inside]
        self._flats = [p for params in self._seen for p in params if flat_of(p) is not None]
        places: dict[Home, list[tuple[int, int]]] = defaultdict(list)
        for index, params in enumerate(self._seen):
            for k, p in enumerate(params):
                if is_trained(p) or self._all_decide:
                    places[self._home_of(p)].append((index, k))
        # Largest group last: a rank that is also in a smaller one then knows what that one found.
        homes = sorted((home for home in places if home[1]), key=lambda h: (len(h[1]), h[1], str(h[0])))
        self._sharing = {self._shared_groups[home]: places[home] for home in homes}
        self._is_joint = self._all_decide or (bool(homes) and len(places) > 1)
        nested = all(set(a[1]) <= set(b[1]) for a, b in itertools.pairwise(homes))
        for group in self._sharing:
            group.own_mode = JOINT * self._is_joint if nested else CHAINED

    def _join(self, engine: Engine, arrival: Arrival, groups: list[Group], labels: list[str]) -> None:
        group = groups[arrival.index]
        roles = self._roles(groups, arrival.index)
        lr, tensor = lr_for(engine.device, group["lr"])
        members = engine.add(
            arrival.index,
            arrival.generation,
            self._config(group, lr),
            arrival.parameters,
            [labels[position] for position in arrival.positions],
            [roles[position] for position in arrival.positions],
        )
        engine.set_lr_tensor(members, tensor)
        members.options = plain(self._option_values(group))
        members.lr = lr
        if engine.group:
            engine.group.is_awaited = True

    def _place(
        self, engines: Engines, newcomers: list[Arrival], groups: list[Group], state: Any, strict: bool
    ) -> tuple[Engines, dict[torch.Tensor, dict[str, Any]]]:
        """Adds newcomers to engines and restores their state, which must be complete if `strict`. Existing engines keep
        them even if this fails."""
        labels = labels_of(groups)
        for arrival in newcomers:
            self._check_parameters(groups, arrival.index, arrival.positions)
            if arrival.home[0].type == "meta":
                raise ValueError(
                    f"{type(self).__name__}: {labels[arrival.index][arrival.positions[0]]!r} is on the meta device and "
                    "has no storage: call model.to_empty(device=...) before steps and load_state_dict"
                )
        engines, first = dict(engines), dict[Home, int]()
        for arrival in newcomers:
            home = arrival.home
            if home not in engines:
                self._home_of(arrival.parameters[0])
                engines[home] = Engine(self.kind, home[0], self._shared_groups.get(home))
            first.setdefault(home, len(engines[home].parameters))
            self._join(engines[home], arrival, groups, labels[arrival.index])
        return engines, put_back(engines, first, functools.partial(self._settle, TAKE), state, strict)

    def _arrivals(
        self, engines: Engines, groups: list[Group], state: Mapping[Any, Any], wanted: Callable[[torch.Tensor], bool]
    ) -> list[Arrival]:
        """Parameters outside of engines that are wanted or have state, in the order of their addition."""
        inside = placed(engines)
        generations = [saved_state.generation_of(state.get(p)) for group in groups for p in group["params"]]
        fresh = 1 + max((g for g in generations if g is not None), default=-1)
        found: dict[tuple[int, int, Home], list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            for position, p in enumerate(group["params"]):
                saved = state.get(p)
                if id(p) not in inside and (saved_state.has_state(saved) or wanted(p)):
                    generation = saved_state.generation_of(saved)
                    home = self._home_of(p, joins=False)
                    found[fresh if generation is None else generation, index, home].append(position)
        return [
            Arrival(home, generation, index, positions, [groups[index]["params"][k] for k in positions])
            for (generation, index, home), positions in sorted(found.items(), key=lambda item: item[0][:2])
        ]

    def _admit(self) -> None:
        """Adds all parameters that require a gradient or have one to engines."""
        newcomers = self._arrivals(self._engines, self.param_groups, self.state, is_trained)
        try:
            self._engines, state = self._place(self._engines, newcomers, self.param_groups, self.state, strict=False)
        except BaseException:
            self._give_up_engines()
            raise
        self.state.update(state)
        self._look_at_groups()

    # --- a step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `step` as PyTorch does, to call hooks and mark a profiler range, but only if there are hooks or a
        profiler: the range dominates the host time of a step of few parameters."""
        heard = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: TorchiumOptimizer, *args: Any, **kwargs: Any) -> Any:
            if (
                torch.compiler.is_dynamo_compiling()
                or profiler_enabled()
                or self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or any(_HOOKS_OF_ALL)
            ):
                return heard(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], _Loss]) -> _Loss: ...

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a step; parameters without gradients are unchanged.

        Args:
            closure: reevaluates the model and returns the loss, which `step` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    def _take_step(self) -> None:
        """The step itself, with the current gradients."""
        self._consolidated = None
        if self._engines and not self.state:  # cleared, to restart
            self._forget_engines()
        if self._groups_changed():
            self._look_at_groups()
        fill_gradients(self._flats)
        arriving = [p for p in self._outside if p.grad is not None]
        doing = BEGIN if any(self._home_of(p)[1] for p in arriving) else STEP
        if self._sharing and self._process_group is not None:
            self._check_inputs()
        with meeting(self._sharing) if self._sharing else contextlib.nullcontext():
            self._step_with(self._decide(doing), bool(arriving))

    def _step_with(self, found: torch.Tensor | None, admits: bool) -> None:
        self._check_finite(found)
        if admits:
            self._admit()
        done: set[int] = set()
        if not self._step_engines(done, found):
            self._replace_engines()
            if not self._step_engines(done, found):
                raise RuntimeError(f"{type(self).__name__}: parameters were modified during step()")

    def _replace_engines(self) -> None:
        """Replaces the engines after parameters or options have changed, keeping their state."""
        changes = self._option_changes()
        self._settle("have changed an option or replaced a parameter")
        self._give_up_engines()
        self._look_at_groups()
        try:
            self._admit()
        except ValueError as error:
            if not changes:
                raise
            raise ValueError(
                f"{type(self).__name__}: {changes}, which is incompatible with the existing state: {error}"
            ) from error

    def _option_changes(self) -> str:
        """Describes the options of groups that differ from the engines'."""
        changes = [
            f"{name} was changed from {shown(old)} to {shown(new)}"
            for engine in self._engines.values()
            for members in engine.groups
            for name, old in zip(self._options.names, members.options or (), strict=False)
            if (new := plain(self.param_groups[members.index][name])) != old
        ]
        return ", ".join(dict.fromkeys(changes))

    def _step_engines(self, done: set[int], found: torch.Tensor | None) -> bool:
        """Steps the remaining engines. False if an engine no longer fits its parameters or options."""
        for engine in self._engines.values():
            for members in engine.groups:
                if not self._configure(engine, members):
                    return False
        for engine in self._engines.values():
            changed = self._step_engine(engine, done, found)
            if changed is None:
                return False
            if changed:
                _mark_changed(changed)
            if len(self._engines) > 1:
                done.update(id(p) for p in engine.parameters)
        return True

    def _step_engine(self, engine: Engine, done: set[int], found: torch.Tensor | None) -> list[torch.Tensor] | None:
        gradients = [None if id(p) in done else p.grad for p in engine.parameters] if done else None
        # Set by GradScaler during a step.
        scale = self.__dict__.get("grad_scale")
        found = self.__dict__.get("found_inf") if found is None else found.float()
        if scale is not None:
            scale = scale.to(engine.device, non_blocking=True)
        if found is not None:
            found = found.to(engine.device, non_blocking=True)
        try:
            return engine.step(gradients, scale, found)
        except _C.NumericError:
            raise
        except (TypeError, ValueError):
            self._given()  # raises PyTorch's error for sparse gradients
            raise
        except (RuntimeError, MemoryError):
            self._given()
            engine.broken = True
            raise

    def _configure(self, engine: Engine, members: Members) -> bool:
        """Passes changes of a group to the engine. False if the engine must be replaced."""
        group = self.param_groups[members.index]
        lr = group["lr"]
        if type(lr) is not float or members.lr_tensor:
            lr, tensor = lr_for(engine.device, lr)
            engine.set_lr_tensor(members, tensor)
        if self._option_values(group) != members.options:
            return self._reconfigure(engine, members, group, lr)
        if lr != members.lr:
            if not has_ratio(group):
                return self._reconfigure(engine, members, group, lr)
            engine.set_lr(members, lr)
        return True

    def _reconfigure(self, engine: Engine, members: Members, group: Group, lr: float) -> bool:
        config = self._config(group, lr)
        try:
            engine.set_config(members, config)
        except (TypeError, ValueError):
            self._check_config(config)
            return False
        members.options = plain(self._option_values(group))
        return True

    # --- saving and loading

    def _collect_counts(self) -> None:
        """Copies the engines' host counts to the state."""
        for engine in self._engines.values():
            for i, p in enumerate(engine.parameters):
                counts = {saved_state.COUNTS: [engine.generation_of(i), *engine.counts(i)]} | engine.failures(i)
                for name, numbers in counts.items() if saved_state.COUNTS in self.state.get(p, ()) else ():
                    self.state[p][name] = torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _check_state(self) -> None:
        """Raises an error for resized state, which could not be loaded."""
        for engine in self._engines.values():
            for label, p, views in zip(engine.labels, engine.parameters, engine.states(), strict=True):
                for name, value in self.state[p].items() if p in self.state else ():
                    if name in views:
                        saved_state.check_form(label, name, views[name], value)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers sharded state on global rank `to`, where `state_dict()` then returns the full state, in host memory,
        as from one process: any number of ranks can load it. All ranks must call this before each save.

        Args:
            to: the rank that gets the full state.
        """
        self._collect_counts()
        found = self._consolidate(to)
        self._consolidated = found or None

    def _consolidate(self, to: int | None) -> dict[Any, Any]:
        """The full state on that rank, or on all."""
        return consolidate(self._engines.values(), self.state, to)

    def _for_checkpoint(self, asked: str) -> dict[Any, Any]:
        """The state as torch.distributed.checkpoint asks for it."""
        if asked == "load":
            found, self._awaited = to_be_loaded(self._engines.values(), self.state)
            return found
        if asked == "own":
            return self.state
        return in_tiles(self._engines.values(), self.state) if asked == "parts" else self._consolidate(_TO[asked])

    def _is_divided(self, shards: bool = False) -> bool:
        return is_divided(self._engines.values(), shards)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer. If ranks of `process_group` divide the state, call `consolidate_state_dict()`
        before, and this on the rank given there, or use torch.distributed.checkpoint."""
        self._collect_counts()
        asked = asked_by_checkpoint()
        if asked is not None and self._flats:
            raise RuntimeError(
                f"{type(self).__name__}: under FSDP1 torch.distributed.checkpoint saves the state of PyTorch's own "
                "optimizers: save that of consolidate_state_dict(to=RANK) and state_dict(), or use fully_shard (FSDP2)"
            )
        if asked is not None:
            self._check_state()
            return self._packed(self._for_checkpoint(asked))
        if self._consolidated is not None:
            return self._packed(self._consolidated)
        if self._is_divided():
            raise RuntimeError(
                f"{type(self).__name__}: the state is sharded over the ranks of process_group: call "
                "consolidate_state_dict(to=RANK) on all ranks after the latest step and state_dict() only on that "
                "rank, or save with torch.distributed.checkpoint (get_state_dict and dcp.save)"
            )
        self._check_state()
        return super().state_dict() | {saved_state.KIND: self.kind}

    def _packed(self, state: dict[Any, Any]) -> dict[str, Any]:
        """A state_dict with the given state."""
        own = self.state
        self.state = defaultdict(dict, state)
        try:
            return super().state_dict() | {saved_state.KIND: self.kind}
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads groups and state from a `state_dict()`. State keeps its precision. After an error nothing has changed.
        Ranks that share parameters must all call this, and all get an error if one does.

        Args:
            state_dict: of this class, or of the class of the same name in torch.optim.
        """
        if self._groups_changed():
            self._look_at_groups()
        with meeting(self._sharing):
            if not isinstance(state_dict, dict):
                raise TypeError(f"state_dict must be a dictionary, got an object of type {type(state_dict).__name__}")
            handle = self.register_load_state_dict_pre_hook(_shield)
            try:
                super().load_state_dict(state_dict)
            finally:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        if self._is_divided(shards=True):
            raise RuntimeError(
                f"{type(self).__name__}: a rank of a group has a part of the state, which cannot be copied or pickled: "
                "load the state_dict() that consolidate_state_dict(to=RANK) makes into another optimizer"
            )
        self._collect_counts()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state:  # from a pickle or a deepcopy: the next step creates engines
            self._forget_engines()
            self._told, self._process_group = set(), None
            super().__setstate__(state)
            self._take_fused()
            self._complete_groups(self.param_groups)
            return
        groups = state["param_groups"]
        loaded = {key: value.value for key, value in state["state"].items()}
        awaited, self._awaited = {id(tensor) for tensor in self._awaited}, []
        for key, value in loaded.items():  # what PyTorch has not filled was not in the checkpoint
            if isinstance(value, Mapping):
                loaded[key] = untiled({name: one for name, one in value.items() if id(one) not in awaited})
        for key, value in loaded.items():
            if isinstance(key, torch.Tensor) and not isinstance(value, Mapping):
                raise TypeError(f"the state of a parameter is a {type(value).__name__}, expected a dictionary")
        self._complete_groups(groups)
        for index in range(len(groups)):
            self._check_group(index, groups)
        self._settle("load a state")
        engines, current = self._engines_for(groups, loaded)
        super().__setstate__({"state": defaultdict(dict, loaded | current), "param_groups": groups})
        self._engines = engines
        self._consolidated = None
        self._look_at_groups()

    def _complete_groups(self, groups: list[Group]) -> None:
        """Adds options missing in groups of other classes or older versions, and renames old ones."""
        for group in groups:
            for name in _RENAMED.keys() & group.keys() - {option.name for option in self._options}:
                group.setdefault(_RENAMED[name], group.pop(name))
            group.pop("refresh_budget", None)  # of an earlier version
            of_another = "adamw_lr" not in group
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if of_another:
                begin_share(group, self._adamw_share(group))

    def _engines_for(self, groups: list[Group], loaded: Any) -> tuple[Engines, dict[torch.Tensor, dict[str, Any]]]:
        """Engines with this state: the current ones if they fit, or else new ones."""
        newcomers = self._arrivals({}, groups, loaded, lambda p: False)
        wanted = [(str(a.home), a.generation, a.index, [id(p) for p in a.parameters]) for a in newcomers]
        present = [
            (str(home), m.generation, m.index, [id(p) for p in m.parameters])
            for home, engine in self._engines.items()
            for m in engine.groups
        ]
        usable = not any(engine.broken for engine in self._engines.values())
        if usable and sorted(wanted) == sorted(present) and self._take_options(groups):
            first, agree = dict.fromkeys(self._engines, 0), functools.partial(self._settle, TAKE)
            return self._engines, put_back(self._engines, first, agree, loaded, strict=True)
        return self._place({}, newcomers, groups, loaded, strict=True)

    def _take_options(self, groups: list[Group]) -> bool:
        """Whether the current engines support the options of these groups."""
        for engine in self._engines.values():
            for members in engine.groups:
                group = groups[members.index]
                lr, tensor = lr_for(engine.device, group["lr"])
                engine.set_lr_tensor(members, tensor)
                fits = self._reconfigure(engine, members, group, lr)
                members.options = None  # so that the next step compares again
                if not fits:
                    return False
        return True

    # --- reports

    def _method_of(self, parameter: torch.Tensor, role: Role, has_blocks: Callable[..., bool]) -> tuple[str, str]:
        """The method of a parameter, and the reason. `has_blocks` tells of a shape, dtype and role."""
        return (type(self).__name__, "parameter") if is_trained(parameter) else ("nothing", "frozen")

    def _methods(self) -> Iterator[Method]:
        labels = labels_of(self.param_groups)
        for index, group in enumerate(self.param_groups):
            config = self._config(group, lr_for(None, group["lr"])[0])
            roles = self._roles(self.param_groups, index)
            has_blocks = functools.cache(functools.partial(_has_blocks, config))
            for parameter, label, role in zip(group["params"], labels[index], roles, strict=True):
                method, reason = self._method_of(parameter, role, has_blocks)
                adamws = method == "AdamW" and self.kind != "adamw"
                rate = None if method == "nothing" else adamw_rate(config) if adamws else config["lr"]
                yield Method(method, reason, rate, index, parameter, label)

    def summary(self) -> Summary:
        """Which method updates which parameter, with the reason and the current learning rate. Prints as a table."""
        return Summary(self._methods())

    def __repr__(self) -> str:
        """The summary, and the non-default options of the first group."""
        usual = {option.name: GROUPED_DEFAULTS.get(option.name, option.default) for option in self._options}
        for cls in reversed(type(self).__mro__[:-1]):
            parameters = inspect.signature(cls.__init__).parameters if "__init__" in vars(cls) else {}
            usual |= {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        group, usual = self.param_groups[0], usual | self._resolved
        changed = [f"{name}={group[name]!r}" for name in usual if name in group and group[name] != usual[name]]
        rows = str(self.summary()).splitlines()
        rows = rows[:8] + ([f"... {len(rows) - 8} more rows"] if len(rows) > 8 else [])
        title = f"{type(self).__name__}({', '.join(changed)})"
        return "\n".join([*textwrap.wrap(title, 118, max_lines=3), *rows])

    def memory_report(self) -> MemoryReport:
        """Bytes of state, scratch and refreshes on this rank; a forecast before the first step."""
        if self._engines:
            return MemoryReport((engine.memory() for engine in self._engines.values()), forecast=False)
        parts = []
        for arrival in self._arrivals({}, self.param_groups, self.state, is_trained):
            group = self.param_groups[arrival.index]
            roles = self._roles(self.param_groups, arrival.index)
            device, ranks = arrival.home
            shared = SharedGroup(None, ranks, device) if ranks else None
            parameters = [
                (local_tensor(p).shape if shared else whole_shape(p), str(p.dtype).removeprefix("torch."), roles[k])
                for p, k in zip(arrival.parameters, arrival.positions, strict=True)
            ]
            config = self._config(group, lr_for(None, group["lr"])[0])
            divided = (shared.arguments(), tuple(map(shared.placement_of, arrival.parameters))) if shared else ()
            parts.append(_C.optim_forecast(device_of_forecast(device), config, parameters, *divided))
        return MemoryReport(parts, forecast=True)

    def measure_update(self) -> None:
        """Makes the next step measure its update, for `stats()`. It copies the parameters, and does not synchronize."""
        self._update = UpdateMeter(self) if self._update is None or self._update.is_measured else self._update

    def stats(self) -> dict[str, float]:
        """A flat dictionary for loggers. Synchronizes.

        steps: all steps, including skipped ones; skipped: skipped steps; refreshes: of roots or bases, per factor;
        failed: factors whose latest refresh failed, which keep their previous root; worst_residual: the largest
        residual of the latest roots; interval_* and staleness_*, mean and max: steps between refreshes of a factor, and
        since the latest; lr/METHOD: current learning rates, lr/METHOD/GROUP if groups differ; update_rms/METHOD: of the
        step for which `measure_update` was called.
        """
        return engine_stats([engine.stats() for engine in self._engines.values()]) | self._rates_and_updates()

    def _rates_and_updates(self) -> dict[str, float]:
        return rates_of(self._methods()) | (self._update.rms() if self._update is not None else {})
