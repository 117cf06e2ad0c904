"""What the engine asks about drafts: it tells of requests and their tokens, and gets guesses for the next step.

Guesses come from matches with earlier text (spec/suffix.py), from a draft model (spec/drafter.py), whose chain arrives
with the tokens it continues, or from both: the chain, continued by what a match foretells behind it.

All of it runs on the thread that plans. `propose` is in the way of the next step and must be quick; `tidy` is called
while a step runs, and does what can wait.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.core.messages import Delta, EngineStats
from perilune.core.plan import MAX_DRAFTS, PENDING, Output, StepPlan, Work
from perilune.spec.costs import Costs
from perilune.spec.policy import Acceptance, Cell, Chance, best_chain, choose, model_cell, suffix_cell
from perilune.spec.suffix import Guess, Store, Trail

CATCH_UP = 4096  # prompt tokens taken in per step, 1-2 ms
WAITING = 0.03  # share of a step lost by planning after its predecessor instead of beside it, until seen
LATENESS, BLAME = (
    0.05,
    0.2,
)  # weight of a new observation of that; how much of it goes to waiting, not to a slow machine
PROBE_EVERY = 64  # steps without a chain, after which a short one is asked for to see how it would do
PROBE = 3


@dataclass(slots=True)
class _Mind:
    """What is known of a request."""

    trail: Trail | None  # its text, if matches are looked for
    known: int  # its tokens
    chain: tuple[tuple[int, float], ...] = ()  # of the draft model, behind the known tokens
    planned: tuple[Cell, ...] = ()  # the drafts in flight


class Speculator:
    """Drafts for the requests of one engine.

    suffix   whether matches with earlier text are looked for
    longest  tokens that a draft model can draft; 0 without one
    fixed    that many drafts whenever they can be had; None: as many as pay, by `costs`
    shared   whether what a request said may help another one (it never changes what that one says)
    """

    def __init__(
        self, *, suffix: bool, longest: int = 0, fixed: int | None = None, costs: Costs | None = None, shared: bool
    ) -> None:
        assert (fixed is None) != (costs is None) and (suffix or longest)
        assert fixed is None or 1 <= fixed <= MAX_DRAFTS, fixed
        self._suffix = suffix
        self._longest = longest
        self._fixed = fixed
        self._costs = costs
        self._store = Store() if shared and suffix else None
        self._minds: dict[int, _Mind] = {}
        self._acceptance = Acceptance()
        self._finished: list[Trail] = []
        self._late, self._waiting = 0.0, WAITING  # shares by which steps are later than the table says
        self._unasked = 0  # steps since the draft model was last asked for a chain
        self.verified = 0  # works that had drafts
        self.drafted: Counter[tuple[str, int]] = Counter()  # by source and position
        self.accepted: Counter[tuple[str, int]] = Counter()

    def open(self, rid: int, prompt: Sequence[int]) -> None:
        self._minds[rid] = _Mind(Trail(prompt, self._store) if self._suffix else None, len(prompt))

    def drop(self, rid: int) -> None:
        """The request has ended; unknown ids are ignored."""
        mind = self._minds.pop(rid, None)
        if mind is not None:
            self._acceptance.drop(rid)
            if self._store is not None and mind.trail is not None:
                self._finished.append(mind.trail)

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        """What a step brought."""
        for delta in deltas:
            mind = self._minds.get(delta.rid)
            if mind is None:
                continue
            if delta.drafted:
                self._judge(delta, mind)
            self._learn(delta, mind)
            mind.known += len(delta.tokens)
            if delta.finish_reason is not None:
                self.drop(delta.rid)
        if self._longest:
            for output in outputs:
                if (mind := self._minds.get(output.rid)) is not None and output.tokens:
                    mind.chain = output.chain

    def timed(self, plan: StepPlan, seconds: float, waited: bool) -> None:
        """A step took so long from when its predecessor had landed, for whose tokens its planning `waited`, or not."""
        if self._costs is None or max(w.count for w in plan.work) > MAX_DRAFTS + 1:
            return
        late = seconds / (self._seconds(plan) + plan.chain * self._costs.chain(len(plan.work))) - 1
        late = min(max(late, -1.0), 1.0)  # what came in between is nobody's fault
        error = LATENESS * (late - self._late - waited * self._waiting)
        self._late += error * (1 - BLAME * waited)
        self._waiting += error * BLAME * waited

    def _seconds(self, plan: StepPlan) -> float:
        assert self._costs is not None
        return self._costs.step([w.count for w in plan.work], [w.end for w in plan.work])

    def _overhead(self, plan: StepPlan) -> float:
        """Seconds by which a step is later if its planning waits."""
        return max(self._waiting, 0.0) * self._seconds(plan)

    def wanted(self, running: StepPlan) -> bool:
        """Whether to wait for the step that is running, because drafts for the one after it promise more than planning
        that one now."""
        if self._fixed is not None:
            return True
        chances = []
        for work in running.work:
            mind = self._minds.get(work.rid)
            chance = Chance(1 if work.sample else work.count, work.end, work.sample)
            chances.append(chance)
            if mind is None or not work.sample:
                continue
            if running.chain:
                chance.survival = self._acceptance.typical(work.rid, running.chain)
            elif mind.trail is not None and not mind.trail.behind and mind.trail.foretold() is not None:
                guesses = mind.trail.guesses(MAX_DRAFTS + 1)
                chance.ready, *rest = self._acceptance.survival(work.rid, cells(guesses), [g.token for g in guesses])
                chance.survival = [s / chance.ready for s in rest]
        if not any(c.survival for c in chances):
            return False
        assert self._costs is not None
        return choose(chances, self._costs, MAX_DRAFTS * len(chances), self._overhead(running)) > 1.0

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """Guesses by rid for a step about to run. None if a predecessor's tokens have not been observed yet."""
        if any(w.tokens[-1] == PENDING for w in plan.work):
            return {}
        found: dict[int, tuple[list[int], list[Cell]]] = {}
        chances = []
        for work in plan.work:
            chance = Chance(work.count, work.end, work.sample)
            chances.append(chance)
            if work.sample and work.count == 1 and (mind := self._minds.get(work.rid)) is not None:
                assert mind.known == work.end, f"request {work.rid}: {mind.known} tokens seen of {work.end}"
                tokens, told, chance.survival = self._guess(work, mind)
                found[work.rid] = tokens, told
        if self._fixed is None and any(c.survival for c in chances):
            assert self._costs is not None
            choose(chances, self._costs, MAX_DRAFTS * len(chances))
        proposed = {}
        for work, chance in zip(plan.work, chances):
            if work.rid in found:
                tokens, told = found[work.rid]
                count = len(tokens) if self._fixed is not None else chance.taken
                self._minds[work.rid].planned = tuple(told[:count])
                if count:
                    proposed[work.rid] = tokens[:count]
        return proposed

    def chain(self, plan: StepPlan) -> int:
        """How many tokens the draft model shall draft behind what this step draws."""
        if not self._longest or not any(w.sample for w in plan.work):
            return 0
        if self._fixed is not None:
            return min(self._fixed, self._longest)
        assert self._costs is not None
        drawing = [w for w in plan.work if w.sample]
        survivals = [self._acceptance.typical(w.rid, self._longest) for w in drawing]
        length = best_chain(survivals, [w.end for w in drawing], self._costs, self._overhead(plan))
        self._unasked = 0 if length else self._unasked + 1
        if self._unasked >= PROBE_EVERY:
            self._unasked = 0
            return min(PROBE, self._longest)
        return length

    def tidy(self) -> None:
        """What is best done while the device is busy."""
        room = CATCH_UP
        for mind in self._minds.values():
            if mind.trail is not None and mind.trail.behind and room:
                room -= mind.trail.catch_up(room)
        for trail in self._finished:
            assert self._store is not None
            self._store.add(trail.answer())
        self._finished.clear()

    def report(self, stats: EngineStats) -> EngineStats:
        """The statistics, with those of drafts."""
        drafts = tuple((*key, count, self.accepted[key]) for key, count in sorted(self.drafted.items()))
        return dataclasses.replace(stats, verified=self.verified, drafts=drafts)

    def _guess(self, work: Work, mind: _Mind) -> tuple[list[int], list[Cell], list[float]]:
        """The most promising of the chains that could be verified: tokens, what they are told apart by, survival."""
        most = min(self._fixed or MAX_DRAFTS, work.left - 1)
        trail = mind.trail if mind.trail is not None and not mind.trail.behind else None
        offers: list[tuple[list[int], list[Cell]]] = []
        if mind.chain:
            tokens = [token for token, _ in mind.chain[:most]]
            told = [model_cell("eagle3", i, sure) for i, (_, sure) in enumerate(mind.chain[:most])]
            if trail is not None:
                behind = trail.guesses(most - len(tokens), after=tokens)
                tokens += [g.token for g in behind]
                told += cells(behind)
            offers.append((tokens, told))
        if trail is not None:
            guesses = trail.guesses(most)
            offers.append(([g.token for g in guesses], cells(guesses)))
        scored = [(tokens, told, self._acceptance.survival(work.rid, told, tokens)) for tokens, told in offers]
        return max(scored, key=lambda offer: sum(offer[2]), default=([], [], []))

    def _learn(self, delta: Delta, mind: _Mind) -> None:
        """Every token says whether what had been foretold was right, drafted or not."""
        for position, ((token, sure), came) in enumerate(zip(mind.chain, delta.tokens)):
            self._acceptance.learn(delta.rid, model_cell("eagle3", position, sure), token, token == came)
            if token != came:
                break
        if delta.tokens:
            mind.chain = ()
        if mind.trail is None:
            return
        for token in delta.tokens:
            if (guess := mind.trail.foretold()) is not None:
                self._acceptance.learn(delta.rid, cells([guess])[0], guess.token, guess.token == token)
            mind.trail.append(token)

    def _judge(self, delta: Delta, mind: _Mind) -> None:
        self.verified += 1
        for position, (source, _, _) in enumerate(mind.planned[: delta.drafted]):
            self.drafted[source, position] += 1
            self.accepted[source, position] += position < delta.accepted


def cells(guesses: Sequence[Guess]) -> list[Cell]:
    """What suffix drafts are told apart by."""
    return [suffix_cell(g.length, g.share, g.alone) for g in guesses]
