"""torchium.integrations with the real packages, if installed. Axolotl, LLaMA-Factory and ms-swift need a model hub and
a trainer each, so their published interfaces are imitated in a few lines if they are missing."""

import copy
import csv
import importlib
import sys
import types

import pytest
import torch
import torchium
from models import Llama
from optim_cases import assert_same_bits, copies
from torch import nn
from torchium import integrations
from torchium.integrations import log_stats, make_optimizer, trainer_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

ADAMWS = {"model.embed_tokens.weight", "lm_head.weight"}
LOG = types.SimpleNamespace(log_metrics=lambda values, step: None)


def arguments(**options):
    """The fields read of a transformers.TrainingArguments."""
    numbers = {"learning_rate": 0.02, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    return types.SimpleNamespace(**{**numbers, **options})


def adamws(optimizer):
    """The names of the matrices that get AdamW."""
    reasons = ("vector or scalar", "matrix")
    return {name for row in optimizer.summary() if row.reason not in reasons for name in row.names}


def step(optimizer, model):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


def provided(name, monkeypatch, **contents):
    """A module: the real one, or one with these contents."""
    try:
        return importlib.import_module(name)
    except ImportError:
        path = name.split(".")
        for k in range(1, len(path) + 1):
            module = types.ModuleType(".".join(path[:k]))
            monkeypatch.setitem(sys.modules, module.__name__, sys.modules.get(module.__name__, module))
        vars(sys.modules[name]).update(contents)
        return sys.modules[name]


# --- factories and options


def test_numbers_come_from_training_arguments():
    optimizer = make_optimizer(Llama(), arguments(), name="Muon", momentum=0.9)
    matrices, *others = optimizer.param_groups
    assert (matrices["lr"], matrices["weight_decay"], matrices["momentum"]) == (0.02, 0.1, 0.9)
    assert all(group["adamw_betas"] == (0.8, 0.9) and group["adamw_eps"] == 1e-6 for group in optimizer.param_groups)
    assert adamws(optimizer) == ADAMWS
    assert {group["weight_decay"] for group in others if group["params"][0].ndim < 2} == {0.0}
    factory, options = trainer_optimizer("soap", arguments(), lr=0.5, adamw={"betas": (0.7, 0.8)})
    optimizer = factory()(Llama(), **options)
    assert type(optimizer) is torchium.optim.SOAP
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["adamw_betas"]) == (0.5, (0.7, 0.8))


def test_options_of_configurations():
    text = integrations._options_of("name=soap, lr=1e-3,use_bias_correction=False,state_dtype=bfloat16")
    assert text == {"name": "soap", "lr": 1e-3, "use_bias_correction": False, "state_dtype": "bfloat16"}
    assert integrations._options_of({"adamw": {"lr": "1e-3"}, "betas": (0.9, 0.9)}) == {
        "adamw": {"lr": 1e-3},
        "betas": (0.9, 0.9),
    }
    assert integrations._options_of(None) == {}
    with pytest.raises(AttributeError, match="NoSuchClass"):
        _ = integrations.NoSuchClass


def test_nothing_is_imported():
    code = "import sys, torch; before = set(sys.modules); import torchium.integrations; "
    code += "print({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    ran = importlib.import_module("subprocess").run([sys.executable, "-c", code], capture_output=True, text=True)
    assert eval(ran.stdout) - {"torch", "numpy"} == {"torchium"}, ran.stderr


# --- statistics


@pytest.mark.parametrize("method", ["add_scalar", "log_metrics", "log"])
def test_log_stats(method):
    model, written = Llama(), {}

    def write(values, *given, step=7):
        written.update({values: given} if method == "add_scalar" else {name: (values[name], step) for name in values})

    optimizer = make_optimizer(model, name="shampoo", lr=0.01)
    optimizer.measure_update()
    step(optimizer, model)
    writer, wrapper = types.SimpleNamespace(**{method: write}), types.SimpleNamespace(optimizer=optimizer)
    assert log_stats(wrapper, writer, 7) == {f"optimizer/{key}": value for key, value in optimizer.stats().items()}
    assert written["optimizer/steps"] == (1.0, 7) and written["optimizer/update_rms/Shampoo"][0] > 0
    several = types.SimpleNamespace(chained_optimizers=[wrapper, torch.optim.SGD(model.parameters()), optimizer])
    assert set(log_stats(several, writer, prefix="")) == {f"{i}/{key}" for i in (0, 1) for key in optimizer.stats()}
    with pytest.raises(TypeError, match="SGD"):
        log_stats(torch.optim.SGD(model.parameters()), writer)
    with pytest.raises(TypeError, match="writer must have"):
        log_stats(optimizer, 3)


def test_weights_and_biases(tmp_path):
    wandb = pytest.importorskip("wandb")
    model = Llama()
    optimizer = make_optimizer(model, name="soap", lr=0.01)
    step(optimizer, model)
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off", silent=True)) as run:
        told = log_stats(optimizer, run)
        assert {key: run.summary[key] for key in told} == told


# --- Hugging Face


