"""Timing: by device events on a GPU, by the clock on the CPU, with alternating sides, since the machine is shared."""

import gc
import itertools
import platform
import statistics
import time

import torch

LONG = 1.0  # seconds: a call that takes longer is not repeated
PAUSE = 0.02  # seconds between sides on the CPU, until the threads of one stop spinning


def machine(device, version):
    """The machine of the figures, without a host name; `version` is Torchium's."""
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
    """A function that synchronizes the device."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


class Clock:
    """Milliseconds of a function on the device, for each call separately."""

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
        """Median of as many calls as take `seconds`, three at least, after a warm-up; a single call if it
        takes long."""
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
    """Median time of repeated synchronous calls, at least three, for about `seconds`."""
    times = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        times.append(host_ms(function))
    return statistics.median(times)


def in_turns(sides, seconds, median=median_ms):
    """Best median of three turns of each side by name, alternating every `seconds`."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(3):
        for name, function in sides.items():
            time.sleep(PAUSE)
            best[name] = min(best[name], median(function, seconds))
    return best


def in_rounds(sides, wait, seconds, calls):
    """Host microseconds of a call: for every side a list with one figure per round, for about `seconds`. Every other
    round is in reverse order, so that none always follows the same other side."""
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
    """Microseconds of a call in a sequence of calls, and of the synchronization after them."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    wait()
    return 1e-3 * (time.perf_counter_ns() - start) / calls
