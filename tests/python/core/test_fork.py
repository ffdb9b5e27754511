"""Forked children, as documented in docs/troubleshooting.md: they compute, on one thread, with their own objects.

Each test is a separate process that has only loaded PyTorch: the effect of a fork on threads of PyTorch and pytest is
not tested. The child's input is created before the fork, since PyTorch's own functions may hang in a child.
"""

import os
import warnings

import pytest

pytest.importorskip("torch")
from processes import server

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

BEGIN = """
import os, threading, time
import torch, torchium, torchium._C
from torchium import linalg
torch.manual_seed(3)
a = torch.randn(150, 150, dtype=torch.float64)
a = a @ a.T + 150 * torch.eye(150, dtype=torch.float64)
wanted = torch.linalg.inv(a)
parameters = [torch.nn.Parameter(torch.randn(60, 40)) for _ in range(2)]
for p in parameters:
    p.grad = torch.randn(60, 40)

def is_right(x):
    return abs(x.numpy() @ a.numpy() - torch.eye(150).numpy()).max() < 1e-10

def ends(child):
    "The child's exit status; one that hangs is ended and has none."
    limit = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > limit:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise SystemExit("a child hangs")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])

assert is_right(linalg.matrix_power(a, -1.0))  # on all threads, which a child does not have
"""


def execute(program, messages):
    os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT), 2)
    warnings.simplefilter("ignore", DeprecationWarning)
    exec(program, {"__name__": "__main__"})


@pytest.fixture
def run(tmp_path):
    def run(program):
        messages = tmp_path / "messages"
        process = server().Process(target=execute, args=(BEGIN + program, str(messages)))
        process.start()
        process.join(300)
        hangs = process.is_alive()
        process.kill()
        process.join()
        assert not hangs and process.exitcode == 0, messages.read_text()

    return run


@pytest.mark.parametrize("using", [False, True])
def test_workers_of_a_loader(run, using):
    """Workers that load, and workers that also compute, while the parent continues."""
    run(f"""
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return linalg.matrix_power(a, -1.0) if {using} else a

optimizer = torchium.optim.Shampoo(parameters)
loader = torch.utils.data.DataLoader(
    Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=120)
for epoch in range(2):
    for batch in loader:
        optimizer.step()
        for x in batch:
            assert is_right(x) if {using} else torch.equal(x, a)
assert optimizer.stats()["steps"] == 8
""")


def test_functions_and_new_optimizers(run):
    run("""
for kind in [getattr(torchium.optim, name) for name in ("Shampoo", "KLShampoo", "SOAP", "Muon", "AdamW")]:
    kind(parameters).step()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            optimizer = kind(parameters)
            optimizer.step()
            fine = is_right(linalg.matrix_power(a, -1.0)) and torchium._C.get_num_threads() == 1
            status = 0 if fine and optimizer.stats()["steps"] == 1 else 2
        finally:
            os._exit(status)
    assert ends(child) == 0, kind
    assert is_right(linalg.matrix_power(a, -1.0))  # the parent goes on as before
""")


def test_what_the_parent_made_raises(run):
    """An optimizer's state belongs to the parent; a child that steps it gets an error that says so."""
    run("""
optimizer = torchium.optim.AdamW(parameters)
optimizer.step()
child = os.fork()
if child == 0:
    try:
        optimizer.step()
    except RuntimeError as error:
        os._exit(0 if "belongs to the process that this one was forked from" in str(error) else 3)
    os._exit(4)
assert ends(child) == 0
optimizer.step()
assert optimizer.stats()["steps"] == 2
""")


def test_a_fork_while_other_threads_compute(run):
    run("""
done = threading.Event()
def work():
    while not done.is_set():
        linalg.matrix_power(a, -1.0)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(20):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if is_right(linalg.matrix_power(a, -1.0)) else 2
            finally:
                os._exit(status)
        assert ends(child) == 0
finally:
    done.set()
    for thread in threads:
        thread.join()
""")
