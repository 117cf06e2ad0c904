"""The engine's interface to speculation: drafts for the next step, and whether to wait for them before planning it.

The engine calls everything from the thread that plans. `propose`, `chain_length`, `chained` and `worth_waiting` delay
the next step, so they must be quick; `maintain` runs while a step runs on the device, for work that can wait.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from perilune.core.messages import Delta, EngineStats
from perilune.core.step import Output, StepPlan


class Observer(Protocol):
    """The engine calls it for every request. `rid` is unique among unfinished requests."""

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        """A request has entered the scheduler. `root`: kv.prefix.root_of its cache keys; texts are shared only between
        requests of the same root."""
        ...

    def drop(self, rid: int) -> None:
        """The request has ended; unknown ids are ignored."""
        ...

    def maintain(self) -> None:
        """Called after a step was launched, for work that can wait."""
        ...


class Drafting(Observer, Protocol):
    """Drafts for the requests of one engine.

    paused          steps left for which the engine asks for no drafts, because drafting does not pay; 0: no pause
    longest         tokens that its draft model drafts at most; 0: it has none
    min_confidence  as StepPlan.min_confidence
    """

    @property
    def paused(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def min_confidence(self) -> float: ...

    def chained(self, running: StepPlan) -> int | None:
        """Whether to plan the next step now, before the tokens of `running` are known (a chained step). Returns how
        many tokens of the chain drafted after `running` it verifies, maybe 0; None: no chained step."""
        ...

    def worth_waiting(self, running: StepPlan) -> bool:
        """Whether to wait for the running step before planning the next, so that the next can have drafts."""
        ...

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """Drafts by rid for a step about to be launched; empty if any token of the plan is PENDING."""
        ...

    def chain_length(self, plan: StepPlan) -> int:
        """StepPlan.chain of a step about to be launched. May begin a pause."""
        ...

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        """Takes the results of a step that was committed."""
        ...

    def record_time(self, plan: StepPlan, seconds: float, alone: bool) -> None:
        """The step observed last took `seconds` from the commit of the step before. `alone`: it was planned after that
        commit, so the device waited for the host."""
        ...

    def record_paused(self, n: int, deltas: Sequence[Delta]) -> None:
        """Called instead of `observe` and `record_time` while paused: a step of `n` requests was committed."""
        ...

    def report(self, stats: EngineStats) -> EngineStats:
        """`stats` with the numbers of drafts filled in."""
        ...
