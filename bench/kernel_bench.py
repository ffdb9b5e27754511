#!/usr/bin/env python3
"""Times users' kernels: compiling, compiling what the cache has, and launching, from C and from Python.

    bench/kernel_bench.py build/cuda/src/libtorchium.so [--device cpu]

One line for each figure, with its target; the process ends with status 1 where one is missed. The library is called
through ctypes with prepared arguments; what ctypes itself takes for a call with as many arguments is subtracted from
launches. Compiling is timed in fresh processes with a cache folder of their own, since the first call of a process also
opens the compiler. --device cpu is a dry run: the targets are a GPU's. The Python row wants the package, and PyTorch.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SOURCE = b"""
__global__ void scale_add(float *y, const float *x, float a, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += a * x[i];
}
"""
OTHER = SOURCE.replace(b"+=", b"-=", 1).replace(b"scale_add", b"other")
N = 256
LAUNCHES = 200  # in a round: well below the number that a stream can hold, beyond which a launch waits
ROUNDS = 25


class Config(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("source", ctypes.c_char_p),
        ("path", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("option_count", ctypes.c_int32),
        ("options", ctypes.c_void_p),
        ("include_count", ctypes.c_int32),
        ("includes", ctypes.c_void_p),
        ("use_cache", ctypes.c_int32),
        ("log", ctypes.c_void_p),
        ("log_size", ctypes.c_size_t),
    ]


class Argument(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("tensor", ctypes.c_void_p),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("bytes", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("grid", ctypes.c_int64 * 3),
        ("block", ctypes.c_int64 * 3),
        ("shared_bytes", ctypes.c_int64),
    ]


class Info(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("parameters", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int64),
        ("local_bytes", ctypes.c_int64),
        ("max_threads", ctypes.c_int32),
        ("suggested_threads", ctypes.c_int32),
        ("suggested_blocks", ctypes.c_int32),
        ("from_cache", ctypes.c_int32),
    ]


class Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


FLOAT32 = Dtype(2, 32, 1)
TENSOR, INT, REAL = 0, 1, 2


class Session:
    """A context on a device, and what is made in it."""

    def __init__(self, path, device):
        self.library = ctypes.CDLL(path)
        self.library.tch_last_error.restype = ctypes.c_char_p
        self.library.tch_tensor_create.argtypes = [
            ctypes.c_void_p,
            Dtype,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self.context = ctypes.c_void_p()
        self.check(self.library.tch_context_create(device.encode(), ctypes.byref(self.context)))

    def check(self, status):
        if status != 0:
            raise SystemExit(f"libtorchium: {self.library.tch_last_error().decode()}")

    def compile(self, source, name, use_cache):
        """A kernel, and the milliseconds it took."""
        config = Config(struct_size=ctypes.sizeof(Config), source=source, name=name, use_cache=use_cache)
        kernel = ctypes.c_void_p()
        start = time.perf_counter_ns()
        self.check(self.library.tch_kernel_compile(self.context, ctypes.byref(config), ctypes.byref(kernel)))
        return kernel, 1e-6 * (time.perf_counter_ns() - start)

    def is_from_cache(self, kernel):
        info = Info(struct_size=ctypes.sizeof(Info))
        self.check(self.library.tch_kernel_get_info(kernel, ctypes.byref(info)))
        return bool(info.from_cache)

    def tensor(self):
        shape = (ctypes.c_int64 * 1)(N)
        made = ctypes.c_void_p()
        self.check(self.library.tch_tensor_create(self.context, FLOAT32, 1, shape, 0, ctypes.byref(made)))
        return made

    def synchronize(self):
        self.check(self.library.tch_context_synchronize(self.context))


def microseconds(function, wait):
    """Median over the rounds of a call's time on the host; what was queued is waited for in between."""
    times = []
    for _ in range(ROUNDS + 3):
        wait()
        start = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            function()
        times.append(1e-3 * (time.perf_counter_ns() - start) / LAUNCHES)
    wait()
    return statistics.median(times[3:])


def launch_from_c(session):
    """A launch of a small kernel with four arguments, less what ctypes takes for a call with as many as it has."""
    kernel, _ = session.compile(SOURCE, b"scale_add", 0)
    x, y = session.tensor(), session.tensor()
    arguments = (Argument * 4)(
        Argument(kind=TENSOR, tensor=y),
        Argument(kind=TENSOR, tensor=x),
        Argument(kind=REAL, real=0.5),
        Argument(kind=INT, integer=N),
    )
    shape = Shape(ctypes.sizeof(Shape), (1, 1, 1), (N, 1, 1), 0)
    place, count = ctypes.byref(shape), ctypes.c_int32(4)
    launch, idle = session.library.tch_kernel_launch, session.library.tch_context_get_workspace_limit
    session.check(launch(kernel, place, count, arguments))
    whole = microseconds(lambda: launch(kernel, place, count, arguments), session.synchronize)
    nothing = microseconds(lambda: idle(session.context, place, count, arguments), session.synchronize)
    session.synchronize()
    return whole - nothing


def launch_from_python(device):
    """None where the package or PyTorch is not there."""
    try:
        import torch
        import torchium
    except ImportError:
        return None
    x = torch.ones(N, device=device)
    y = torch.zeros(N, device=device)
    kernel = torchium.kernel(SOURCE.decode(), "scale_add", cache=False)
    arguments = (y, x, 0.5, N)
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    return microseconds(lambda: kernel(1, N, arguments), wait)


def time_compiling(path, device):
    """In this process: the first kernel, the second, and the second again, which is in the cache by then."""
    session = Session(path, device)
    first, first_ms = session.compile(SOURCE, b"scale_add", 1)
    _, second_ms = session.compile(OTHER, b"other", 1)
    again = [session.compile(OTHER, b"other", 1) for _ in range(9)]
    return {
        "first": first_ms,
        "first_from_cache": session.is_from_cache(first),
        "second": second_ms,
        "again": statistics.median(ms for _, ms in again),
        "again_from_cache": all(session.is_from_cache(kernel) for kernel, _ in again),
    }


def in_fresh_process(arguments, cache):
    command = [sys.executable, __file__, arguments.library, "--device", arguments.device, "--compiling"]
    done = subprocess.run(
        command, env=os.environ | {"TORCHIUM_CACHE": cache}, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def report(what, figure, unit, target):
    """One line; whether the target, if there is one, was met."""
    if figure is None:
        print(f"{what:<52} not measured")
        return True
    met = target is None or figure <= target
    goal = "" if target is None else f"  target {target:g} {unit}: {'met' if met else 'MISSED'}"
    print(f"{what:<52} {figure:8.2f} {unit}{goal}")
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiling", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compiling:
        print(json.dumps(time_compiling(arguments.library, arguments.device)))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        cold = in_fresh_process(arguments, cache)
        warm = in_fresh_process(arguments, cache)
    if cold["first_from_cache"] or not (warm["first_from_cache"] and cold["again_from_cache"]):
        raise SystemExit("the cache was not used as the figures need it")
    met = [
        report("first compile of a process", cold["first"], "ms", 300),
        report("next compile", cold["second"], "ms", 300),
        report("cached", cold["again"], "ms", 5),
        report("cached, the first of a process", warm["first"], "ms", None),
        report("launch from C, host", launch_from_c(Session(arguments.library, arguments.device)), "us", 5),
        report("launch from Python, host", launch_from_python(arguments.device), "us", 12),
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
