"""qk_clip_: logits after it, heads that share keys, shards, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchium.optim import qk_clip_

HEADS, SIZE, WIDTH = 6, 4, 10


def weights(key_heads, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    return (torch.randn(heads * SIZE, WIDTH, device=device, dtype=dtype) for heads in (HEADS, key_heads))


def logits(q, k, x):
    """[heads, positions, positions]"""
    queries, keys = ((x @ w.T).unflatten(1, (-1, SIZE)).transpose(0, 1) for w in (q, k))
    return queries @ keys.repeat_interleave(HEADS // len(keys), 0).mT


@pytest.mark.parametrize("key_heads", [HEADS, 3, 1])
def test_logits_are_scaled_to_the_threshold(key_heads, device):
    q, k = weights(key_heads, device)
    x = torch.randn(5, WIDTH, device=device, dtype=q.dtype)
    before = logits(q, k, x)
    largest = before.amax((1, 2))
    threshold = largest.median().item()  # half of the heads exceed it
    parameters = [torch.nn.Parameter(w.clone()) for w in (q, k)]
    qk_clip_(*parameters, largest.float(), threshold)
    factor = (threshold / largest).clamp(max=1)
    torch.testing.assert_close(logits(*parameters, x).detach(), before * factor[:, None, None], rtol=1e-6, atol=1e-6)
    below = (largest <= threshold).repeat_interleave(SIZE)
    assert 0 < below.sum() < len(q) and torch.equal(parameters[0][below], q[below])
    assert torch.equal(parameters[1], k) == (key_heads < HEADS)


def test_heads_without_a_finite_logit_stay(device):
    q, k = weights(HEADS, device, torch.bfloat16)
    clipped = q.clone()
    qk_clip_(clipped, k, torch.tensor([400.0, float("inf"), float("nan"), -float("inf"), 0.0, -5.0], device=device))
    assert torch.equal(clipped[:SIZE], q[:SIZE] / 2) and torch.equal(clipped[SIZE:], q[SIZE:])


@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(1), Shard(0)]])
def test_shards_are_scaled_without_communication(placements):
    """As six ranks, one after another, with the backend that does nothing."""
    largest, (q, k) = torch.linspace(50, 200, HEADS), weights(HEADS)
    whole = [q.clone(), k.clone()]
    qk_clip_(*whole, largest)
    for rank in range(6):
        dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 3))
            shards = []
            for w in (q, k, *whole):
                local = w
                for dim, placement in enumerate(placements):
                    if isinstance(placement, Shard):
                        local = local.chunk(mesh.shape[dim], placement.dim)[mesh.get_coordinate()[dim]]
                kept = {"shape": w.shape, "stride": w.stride()}
                shards.append(DTensor.from_local(local.clone(), mesh, placements, run_check=False, **kept))
            qk_clip_(*shards[:2], largest)
            assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(shards[:2], shards[2:], strict=True))
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rows", "threshold", "text"),
    [((24, 24), 0.0, "threshold"), ((25, 24), 1.0, "q_weight has 25 rows"), ((24, 16), 1.0, "k_weight has 16 rows")],
)
def test_wrong_arguments_are_refused(rows, threshold, text):
    with pytest.raises(ValueError, match=text):
        qk_clip_(torch.ones(rows[0], 3), torch.ones(rows[1], 3), torch.ones(6), threshold)