def train(tmp_path, report_to=(), **how):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(9) + torch.randint(20, (32, 1))]
    options = transformers.TrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 2},
        **{"learning_rate": 0.02, "weight_decay": 0.1, "report_to": list(report_to), "save_strategy": "no"},
        **{"use_cpu": True, "disable_tqdm": True},
    )
    made = how["made"](model, options)
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows, **made)
    if report_to:
        integrations.add_stats(trainer)
    trainer.train()
    return trainer


def test_trainer_makes_the_optimizer_from_the_model(tmp_path):
    """Bitwise equal to an optimizer created beforehand; its logs contain the statistics, which reach TensorBoard."""
    pytest.importorskip("tensorboard")
    trainer = train(
        tmp_path, ["tensorboard"], made=lambda _, args: {"optimizer_cls_and_kwargs": trainer_optimizer("muon", args)}
    )
    optimizer = trainer.optimizer.optimizer
    assert adamws(optimizer) == ADAMWS and optimizer.stats()["steps"] == 6
    beforehand = train(
        tmp_path, made=lambda model, args: {"optimizers": (make_optimizer(model, args, name="muon"), None)}
    )
    assert_same_bits(copies(trainer.model.parameters()), copies(beforehand.model.parameters()))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["optimizer/steps"] for row in rows] == [2.0, 4.0, 6.0]
    assert all(row["optimizer/update_rms/Muon"] > row["optimizer/update_rms/AdamW"] > 0 for row in rows)
    assert rows[0]["optimizer/lr/Muon"] > rows[1]["optimizer/lr/Muon"] > 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = next(path.parent for path in tmp_path.rglob("events.out.*"))
    events = EventAccumulator(str(folder)).Reload()
    name = next(tag for tag in events.Tags()["scalars"] if tag.endswith("optimizer/lr/Muon"))
    assert [event.value for event in events.Scalars(name)] == pytest.approx([row["optimizer/lr/Muon"] for row in rows])


def test_axolotl(monkeypatch):
    base = provided("axolotl.integrations.base", monkeypatch, BasePlugin=type("BasePlugin", (), {}))
    plugin = integrations._axolotl_plugin()()
    assert isinstance(plugin, base.BasePlugin)
    callbacks = types.SimpleNamespace(callbacks=["a reporter"])
    trainer = types.SimpleNamespace(args=arguments(), optimizer_cls_and_kwargs=None, callback_handler=callbacks)
    config = types.SimpleNamespace(optim_args={"name": "soap", "precondition_frequency": "7"})
    monkeypatch.setitem(vars(integrations), "TrainerStats", type("TrainerStats", (), {}))
    plugin.post_trainer_create(config, trainer)
    factory, options = trainer.optimizer_cls_and_kwargs
    optimizer = factory()(Llama(), trainer.args, **options)  # as Axolotl's create_optimizer does
    assert optimizer.param_groups[0]["precondition_frequency"] == 7 and optimizer.param_groups[0]["lr"] == 0.02
    assert adamws(optimizer) == ADAMWS and len(callbacks.callbacks) == 2 and callbacks.callbacks[1] == "a reporter"


def test_llamafactory(monkeypatch):
    utils = provided("llamafactory.train.trainer_utils", monkeypatch, create_custom_optimizer=None)
    monkeypatch.setattr(utils, "create_custom_optimizer", None)
    trainer = types.ModuleType("llamafactory.train.sft.trainer")
    trainer.create_custom_optimizer = None
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    registry = {}

    class OptimizerPlugin:
        def __init__(self, name):
            self.register = lambda: lambda function: registry.setdefault(name, function)
            self.made = registry.get(name)

        def __call__(self, *given):
            return self.made(*given)

    plugins = provided(
        "llamafactory.v1.plugins.trainer_plugins.optimizer", monkeypatch, OptimizerPlugin=OptimizerPlugin
    )
    integrations.register_llamafactory("muon", momentum=0.8)
    for module in (utils, trainer):
        optimizer = module.create_custom_optimizer(Llama(), arguments(), object())
        assert adamws(optimizer) == ADAMWS
        assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["lr"]) == (0.8, 0.02)
    config = {"name": "torchium", "optimizer": "normuon", "lr": "3e-2"}
    optimizer = plugins.OptimizerPlugin("torchium")(Llama(), config)
    assert type(optimizer) is torchium.optim.NorMuon and optimizer.param_groups[0]["lr"] == 0.03


def test_swift(monkeypatch):
    class OptimizerCallback:
        def __init__(self, args, trainer):
            self.args, self.trainer = args, trainer

    swift = provided("swift.optimizers", monkeypatch, OptimizerCallback=OptimizerCallback)
    mapping = provided("swift.optimizers.mapping", monkeypatch, optimizers_map={"default": OptimizerCallback})
    monkeypatch.setitem(sys.modules, "swift.optimizers", swift)
    integrations.register_swift()
    trainer = types.SimpleNamespace(model=Llama())
    callback = mapping.optimizers_map["torchium"](arguments(optim_args="name=shampoo,grafting=None"), trainer)
    assert isinstance(callback, swift.OptimizerCallback)
    for given in ((), (Llama(),)):
        optimizer = callback.create_optimizer(*given)
        assert adamws(optimizer) == ADAMWS and optimizer.param_groups[0]["grafting"] is None


