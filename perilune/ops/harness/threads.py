"""How many threads this package's CPU kernels use.

These kernels use the thread pool of work_pool.h, torch's own calls use OpenMP. OpenMP threads spin for milliseconds
after each call and keep cores from the pool. So in a step with only small torch calls, torch computes on one thread.
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
    """Inside this context torch's own calls compute on the calling thread only."""
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
