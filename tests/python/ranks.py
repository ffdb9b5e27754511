"""Processes of a group for tests. All are forked from one that has loaded PyTorch, which takes longer than most of what
they do."""

import multiprocessing

# By names that need no folder of tests in the path. What cannot be imported is left to the tests to say.
LOADED_ONCE = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchium.optim",
]


def run_ranks(function, size, *arguments, seconds=600):
    """function(rank, size, *arguments) in `size` processes at once; their exit codes. Who takes longer is stopped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED_ONCE)
    ranks = [context.Process(target=function, args=(rank, size, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]
