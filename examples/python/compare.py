"""Trains one model with several optimizers, from the same first weights over the same batches, and compares them.

char_gpt.py and kfac.py define what is trained, a `Task`; the training loop, the clock and the table are here. `train`
is the usual loop for any optimizer of PyTorch.
"""

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Task:
    """What is trained: the model gives logits of shape [..., classes] for the inputs of a batch."""

    title: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[str, nn.Module, float], torch.optim.Optimizer]
    rates: dict[str, float]  # the optimizers there are, and the learning rate of each
    batch: Callable[[int], Batch]  # of a step: the same for every optimizer
    held_out: list[Batch]


@dataclass
class Run:
    """The measurements of one optimizer. Seconds are those of training alone, without the measurements."""

    name: str
    lr: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    optimizer_seconds: float = 0.0

    def add(self, step: int, seconds: float, loss: float, accuracy: float) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.accuracies.append(accuracy)

    def reached(self, loss: float) -> int | None:
        """The first measurement with at most this loss."""
        return next((i for i, value in enumerate(self.losses) if value <= loss), None)


# --- options ---------------------------------------------------------------------------------------------------------


def options(description: str, steps: int, rates: dict[str, float]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--precision", choices=["auto", *PRECISIONS], default="auto", help="auto: bf16 on a GPU")
    parser.add_argument("--optimizers", default=",".join(rates), help="which ones, separated by commas")
    parser.add_argument("--lr", action="append", default=[], metavar="NAME=RATE", help="another rate for one of them")
    parser.add_argument("--steps", type=int, default=steps, help="of each optimizer")
    parser.add_argument("--batch", type=int, default=32, help="examples in a step")
    parser.add_argument("--seed", type=int, default=0, help="of data, first weights and batches")
    parser.add_argument("--log-every", type=int, default=0, help="steps between measurements; 0: a thirtieth of them")
    return parser


def settle(args: argparse.Namespace, rates: dict[str, float]) -> argparse.Namespace:
    """Replaces words by their meaning: devices, precisions, names of optimizers."""
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    if args.precision == "auto":
        args.precision = "bf16" if args.device.type == "cuda" else "fp32"
    args.optimizers = args.optimizers.split(",")
    args.lr = dict(rate.partition("=")[::2] for rate in args.lr)
    for name in [*args.optimizers, *args.lr]:
        if name not in rates:
            raise SystemExit(f"there is no optimizer {name!r} here, only {', '.join(rates)}")
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    args.log_every = args.log_every or max(1, args.steps // 30)
    return args


# --- training --------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time spent in `with` blocks; on a GPU between events, which are synchronized when the sum is read."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.total, self.events = device.type == "cuda", 0.0, []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self.on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self.events.append((begin, end))
        else:
            begin = time.perf_counter()
            yield
            self.total += time.perf_counter() - begin

    def read(self) -> float:
        if self.events:
            self.events[-1][1].synchronize()
            self.total += sum(begin.elapsed_time(end) for begin, end in self.events) / 1000
            self.events.clear()
        return self.total


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor]:
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction), logits


@torch.no_grad()
def measure(model: nn.Module, batches: list[Batch], autocast: contextlib.AbstractContextManager) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    loss = right = count = 0.0
    for inputs, targets in batches:
        with autocast:
            part, logits = loss_of(model, inputs, targets, "sum")
        loss += part.item()
        right += (logits.argmax(-1) == targets).sum().item()
        count += targets.numel()
    model.train()
    return loss / count, right / count


def schedule(steps: int) -> Callable[[int], float]:
    """5 % of the steps for warm-up, then a cosine schedule to 0."""
    warmup = max(1, steps // 20)
    return lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))


def train(task: Task, args: argparse.Namespace, run: Run) -> nn.Module:
    torch.manual_seed(args.seed)
    model = task.make_model().to(args.device)
    optimizer = task.make_optimizer(run.name, model, run.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.steps))
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.precision == "fp16")
    autocast = torch.autocast(args.device.type, PRECISIONS[args.precision], enabled=args.precision != "fp32")

    in_optimizer, elapsed, begin = Stopwatch(args.device), 0.0, time.perf_counter()
    for step in range(args.steps + 1):
        if step % args.log_every == 0 or step == args.steps:
            run.optimizer_seconds = in_optimizer.read()  # on a GPU this synchronizes with the end of the step
            elapsed += time.perf_counter() - begin
            run.add(step, elapsed, *measure(model, task.held_out, autocast))
            if len(run.steps) % 5 == 1:
                print(f"  {run.name:10} step {step:5}, held-out loss {run.losses[-1]:.4f}", flush=True)
            begin = time.perf_counter()
        if step == args.steps:
            break

        inputs, targets = task.batch(step)
        with autocast:
            loss, _ = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with in_optimizer.running():
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return model


def warm_up(task: Task, args: argparse.Namespace) -> None:
    """One untimed pass, so that the first optimizer does not pay for the initialization of libraries."""
    loss_of(task.make_model().to(args.device), *task.batch(0))[0].backward()


# --- output ----------------------------------------------------------------------------------------------------------


def table(runs: list[Run]) -> None:
    """One line for each run. The last two columns: when it reached the final loss of AdamW, or else of the last run."""
    baseline = next((run for run in runs if run.name == "adamw"), runs[-1])
    goal = baseline.losses[-1]
    print(
        f"\n  {'optimizer':10}{'rate':>8}{'steps':>7}{'loss':>9}{'accuracy':>10}{'time':>9}{'a step':>10}"
        f"{'optimizer':>11}{'steps to L':>12}{'time to L':>11}"
    )
    for run in runs:
        per_step, at = 1e3 / max(1, run.steps[-1]), run.reached(goal)
        when = ("-", "-") if at is None else (f"{run.steps[at]}", f"{run.seconds[at]:.1f} s")
        print(
            f"  {run.name:10}{run.lr:8.2g}{run.steps[-1]:7}{run.losses[-1]:9.4f}{100 * run.accuracies[-1]:8.2f} %"
            f"{run.seconds[-1]:7.1f} s{run.seconds[-1] * per_step:7.1f} ms{run.optimizer_seconds * per_step:8.2f} ms"
            f"{when[0]:>12}{when[1]:>11}"
        )
    print(f"\n  L = {goal:.4f}, the final loss of {baseline.name}. Losses are of held-out data.")


# --- the comparison --------------------------------------------------------------------------------------------------


def compare(task: Task, args: argparse.Namespace, subtitle: str) -> dict[str, nn.Module]:
    """Trains with each optimizer in turn, prints the table; returns the trained models by name."""
    models, runs = {}, []
    print(f"{task.title}\n  {subtitle}\n  on {args.device}, {args.precision}")
    warm_up(task, args)
    for name in args.optimizers:
        runs.append(Run(name, float(args.lr.get(name, task.rates[name]))))
        models[name] = train(task, args, runs[-1])
    table(runs)
    return models
