"""What the programs with several processes share: the process group that torchrun describes, and the check that a
checkpoint resumes to the same bits."""

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

Optimizers = Optimizer | list[Optimizer]


def start() -> str:
    """Joins the process group: over NCCL where there is a GPU for each process of this machine, else over gloo."""
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return device


def say(text: str) -> None:
    print(f"rank {distributed.get_rank()}: {text}", flush=True)


def save(net: nn.Module, optimizers: Optimizers, folder: str) -> None:
    """Each process writes its shards; any number of processes can load them."""
    net_state, state = get_state_dict(net, optimizers)
    dcp.save({"net": net_state, "optimizer": state}, checkpoint_id=folder)


def load(net: nn.Module, optimizers: Optimizers, folder: str) -> None:
    net_state, state = get_state_dict(net, optimizers)
    dcp.load({"net": net_state, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizers, model_state_dict=net_state, optim_state_dict=state)


def finish(
    make: Callable[[], tuple[nn.Module, Optimizers]],
    train: Callable[[nn.Module, Optimizers, range], list[float]],
    net: nn.Module,
    optimizers: Optimizers,
    steps: int,
) -> None:
    """Saves a checkpoint, loads it into new objects, trains both two steps further, and compares the losses."""
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folder)
    save(net, optimizers, folder[0])
    other, resumed = make()
    load(other, resumed, folder[0])
    then = range(steps, steps + 2)
    same = train(net, optimizers, then) == train(other, resumed, then)
    say(f"resumed {'bitwise identical' if same else 'with a difference'}")
    distributed.barrier()  # no process leaves while another still waits for it
    distributed.destroy_process_group()
