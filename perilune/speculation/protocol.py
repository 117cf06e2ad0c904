"""What the engine asks of speculation: drafts for the next step, and which of two steps to plan first.

The engine calls everything from the thread that plans. `propose`, `chain_length`, `chained` and `worth_waiting` delay
the next step, so they must be quick; `maintain` runs while a step runs on the device, for work that can wait.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from perilune.core.messages import Delta, EngineStats
from perilune.core.step import Output, StepPlan


class Observer(Protocol):
    """Hears of every request of an engine. `rid` is unique among unfinished requests."""

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        """A request has entered the scheduler. `root`: kv.prefix.root_of its cache keys; texts are shared only with
        requests of the same one."""
        ...

    def drop(self, rid: int) -> None:
        """The request has ended; unknown ids are ignored."""
        ...

    def maintain(self) -> None:
        """A step was launched: time for work that can wait."""
        ...


class Drafting(Observer, Protocol):
    """Drafts for the requests of one engine.

    paused          steps for which it is asked nothing, because drafting does not pay now; 0: it is asked
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
        """How many tokens of the running step's draft chain the next step verifies, if it is to be planned now, before
        the running step's tokens are known; None: plan it otherwise."""
        ...

    def worth_waiting(self, running: StepPlan) -> bool:
        """Whether to wait for the running step before planning the next, so that the next can have drafts."""
        ...

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """Drafts by rid for a step about to be launched; none if it has PENDING tokens."""
        ...

    def chain_length(self, plan: StepPlan) -> int:
        """StepPlan.chain of a step about to be launched. May also pause."""
        ...

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        """The results of a step, committed."""
        ...

    def record_time(self, plan: StepPlan, seconds: float, alone: bool) -> None:
        """The step observed last took `seconds` since the step before it was committed. `alone`: it was planned only
        then, so that the device waited for the host."""
        ...

    def record_paused(self, n: int, deltas: Sequence[Delta]) -> None:
        """Instead of `observe` and `record_time` while paused: a step of `n` requests was committed."""
        ...

    def report(self, stats: EngineStats) -> EngineStats:
        """The statistics, with those of drafts filled in."""
        ...
