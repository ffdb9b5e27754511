"""How the benchmarks time a call, and on what: by device events on a GPU, by the clock on the CPU, and sides in turns,
since others use the machine too."""

import gc
import itertools
import platform
import statistics
import time

import torch

LONG = 1.0  # seconds: a call that takes longer is not repeated
PAUSE = 0.02  # seconds between sides on the CPU: the threads of one stop waiting actively before the other starts


def machine(device, version):
    """What figures were measured on, without naming a host; `version` is Torchium's."""
    return {
        "device": torch.cuda.get_device_name(device)
        if torch.device(device).type == "cuda"
        else f"cpu, {torch.get_num_threads()} cores",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "torchium": version,
    }


def waiter(device):
    """A function that waits for what the device has been given."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


class Clock:
    """Milliseconds of a function on the device, each call measured on its own."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"

    def times(self, function, count):
        if not self.cuda:
            return [host_ms(function) for _ in range(count)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def median(self, function, seconds):
        """Median of as many calls as take `seconds`, three at least, after a warm-up; of one where it takes long."""
        function()
        first = self.times(function, 1)[0]
        if first > 1e3 * LONG:
            return first
        return statistics.median(self.times(function, max(3, min(500, int(1e3 * seconds / first)))))


def median_of(count, function):
    return statistics.median(function() for _ in range(count))


def host_ms(function):
    """Milliseconds until a call returns."""
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def median_ms(function, seconds):
    """Median time of repeated calls that return when they are done, at least three of them, for about `seconds`."""
    times = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        times.append(host_ms(function))
    return statistics.median(times)


def in_turns(sides, seconds, median=median_ms):
    """Best median of three turns of each side by its name, the sides taking turns of `seconds`."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(3):
        for name, function in sides.items():
            time.sleep(PAUSE)
            best[name] = min(best[name], median(function, seconds))
    return best


def in_rounds(sides, wait, seconds, calls):
    """Microseconds of the host for a call: for every side a list with one figure for each round, for about `seconds`.
    Every other round goes through the sides backwards, so that none is always the one after a certain other."""
    times = {name: [] for name in sides}
    order = list(sides.items())
    for _, function in order:
        for _ in range(3):
            function()
    gc.disable()
    try:
        stop = time.perf_counter() + seconds
        while len(times[order[0][0]]) < 5 or time.perf_counter() < stop:
            for name, function in order:
                wait()
                times[name].append(row_us(function, calls))
            order.reverse()
    finally:
        gc.enable()
        wait()
    return times


def row_us(function, calls, wait=lambda: None):
    """Microseconds of a call in a row of calls, and of the wait behind them."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    wait()
    return 1e-3 * (time.perf_counter_ns() - start) / calls
