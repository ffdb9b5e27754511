"""Compiled models; and GPU features: CUDA graphs, streams, several devices."""

import copy
import io

import pytest
import torch
from optim_cases import (
    CLASSES,
    assert_close,
    assert_same_bits,
    copies,
    exact,
    loss_of,
    make,
    small,
    square,
    train,
    train_square,
)


def test_compiled_model(kind, device):
    """torch.compile of the model, with the step outside: as without."""
    model, twin = small(device), small(device)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer, beside = make(kind, compiled.parameters()), make(kind, twin.parameters())
    losses = train(compiled, optimizer, 6)
    for a, b in zip(losses, train(twin, beside, 6), strict=True):
        assert a == pytest.approx(b, rel=1e-2)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_compiled_function_may_step(device):
    """Dynamo does not trace the step: a graph break, and the same numbers."""
    model, twin = small(device), small(device)
    optimizer, beside = make("shampoo", model.parameters()), make("shampoo", twin.parameters())

    @torch.compile(backend="eager")
    def update():
        optimizer.step()

    for step in range(4):
        for m, o, go in ((model, optimizer, update), (twin, beside, beside.step)):
            o.zero_grad()
            loss_of(m, step).backward()
            go()
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda"


SHAPES = [(45, 70), (70, 33), (64, 64), (77,)]
EVERY_STEP = {kind: {"precondition_frequency": 1} for kind in ("shampoo", "soap", "kl_shampoo")}


class Replayed:
    """Parameters whose gradients stay in place, so that a step can be captured; two of them get the same values."""

    def __init__(self, kind, device):
        self.generator = torch.Generator(device).manual_seed(5)
        self.lr = torch.tensor(0.01, device=device)
        self.params = [torch.nn.Parameter(torch.empty(s, device=device)) for s in SHAPES]
        for p in self.params:
            p.data.normal_(generator=self.generator)
            p.grad = torch.zeros_like(p)
        self.optimizer = make(kind, self.params, lr=self.lr, **EVERY_STEP.get(kind, {}))

    def draw(self):
        for p in self.params:
            p.grad.normal_(generator=self.generator)

    def run(self, step, count):
        for _ in range(count):
            self.draw()
            step()


@pytest.mark.gpu
def test_step_in_a_cuda_graph(kind, cuda):
    """Warmed up, captured once, and replayed with new gradients and another learning rate in its tensor: bitwise equal
    to calls."""
    called, replayed = Replayed(kind, cuda), Replayed(kind, cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed.run(replayed.optimizer.step, 3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.optimizer.step()
    replayed.run(graph.replay, 4)
    replayed.lr.mul_(0.5)
    replayed.run(graph.replay, 4)
    called.run(called.optimizer.step, 7)
    called.lr.mul_(0.5)
    called.run(called.optimizer.step, 4)
    assert_same_bits(copies(called.params), copies(replayed.params))
    called.run(called.optimizer.step, 1)
    replayed.run(replayed.optimizer.step, 1)
    assert_same_bits(copies(called.params), copies(replayed.params))


@pytest.mark.gpu
def test_step_on_another_stream(kind, cuda):
    """The step is queued on torch's current stream, after work queued there earlier."""
    results = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        trained = Replayed(kind, cuda)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                torch.cuda._sleep(1_000_000)
                trained.run(trained.optimizer.step, 1)
        stream.synchronize()
        results.append(copies(trained.params))
    assert_same_bits(*results)


@pytest.mark.gpu
def test_parameters_on_both_devices(kind, cuda):
    """One optimizer over CPU and GPU parameters: each as in a separate optimizer."""
    torch.manual_seed(0)
    start = [torch.randn(6, 6), torch.randn(5)]
    grads = [[torch.randn_like(s) for s in start] for _ in range(5)]

    def run(places):
        params = [torch.nn.Parameter(s.to(d, copy=True)) for s, d in zip(start, places, strict=True)]
        optimizer = CLASSES[kind](params, lr=0.01)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
        return copies(params)

    both, host, card = run((cuda, "cpu")), run(("cpu", "cpu")), run((cuda, cuda))
    assert_same_bits(both, [card[0], host[1]])


@pytest.mark.gpu
def test_model_moved_between_devices(kind, cuda):
    """model.cuda() after some steps, and back: the state moves with it."""
    model, twin = square(), square()
    optimizer, beside = (make(kind, m.parameters(), **exact(kind)) for m in (model, twin))
    train_square(model, optimizer, 3)
    model.to(cuda)
    train_square(model, optimizer, 3, 3)
    assert all(v.is_cuda for s in optimizer.state.values() for v in s.values() if v.is_floating_point())
    model.cpu()
    assert_close(train_square(model, optimizer, 3, 6), train_square(twin, beside, 9))


@pytest.mark.gpu
def test_state_loaded_on_the_other_device(kind, cuda):
    """Saved on one device, loaded with map_location, and resumed on the other."""
    model = square()
    optimizer = make(kind, model.parameters(), **exact(kind))
    train_square(model, optimizer, 4)
    twin = copy.deepcopy(model).to(cuda)
    other = make(kind, twin.parameters(), **exact(kind))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, map_location=cuda, weights_only=True))
    assert_close(train_square(model, optimizer, 4, 4), train_square(twin, other, 4, 4))
