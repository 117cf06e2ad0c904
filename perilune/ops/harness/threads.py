"""How many threads the kernels of this package compute on, where there is no GPU.

They share work over the pool of work_pool.h, torch's own calls over OpenMP, whose threads spin for milliseconds after
each call and so keep processors from the pool. A step whose torch calls are all small computes those on one thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_here = threading.local()


def count() -> int:
    """Threads for a kernel called from this thread: torch's number, also within `torch_alone`."""
    return getattr(_here, "count", 0) or torch.get_num_threads()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Torch's own calls compute on the calling thread."""
    before = torch.get_num_threads()
    if before == 1 or getattr(_here, "count", None):
        yield
        return
    _here.count = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _here.count = 0
