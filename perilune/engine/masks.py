"""Constrained answers in the engine: which tokens each may go on with, worked out while the device is busy.

A form (tools, a schema), allowed_token_ids and bad words all constrain an answer (engine/allowed.py).

A mask depends on the token before it, which the host learns one step late. So as soon as a step's tokens are drawn, a
thread of its own waits for them, advances the answers and prepares the masks of the next step, while that step's
forward pass runs; the runner waits for the masks only before it draws. Grammars are compiled on yet another thread,
before a request enters the scheduler. Nothing here costs requests without a constraint anything.

Drafts are walked on copies of the answer's state, one for each, so there is nothing to take back: the answer goes on
from the copy at which the accepted ones end. Where the answer may not go, or cannot be followed, its drafts end.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import CheckpointError, EngineError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Work, draws
from perilune.engine.allowed import Answer, NoTokenLeft, TokenRules, allowed
from perilune.engine.sampler import on_device, to_host
from perilune.grammar.enforcer import Enforcer
from perilune.grammar.matcher import GrammarError, Vocabulary, Words, forbid
from perilune.ops.sampling.mask_logits import mask_logits


class Session:
    """One request's answer. Touched by one thread at a time: whoever has waited for `job`."""

    def __init__(self, answer: Answer, words: int) -> None:
        self.answer = answer
        self.mask: Words = np.zeros(words, np.uint32)  # for output token number `draw`
        self.draw = -1
        self.states: list[Answer] = []  # of a step with drafts: before each token it draws
        self.job: Future[None] | None = None
        self.error: str | None = None

    def prepare(self, draw: int, left: int) -> None:
        """Fills the mask for output token number `draw`, when `left` tokens are left, it included."""
        try:
            self.answer.fill(self.mask, left)
        except NoTokenLeft as e:
            self.error = str(e)
        except GrammarError as e:
            self.error = f"the answer cannot go on as its grammar wants: {e}"
        self.draw = draw

    def advance(self, token: int, draw: int, left: int) -> None:
        """Takes output token number `draw`, and prepares for the next one."""
        if self.error is not None:
            return
        try:
            self.answer.advance(token)
        except GrammarError as e:
            self.error = f"the answer does not follow its grammar: {e}"
            return
        if left > 1:
            self.prepare(draw + 1, left - 1)

    def walk(self, work: Work, first: Words) -> list[Words]:
        """The masks for a work's draws: `first`, the one prepared, and one after each draft that may be followed."""
        masks, self.states = [first], [self.answer]
        for row, guess in zip(draws((work,)), work.guesses):
            state = self.states[-1].copy()
            if not allowed(masks[-1], guess) or row.left < 2:
                break
            mask = np.zeros_like(self.mask)
            try:
                if state.tight and state.settle(guess, row.left) != guess:
                    break
                state.advance(guess)
                state.fill(mask, row.left - 1)
            except GrammarError:
                break  # for plain decoding to meet, should it come to that
            mask = _ends_forbidden(mask, work, row.draw + 1)
            if not mask.any() or not state.safe:
                break
            masks.append(mask)
            self.states.append(state)
        return masks


