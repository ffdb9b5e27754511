"""Examples over processes, for test_examples.py: started by torchrun, or as it would start them, in processes that have
loaded PyTorch."""

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


def torchrun(_, __, size, arguments, folder):
    """torchrun itself, which starts every rank as a Python of its own; only what starts them need not load PyTorch
    again. What rank R says is in FOLDER/RUN/attempt_0/R."""
    from torch.distributed.run import main

    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    main(["--standalone", "--nproc-per-node", str(size), "--redirects", "3", "--log-dir", str(folder), *arguments])
    os._exit(0)
