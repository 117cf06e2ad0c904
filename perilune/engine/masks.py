"""Token masks of constrained answers (guided decoding), computed on the host while the device is busy.

A form (tools, a schema), allowed_token_ids and bad words all constrain an answer (engine/allowed.py).

A mask depends on the token before it, which the host learns one step late. So when a step's tokens are sampled, a
thread waits for them, advances the answers and prepares the masks of the next step, while the next step's forward pass
runs; the runner waits for the masks only before it samples. Grammars are compiled on another thread, before a request
enters the scheduler. Requests without a constraint cost nothing here.

Each draft is checked on a copy of the answer's state, so that a rejected draft needs no undo: the copy after the last
accepted draft becomes the answer's state. A work's drafts are cut before the first that the constraint forbids.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import CheckpointError, EngineError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Work, samples
from perilune.engine.allowed import Answer, NoTokenLeft, TokenRules, allowed
from perilune.engine.sampler import done_event, on_device, to_host
from perilune.grammar.enforcer import Enforcer
from perilune.grammar.matcher import GrammarError, Vocabulary, Words, forbid
from perilune.ops.sampling.mask_logits import mask_logits


class Session:
    """The state of one constrained request. Used by the grammar thread while `job` runs, else by the runner's thread:
    never by both at once."""

    def __init__(self, answer: Answer, words: int) -> None:
        self.answer = answer
        self.mask: Words = np.zeros(words, np.uint32)  # for output token number `output_index`
        self.output_index = -1
        self.states: list[Answer] = []  # the answer before each token that the running step samples
        self.job: Future[None] | None = None
        self.error: str | None = None

    def prepare(self, output_index: int, left: int) -> None:
        """Fills the mask for output token number `output_index`; `left` tokens may still come, this one included."""
        try:
            self.answer.fill(self.mask, left)
        except NoTokenLeft as e:
            self.error = str(e)
        except GrammarError as e:
            self.error = f"the answer cannot go on as its grammar wants: {e}"
        self.output_index = output_index

    def advance(self, token: int, output_index: int, left: int) -> None:
        """Takes output token number `output_index`, and prepares the mask of the next one."""
        if self.error is not None:
            return
        try:
            self.answer.advance(token)
        except GrammarError as e:
            self.error = f"the answer does not follow its grammar: {e}"
            return
        if left > 1:
            self.prepare(output_index + 1, left - 1)

    def walk(self, work: Work, first: Words) -> list[Words]:
        """The masks for a work's samples: `first`, for the token before the drafts, and one after each draft, up to the
        first draft that the constraint forbids."""
        masks, self.states = [first], [self.answer]
        for row, token in zip(samples((work,)), work.draft_tokens):
            state = self.states[-1].copy()
            if not allowed(masks[-1], token) or row.left < 2:
                break
            mask = np.zeros_like(self.mask)
            try:
                if state.tight and state.settle(token, row.left) != token:
                    break
                state.advance(token)
                state.fill(mask, row.left - 1)
            except GrammarError:
                break  # the draft is not verified; if its token is sampled, the next step reports the error
            mask = _ends_forbidden(mask, work, row.output_index + 1)
            if not mask.any() or not state.safe:
                break
            masks.append(mask)
            self.states.append(state)
        return masks


# (session, request, seed); the future raises EngineError if the grammar does not compile.
Compiled = tuple[Future[Session], Submit, int]


class Grammars:
    """The constrained requests of an engine.

    The engine's thread calls `compile`, `compiled`, `open` and `drop`; the runner's calls `mask`, `settle`, `follow`
    and `refusals`. `load` returns the vocabulary; it is called for the first constrained request, may raise
    CheckpointError, and is not called again after it has succeeded.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._compiling: dict[int, Compiled] = {}  # by rid; not in the scheduler yet
        self._sessions: dict[int, Session] = {}  # by rid; of requests in the scheduler
        self._compiler = ThreadPoolExecutor(1, "perilune-compile-grammar")
        self._worker = ThreadPoolExecutor(1, "perilune-grammar")

    @property
    def compiling(self) -> bool:
        """Whether requests given to `compile` have yet to be returned by `compiled`."""
        return bool(self._compiling)

    def compile(self, request: Submit, seed: int) -> None:
        """Starts to compile the request's constraint on another thread; `compiled` returns it with `seed`."""
        self._compiling[request.rid] = self._compiler.submit(self._compile, request), request, seed

    def compiled(self, timeout: float) -> list[Compiled]:
        """The requests with compiled constraints, once each. If there is none, waits up to `timeout` seconds."""
        wait([compiling for compiling, *_ in self._compiling.values()], timeout, FIRST_COMPLETED)
        done = {rid: found for rid, found in self._compiling.items() if found[0].done()}
        for rid in done:
            del self._compiling[rid]
        return list(done.values())

    @staticmethod
    def unformed(params: SamplingParams, vocab_size: int) -> Session | None:
        """The session of a request without a form, but with allowed_token_ids or bad words; None if it has neither."""
        words = -(-vocab_size // 32)
        return Session(Answer(None, TokenRules(params, words)), words) if params.restricted else None

    def open(self, rid: int, session: Session) -> None:
        self._sessions[rid] = session

    def drop(self, rid: int) -> None:
        """Forgets a request; unknown ids are ignored."""
        if (compiling := self._compiling.pop(rid, None)) is not None:
            compiling[0].cancel()  # if it has not begun: other requests wait for the one thread that compiles
        self._sessions.pop(rid, None)

    def holds(self, work: Sequence[Work]) -> bool:
        """Whether one of the requests has a constraint."""
        return bool(self._sessions) and any(w.rid in self._sessions for w in work)

    def closed(self, rid: int) -> bool:
        """Whether the grammar replaced sampled tokens at the answer's end, because few tokens were left. Call it when
        the request's last tokens have reached the host."""
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
        """The logits [R, V] float32 with -inf for tokens that row i's request may not choose; `logits` stays as it is.

        Also, by index in `work`, how many leading drafts the constraint allows, for works with a forbidden draft. Waits
        for masks that the grammar thread is preparing, not for the device. A request with no token left to choose is
        not masked; `refusals` names it.
        """
        held, cut = self._held(work), dict[int, int]()
        if not held:
            return logits, cut
        words = -(-logits.shape[1] // 32)
        rows: list[int] = []
        masks: list[Words] = []
        for index, first, w, session in held:
            if session.job is not None:
                session.job.result()  # before `walk` below replaces the states, which the job reads
                session.job = None
            elif session.error is None:
                session.prepare(w.output_index, w.left)
            session.states = [session.answer]
            if session.error is not None:
                continue
            index_now = session.output_index
            assert index_now == w.output_index, f"request {w.rid}: mask of token {index_now} at token {w.output_index}"
            given = [_ends_forbidden(session.mask, w, w.output_index)]
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
        """The tokens [R] int64 to take instead of those sampled from the logits that `mask` returned last.

        A token differs only when so few are left that the grammar must lead to the answer's end. Only then does the
        host wait for the device here.
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
        taken = tokens.tolist()
        for row, state, left, session in tight:
            try:
                taken[row] = state.settle(taken[row], left)
            except NoTokenLeft as e:  # only for a work's first token: else `walk` has cut the drafts before
                session.error = str(e)
        return on_device(np.array(taken), tokens.device)

    def follow(self, tokens: Tensor, lengths: Tensor | None, work: tuple[Work, ...]) -> None:
        """Lets the grammar thread advance the answers by the sampled `tokens` [R] int64 and prepare the next masks.
        Each request gets the first `lengths` [S] of its rows; None: one each."""
        held = self._held(work)
        if not held:
            return
        host = to_host(tokens)
        counts = None if lengths is None else to_host(lengths)
        arrived = done_event(tokens.device)
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
            # `opened`: the prompt ends inside a thought, that is <think> and perhaps some text after it.
            last = next(filter(known.tokenizer.is_special, reversed(request.prompt)), None)
            opened = last is not None and last == known.tokenizer.special_id("<think>")
            enforcer = Enforcer(known, request.constraint, opened=opened)
            rules = TokenRules(request.params, known.words) if request.params.restricted else None
            return Session(Answer(enforcer, rules), known.words)
        except (GrammarError, CheckpointError) as e:
            raise EngineError(f"the constraint cannot be enforced: {e}") from e


def _ends_forbidden(mask: Words, work: Work, output_index: int) -> Words:
    """The mask without the tokens that end the request, if output token number `output_index` is before min_tokens."""
    if output_index >= work.params.min_tokens:
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
    if accepted < 0:  # the request got no token, so the mask is still that of its next token
        return
    closed = any(state.closed for state in session.states[: accepted + 1])
    session.answer = session.states[accepted]
    session.answer.closed = closed
    session.advance(int(tokens[first + accepted]), work.output_index + accepted, work.left - accepted)