class Grammars:
    """The constrained requests of an engine.

    `open` and `drop` belong to the engine's owner, `mask`, `settle` and `refusals` to the runner. `load` gives the
    vocabulary, once, when the first constrained request comes; it may raise CheckpointError.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._sessions: dict[int, Session] = {}  # by rid; of requests in the scheduler
        self._compiler = ThreadPoolExecutor(1, "perilune-compile-grammar")
        self._worker = ThreadPoolExecutor(1, "perilune-grammar")

    def compile(self, request: Submit) -> "Future[Session]":
        """The answer's beginning; the future raises EngineError if it cannot be."""
        return self._compiler.submit(self._compile, request)

    @staticmethod
    def unformed(params: SamplingParams, vocab_size: int) -> Session | None:
        """The beginning of an answer without a form; None where any token may come."""
        words = -(-vocab_size // 32)
        return Session(Answer(None, TokenRules(params, words)), words) if params.restricted else None

    def open(self, rid: int, session: Session) -> None:
        self._sessions[rid] = session

    def drop(self, rid: int) -> None:
        """Forgets a request; unknown ids are ignored."""
        self._sessions.pop(rid, None)

    def holds(self, work: Work) -> bool:
        """Whether the request has a constraint."""
        return work.rid in self._sessions

    def closed(self, rid: int) -> bool:
        """Whether the request's form has ended its answer, at least in part, because few tokens were left. Asked when
        its last tokens have arrived on the host."""
        session = self._sessions.get(rid)
        if session is None:
            return False
        if (job := session.job) is not None:
            job.result()
        return session.answer.closed

    def close(self) -> None:
        self._sessions.clear()
        self._compiler.shutdown(cancel_futures=True)
        self._worker.shutdown(cancel_futures=True)

    def mask(self, logits: Tensor, work: tuple[Work, ...]) -> tuple[Tensor, dict[int, int]]:
        """The logits [R, V] float32 with -inf for what row i's request may not choose; `logits` stays as it is.

        Also the works, by index, whose drafts cannot all be followed, with how many can. Waits for the masks that are
        still being worked out, not for the device. A request for which nothing is left to choose is not masked:
        `refusals` has it.
        """
        held, cut = self._held(work), dict[int, int]()
        if not held:
            return logits, cut
        words = -(-logits.shape[1] // 32)
        rows: list[int] = []
        masks: list[Words] = []
        for index, first, w, session in held:
            if session.job is not None:
                session.job.result()  # which reads the states of the step before
                session.job = None
            elif session.error is None:
                session.prepare(w.draw, w.left)
            session.states = [session.answer]
            if session.error is not None:
                continue
            assert session.draw == w.draw, f"request {w.rid}: a mask for draw {session.draw} at draw {w.draw}"
            given = [_ends_forbidden(session.mask, w, w.draw)]
            if not given[0].any():
                why = "the answer's form is complete before" if session.answer.formed else "only its end is allowed"
                session.error = f"min_tokens is {w.params.min_tokens}, but {why}"
                continue
            if w.drafts:
                given = session.walk(w, given[0])
                if len(given) <= w.drafts:
                    cut[index] = len(given) - 1
            masks += given
            rows += range(first, first + len(given))
        if not rows:
            return logits, cut
        packed = np.zeros((len(rows), words), np.uint32)
        for row, given_mask in zip(packed, masks):
            row[: len(given_mask)] = given_mask[:words]
        bits = on_device(packed.view(np.int32), logits.device)
        if len(rows) == logits.shape[0]:
            return mask_logits(logits, bits), cut
        where = on_device(np.array(rows), logits.device)
        return logits.index_copy(0, where, mask_logits(logits.index_select(0, where), bits)), cut

    def settle(self, tokens: Tensor, work: tuple[Work, ...]) -> Tensor:
        """The tokens [R] int64 to take for those drawn from what `mask` returned last.

        They differ, and the host waits for the device, only near the end of a request's tokens.
        """
        tight = [
            (first + i, state, left, session)
            for _, first, w, session in self._held(work)
            if session.error is None
            for i, (state, left) in enumerate(zip(session.states, range(w.left, 0, -1)))
            if state.tight
        ]
        if not tight:
            return tokens
        drawn = tokens.tolist()
        for row, state, left, session in tight:
            try:
                drawn[row] = state.settle(drawn[row], left)
            except NoTokenLeft as e:  # not behind a draft, which would not be followed there
                session.error = str(e)
        return on_device(np.array(drawn), tokens.device)

    def follow(self, tokens: Tensor, lengths: Tensor | None, work: tuple[Work, ...]) -> None:
        """The answers go on with `tokens` [R] int64: each with the first `lengths` [S] of its rows, None being one."""
        held = self._held(work)
        if not held:
            return
        host = to_host(tokens)
        counts = None if lengths is None else to_host(lengths)
        arrived = None
        if tokens.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        for index, first, w, session in held:
            session.job = self._worker.submit(_advance, session, host, counts, index, first, w, arrived)

    def refusals(self, work: tuple[Work, ...]) -> dict[int, str]:
        """Why requests cannot go on, by rid, after `mask` and `settle`."""
        return {w.rid: session.error for _, _, w, session in self._held(work) if session.error is not None}

    def _held(self, work: tuple[Work, ...]) -> list[tuple[int, int, Work, Session]]:
        """(index, first row, work, session) of the works with a constraint."""
        found: list[tuple[int, int, Work, Session]] = []
        if self._sessions:
            first = 0
            for index, w in enumerate(work):
                if (session := self._sessions.get(w.rid)) is not None:
                    found.append((index, first, w, session))
                first += w.drafts + 1
        return found

    def _compile(self, request: Submit) -> Session:
        assert request.constraint is not None
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            known = self._vocabulary
            # Behind <think> the prompt may hold the beginning of the thought, which is text.
            last = next(filter(known.tokenizer.is_special, reversed(request.prompt)), None)
            opened = last is not None and last == known.tokenizer.special_id("<think>")
            enforcer = Enforcer(known, request.constraint, opened=opened)
            rules = TokenRules(request.params, known.words) if request.params.restricted else None
            return Session(Answer(enforcer, rules), known.words)
        except (GrammarError, CheckpointError) as e:
            raise EngineError(f"the constraint cannot be enforced: {e}") from e


def _ends_forbidden(mask: Words, work: Work, draw: int) -> Words:
    """The mask without the tokens that end the request, if output token number `draw` comes before min_tokens."""
    if draw >= work.params.min_tokens:
        return mask
    mask = mask.copy()
    for token in work.params.stop_token_ids:
        if token < 32 * len(mask):
            forbid(mask, token)
    return mask


def _advance(
    session: Session,
    tokens: Tensor,
    lengths: Tensor | None,
    index: int,
    first: int,
    work: Work,
    arrived: "torch.cuda.Event | None",
) -> None:
    if arrived is not None:
        arrived.synchronize()
    accepted = 0 if lengths is None else int(lengths[index]) - 1
    if accepted < 0:  # nothing came: the mask is prepared already
        return
    closed = any(state.closed for state in session.states[: accepted + 1])
    session.answer = session.states[accepted]
    session.answer.closed = closed
    session.advance(int(tokens[first + accepted]), work.draw + accepted, work.left - accepted)
