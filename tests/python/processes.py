"""Test processes, forked from a server that has only loaded PyTorch, which takes seconds that every new process would
spend again. The library is not loaded there, so that none of these is a forked child to it."""

import inspect
import multiprocessing
import os
import subprocess
import sys
import traceback

# Import errors are left to the tests. The first optimizer of a process loads torch._dynamo.
LOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
]


def server():
    """The multiprocessing context whose processes are forked from the server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def join_group(rank, size, folder, backend="gloo", **options):
    """Initializes a process of a group. PyTorch is loaded by now, and not before: see above."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store{size}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    return dist


def run_cases(rank, size, folder, cases, backend="gloo"):
    """Runs functions of (size) or (size, folder) in a group; errors are written to a file of this rank."""
    dist = join_group(rank, size, folder, backend)
    failures = []
    for case in cases:
        try:
            case(size, *([folder] if "folder" in inspect.signature(case).parameters else []))
        except Exception:
            failures.append(f"{case.__name__}, rank {rank}: {traceback.format_exc()}")
        if backend == "gloo":
            dist.barrier()
    with open(f"{folder}/failures.{rank}", "w") as file:
        file.write("\n".join(failures))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group


def check_cases(folder, size, cases, *backend):
    """Runs the cases in processes of a group, without errors."""
    assert run_ranks(run_cases, size, str(folder), cases, *backend) == [0] * size
    said = "\n".join((folder / f"failures.{rank}").read_text() for rank in range(size))
    assert not said.strip(), said
    (folder / f"store{size}").unlink(missing_ok=True)


def run_python(*arguments, **options):
    """The output of a new Python, which must succeed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def save_checkpoint(model, optimizer, path):
    """By torch.distributed.checkpoint: each rank saves its part."""
    import torch.distributed.checkpoint as dcp

    dcp.save(_states_of(model, optimizer), checkpoint_id=path)


def load_checkpoint(model, optimizer, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    states = _states_of(model, optimizer)
    dcp.load(states, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def _states_of(model, optimizer):
    """PyTorch takes a step with zero gradients if there is no state yet."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def run_ranks(function, size, *arguments, seconds=600):
    """Runs function(rank, size, *arguments) in `size` processes; returns their exit codes. Slow ones are killed."""
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
