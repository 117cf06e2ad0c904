"""Noise-free times of `bench drafts`'s trace, by a table of step costs: each setting, the policy, hindsight.

The engine plays the trace once without drafts, while a Listener records the draft model's chain after every token. Then
no model is needed: the speculator of serving runs through the same texts, planned and committed in the engine's order
(chained, if the table has such steps), and a Clock adds up the cost of steps. So policies can be compared exactly, also
with an oracle that knows every answer.

The clock's costs may differ from the speculator's table, to test how the policy copes. Prompts cost nothing: only
decoding is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.core.messages import Delta, Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, PENDING, Output, StepPlan, Work
from perilune.engine.engine import Engine
from perilune.speculation.drafting import Speculator
from perilune.speculation.step_cost import Costs, StepKind
from perilune.speculation.suffix import Store, SuffixMatcher

PARAMS = SamplingParams()  # of all works: made once, because making and checking one takes as long as planning a work
Chain = tuple[tuple[int, float], ...]  # drafted tokens, each with the draft model's probability


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request and its answer; chains[i]: the draft model's chain after answer[: i + 1]."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    most: int  # max_tokens of the answer
    chains: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of steps, from `costs`: plus `wait` if planning waited for the step before, plus `follow` if a draft
    model reads the step and `costs` does not include that. A chain ends when the product of its drafts' probabilities
    is below `floor`."""

    costs: Costs
    wait: float = 0.0
    follow: float = 0.0
    floor: float = 0.0

    def step(self, counts: Sequence[int], contexts: Sequence[int], chain: int, how: StepKind) -> float:
        curve = (
            self.costs.base
            if how in (StepKind.WAITED, StepKind.NO_DRAFTER)
            else self.costs.overlapped or self.costs.base
        )
        if how == StepKind.CHAINED:
            curve = self.costs.chained or self.costs.base
        seconds = curve(sum(counts)) + sum(self.costs.attention(n) * c for n, c in zip(counts, contexts))
        seconds += (how in (StepKind.WAITED, StepKind.NO_DRAFTER)) * self.wait - (
            how == StepKind.NO_DRAFTER
        ) * self.costs.drafter(sum(counts))
        if chain == LEFT_OUT:
            return seconds
        seconds += (how == StepKind.OVERLAPPED) * self.costs.drafter(sum(counts))
        return seconds + (how != StepKind.CHAINED) * self.follow + chain * self.costs.draft_token(len(counts))

    def drafted(self, chains: Sequence[Chain]) -> int:
        """Length of a step's chains: all grow together until the confidence of each is below `floor`."""
        most = max(map(len, chains), default=0)
        confidences = [1.0] * len(chains)
        for length in range(most):
            confidences = [
                c * chain[length][1] if length < len(chain) else 0.0 for c, chain in zip(confidences, chains)
            ]
            if max(confidences) < self.floor:
                return length + 1
        return most


@dataclass(slots=True)
class Tally:
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Listener(Speculator):
    """Lets the draft model draft after every token; no draft is verified."""

    def __init__(self, longest: int) -> None:
        super().__init__(suffix=not longest, longest=longest, fixed=MAX_DRAFTS, shared=False)
        self.chains: dict[int, list[Chain]] = {}

    def propose(self, plan: StepPlan) -> dict[int, Sequence[int]]:
        return {}

    def chained(self, running: StepPlan) -> int | None:
        return None

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.tokens:
                self.chains.setdefault(output.rid, []).append(output.chain)
        super().observe(deltas, outputs)


def listen(engine: Engine, asked: Sequence[tuple[str, tuple[int, ...], SamplingParams]]) -> list[Recorded]:
    """Plays the trace of (kind, prompt, parameters) once, on an engine that has nothing in flight, and records it."""
    longest = engine.speculator.longest if engine.speculator is not None else 0
    before, engine.speculator = engine.speculator, (listener := Listener(longest))
    try:
        for rid, (_, prompt, params) in enumerate(asked):
            engine.submit(Submit(rid, prompt, params))
        answers: list[list[int]] = [[] for _ in asked]
        while engine.busy:
            for delta in engine.step():
                answers[delta.rid] += delta.tokens
    finally:
        engine.speculator = before
    return [
        Recorded(kind, prompt, tuple(answers[rid]), params.max_tokens or 0, tuple(listener.chains.get(rid, ())))
        for rid, (kind, prompt, params) in enumerate(asked)
    ]


