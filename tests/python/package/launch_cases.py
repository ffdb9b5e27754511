"""Runs an example as torchrun would, in a process of its own: see test_examples.py."""

import os
import runpy
import sys
import traceback

import torch


def run(rank, size, arguments, port, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    sys.argv = arguments
    with open(folder / f"rank{rank}", "w") as sys.stdout:
        try:
            runpy.run_path(arguments[0], run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            status = 1
        sys.stdout.flush()
    os._exit(status)  # gloo's threads may outlive the group
