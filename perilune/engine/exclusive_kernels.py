"""Which engine of this process may run kernels with CTAs that wait for each other.

Such a kernel needs all of its CTAs resident on the GPU at once. Kernels of one stream run one after the other, but
kernels of two streams could each get a part of the SMs and wait forever for the rest. So on every GPU only one engine
has these kernels; engines that start while it lives run the same ops in several launches: `registry.alone` names them,
and `Workspaces.alone` is False for ops that choose by themselves (moe_int4).

Processes share a GPU by time slices and cannot block each other, unless MPS runs their kernels at the same time: then
all processes but one must override the ops that `registry.alone` names.
"""

import logging
import threading
import weakref
from collections.abc import Mapping

import torch

from perilune.ops.harness import registry

log = logging.getLogger("perilune.engine")

_lock = threading.Lock()
_holders: dict[torch.device, "weakref.ref[object]"] = {}


def claim(device: torch.device, holder: object) -> Mapping[str, str]:
    """Gives `holder`, which must live as long as its engine, the exclusive kernels of `device` and returns {}. If
    another engine has them: returns the overrides, as `registry.using` takes them, that avoid these kernels."""
    if device.type != "cuda":
        return {}
    with _lock:
        found = _holders.get(device)
        other = None if found is None else found()
        if other is None:
            _holders[device] = weakref.ref(holder)
        elif other is not holder:
            instead = registry.alone()
            log.info("another engine runs on %s: %s in several launches here", device, ", ".join(instead))
            return instead
    return {}


def taken(device: torch.device) -> bool:
    """Whether an engine of this process has the exclusive kernels of `device`."""
    with _lock:
        found = _holders.get(device)
        return found is not None and found() is not None


def release(holder: object) -> None:
    """Frees the exclusive kernels for another engine. Call it when `holder` closes, or before another engine starts
    that never computes at the same time."""
    with _lock:
        for device in [d for d, found in _holders.items() if found() is holder]:
            del _holders[device]
