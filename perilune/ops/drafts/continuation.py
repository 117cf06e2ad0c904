"""Device state of each request slot: a chained step starts from it before the host has read the step before."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """N slots; the last one is the padding row.

    last_tokens  [N] int64: the last token of each request
    shifts       [N] int64: number of drafts that the last step accepted: it produced one token more
    drafts       [N, K] int64: the chain that a draft model drafted after the last token
    """

    last_tokens: Tensor
    shifts: Tensor
    drafts: Tensor

    def check(self) -> None:
        tensors = (self.last_tokens, self.shifts, self.drafts)
        assert self.last_tokens.shape == self.shifts.shape == self.drafts.shape[:1], [t.shape for t in tensors]
        assert all(t.is_contiguous() and str(t.dtype) == "torch.int64" for t in tensors), [t.dtype for t in tensors]
