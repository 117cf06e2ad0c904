"""What a format stores for one linear layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def finite(values: torch.Tensor) -> str | None:
    """What is wrong with scales that are not all finite; None if they are."""
    if values.dtype == torch.float8_e4m3fn:
        whole = not has_nan(values)
    else:
        whole = bool(values.isfinite().all())
    return None if whole else "holds scales that are not finite"


def has_nan(values: torch.Tensor) -> bool:
    """Whether a float8_e4m3fn tensor holds nan (bytes 0x7f and 0xff). Two passes at memory speed."""
    if not values.numel():
        return False
    return values.view(torch.int8).amax().item() == 0x7F or values.view(torch.uint8).amax().item() == 0xFF


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor stored for a linear layer: its shape, and the types it may have.

    covers      rows of the layer that share one row of this tensor; 0 if it belongs to the layer as a whole
    spans       columns of the layer that share one column of this tensor; 0 if all share it
    fault       values -> what is wrong, worded to follow "tensor X", or None; without `fault` nothing is checked
    reciprocal  the part is one number; the records of model/weights.py hold its reciprocal
    unread      the part is for other programs: it may be absent and is not read

    Shape () allows [1] too: writers differ in how they store a single number.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    covers: int = 1
    spans: int = 1
    fault: Callable[[torch.Tensor], str | None] | None = None
    reciprocal: bool = False
    unread: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or (self.shape == () and shape == (1,))

    def region(self, stored: tuple[int, ...], layer: tuple[int, ...], cut: tuple[slice, ...]) -> tuple[slice, ...]:
        """The region of this tensor, of shape `stored`, for the rows and columns `cut` of the layer [o, i]. ValueError
        ("groups of 32 columns") if `cut` begins or ends inside a group."""
        if not self.covers:
            return tuple(slice(0, n) for n in stored)
        found = []
        for _, size, own, shared, kind in zip(stored, layer, cut, (self.covers, self.spans), ("rows", "columns")):
            if not shared:
                found.append(slice(0, 1))
                continue
            if own.start % shared or (own.stop % shared and own.stop != size):
                raise ValueError(f"groups of {shared} {kind}")
            found.append(slice(own.start // shared, -(-own.stop // shared)))
        return tuple(found)
