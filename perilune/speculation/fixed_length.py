"""The drafting policy with a fixed number of drafts per request."""

from collections.abc import Sequence

from perilune.core.step import MAX_DRAFTS, StepPlan
from perilune.speculation.policy import Candidates


class FixedLength:
    """Up to `count` drafts per request; `longest`: tokens that the draft model can draft, 0: there is no draft model.
    Methods as in Adaptive."""

    def __init__(self, count: int | None, longest: int, *, suffix: bool) -> None:
        assert count is not None and 1 <= count <= MAX_DRAFTS, count
        self.records = None  # nothing is measured
        self._count = count
        self._longest = longest
        self._suffix = suffix

    def can_look_up(self, requests: int) -> bool:
        return self._suffix

    def defers_lookup(self, requests: int) -> bool:
        return False

    def worth_waiting(self, running: StepPlan) -> bool:
        return True

    def chained(self, running: StepPlan) -> int | None:
        drafted = any(w.drafts for w in running.work)
        return None if self._suffix or running.chain < drafted else min(self._count, running.chain)

    def max_drafts(self, plan: StepPlan) -> int:
        return self._count

    def choose(self, plan: StepPlan, candidates: Sequence[Candidates]) -> None:
        for candidate in candidates:
            candidate.taken = len(candidate.survival)

    def chain_length(self, plan: StepPlan) -> int:
        return min(self._count, self._longest) if any(w.sample for w in plan.work) else 0
