"""NVML, a library of NVIDIA's driver. Asking it creates no CUDA context."""

import ctypes
from dataclasses import dataclass

from perilune.ops.harness import build


@dataclass(frozen=True)
class Device:
    """`handle` names the GPU to functions of `library`, which return 0 or an error."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p


def device(gpu: int) -> Device | None:
    """GPU `gpu` of this process; None where NVML is missing or does not know it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(build.uuid(gpu), ctypes.byref(handle)):
        return None
    return Device(library, handle)
