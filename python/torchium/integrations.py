"""torchium's optimizers by name in other frameworks, and their statistics in loggers.

Functions are below. These classes derive from a framework's and are created on first use:

- `TrainerStats`, `LightningStats`: callbacks of Hugging Face's Trainer and of Lightning that log `stats()`;
- `AxolotlPlugin`: for `plugins:` of an Axolotl configuration;
- `AutomodelOptimizer`: for `_target_:` of the optimizer in a NeMo Automodel configuration;
- `TitanOptimizers`: a torchtitan OptimizersContainer with torchium's optimizers.

Optimizers are constructed from the model, so that embeddings and output layers get AdamW. Only PyTorch is imported
eagerly.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchium.factory import _CLASSES, _FIRST_ORDER, _OF_MODEL, create_optimizer
from torchium.optim._model.choose import reasons_of

__all__ = [
    "add_stats",
    "log_stats",
    "make_optimizer",
    "megatron_optimizer",
    "register_llamafactory",
    "register_megatron",
    "register_swift",
    "trainer_optimizer",
]

# --- from a model and a framework's arguments -------------------------------------------------------------------------


def _options_of(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parses options: a mapping, or "key=value,key=value"; numbers may be text, as "1e-3" is in YAML."""
    if isinstance(given, str):
        given = dict(pair.split("=") for pair in given.replace(" ", "").split(","))
    options = {}
    for key, value in (given or {}).items():
        options[key] = _options_of(value) if isinstance(value, Mapping) else value
        with contextlib.suppress(SyntaxError, ValueError):
            options[key] = ast.literal_eval(value) if isinstance(value, str) else options[key]
    return options


