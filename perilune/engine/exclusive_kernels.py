"""Which engine of this process may run kernels whose CTAs wait for each other.

Such a kernel needs all of its CTAs on the GPU at once. Launches of one stream follow each other; but of two streams
each could get a part of the processors for its kernel, and wait for the rest for ever. So on every GPU one engine has
these kernels, and those that start while it lives run what they stand for in several launches.

Processes take turns on a GPU, so they are safe from each other, unless a multi-process service (MPS) runs their kernels
together: there, only one of them may be left the ops that `registry.alone` names.
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
    """As `registry.using` takes it: what `holder`, an engine's part that lives as long, has to do without there."""
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


def release(holder: object) -> None:
    """The next engine may have them. Also for engines that never run at the same time as others."""
    with _lock:
        for device in [d for d, found in _holders.items() if found() is holder]:
            del _holders[device]
