"""One training run of bench/train_lm.py, and what is measured of it.

All runs of a course share the model, compiled once, its first weights and the batches. Nothing in the loop waits for a
GPU: losses stay on the device and times are events, read when the run is over.
"""

import gc
import math
import statistics
import time

import torch

from lm.model import GPT, TIED

EVERY = 5  # steps that a point of a curve is the mean of
LAST = 4  # points averaged for the final loss: single batches vary by 5 %
WARM_UP = 0.1  # of the steps
LINEAR = 0.3  # of the steps: the last ones of a linear schedule
CLIP = 1.0
HELD_OUT = 8  # batches
FIRST_STEPS = 2  # not timed: optimizers compile here what they compile
SETTLED = 10  # steps: before, state is made and steps are recorded; the slowest step is one behind them


def factor(step, steps, schedule="cosine", warm_up=WARM_UP):
    """Of the learning rate: a line up, then a cosine down to nothing, or constant and then a line."""
    warm_up = max(1, round(warm_up * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    if schedule == "linear":
        return min(1.0, (steps - step) / (LINEAR * steps))
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


class Batches:
    """Windows of the text, side by side, in an order drawn once for a seed; the text comes again when it is over."""

    def __init__(self, tokens, size, seed, device):
        self.size, self.windows = size, (len(tokens) - 1) // size.context
        if self.windows < size.batch:
            raise SystemExit(f"the text has {self.windows} windows of {size.context} tokens, a step needs {size.batch}")
        self.tokens = torch.from_numpy(tokens.astype("int32")).to(device)
        self.order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(seed)).to(device)
        self.within = torch.arange(size.context + 1, device=device)

    def __getitem__(self, step):
        count = self.size.batch
        turns = torch.arange(step * count, (step + 1) * count, device=self.order.device) % self.windows
        rows = self.tokens[self.order[turns][:, None] * self.size.context + self.within].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Stamps:
    """Times on the device, or the clock's on the CPU, in seconds after the first."""

    def __init__(self, device):
        self.cuda, self.marks = torch.device(device).type == "cuda", []

    def mark(self):
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self):
        if not self.cuda:
            return [mark - self.marks[0] for mark in self.marks]
        torch.cuda.synchronize()
        return [self.marks[0].elapsed_time(mark) / 1e3 for mark in self.marks]


class Course:
    """What all runs share."""

    def __init__(self, size, corpus, device, seed, compiled, head=TIED, **schedule):
        self.size, self.device, self.schedule = size, device, schedule
        self.train = Batches(corpus.train, size, seed, device)
        self.held_out = Batches(corpus.held_out, size, seed, device)
        torch.manual_seed(seed)
        self.model = GPT(size, corpus.vocabulary, head).to(self.device)
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.compiled = torch.compile(self.model) if compiled else self.model

    def loss(self, batch):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.compiled(*batch)

    def begin(self, entry, rates):
        """The first weights, and an optimizer for them."""
        self.model.load_state_dict(self.first)
        return entry.make(self.model.matrices(), self.model.rest(), rates)

    def step(self, optimizer, index, stamps):
        """One step; the optimizer's part lies between two stamps."""
        loss = self.loss(self.train[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        stamps.mark()
        optimizer.step()
        stamps.mark()
        optimizer.zero_grad()
        return loss.detach()

    def warm_up(self, entry, rates):
        """Steps that are not counted: the model is compiled in the first of all, and what others compile in theirs."""
        optimizer = self.begin(entry, rates)
        for index in range(FIRST_STEPS):
            self.step(optimizer, index, Stamps(self.device))

    def validate(self):
        """With unused gradients: without them the model would be compiled once more."""
        count = max(1, min(HELD_OUT, self.held_out.windows // self.size.batch))
        return statistics.fmean(self.loss(self.held_out[index]).item() for index in range(count))

    def run(self, entry, rates, steps):
        """A whole run, as a row of figures."""
        before = self.forget()
        optimizer = self.begin(entry, rates)
        scheduled = [(group, float(group["lr"])) for group in optimizer.param_groups]
        stamps, losses = Stamps(self.device), []
        stamps.mark()
        for index in range(steps):
            for group, rate in scheduled:
                group["lr"] = rate * factor(index, steps, **self.schedule)
            losses.append(self.step(optimizer, index, stamps))
        seconds = stamps.seconds()
        figures = {"memory": self.memory(before)} if self.device.type == "cuda" else {}
        if hasattr(optimizer, "stats"):
            stats = optimizer.stats()
            figures |= {"failed_factors": stats["failed"], "refreshes": stats["refreshes"]}
        losses = [float(loss) for loss in losses]
        return curve(losses, seconds) | figures | {"held_out_loss": self.validate()}

    def forget(self):
        """Gives the last run's memory back; what is left is the model's."""
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def memory(self, before):
        """Gigabytes: PyTorch's peak, what stays between steps in addition to the model, and the pool of our library."""
        import torchium

        pools = [value["reserved"] for name, value in torchium.memory_report().items() if name.startswith("cuda")]
        return {
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "state_gb": (torch.cuda.memory_allocated() - before) / 1e9,
            "pool_gb": sum(pools) / 1e9,
        }


def curve(losses, seconds):
    """Means of the loss with the steps and seconds at their ends, and the times of the optimizer's part."""
    ends = list(range(EVERY, len(losses) + 1, EVERY)) or [len(losses)]
    steps_ms = [1e3 * (after - before) for before, after in zip(seconds[1::2], seconds[2::2], strict=True)]
    points = [statistics.fmean(losses[max(0, end - EVERY) : end]) for end in ends]
    return {
        "loss": last_loss(points),
        "seconds": seconds[-1],
        "step_ms": statistics.median(steps_ms),
        "slowest_step_ms": max(steps_ms[SETTLED:] or steps_ms),
        "curve": {"steps": ends, "seconds": [seconds[2 * end] for end in ends], "losses": points},
    }


def last_loss(points, count=LAST):
    return statistics.fmean(points[-count:])


def reached(run, loss):
    """Step and second at which the mean of the last points first was at most `loss`, or None."""
    line = run["curve"]
    for k, (step, second) in enumerate(zip(line["steps"], line["seconds"], strict=True), 1):
        points = line["losses"][max(0, k - LAST) : k]
        if None not in points and last_loss(points) <= loss:
            return step, second
    return None
