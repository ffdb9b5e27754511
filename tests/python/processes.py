"""Processes of tests, forked from a server that has loaded PyTorch and nothing else has happened in: loading it takes
seconds, which every process that begins anew would spend again. The library is not loaded there, so that no process of
these is a child of a fork to it.
"""

import multiprocessing

import torch.multiprocessing

# The first optimizer of a process loads torch._dynamo.
LOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo"]


def server():
    """The context whose processes are forked from the server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def run_ranks(worker, args, ranks):
    """worker(rank, *args) in a process for each rank; raises where one of them fails."""
    server()
    torch.multiprocessing.start_processes(worker, args=args, nprocs=ranks, start_method="forkserver")
