"""Training runs of bench/train_lm.py and their measurements.

All runs of a course share the model, compiled once, its initial weights and the batches. The loop never waits for the
GPU: losses stay on the device, and times are events that are read after the run.
"""

import gc
import math
import statistics
import time

import torch

from lm.model import GPT, TIED

EVERY = 5  # steps averaged for a point of the curve
LAST = 4  # points averaged for the final loss: single batches vary by 5 %
WARM_UP = 0.1  # of the steps
LINEAR = 0.3  # share of the steps in which a linear schedule decreases
CLIP = 1.0
HELD_OUT = 8  # batches
FIRST_STEPS = 2  # warm-up steps, in which models and optimizers compile
SETTLED = 10  # steps excluded from the slowest step: they allocate state and record graphs


def factor(step, steps, schedule="cosine", warm_up=WARM_UP):
    """The factor of the learning rate: linear warm-up, then a cosine to 0, or constant and finally linear."""
    warm_up = max(1, round(warm_up * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    if schedule == "linear":
        return min(1.0, (steps - step) / (LINEAR * steps))
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


class Batches:
    """Adjacent windows of the text in a random order that depends on the seed, repeated when exhausted."""

    def __init__(self, tokens, size, seed, device):
        self.size, self.windows = size, (len(tokens) - 1) // size.context
        self.count = self.windows // size.batch
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
    """Times in seconds since the first mark: of events on a GPU, of the clock on the CPU."""

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
    """The state shared by all runs."""

    def __init__(self, model, train, held_out, device, compiled, **schedule):
        self.train, self.held_out, self.device, self.schedule = train, held_out, device, schedule
        self.model = model.to(device)
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.compiled = torch.compile(self.model) if compiled else self.model

    def use_bfloat16(self):
        for p in self.model.parameters():
            p.data = p.data.bfloat16()
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}

    def scale_matrices(self, factor):
        for p in self.model.matrices():
            p.data *= factor
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}

    def loss(self, batch):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.compiled(*batch)

    def begin(self, entry, rates):
        """Restores the initial weights and creates an optimizer."""
        self.model.load_state_dict(self.first)
        return entry.make(self.model.matrices(), self.model.rest(), rates)

    def step(self, optimizer, index, stamps):
        """One step; two stamps enclose the optimizer's part."""
        loss = self.loss(self.train[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        stamps.mark()
        optimizer.step()
        stamps.mark()
        optimizer.zero_grad()
        return loss.detach()

    def warm_up(self, entry, rates):
        """Untimed steps, in which models and optimizers compile."""
        optimizer = self.begin(entry, rates)
        for index in range(FIRST_STEPS):
            self.step(optimizer, index, Stamps(self.device))

    def validate(self):
        """Gradients are enabled, since the model would be compiled again without."""
        count = max(1, min(HELD_OUT, self.held_out.count))
        return statistics.fmean(self.loss(self.held_out[index]).item() for index in range(count))

    def run(self, entry, rates, steps):
        """A whole run, as a row of results."""
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
        """Frees the memory of the previous run; returns what the model uses."""
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def memory(self, before):
        """Gigabytes: PyTorch's peak, the state beyond the model, and our library's pool."""
        import torchium

        pools = [value["reserved"] for name, value in torchium.memory_report().items() if name.startswith("cuda")]
        return {
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "state_gb": (torch.cuda.memory_allocated() - before) / 1e9,
            "pool_gb": sum(pools) / 1e9,
        }


def of_text(size, corpus, device, seed, compiled, head=TIED):
    torch.manual_seed(seed)
    texts = (Batches(tokens, size, seed, device) for tokens in (corpus.train, corpus.held_out))
    return Course(GPT(size, corpus.vocabulary, head), *texts, device, compiled)


def curve(losses, seconds):
    """Averaged losses with their last steps and seconds, and the times of the optimizer's part."""
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
