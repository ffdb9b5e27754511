"""What processes of a group do for test_optim_lost_rank.py: one of them dies in the middle of a step."""

import datetime
import os
import signal
import time

import shared_cases
import torch
from processes import join_group
from torchium.optim._shared.group import Group

SIZE, LAST, STEPS, TIMEOUT = 3, 2, 3, 4  # ranks, the one that dies, steps before it does, seconds


def die_in(operation):
    """This process ends without a word the next time that it comes to the operation."""
    call = Group._call

    def deadly(self, name, *rest):
        if name == operation:
            os.kill(os.getpid(), signal.SIGKILL)
        call(self, name, *rest)

    Group._call = deadly


def worker(rank, size, folder):
    """Writes what a survivor was told, after how many seconds, and whether it may go on."""
    dist = join_group(rank, size, folder, timeout=datetime.timedelta(seconds=TIMEOUT))
    optimizer, parameters = shared_cases.train("Shampoo", lambda v: v, STEPS, process_group=dist.group.WORLD)
    dist.barrier()
    if rank == LAST:
        die_in("all_gather")
    begin, said = time.monotonic(), []
    for _ in range(2):
        try:
            shared_cases.run(optimizer, parameters, lambda gradient: gradient, [STEPS + 1])
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    seconds = time.monotonic() - begin
    torch.save({"said": said, "seconds": seconds}, f"{folder}/rank{rank}.pt")
    os._exit(0)  # the group cannot be taken down without the rank that is gone
