"""Facts about tensors that several rooms of ops share."""

from torch import Tensor

FEW_ON_CPU = 64  # rows up to which float32 is no slower here than in torch's library


def aligned(x: Tensor) -> Tensor:
    """x itself if its rows can be read in pieces of 16 bytes."""
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def address(x: Tensor | None) -> int | None:
    """As an argument of a launcher."""
    return None if x is None else x.data_ptr()
