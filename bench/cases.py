"""Shared by the benchmarks: a case is a row of the table with the work to time."""

import dataclasses
import math
from collections.abc import Callable

import torch
from timing import Clock, host_ms, in_turns, median_of, waiter


@dataclasses.dataclass
class Work:
    """Functions by name, the first of Torchium's being the row's; a number instead is a measured time in
    milliseconds."""

    ours: dict
    anchors: dict = dataclasses.field(default_factory=dict)
    error: Callable | None = None  # of a function's result
    allowed: float = math.inf  # the largest error that is accepted
    more: Callable = dict  # further figures, measured after the times
    close: Callable = lambda: None


@dataclasses.dataclass(frozen=True)
class Case:
    row: object  # in the table of targets; None if it has none
    work: str
    size: str
    make: Callable  # returns the functions for a Bench
    target: float | None = None  # milliseconds on an H200; on the CPU the speedup over PyTorch
    limit: float | None = None  # milliseconds on an H200
    slow: bool = False  # skipped by --quick


class Bench:
    """The library, the device and the timer shared by cases. `tiny` is a dry run whose figures are meaningless."""

    def __init__(self, library, device, seconds, quick=False, tiny=False):
        self.library, self.device, self.seconds, self.quick, self.tiny = library, device, seconds, quick, tiny
        self.cuda = device.type == "cuda"
        self.clock = Clock(device)
        self.failed = []
        if self.cuda:
            library.set_stream(torch.cuda.current_stream().cuda_stream)

    def attempt(self, what, function, *arguments):
        """A failure is printed and recorded, and the other cases run."""
        try:
            return function(*arguments)
        except Exception as failure:
            why = f"{type(failure).__name__}: {failure}".splitlines()[0]
            self.failed.append({"what": what, "why": why})
            print(f"FAILED {what}: {why}", flush=True)
            return None

    def random(self, seed):
        return torch.Generator(self.device).manual_seed(seed)

    def poisoned(self, *shape, dtype=torch.float32):
        return torch.full(shape, math.nan, dtype=dtype, device=self.device)

    def times(self, sides):
        """Milliseconds of each side: by events on a GPU, alternating on the CPU, which is shared."""
        known = {name: side for name, side in sides.items() if not callable(side)}
        sides = {name: side for name, side in sides.items() if callable(side)}
        if self.cuda:
            return known | {name: self.clock.median(side, self.seconds) for name, side in sides.items()}
        for side in sides.values():
            side()
        return known | in_turns(sides, self.seconds / 6)

    def host_ms(self, step, count=20):
        """Host time of a step, without synchronizing."""
        wait = waiter(self.device)
        return median_of(count, lambda: (wait(), host_ms(step))[1])

    def measure(self, case):
        """The row of a case."""
        work = case.make(self)
        try:
            ms = self.times(work.ours), self.times(work.anchors)
            functions = {name: side for name, side in (work.ours | work.anchors).items() if callable(side)}
            errors = {name: work.error(side()) for name, side in functions.items()} if work.error else {}
            more = work.more()
            errors = more.pop("errors", errors)
            target = more.pop("target_ms", None) or case.target
        finally:
            work.close()
        (first, ours_ms), *variants = ms[0].items()
        row = {"row": case.row, "work": case.work, "size": case.size, "ours_ms": ours_ms}
        row |= {"variants_ms": dict(variants)} if variants else {}
        row |= {"anchors_ms": ms[1], "errors": errors} | more
        row |= {"limit_ms": case.limit} if case.limit else {}
        if row["anchors_ms"]:
            row["ratio"] = min(row["anchors_ms"].values()) / ours_ms
        if target is not None:
            good = not errors or errors[first] <= work.allowed
            fast = ours_ms <= target if self.cuda else row.get("ratio", math.inf) >= target
            row |= {"target_ms" if self.cuda else "target_ratio": target, "met": bool(good and fast)}
        return row


def frobenius(x, reference):
    """Largest relative Frobenius error of a batch; infinite with a NaN."""
    gap = torch.linalg.matrix_norm(x.double() - reference) / torch.linalg.matrix_norm(reference)
    return finite(gap.max().item())


def finite(value):
    return value if math.isfinite(value) else math.inf


def returning(call, out):
    """A call that returns its output."""

    def called():
        call()
        return out

    return called