def play(trace: Sequence[Recorded], users: int, clock: Clock, speculator: Speculator | None) -> Tally:
    """Simulates `users` requests at a time, with calls in the order of Engine.step."""
    tally, known, waiting, number = Tally(), dict[int, int](), list(range(len(trace)))[::-1], 0
    running: tuple[StepPlan, StepKind] | None = None
    while waiting or known or running is not None:
        while waiting and len(known) < users:
            rid = waiting.pop()
            known[rid] = 0
            if speculator is not None:
                speculator.open(rid, trace[rid].prompt)
        chained = drafts = None
        asked = None if speculator is None or speculator.paused else speculator
        if running is not None and asked is not None and clock.costs.chained is not None:
            drafts = asked.chained(running[0])
        if running is not None and drafts is not None:
            chained = _plan_chained(trace, known, running[0], drafts, number)
        first = chained is None and running is not None and asked is not None and _waits(asked, running[0])
        if running is not None and first:
            _land(trace, known, *running, clock, speculator, tally)
        following = chained or _launch(trace, known, None if first else running, number, asked)
        if following is not None and asked is not None:
            following = StepPlan(following.step, following.work, asked.chain_length(following))
            asked.maintain()
        elif following is not None:
            following = StepPlan(following.step, following.work, LEFT_OUT)
        if running is not None and not first:
            _land(trace, known, *running, clock, speculator, tally)
        number += 1
        running = None if following is None else (following, _how(following, first, clock, speculator))
    return tally


def _how(plan: StepPlan, waited: bool, clock: Clock, speculator: Speculator | None) -> StepKind:
    modelled = speculator is not None and speculator.longest > 0
    follows = modelled and plan.chain != LEFT_OUT
    if waited:
        return StepKind.NO_DRAFTER if modelled and not follows else StepKind.WAITED
    return StepKind.CHAINED if follows and clock.costs.chained is not None else StepKind.OVERLAPPED


def _plan_chained(
    trace: Sequence[Recorded], known: dict[int, int], running: StepPlan, drafts: int, number: int
) -> StepPlan | None:
    """The plan of the step chained to `running`, as Scheduler.plan_chained makes it; None if it cannot be chained."""
    flying = {w.rid: w.drafts for w in running.work}
    work = []
    for rid, count in known.items():
        one = trace[rid]
        if not count and rid not in flying:
            return None
        at = count + (rid in flying)
        left = one.most - at - flying.get(rid, 0)
        if left < 1:
            continue
        more = min(drafts, left - 1) if rid in flying else 0
        tokens = (PENDING,) * (1 + more) if rid in flying else (one.answer[at - 1],)
        start = len(one.prompt) + at - 1
        later = rid in flying
        work.append(
            Work(rid, rid, start, tokens, (), True, at, PARAMS, 0, left=one.most - at, drafts=more, chained=later)
        )
    return StepPlan(number, tuple(work)) if work else None


def _waits(speculator: Speculator, running: StepPlan) -> bool:
    return any(w.drafts for w in running.work) or speculator.worth_waiting(running)


def _launch(
    trace: Sequence[Recorded],
    known: dict[int, int],
    flying: tuple[StepPlan, StepKind] | None,
    number: int,
    speculator: Speculator | None,
) -> StepPlan | None:
    ahead = {w.rid for w in flying[0].work} if flying is not None else set()
    work = []
    for rid, count in known.items():
        one, at = trace[rid], count + (rid in ahead)
        if at >= one.most:
            continue
        if at == 0:
            tokens, start = one.prompt, 0
        else:
            tokens = (PENDING,) if rid in ahead else (one.answer[at - 1],)
            start = len(one.prompt) + at - 1
        work.append(Work(rid, rid, start, tokens, (), True, at, PARAMS, 0, left=one.most - at))
    if not work:
        return None
    plan = StepPlan(number, tuple(work))
    if speculator is None:
        return plan
    drafts = speculator.propose(plan)
    works = []
    for w in plan.work:
        drafted = tuple(drafts.get(w.rid, ()))[: w.left - 1]
        works.append(
            Work(
                w.rid,
                w.slot,
                w.start,
                (*w.tokens, *drafted),
                (),
                True,
                w.output_index,
                w.params,
                0,
                (),
                (),
                w.left,
                len(drafted),
            )
        )
    return StepPlan(number, tuple(works))


