"""Two processes with gloo: under DistributedDataParallel the replicas of a model trained by KFAC stay the same to the
bit, and follow one process on the whole batch.

All of it runs in one pair of processes, whose results the tests look at one by one.
"""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from kfac_cases import METHODS, assert_close, assert_same, batch, mlp, mse, train
from processes import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torchium.optim import KFAC

STEPS = 9
RANKS = 2
OPTIONS = {"lr": 0.05, "damping": 0.01, "TCov": 1, "TInv": 3}


def fresh(method):
    torch.manual_seed(3)
    model = mlp()
    return model, KFAC(model, method=method, **OPTIONS)


def replica(method, rank):
    model, optimizer = fresh(method)
    parallel = DistributedDataParallel(model)
    for step in range(STEPS):
        x, y = (t.chunk(RANKS)[rank] for t in batch(model, 8, step))
        optimizer.zero_grad()
        mse(parallel(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def worker(rank, size, folder):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    torch.save({method: replica(method, rank) for method in METHODS}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and sometimes abort the interpreter that takes itself down


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    assert run_ranks(worker, RANKS, str(folder)) == [0] * RANKS
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("method", METHODS)
def test_replicas_stay_the_same(method, ranks):
    assert_same(ranks[0][method], ranks[1][method])
    model, optimizer = fresh(method)
    for got, expected in zip(ranks[0][method], train(model, optimizer, STEPS), strict=True):
        assert_close(got, expected, 1e-9)
