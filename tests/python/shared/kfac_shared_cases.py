"""Functions run by test_kfac_shared.py's processes, and one process with the same samples."""

import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kfac_cases import METHODS, batch, mlp, mse, train
from processes import load_checkpoint, save_checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchium.optim import KFAC

STEPS = 7
SAMPLES = 12  # per batch: with fewer than a factor has rows, rounding would determine the eigenvectors of 0
OPTIONS = {"lr": 0.05, "damping": 0.01, "factor_update_steps": 1, "inv_update_steps": 3, "kl_clip": 1e-4}
RESULTS = ("input_inverse", "output_inverse", "input_basis", "output_basis", "input_values", "output_values")


def fresh(method, dtype=torch.float64, **more):
    torch.manual_seed(3)
    model = mlp(dtype=dtype, sizes=(5, 7, 7, 4, 3))
    return model, KFAC(model, method=method, **OPTIONS, **more)


@functools.cache
def itself():
    """A single process: without a group, KFAC would average over the world, and the mean of three equal numbers need
    not equal them."""
    return {"process_group": dist.new_group([dist.get_rank()], use_local_synchronization=True)}


def shared():
    """All ranks have the same samples, and so the same factors, which need not be averaged."""
    return {"process_group": dist.group.WORLD, "average_factors": False}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fits(method, size, got, expected):
    """Bitwise equal, except for the scales of EKFAC in a world of three, which are averaged in any case."""
    if method != "ekfac" or size == 2:
        return same(got, expected)
    bound = 1e-3 if got[0].dtype == torch.float32 else 1e-9
    return all(torch.allclose(a, b, rtol=bound, atol=bound) for a, b in zip(got, expected, strict=True))


def equal_bits(size):
    """The same samples on every rank: the result of one process."""
    for method in METHODS:
        for dtype in (torch.float32, torch.float64):
            expected = train(*fresh(method, dtype, **itself()), STEPS)
            model, optimizer = fresh(method, dtype, **shared())
            assert fits(method, size, train(model, optimizer, STEPS), expected), f"{method} {dtype}"
            assert optimizer.stats()["scale"] < 1, "kl_clip had nothing to do"


def sharded(size):
    """Under fully_shard, each rank with its part of the batch and, of three, some without a row of a layer: the result
    of one process up to rounding."""
    for method in METHODS:
        model, optimizer = fully_sharded(method)
        for step in range(STEPS):
            step_on_part(model, optimizer, step, size)
        own = [p.full_tensor() for p in model.parameters()]
        expected = train(*fresh(method, **itself()), STEPS, size=SAMPLES)
        for a, b in zip(own, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-10), method


def sharded_goes_on(size, folder):
    """torch.distributed.checkpoint during training: bitwise equal to an uninterrupted run."""
    ends = []
    for breaks in (False, True):
        model, optimizer = fully_sharded("eigen")
        for step in range(STEPS):
            step_on_part(model, optimizer, step, size)
            if breaks and step == 3:
                save_checkpoint(model, optimizer, f"{folder}/sharded.{size}")
                model, optimizer = fully_sharded("eigen")
                load_checkpoint(model, optimizer, f"{folder}/sharded.{size}")
        ends.append([p.full_tensor() for p in model.parameters()])
    assert same(*ends)


def sharded_samples(size):
    """Sampled labels need a separate backward pass, which sharded parameters do not support."""
    model, optimizer = fully_sharded("eigen", fisher="sampled")
    out = model(torch.randn(4, 5, dtype=torch.float64))
    try:
        optimizer.observe_sampled(out, "mse")
    except RuntimeError as error:
        assert "the parameters are sharded" in str(error)
    else:
        raise AssertionError("observe_sampled took sharded parameters")


def tensor_parallel(size):
    """A layer divided by tensor parallelism raises an error with advice; without it the rest works."""
    mesh = init_device_mesh("cpu", (size,))
    x, y = torch.randn(6, 8, generator=torch.Generator().manual_seed(5)), torch.zeros(6, 3)
    for skip in (None, ("^0$", "^1$")):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = KFAC(model, skip_layers=skip, **OPTIONS)
        before = model[2].weight.detach().clone()
        try:
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
        except TypeError as error:
            assert skip is None and "skip_layers leaves it out" in str(error), error
        else:
            assert skip is not None and not torch.equal(model[2].weight, before)
        optimizer.remove()