def _land(
    trace: Sequence[Recorded],
    known: dict[int, int],
    plan: StepPlan,
    how: StepKind,
    clock: Clock,
    speculator: Speculator | None,
    tally: Tally,
) -> None:
    deltas, outputs = [], []
    for w in plan.work:
        if w.rid not in known:
            continue  # the request has ended; this step was planned before that was known
        one, at = trace[w.rid], known[w.rid]
        right = 0
        drafted = tuple(token for token, _ in one.chains[at - 1]) if w.chained else w.draft_tokens
        while right < w.drafts and at + right < len(one.answer) - 1 and drafted[right] == one.answer[at + right]:
            right += 1
        tokens = one.answer[at : at + right + 1]
        at = known[w.rid] = at + len(tokens)
        over = at == len(one.answer)
        if over:
            del known[w.rid]
        tally.tokens += len(tokens)
        tally.drafted += w.drafts
        tally.accepted += right
        finish = "stop" if over else None
        deltas.append(Delta(w.rid, tokens, finish_reason=finish, drafted=w.drafts, accepted=right))
        chain = one.chains[at - 1][: plan.chain] if one.chains and plan.chain > 0 else ()
        outputs.append(Output(w.rid, tokens, chain=chain))
    longest = clock.drafted([o.chain for o in outputs])
    outputs = [Output(o.rid, o.tokens, chain=o.chain[:longest]) for o in outputs]
    counts = [w.drafts + 1 for w in plan.work]
    length = LEFT_OUT if speculator is None else min(longest, plan.chain)
    seconds = clock.step(counts, [w.end for w in plan.work], length, how)
    tally.seconds += seconds
    tally.steps += 1
    if speculator is not None and speculator.paused:
        speculator.record_paused(len(plan.work), deltas)
    elif speculator is not None:
        speculator.observe(deltas, outputs)
        speculator.record_time(plan, seconds, how in (StepKind.WAITED, StepKind.NO_DRAFTER))


def oracle(trace: Sequence[Recorded], clock: Clock) -> float:
    """Seconds of one user's requests if each step had the best number of correct drafts of the better source and the
    best length of chain. If `clock` has chained steps, no step waits for the host."""
    store, spent = Store(), 0.0
    for one in trace:
        matcher = SuffixMatcher(one.prompt, store)
        matcher.index_prompt(len(one.prompt))
        right = []  # correct drafts of the better source, by known tokens and by length of the chain
        for at in range(len(one.answer)):
            right.append(_right(one, at, matcher))
            matcher.append(one.answer[at])
        store.add(matcher.answer())
        spent += _least(one, right, clock)
    return spent


def _right(one: Recorded, at: int, matcher: SuffixMatcher) -> list[int]:
    rest = one.answer[at : at + MAX_DRAFTS]
    if not at or len(rest) == 1:
        return [0]
    alone = _same([g.token for g in matcher.drafts(MAX_DRAFTS)], rest)
    found = [alone]
    chain = [token for token, _ in one.chains[at - 1]] if one.chains else []
    for length in range(1, len(chain) + 1):
        head = chain[:length]
        same = _same(head, rest)
        if same == length:
            same += _same([g.token for g in matcher.drafts(MAX_DRAFTS - length, after=head)], rest[length:])
        found.append(max(alone, same))
    return [min(n, len(rest) - 1) for n in found]


def _same(drafted: Sequence[int], rest: Sequence[int]) -> int:
    count = 0
    while count < min(len(drafted), len(rest)) and drafted[count] == rest[count]:
        count += 1
    return count


def _least(one: Recorded, right: Sequence[Sequence[int]], clock: Clock) -> float:
    """The least seconds of an answer, computed from its end: best[at][length] are the seconds still needed with `at`
    known tokens and a chain of this length after them."""
    lengths = max(map(len, right))
    best = [[0.0] * lengths for _ in range(len(one.answer) + 1)]
    chain, how = clock.costs.draft_token(1), StepKind.WAITED if clock.costs.chained is None else StepKind.CHAINED
    for at in range(len(one.answer) - 1, -1, -1):
        context = len(one.prompt) + at
        for length in range(lengths):
            most = right[at][min(length, len(right[at]) - 1)]
            best[at][length] = min(
                clock.step([n + 1], [context + n], 0, how if n else StepKind.OVERLAPPED)
                + min(chain * ask + best[at + n + 1][ask] for ask in range(lengths))
                for n in range(most + 1)
            )
    return best[0][0]
