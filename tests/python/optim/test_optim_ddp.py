"""Two processes with gloo: under DistributedDataParallel the replicas are bitwise equal, and agree with one process on
the whole batch; ZeroRedundancyOptimizer; and an optimizer pickled in one process continues in another.

Everything runs in one pair of processes, whose results the tests check one by one.
"""

import datetime
import os
import pickle

import pytest
import torch
from optim_cases import (
    CLASSES,
    KINDS,
    assert_close,
    assert_same_bits,
    copies,
    exact,
    make,
    small,
    square,
    square_batch,
    train,
    train_square,
)
from processes import join_group, run_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 10
RANKS = 2


def replica(kind, rank, bare):
    """A float64 model on this rank's share of each batch; `bare`: the optimizer is not wrapped."""
    model = square()
    parallel = DistributedDataParallel(model)
    optimizer = bare(model, exact(kind))
    for step in range(STEPS):
        optimizer.zero_grad()
        parallel(square_batch(step).chunk(RANKS)[rank]).square().mean().backward()
        optimizer.step()
    return copies(model.parameters())


def zero_redundancy(kind):
    return lambda m, options: ZeroRedundancyOptimizer(m.parameters(), optimizer_class=CLASSES[kind], **options)


def resume(pickled):
    model, optimizer = pickle.loads(pickled)
    train(model, optimizer, 4, first=4)
    return copies(model.parameters())


def worker(rank, size, folder, pickled):
    dist = join_group(rank, size, folder, timeout=datetime.timedelta(seconds=60))
    results = {}
    for kind in KINDS:
        results["ddp", kind] = replica(kind, rank, lambda m, options, k=kind: CLASSES[k](m.parameters(), **options))
        results["zero", kind] = replica(kind, rank, zero_redundancy(kind))
        results["pickle", kind] = resume(pickled[kind])
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and sometimes abort the interpreter at exit


def trained(kind):
    model = small()
    optimizer = make(kind, model.parameters())
    train(model, optimizer, 4)
    return model, optimizer


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    pickled = {kind: pickle.dumps(trained(kind)) for kind in KINDS}
    assert run_ranks(worker, RANKS, str(folder), pickled) == [0] * RANKS
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("how", ["ddp", "zero"])
def test_replicas_stay_the_same(kind, how, ranks):
    assert_same_bits(ranks[0][how, kind], ranks[1][how, kind])
    alone = square()
    optimizer = CLASSES[kind](alone.parameters(), **exact(kind))
    assert_close(ranks[0][how, kind], train_square(alone, optimizer, STEPS))


def test_an_optimizer_goes_on_in_another_process(kind, ranks):
    model, optimizer = trained(kind)
    train(model, optimizer, 4, first=4)
    for rank in range(RANKS):
        assert_same_bits(ranks[rank]["pickle", kind], copies(model.parameters()))
