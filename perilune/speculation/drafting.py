"""What the engine asks about drafts: it tells of requests and their tokens, and gets guesses for the next step.

Guesses come from matches with earlier text (speculation/suffix.py), from a draft model (speculation/drafter.py), whose
chain arrives with the tokens it continues, or from both: the chain, continued by what a match foretells behind it.

All of it runs on the thread that plans. `propose` is in the way of the next step and must be quick; `tidy` is called
while a step runs, and does what can wait. Where steps may be planned behind drafts in flight (`behind`) nothing is in
the way of anything; then what a step verifies is known here one step late.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.core.messages import Delta, EngineStats
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, PENDING, Output, StepPlan, Work
from perilune.speculation.chain_length import Lengths
from perilune.speculation.modes import SOON, Earnings, Way
from perilune.speculation.policy import Acceptance, Cell, Chance, Worth, choose, net_worth
from perilune.speculation.request_state import Lesson, Mind, cells
from perilune.speculation.stats import Tally
from perilune.speculation.step_cost import Bare, Costs, How, Pace
from perilune.speculation.suffix import Guess, Store, Trail

CATCH_UP = 4096  # prompt tokens taken in per step, 1-2 ms
HOPE = 0.4  # of a chain's confidence: below it the rest is not worth drafting, where the model can stop
EFFORT = 60e-6  # seconds that a request's matches take in Python, per step, about
HURRY = 0.03  # the share of a step above which that is put off where there is a chain to draft from
SPARE = 0.1  # the share of a step that this may take where planning is not in the way; above it, it is left
HEEDED = 4  # requests of a step whose chains are learned from and appraised, where steps are planned behind others
SAMPLED = 8  # steps without a draft model of which one is accounted for, where steps are planned behind others
DRAFTED = 3  # steps with one of which one is learned from there, once its way is settled
SETTLED = 16.0  # chains that must have been learned from before
IN_FLIGHT = 3  # steps at most
REST = 48  # steps at a time for which nothing is asked, where nothing is drafted
KNOWN = 8.0  # chains of a draft model after which something is known of it
PROMISING = 1.05  # times what plain steps bring must it promise by the table then, to begin with it


@dataclass(frozen=True, slots=True)
class _Timing:
    """A step that landed: its seconds, how it was planned, its tokens, those of the chain behind it."""

    plan: StepPlan
    seconds: float
    way: Way
    how: How
    brought: int
    chained: int
    steps: int  # that it stands for


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
        self.longest = longest
        self._fixed = fixed
        self._pace = None if costs is None else Pace(costs if longest else costs.alone())
        self._earnings = None if self._pace is None else Earnings(self._pace, self._ways)
        self._store = Store() if shared and suffix else None
        self._minds: dict[int, Mind] = {}
        self._acceptance = Acceptance()
        self._finished: list[Trail] = []
        # What is learned when there is time for it.
        self._timings: list[_Timing] = []
        self._lessons: list[Lesson] = []
        self._gone: list[int] = []
        self._lengths = Lengths(longest)
        self._remembered = False  # there are chains of the step before
        self._unseen, self._unseen_way = 0, Way.PLAIN  # steps since the last one that was accounted for, all of one way
        self._hears = True  # whether the next step is learned from
        self._planned: dict[int, Way] = {}  # which way steps in flight were planned, by number
        self._shapes: dict[int, tuple[int, int]] = {}  # of theirs, likewise: see _shape
        self._latest = Way.ALL  # which way the last one was
        self._asleep = self._dozes(1)  # there is no time for matches
        self._brought = self._chained = 0  # tokens of the step that landed last, and of the longest chain behind it
        # Steps for which nothing is asked: see `rest`.
        self.paused, self._quiet, self._size, self._woken = 0, 0, 0, False
        self._unheard: list[Sequence[Delta]] = []
        self.min_confidence = HOPE if fixed is None else 0.0  # see StepPlan
        self._turn = 0  # whose turn it is to be heeded
        self._tally = Tally()

    def open(self, rid: int, prompt: Sequence[int]) -> None:
        if self.paused and self.longest and self._quiet <= SOON:
            self._wake()
        self._minds[rid] = Mind(Trail(prompt, self._store) if self._suffix else None, len(prompt))

    def drop(self, rid: int) -> None:
        """The request has ended; unknown ids are ignored."""
        if self._unheard and rid in self._minds:
            self._hear()
        mind = self._minds.pop(rid, None)
        if mind is not None:
            mind.rouse()
            self._gone.append(rid)
            if self._store is not None and mind.trail is not None:
                self._finished.append(mind.trail)

    def record_paused(self, requests: int, deltas: Sequence[Delta]) -> None:
        """Instead of everything else, of a step that landed while `resting` is not 0: there will be no drafts until it
        is. The steps in between are those of an engine without drafts, and what they bring is taken in when they are
        over, or the number of requests has changed."""
        self._unheard.append(deltas)
        self._planned.clear()
        self._unseen += 1
        self.paused -= 1
        if requests > self._size or 2 * requests <= self._size:
            self.paused = 0
        if not self.paused:
            self._wake()

    def _wake(self) -> None:
        self.paused, self._woken = 0, True
        self._hear()

    def _hear(self) -> None:
        for deltas in self._unheard if self._suffix else ():
            for delta in deltas:
                if (mind := self._minds.get(delta.rid)) is not None:
                    mind.lag += delta.tokens
                    mind.known += len(delta.tokens)
        self._unheard.clear()

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        """What a step brought."""
        self._brought = sum(len(d.tokens) for d in deltas)
        self._chained = max((len(o.chain) for o in outputs), default=0)
        chained = {o.rid for o in outputs if o.chain}
        n = len(deltas)
        self._turn += 1
        self._asleep = self._dozes(n)
        hurry = self._pace is not None and n * EFFORT > HURRY * self._pace.base(n)
        for delta in deltas:
            mind = self._minds.get(delta.rid)
            if mind is None:
                continue
            if delta.drafted:
                self._judge(delta, mind)
            if mind.chain and self._hears and (self._suffix or self._fixed is None) and self._heeded(delta.rid, n):
                self._lessons += mind.lessons(delta.rid, delta.tokens)
            if delta.tokens:
                mind.chain = ()
            if mind.trail is not None:
                mind.lag += delta.tokens
            if mind.lag and not (self._asleep or (hurry and delta.rid in chained)):
                self._lessons += mind.catch_up(delta.rid)
            mind.known += len(delta.tokens)
            if delta.finish_reason is not None:
                self.drop(delta.rid)
        for output in outputs if self.longest and (self._chained or self._remembered) else ():
            if (mind := self._minds.get(output.rid)) is not None and output.tokens:
                mind.compare(output.chain)
        self._remembered = self._chained > 0

    def _dozes(self, n: int) -> bool:
        """Whether matches of so many requests take more time than steps leave: those planned behind drafts, or, where
        there is no draft model, those without any."""
        if self._pace is None or (self.longest and not self._pace.trails):
            return False
        return n * EFFORT > SPARE * (self._pace.drafting(n) if self.longest else self._pace.plain(n, 0))

    def record_time(self, plan: StepPlan, seconds: float, waited: bool) -> None:
        """The step last observed took so long from when its predecessor had landed, for whose tokens its planning
        `waited`, or not."""
        if self._pace is None:
            return
        way = self._planned.pop(plan.step, Way.PLAIN)
        if any(w.count > MAX_DRAFTS + 1 for w in plan.work):
            return
        follows = self.longest > 0 and plan.chain != LEFT_OUT
        if waited:
            how = How.BARE if self.longest and not follows else How.WAITED
        elif follows and self._pace.trails:
            how = How.FOLLOWED
        else:
            how = How.AHEAD if way == Way.PLAIN else How.LOOKED
        if way != self._unseen_way:
            self._unseen, self._unseen_way = 0, way
        self._unseen += 1
        every = self._every(plan, way)
        self._hears = way != Way.ALL or self._unseen + 1 >= every
        if self._unseen < every and not self._woken:
            return
        self._hears = way != Way.ALL or every == 1
        self._timings.append(_Timing(plan, seconds, way, how, self._brought, self._chained, self._unseen))
        self._unseen, self._woken = 0, False

    def _every(self, plan: StepPlan, way: Way) -> int:
        """Of so many steps planned like this one, one is learned from: the others shall cost as little as can be."""
        assert self._pace is not None and self._earnings is not None
        if not self._pace.trails or way == Way.MATCHES:
            return 1
        if way == Way.PLAIN:
            return SAMPLED
        known = self._acceptance.chains >= SETTLED and self._earnings.settled(*self._shape(plan))
        return DRAFTED if known else 1

    def _shape(self, plan: StepPlan) -> tuple[int, int]:
        """Its requests, and their mean context."""
        found = self._shapes.get(plan.step)
        if found is None:
            n = len(plan.work)
            found = self._shapes[plan.step] = n, sum([w.end for w in plan.work]) // n
            if len(self._shapes) > IN_FLIGHT:
                del self._shapes[next(iter(self._shapes))]
        return found

    def _account(self, t: _Timing) -> None:
        """Makes of a step what it has to teach."""
        assert self._pace is not None and self._earnings is not None
        counts, contexts = [w.count for w in t.plan.work], [w.end for w in t.plan.work]
        n, context = self._shape(t.plan)
        self._pace.saw(counts, contexts, t.chained, t.how, t.seconds)
        # By the table as it is now, not by the clock: what came in between is nobody's fault.
        seconds = self._pace.step(counts, contexts, t.chained, t.how)
        self._earnings.earned(n, context, t.way, t.brought, seconds, t.steps)
        if t.plan.chain > 0:
            self._appraise(t.plan)

    def _appraise(self, plan: StepPlan) -> None:
        """What the chains just drafted are worth."""
        assert self._pace is not None
        verifying, drafting = self._rates(*self._shape(plan))
        worths: list[tuple[list[float], Worth | None]] = []
        for work in plan.work:
            mind = self._minds.get(work.rid)
            if mind is None or not mind.chain or not self._heeded(work.rid, len(plan.work)):
                continue
            survival = self._acceptance.survival(work.rid, mind.told, [token for token, _ in mind.chain])
            drafted = len(survival)
            if drafted == plan.chain and drafted < self.longest:  # goes on as chains do
                typical = self._acceptance.typical(work.rid, self.longest)
                survival += [survival[-1] * t / typical[drafted - 1] for t in typical[drafted:]]
                drafted = self.longest
            survival += [0.0] * (self.longest - len(survival))
            worth = net_worth(survival, verifying, drafting, drafted, self._pace.trails)
            worths.append((worth, mind.worth))
        self._lengths.saw(worths)

    def _ways(self, requests: int, context: int) -> list[Way]:
        """As earnings.Ways."""
        assert self._pace is not None
        if not self.longest:
            return [Way.PLAIN] if self._dozes(requests) else [Way.MATCHES, Way.PLAIN]
        matched = self._suffix and not self._dozes(requests)
        found = [Way.ALL, Way.MATCHES] if matched else [Way.ALL]
        if self._acceptance.chains < KNOWN:
            return [*found, Way.PLAIN]
        alive, best, plain = 1.0, 0.0, self._pace.plain(requests, 0)
        for length, survival in enumerate(self._acceptance.typical(-1, self.longest), 1):
            alive += survival
            step = self._pace.drafting((1 + length) * requests) + length * self._pace.chain(requests)
            best = max(best, alive * plain / step)
        return [*found, Way.PLAIN] if best >= PROMISING else [*found[1:], Way.PLAIN, Way.ALL]

    def _rates(self, requests: int, context: int) -> tuple[list[float], float]:
        """In tokens, a request's share: of verifying 1, 2, ... drafts of each; of a draft model's next token."""
        assert self._pace is not None and self._earnings is not None
        price = self._earnings.price(requests, context) / requests
        plain = self._pace.drafting(requests)
        verifying = [price * (self._pace.drafting((1 + k) * requests) - plain) for k in range(1, self.longest + 1)]
        return verifying, price * self._pace.chain(requests)

    def worth_waiting(self, running: StepPlan) -> bool:
        """Whether to wait for the step that is running, because drafts for the one after it promise more than planning
        that one now."""
        if self._fixed is not None:
            return True
        assert self._pace is not None and self._earnings is not None
        if running.chain <= 0 and (self._asleep or not self._suffix):
            return False
        n, context = self._shape(running)
        if self._earnings.way(n, context) == Way.PLAIN:
            return False
        if running.chain > 0:
            return True
        chances = []
        for work in running.work:
            mind = self._minds.get(work.rid)
            chance = Chance(1 if work.sample else work.count, work.end, work.sample)
            chances.append(chance)
            if mind is None or not work.sample:
                continue
            if (trail := mind.ready) is not None and trail.foretold() is not None:
                guesses = trail.guesses(MAX_DRAFTS + 1)
                chance.ready, *rest = self._acceptance.survival(work.rid, cells(guesses), [g.token for g in guesses])
                chance.survival = [s / chance.ready for s in rest]
        if not any(c.survival for c in chances):
            return False
        price, costs = self._earnings.price(n, context), self._prices(n, context)
        return choose(chances, costs, MAX_DRAFTS * n, price, costs.overhead(n)) > 0.0

    def _prices(self, n: int, context: int) -> Pace | Bare:
        """Of steps whose planning waits."""
        assert self._pace is not None and self._earnings is not None
        left_out = self.longest and self._earnings.way(n, context) != Way.ALL
        return self._pace.bare if left_out else self._pace

    def chained(self, running: StepPlan) -> int | None:
        """How many tokens of the chain behind the step that is running the next one shall verify, planned before they
        are known; None if it shall not be planned so."""
        drafted = any(w.drafts for w in running.work)
        if running.chain <= 0 and not drafted and self._fixed is None:
            return None
        if self._fixed is not None:
            return None if self._suffix or running.chain < drafted else min(self._fixed, running.chain)
        assert self._pace is not None and self._earnings is not None
        n, context = self._shape(running)
        if running.chain <= 0 or self._earnings.way(n, context) != Way.ALL:
            return 0 if drafted else None
        return None if self._suffix and self._matched(running, n, context) else running.chain

    def _matched(self, running: StepPlan, n: int, context: int) -> bool:
        """Whether matches promise more behind the running step than its chain does, and enough to wait for it."""
        assert self._pace is not None and self._earnings is not None
        if self._dozes(n):
            return False
        gain, most = 0.0, 0
        for work in running.work:
            mind = self._minds.get(work.rid)
            if mind is None or not work.sample:
                continue
            self._lessons += mind.catch_up(work.rid)
            if (trail := mind.ready) is None:
                continue
            before = [token for token, _ in mind.chain[: work.drafts]] if work.chained else list(work.guesses)
            told = mind.told if mind.planned is None else mind.planned
            if len(before) < work.drafts:
                continue
            guesses = trail.guesses(MAX_DRAFTS + 1, before)
            if len(guesses) <= running.chain + 1:
                continue
            expected = [*told[: len(before)], *cells(guesses)]
            survival = self._acceptance.survival(work.rid, expected, [*before, *(g.token for g in guesses)])
            survival = survival[len(before) :]
            theirs = sum(self._acceptance.typical(work.rid, running.chain))
            ours = sum(survival[1:]) / survival[0]
            if ours > theirs:
                gain, most = gain + survival[0] * (ours - theirs), max(most, len(guesses) - 1)
        if not gain:
            return False
        later = self._pace.base(n * (1 + most)) - self._pace.drafting(n * (1 + running.chain))
        return gain > self._earnings.price(n, context) * later

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """Guesses by rid for a step about to run. None if a predecessor's tokens have not been observed yet."""
        if any(w.tokens[-1] == PENDING for w in plan.work):
            return {}
        n, context = self._shape(plan)
        if self._earnings is not None and self._earnings.way(n, context) == Way.PLAIN:
            for work in plan.work:
                if (mind := self._minds.get(work.rid)) is not None:
                    mind.planned = ()
            return {}
        found: dict[int, tuple[list[int], list[Cell]]] = {}
        chances = []
        for work in plan.work:
            chance = Chance(work.count, work.end, work.sample)
            chances.append(chance)
            if work.sample and work.count == 1 and (mind := self._minds.get(work.rid)) is not None:
                if self._suffix:
                    assert mind.known == work.end, f"request {work.rid}: {mind.known} tokens seen of {work.end}"
                tokens, told, chance.survival = self._guess(work, mind)
                found[work.rid] = tokens, told
        if self._fixed is None and any(c.survival for c in chances):
            assert self._pace is not None and self._earnings is not None
            choose(chances, self._prices(n, context), MAX_DRAFTS * n, self._earnings.price(n, context))
        proposed = {}
        for work, chance in zip(plan.work, chances):
            if work.rid in found:
                tokens, told = found[work.rid]
                count = len(tokens) if self._fixed is not None else chance.taken
                self._minds[work.rid].planned = tuple(told[:count])
                if count:
                    proposed[work.rid] = tokens[:count]
        return proposed

    def chain_length(self, plan: StepPlan) -> int:
        """How many tokens the draft model shall draft behind what this step draws. Also decides whether to rest."""
        if self._fixed is not None:
            return min(self._fixed, self.longest) if any(w.sample for w in plan.work) else 0
        assert self._pace is not None and self._earnings is not None
        n, context = self._shape(plan)
        if self.longest and any(w.count > MAX_DRAFTS + 1 for w in plan.work):
            self._earnings.prompted(n, context)
        way, trying = self._earnings.way(n, context), self._earnings.trying(n, context)
        if self._latest == way == Way.PLAIN and not self._woken and not any(w.drafts or w.chained for w in plan.work):
            self._quiet, self._size = self._earnings.quiet(n, context), 1 << (n - 1).bit_length()
            self.paused = min(self._quiet, REST)
        self._latest = self._planned[plan.step] = way
        if len(self._planned) > IN_FLIGHT:
            del self._planned[next(iter(self._planned))]
        if self.longest and way != Way.ALL:
            self._lengths.left_out()
            return LEFT_OUT
        if not self.longest or not any(w.sample for w in plan.work):
            return 0
        if not trying and (known := self._lengths.known(n)) is not None:
            return known
        if not self._lengths.knows:
            verifying, drafting = self._rates(n, context)
            typical = self._acceptance.typical(-1, self.longest)
            self._lengths.hope(net_worth(typical, verifying, drafting, self.longest, self._pace.trails))
        worths = []
        for work in plan.work:
            mind = self._minds.get(work.rid)
            if mind is not None and work.sample:
                if mind.worth is None:
                    mind.worth = self._lengths.of_request()
                worths.append(mind.worth)
        return self._lengths.ask(worths, self._earnings.price(n, context) * self._pace.following(n), trying)

    def maintain(self) -> None:
        """What is best done while the device is busy."""
        for timing in self._timings:
            self._account(timing)
        for lesson in self._lessons:
            self._acceptance.learn(*lesson)
        self._timings.clear()
        self._lessons.clear()
        for rid in self._gone:
            self._acceptance.drop(rid)
        self._gone.clear()
        room = CATCH_UP
        for rid, mind in self._minds.items() if self._suffix and not self._asleep else ():
            if mind.lag:
                self._lessons += mind.catch_up(rid)
            if mind.trail is not None and mind.trail.behind and room:
                room -= mind.trail.catch_up(room)
        for trail in self._finished:
            assert self._store is not None
            self._store.add(trail.answer())
        self._finished.clear()

    def report(self, stats: EngineStats) -> EngineStats:
        """The statistics, with those of drafts."""
        return self._tally.report(stats)

    def _guess(self, work: Work, mind: Mind) -> tuple[list[int], list[Cell], list[float]]:
        """The most promising of the chains that could be verified: tokens, what they are told apart by, survival."""
        most = min(self._fixed or MAX_DRAFTS, work.left - 1)
        trail = mind.ready
        offers: list[tuple[list[int], list[Cell]]] = []
        if mind.chain:
            tokens, told = [token for token, _ in mind.chain[:most]], mind.told[:most]
            behind = mind.behind[: most - len(tokens)]
            offers.append((tokens + [g.token for g in behind], told + cells(behind)))
            cut = self._cut(work.rid, tokens, told, mind.instead)
            if cut and trail is not None:
                guesses = trail.guesses(most - cut, tokens[:cut])
                offers.append((tokens[:cut] + [g.token for g in guesses], told[:cut] + cells(guesses)))
        if trail is not None:
            guesses = trail.guesses(most)
            offers.append(([g.token for g in guesses], cells(guesses)))
        scored = [(tokens, told, self._acceptance.survival(work.rid, told, tokens)) for tokens, told in offers]
        return max(scored, key=lambda offer: sum(offer[2]), default=([], [], []))

    def _heeded(self, rid: int, n: int) -> bool:
        """Whether it is the request's turn, of n in a step. Where planning does not wait, Python would otherwise."""
        return self._pace is None or not self._pace.trails or n <= HEEDED or (rid + self._turn) % (-(-n // HEEDED)) == 0

    def _cut(self, rid: int, tokens: Sequence[int], told: Sequence[Cell], instead: Sequence[Guess | None]) -> int:
        """How many of a chain's drafts come before the first in whose place a match foretells something likelier; 0 if
        there is none."""
        for i, (token, cell, guess) in enumerate(zip(tokens, told, instead)):
            if guess is not None and guess.token != token:
                ours = self._acceptance.probability(rid, cells([guess])[0], guess.token)
                if ours > self._acceptance.probability(rid, cell, token):
                    return i
        return 0

    def _judge(self, delta: Delta, mind: Mind) -> None:
        planned, mind.planned = mind.planned, None
        if planned is None:  # behind a step in flight: all its chain's
            self._tally.chain(min(delta.drafted, len(mind.chain)), delta.accepted)
        else:
            self._tally.add(planned[: delta.drafted], delta.accepted)