def _options_from(arguments: Any, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, with defaults from a transformers.TrainingArguments."""
    found = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    key = "betas" if name == "adamw" else "adamw_betas"
    if name not in (*_OF_MODEL, "lion", "sgd") and not {"adamw", key} & options.keys():
        found[key] = (arguments.adam_beta1, arguments.adam_beta2)
        found[key.replace("betas", "eps")] = arguments.adam_epsilon
    return found | dict(options)


def make_optimizer(model: torch.nn.Module, arguments: Any = None, /, *, name: str = "muon", **options: Any) -> Any:
    """`torchium.create_optimizer` as frameworks call it; biases and norms get no weight decay.

    Args:
        model: the model, wrapped or not.
        arguments: a transformers.TrainingArguments, for the learning rate, the weight decay and AdamW's options.
        name: as for `create_optimizer`.
        options: of the optimizer; they override `arguments`.
    """
    name = name.lower()
    if arguments is not None:
        options = _options_from(arguments, name, options)
    if name in _CLASSES and name not in _OF_MODEL:
        options.setdefault("no_decay_1d", True)
    return create_optimizer(name, model, **options)


def trainer_optimizer(name: str = "muon", arguments: Any = None, /, **options: Any) -> tuple[Any, dict[str, Any]]:
    """For Hugging Face's `Trainer(optimizer_cls_and_kwargs=...)`: Trainer calls the factory with the model.

    Args:
        name: as for `torchium.create_optimizer`.
        arguments: the TrainingArguments, for the learning rate, the weight decay and AdamW's options.
        options: of the optimizer; they override `arguments`.
    """
    found = _options_from(arguments, name.lower(), options) if arguments else options
    return (lambda: make_optimizer), {"name": name, **found}


def _divided(groups: Iterable[dict[str, Any]], adamws: set[torch.Tensor], name: str) -> list[dict[str, Any]]:
    """Splits groups, so that parameters with AdamW are separate."""
    divided = []
    for group in groups if name.lower() not in _FIRST_ORDER else ():
        for chosen in (False, True):
            places = [i for i, p in enumerate(group["params"]) if (p in adamws) == chosen]
            lists = {key: [group[key][i] for i in places] for key in ("params", "param_names") if key in group}
            divided += [{**group, **lists, "use_adamw": chosen}] if places else []
    return divided or list(groups)


def _elementwise_of(model: torch.nn.Module) -> set[torch.Tensor]:
    """The parameters of a part of a model with AdamW: output layers only by name, since they may be in another part."""
    heads = {p for n, p in model.named_parameters() if n.split(".")[-2:-1] in (["lm_head"], ["output"], ["head"])}
    return {p for p, reason in reasons_of(model).items() if reason != "output layer" or p in heads}


# --- statistics -------------------------------------------------------------------------------------------------------


def _optimizers(optimizer: Any) -> list[Any]:
    """The optimizers with statistics inside wrappers and chains."""
    if isinstance(optimizer, (list, tuple)):
        return [inner for each in optimizer for inner in _optimizers(each)]
    for name in ("optimizers", "chained_optimizers", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, (list, tuple, torch.optim.Optimizer)) or hasattr(inner, "param_groups"):
            return _optimizers(inner)
    return [optimizer] if callable(getattr(optimizer, "stats", None)) else []


def _stats_of(optimizer: Any, prefix: str) -> dict[str, float]:
    found = _optimizers(optimizer)
    prefixes = [f"{prefix}{i}/" for i in range(len(found))] if len(found) > 1 else [prefix]
    return {f"{begin}{key}": v for begin, one in zip(prefixes, found, strict=False) for key, v in one.stats().items()}


def log_stats(optimizer: Any, writer: Any, step: int | None = None, *, prefix: str = "optimizer/") -> dict[str, float]:
    """Logs `optimizer.stats()`, and returns it. Synchronizes: call it once in many steps.

    Args:
        optimizer: one of torchium.optim, wrapped or not; several are numbered in the names.
        writer: a run of Weights & Biases or `wandb` itself, a SummaryWriter of TensorBoard, a logger of Lightning, an
            Accelerator, or any object with `log(values, step=)`, `log_metrics(values, step)` or `add_scalar`.
        step: the number of the step.
        prefix: of every name.
    """
    stats = _stats_of(optimizer, prefix)
    if not stats:
        raise TypeError(f"optimizer has none of torchium.optim in it: {type(optimizer).__name__!r}")
    if hasattr(writer, "add_scalar"):
        for name, value in stats.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(stats, step)
    elif hasattr(writer, "log"):
        writer.log(stats, step=step)
    else:
        raise TypeError(f"writer must have log, log_metrics or add_scalar, got {type(writer).__name__!r}")
    return stats


def add_stats(trainer: Any) -> None:
    """Adds the statistics to the logs of a Hugging Face Trainer, and so to Weights & Biases, TensorBoard and others.

    Args:
        trainer: the Trainer.
    """
    trainer.callback_handler.callbacks.insert(0, __getattr__("TrainerStats")())


def _trainer_stats() -> type:
    from transformers import TrainerCallback

    class TrainerStats(TrainerCallback):
        """Adds `stats()` to Trainer's logs, for the callbacks after this one."""

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            if (state.global_step + 1) % max(1, state.logging_steps or 1) == 0:
                [each.measure_update() for each in _optimizers(optimizer)]

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            if "loss" in (logs or ()):  # but not of an evaluation, or the last ones
                stats = _stats_of(given["optimizer"], "optimizer/")
                logs.update(stats)
                state.log_history[-1].update(stats)

    return TrainerStats


def _lightning_stats() -> type:
    from lightning.pytorch import Callback

    class LightningStats(Callback):
        """Writes `stats()` to the loggers of a Lightning Trainer, every `log_every_n_steps`."""

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
                [each.measure_update() for each in _optimizers(trainer.optimizers)]

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
                for logger in trainer.loggers:
                    log_stats(trainer.optimizers, logger, trainer.global_step)

    return LightningStats


# --- Axolotl, LLaMA-Factory, ms-swift, NeMo Automodel, torchtitan -----------------------------------------------------


def _axolotl_plugin() -> type:
    from axolotl.integrations.base import BasePlugin

    class AxolotlPlugin(BasePlugin):
        """Gives Axolotl's trainer the optimizer of `optim_args:`; the training arguments provide the other options."""

        def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
            options = _options_of(cfg.optim_args)
            trainer.optimizer_cls_and_kwargs = trainer_optimizer(options.pop("name", "muon"), trainer.args, **options)
            add_stats(trainer)

    return AxolotlPlugin


def register_llamafactory(name: str = "muon", **options: Any) -> None:
    """Makes LLaMA-Factory use this optimizer: call it before `llamafactory.train.tuner.run_exp`. In its version 1 the
    optimizer is the plugin "torchium" of `optim_config`, whose other keys override `options`.

    Args:
        name: as for `torchium.create_optimizer`.
        options: of the optimizer; they override the training arguments.
    """

    def create_custom_optimizer(model: Any, training_args: Any, finetuning_args: Any) -> Any:
        return make_optimizer(model, training_args, name=name, **options)

    loaded = [module for key, module in sys.modules.items() if key.startswith("llamafactory.train.")]
    for module in [*loaded, importlib.import_module("llamafactory.train.trainer_utils")]:
        if hasattr(module, "create_custom_optimizer"):
            module.create_custom_optimizer = create_custom_optimizer  # type: ignore[attr-defined]
    plugins = importlib.import_module("llamafactory.v1.plugins.trainer_plugins.optimizer")

    def plugin(model: Any, config: Mapping[str, Any]) -> Any:
        given = {**options, **_options_of({key: value for key, value in config.items() if key != "name"})}
        return make_optimizer(model, name=given.pop("optimizer", name), **given)

    plugins.OptimizerPlugin("torchium").register()(plugin)


def register_swift(key: str = "torchium") -> None:
    """Adds an optimizer to ms-swift, for `--optimizer`; `--optim_args` has its name and options.

    Args:
        key: its name there.
    """
    swift = importlib.import_module("swift.optimizers")

    class TorchiumCallback(swift.OptimizerCallback):  # type: ignore[name-defined, misc]
        def create_optimizer(self, model: Any = None) -> Any:
            chosen = self.trainer.model if model is None else model
            return make_optimizer(chosen, self.args, **_options_of(self.args.optim_args))

    importlib.import_module("swift.optimizers.mapping").optimizers_map[key] = TorchiumCallback


def _automodel_optimizer() -> type:
    from nemo_automodel.components.optim import OptimizerConfig

    @dataclasses.dataclass
    class AutomodelOptimizer(OptimizerConfig):
        """The optimizer of a NeMo Automodel recipe: name, lr, weight_decay, and `options` for the rest."""

        supports_megatron_fsdp_sharding = False
        name: str = "muon"
        lr: float = 0.02
        weight_decay: float = 0.0
        options: dict[str, Any] = dataclasses.field(default_factory=dict)

        def build(self, model: Any, *, device_mesh: Any = None, is_peft: bool = False) -> list[Any]:
            if self.param_group_overrides:
                raise ValueError("AutomodelOptimizer does not support param_group_overrides")
            options = {"lr": self.lr, "weight_decay": self.weight_decay, **_options_of(self.options)}
            made = []
            for part in getattr(model, "parts", [model]):
                labels, parameters = zip(*((n, p) for n, p in part.named_parameters() if p.requires_grad), strict=True)
                groups = [{"params": list(parameters), "param_names": list(labels)}]
                made.append(create_optimizer(self.name, _divided(groups, _elementwise_of(part), self.name), **options))
            return made

    return AutomodelOptimizer


def _titan_optimizers() -> type:
    from torchtitan.components.optimizer import OptimizersContainer

    class TitanOptimizers(OptimizersContainer):
        """torchtitan's container; `optimizer_name` may also be a class name, as "torchium.Muon"."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):  # type: ignore[name-defined, misc]
            pass

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            if name.startswith("torchium."):
                return getattr(importlib.import_module("torchium.optim"), name.removeprefix("torchium."))
            return OptimizersContainer._resolve_optimizer_factory(name)

        @staticmethod
        def _build_param_groups(model: torch.nn.Module, configs: Any, implementation: Any) -> Any:
            groups, patterns = OptimizersContainer._build_param_groups(model, configs, implementation)
            for name in [name for name in groups if name.startswith("torchium.")]:
                plain = [{k: v for k, v in group.items() if k not in implementation} for group in groups[name]]
                parts = [_divided([group], _elementwise_of(model), name.removeprefix("torchium.")) for group in plain]
                patterns[name] = [text for text, part in zip(patterns[name], parts, strict=True) for _ in part]
                groups[name] = [group for part in parts for group in part]
            return groups, patterns

    return TitanOptimizers


# --- Megatron ---------------------------------------------------------------------------------------------------------


def megatron_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: Any = None,
    *,
    pg_collection: Any = None,
    name: str = "muon",
    **options: Any,
) -> Any:
    """An optimizer for Megatron Core, in place of its `get_megatron_optimizer`: in float32 or bfloat16, without the
    distributed optimizer. Under tensor parallelism each rank's shard of a matrix is a separate matrix.

    Args:
        config: Megatron's OptimizerConfig, for the learning rate and the weight decay.
        model_chunks: the chunks of the model.
        config_overrides: as in Megatron.
        pg_collection: Megatron's process groups, if they are not the global ones.
        name: as for `torchium.create_optimizer`; not "kfac" or "natural".
        options: of the optimizer.
    """
    from megatron.core import optimizer as core
    from megatron.core.optimizer import optimizer as wrappers
    from megatron.core.process_groups_config import ProcessGroupCollection

    if config.use_distributed_optimizer or config.fp16 or name.lower() in _OF_MODEL:
        raise ValueError(
            "in Megatron torchium supports neither use_distributed_optimizer nor fp16, KFAC, NaturalGradient"
        )
    collection = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
    chained, groups = [], core._get_param_groups(model_chunks, config, config_overrides)
    for expert, reduced in ((False, "mp"), (True, "tp_ep_pp")):
        chosen = [group for group in groups if group["is_expert_parallel"] == expert and group["params"]]
        if chosen:
            adamws = {p for g in chosen for p in g["params"] if getattr(p, "is_embedding_or_output_parameter", False)}
            numbers = {"lr": config.lr, "weight_decay": config.weight_decay, **options}
            inner = create_optimizer(name, _divided(chosen, adamws, name), **numbers)
            wrapper = wrappers.Float16OptimizerWithFloat16Params if config.bf16 else wrappers.FP32Optimizer
            wrapped = wrapper(inner, config, *([None] if config.bf16 else []), lambda *_: None)
            wrapped.grad_stats_parallel_group = getattr(collection, reduced)
            wrapped.tp_group = collection.tp
            chained.append(wrapped)
    return wrappers.ChainedOptimizer(chained)


def register_megatron(name: str = "muon", **options: Any) -> None:
    """Replaces `get_megatron_optimizer` by `megatron_optimizer`: call it before Megatron's `pretrain`.

    Args:
        name: as for `megatron_optimizer`.
        options: of the optimizer.
    """

    def get_megatron_optimizer(
        config: Any, model_chunks: Any, config_overrides: Any = None, *_: Any, pg_collection: Any = None, **__: Any
    ) -> Any:
        return megatron_optimizer(
            config, model_chunks, config_overrides, pg_collection=pg_collection, name=name, **options
        )

    importlib.import_module("megatron.core.optimizer")
    for module in ("megatron.core.optimizer", "megatron.training.training"):
        if hasattr(sys.modules.get(module), "get_megatron_optimizer"):
            sys.modules[module].get_megatron_optimizer = get_megatron_optimizer  # type: ignore[attr-defined]


# --- classes that derive from a framework's ---------------------------------------------------------------------------

_MADE: dict[str, Callable[[], type]] = {
    "AutomodelOptimizer": _automodel_optimizer,
    "AxolotlPlugin": _axolotl_plugin,
    "LightningStats": _lightning_stats,
    "TitanOptimizers": _titan_optimizers,
    "TrainerStats": _trainer_stats,
}


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = globals().get(name) or _MADE[name]()
    made.__module__, made.__qualname__ = __name__, name
    return made