# --- NeMo Automodel, torchtitan, Megatron


class Parts(nn.Module):
    """Two stages of a pipeline: the last Linear of the first is not an output layer."""

    def __init__(self):
        super().__init__()
        self.parts = [nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8)), Llama()]


def test_nemo_automodel():
    optim = pytest.importorskip("nemo_automodel.components.optim")
    options = {"name": "muon", "lr": 0.03, "options": {"momentum": "0.9"}}
    config = optim.build_optimizer_config("torchium.integrations.AutomodelOptimizer", options)
    model = Parts()
    first, second = config.build(model)
    assert adamws(first) == {"0.weight"} and adamws(second) == ADAMWS
    assert (first.param_groups[0]["momentum"], second.param_groups[-1]["lr"]) == (0.9, 0.03)
    step(first, model.parts[0])
    schedule = optim.LRSchedulerConfig(lr_warmup_steps=2)
    steps = types.SimpleNamespace(epoch_len=10, num_epochs=1, max_steps=None)
    assert schedule.build([first], steps)[0].get_lr(first.param_groups[0]) == pytest.approx(0.003)


def test_torchtitan():
    optimizer = pytest.importorskip("torchtitan.components.optimizer")
    last = optimizer.ParamGroupConfig(pattern=r".*", optimizer_name="torchium.Muon", optimizer_kwargs={"lr": 0.03})
    norms = optimizer.ParamGroupConfig(pattern=r"norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.004})
    config = integrations.TitanOptimizers.Config(param_groups=[norms, last], implementation="foreach")
    built = []
    for _ in range(2):
        model = Llama()
        container = config.build(model_parts=[model])
        assert type(container) is integrations.TitanOptimizers
        theirs, ours = container.optimizers
        assert type(theirs) is torch.optim.AdamW and adamws(ours) == ADAMWS
        built.append((model, container))
    (model, container), (other, loaded) = built
    for k in range(3):
        torch.manual_seed(k)
        step(container, model)
    container.zero_grad()
    loaded.load_state_dict(copy.deepcopy(container.state_dict()))
    other.load_state_dict(model.state_dict())
    for pair in built:
        torch.manual_seed(9)
        step(pair[1], pair[0])
    assert_same_bits(copies(model.parameters()), copies(other.parameters()))
    assert log_stats(container, LOG, 4)["optimizer/steps"] == 4.0


class OnCpu(torch.overrides.TorchFunctionMode):
    """Megatron's wrappers require "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **{**kwargs, **({"device": "cpu"} if kwargs.get("device") == "cuda" else {})})


@pytest.mark.filterwarnings("ignore")
def test_megatron(tmp_path, monkeypatch):
    core = pytest.importorskip("megatron.core.optimizer")
    parallel = importlib.import_module("megatron.core.parallel_state")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        parallel.initialize_model_parallel()
        model = Llama()
        for name in ADAMWS:
            model.get_parameter(name).is_embedding_or_output_parameter = True
        config = core.OptimizerConfig(optimizer="adam", lr=0.03, min_lr=0.0, weight_decay=0.1, clip_grad=0.0)
        monkeypatch.setattr(core, "get_megatron_optimizer", core.get_megatron_optimizer)
        integrations.register_megatron("muon", momentum=0.9)
        with OnCpu():
            chained = core.get_megatron_optimizer(config, [model])
            (wrapped,) = chained.chained_optimizers
            told = {id(p): group.get("use_adamw") for group in wrapped.optimizer.param_groups for p in group["params"]}
            assert {name for name, p in model.named_parameters() if told[id(p)]} == ADAMWS
            assert {group["wd_mult"] for group in wrapped.optimizer.param_groups} == {0.0, 1.0}
            before = copies(model.parameters())
            for p in model.parameters():
                p.main_grad = torch.randn_like(p)
            assert chained.step()[0]
            assert not any(map(torch.equal, before, copies(model.parameters())))
        assert log_stats(chained, LOG, 1)["optimizer/steps"] == 1.0
        with pytest.raises(ValueError, match="use_distributed_optimizer"):
            integrations.megatron_optimizer(core.OptimizerConfig(fp16=True, lr=0.1), [model])
    finally:
        parallel.destroy_model_parallel()
        torch.distributed.destroy_process_group()


# --- Lightning


def test_lightning_logs_statistics(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return make_optimizer(self, name="soap", lr=0.01)

    logger = CSVLogger(tmp_path)
    silent = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [integrations.LightningStats()]
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=6, logger=logger, log_every_n_steps=3, callbacks=callbacks, **silent
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4))
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["optimizer/steps"]]
    assert [float(row["optimizer/steps"]) for row in rows] == [3.0, 6.0]
    assert all(float(row["optimizer/update_rms/SOAP"]) > 0 for row in rows)
    assert all(float(row["optimizer/lr/AdamW"]) == 0.01 for row in rows)