def fully_sharded(method, **more):
    torch.manual_seed(3)
    model = mlp(dtype=torch.float64, sizes=(5, 7, 7, 4, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # otherwise it would use a GPU if there is one
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, KFAC(model, method=method, **OPTIONS, **more)


def step_on_part(model, optimizer, step, size, forward=None):
    """Each rank with its part of the batch."""
    x, y = (t.chunk(size)[dist.get_rank()] for t in batch(model, SAMPLES, step))
    optimizer.zero_grad()
    mse((forward or model)(x), y).backward()
    optimizer.step()


def replicas(size):
    """Under DistributedDataParallel, each rank with its part of the batch, layers sharded or not: equal on all, and the
    result of one process up to rounding."""
    for method, more in itertools.product(METHODS, ({"process_group": dist.group.WORLD}, {})):
        model, optimizer = fresh(method, **more)
        parallel = DistributedDataParallel(model)
        for step in range(STEPS):
            step_on_part(model, optimizer, step, size, parallel)
        own = [p.detach() for p in model.parameters()]
        every = [None] * size
        dist.all_gather_object(every, own)
        assert all(same(other, own) for other in every), f"{method} {more}"
        expected = train(*fresh(method, **itself()), STEPS, size=SAMPLES)
        for a, b in zip(own, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-10), f"{method} {more}"


def consolidates(size, folder):
    """The last rank saves; one process and the same number of them resume bitwise, the others get an error
    with advice."""
    for method in METHODS:
        expected = train(*fresh(method, **itself()), 2 * STEPS)
        model, optimizer = fresh(method, **shared())
        train(model, optimizer, STEPS)
        with mock.patch.object(dist, "gather_object", side_effect=AssertionError("it unpickles what others send")):
            optimizer.consolidate_state_dict(to=size - 1)
        if dist.get_rank() == size - 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{method}.pt")
        else:
            try:
                optimizer.state_dict()
                raise AssertionError(f"{method} gave a part of the state")
            except RuntimeError as error:
                assert "consolidate_state_dict" in str(error), error
        dist.barrier()
        saved = torch.load(f"{folder}/{method}.pt")
        for more in (itself(), shared()):
            model, optimizer = fresh(method, **more)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            assert fits(method, size, train(model, optimizer, STEPS, first=STEPS), expected), f"{method} {list(more)}"


def saves_by_checkpoint(size, folder):
    """Each rank saves its part, between two refreshes."""
    for method in METHODS:
        model, optimizer = fresh(method, **shared())
        train(model, optimizer, STEPS)
        save_checkpoint(model, optimizer, f"{folder}/{method}")


def resumes_by_checkpoint(size, folder):
    """A checkpoint of two ranks resumes in any world like an uninterrupted process."""
    for method in METHODS:
        expected = train(*fresh(method, **itself()), 2 * STEPS)
        model, optimizer = fresh(method, **shared())
        load_checkpoint(model, optimizer, f"{folder}/{method}")
        assert optimizer.preconditioner.steps == STEPS, method
        assert fits(method, size, train(model, optimizer, STEPS, first=STEPS), expected), method


def averages_in_a_checkpoint(size, folder):
    """Ranks with different samples since the last refresh: the mean is saved, and nothing changes here. Also if the
    preconditioner, or the optimizer, is saved separately."""
    model, optimizer = fresh("inverse", process_group=dist.group.WORLD)
    for step in range(5):
        step_on_part(model, optimizer, step, size)
    before = {name: dict(values) for name, values in optimizer.preconditioner._factors.state().items()}
    dcp.save({"kfac": optimizer.preconditioner}, checkpoint_id=f"{folder}/preconditioner")
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=f"{folder}/optimizer")
    others = [fresh("inverse", process_group=dist.group.WORLD) for _ in range(2)]
    dcp.load({"kfac": others[0][1].preconditioner}, checkpoint_id=f"{folder}/preconditioner")
    state = get_optimizer_state_dict(*others[1])
    dcp.load(state, checkpoint_id=f"{folder}/optimizer")
    set_optimizer_state_dict(*others[1], state)
    for name, values in before.items():
        every = [torch.empty_like(values["input_factor"]) for _ in range(size)]
        dist.all_gather(every, values["input_factor"])
        assert not torch.equal(every[0], every[1]), "the ranks have seen the same"
        for _, other in others:
            loaded = other.preconditioner._factors.state()[name]
            assert torch.equal(loaded["input_factor"], torch.stack(every).mean(0)), name
            assert loaded["counts"] == values["counts"] and other.preconditioner.steps == 5, name
            same_results = [torch.equal(loaded[key], values[key]) for key in values if key in RESULTS]
            assert all(same_results), name


def samples_labels_in_a_checkpoint(size):
    """PyTorch takes a step with zero gradients if there is no state yet, before which no labels can have been drawn."""
    model, optimizer = fresh("eigen", fisher="sampled", process_group=dist.group.WORLD)
    assert "kfac" in get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]


# Two ranks, unless a case is about the number of them: EKFAC is bitwise equal to one process in a world of two only.
CASES = {
    2: [
        equal_bits,
        replicas,
        consolidates,
        sharded_goes_on,
        sharded_samples,
        tensor_parallel,
        saves_by_checkpoint,
        averages_in_a_checkpoint,
        samples_labels_in_a_checkpoint,
    ],
    3: [sharded, resumes_by_checkpoint],
    1: [resumes_by_checkpoint],
}
