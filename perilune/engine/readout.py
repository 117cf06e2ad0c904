"""Reads a step's results back to the host: from queued copies to one Output per request.

A step is queued without waiting for it. A `Readout` holds the host buffers of the queued copies and the CUDA event
after which they are complete; `wait` waits for that event, `result` makes the outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.core.step import MAX_DRAFTS, Output, StepPlan, StepResult, TokenLogprob, Work
from perilune.engine import sampler
from perilune.engine.graphs.decode import CHAIN_COLUMN, Arriving
from perilune.engine.sampler import FAILED
from perilune.speculation.acceptance import Accepted
from perilune.speculation.drafter import Drafts

Chain = tuple[tuple[int, float], ...]
# A request's new tokens; whether the logits after them are not finite; the draft chain after them.
Kept = tuple[tuple[int, ...], bool, Chain]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled from a step's logits, on the device.

    tokens   [R] int64: one token for each sample of `work`
    checked  [R] int64: the same, FAILED where the logits were not finite
    cut      by index in `work`: how many leading drafts the grammar allows; absent: all
    records, refused   as in Readout
    """

    work: tuple[Work, ...]
    tokens: Tensor
    checked: Tensor
    cut: Mapping[int, int] = field(default_factory=dict)
    records: Callable[[], dict[int, TokenLogprob]] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def nothing(device: torch.device) -> "Sampled":
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Sampled((), none, none)


@dataclass(frozen=True, slots=True)
class Readout:
    """A queued step's results on their way to the host.

    done     CUDA event after which the copies are complete; None on a CPU
    kept     to be called after `done`: a Kept for each of `work`
    records  to be called after `done`: log-probabilities by row
    scores   to be called after `done`: Outputs of prompts with log-probabilities
    refused  by rid: one line saying why the request's own rules leave no token
    """

    step: int
    work: tuple[Work, ...]
    kept: Callable[[], Iterable[Kept]]
    records: Callable[[], dict[int, TokenLogprob]] | None
    scores: list[Callable[[], Output]]
    done: torch.cuda.Event | None
    refused: Mapping[int, str] = field(default_factory=dict)

    def wait(self) -> "Readout":
        """Waits until the device has ended the step."""
        if self.done is not None:
            self.done.synchronize()
        return self

    def result(self) -> StepResult:
        """The outputs; to be called after `wait`."""
        scored = {output.rid: output for output in (score() for score in self.scores)}
        records = {} if self.records is None else self.records()
        outputs, first = dict(scored), 0
        every = list(self.kept())
        for w, (tokens, failed, chain) in zip(self.work, every):
            prompt = scored.get(w.rid)
            again = failed and w.drafts > 0
            error = (None if prompt is None else prompt.error) or self.refused.get(w.rid)
            if error is None and failed and not again:
                error = sampler.NOT_FINITE
            if error is not None:
                outputs[w.rid] = Output(w.rid, error=error)
            else:
                rows = range(first, first + len(tokens))
                logprobs = tuple([records[i] for i in rows if i in records]) if records else ()
                scores = () if prompt is None else prompt.prompt_logprobs
                outputs[w.rid] = Output(w.rid, tokens, logprobs, scores, None, again, () if again else chain)
            first += w.drafts + 1
        return StepResult(self.step, tuple(outputs.values()), hash(tuple([tokens for tokens, _, _ in every])))


def from_graph(plan: StepPlan, arriving: Arriving, sampled: Sampled | None = None) -> Readout:
    """The readout of a graph's step; `sampled` if its tokens were sampled outside the graph."""
    each, chain = arriving.each, arriving.chain
    ids = slice(CHAIN_COLUMN, CHAIN_COLUMN + chain)
    confidences = slice(CHAIN_COLUMN + MAX_DRAFTS, CHAIN_COLUMN + MAX_DRAFTS + chain)

    def kept() -> Iterator[Kept]:
        table = arriving.table[: len(plan.work), : confidences.stop if chain else each + 2]
        for w, row in zip(plan.work, table.tolist()):
            front = each - len(w.tokens)
            tokens = tuple(map(int, row[front : front + int(row[each])]))
            drafted = tuple(zip(map(int, row[ids]), row[confidences])) if chain else ()
            yield tokens, row[each + 1] > 0, drafted

    records, refused = (None, {}) if sampled is None else (sampled.records, sampled.refused)
    return Readout(plan.step, plan.work, kept, records, [], arriving.done, refused)


def from_calls(
    step: int, sampled: Sampled, accepted: Accepted | None, chains: Drafts | None, scores: list[Callable[[], Output]]
) -> Readout:
    """The readout of a step queued op by op: queues the copies to the host. `accepted` None: no work has drafts."""
    kept = _ragged(sampled, accepted, chains)
    done = sampler.done_event(sampled.tokens.device)
    return Readout(step, sampled.work, kept, sampled.records, scores, done, sampled.refused)


def _ragged(sampled: Sampled, accepted: Accepted | None, chains: Drafts | None) -> Callable[[], Iterator[Kept]]:
    """Queues the copies of a step that ran op by op, in which works may have different numbers of drafts. Returns a
    function that gives each work's Kept, to be called once the copies are complete."""
    rows, work, sent = len(sampled.checked), sampled.work, sampled.checked
    if accepted is not None:
        sent = torch.cat([sent, accepted.lengths, accepted.spoilt.long()])
    host, chain_host = sampler.to_host(sent), None
    if chains is not None:  # float64 holds ids and float32 values alike
        chain_host = sampler.to_host(torch.stack([chains.tokens.double(), chains.confidence.double()]))

    def kept() -> Iterator[Kept]:
        numbers = host.tolist()
        tokens, lengths, failed = numbers[:rows], numbers[rows : rows + len(work)], numbers[rows + len(work) :]
        drafted: list[Chain] = [()] * len(work)
        if chain_host is not None:
            drafted = [tuple(zip(map(int, ids), confidence)) for ids, confidence in zip(*chain_host.tolist())]
        first = 0
        for i, w in enumerate(work):
            own = tokens[first : first + w.drafts + 1]
            if accepted is None:
                yield tuple(own), own[0] == FAILED, drafted[i]
            else:
                yield tuple(own[: lengths[i]]), bool(failed[i]), drafted[i]
            first += w.drafts + 1

    return kept
