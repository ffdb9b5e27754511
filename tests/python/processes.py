"""Processes of tests, forked from a server that has loaded PyTorch and nothing else has happened in: loading it takes
seconds, which every process that begins anew would spend again. The library is not loaded there, so that no process of
these is a child of a fork to it.
"""

import multiprocessing

# What cannot be imported is left to the tests to say. The first optimizer of a process loads torch._dynamo.
LOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
]


def server():
    """The context whose processes are forked from the server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def run_ranks(function, size, *arguments, seconds=600):
    """function(rank, size, *arguments) in `size` processes at once; their exit codes. Who takes longer is stopped."""
    context = server()
    ranks = [context.Process(target=function, args=(rank, size, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]
