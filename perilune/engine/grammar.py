"""Constrained answers in the engine: which tokens each may go on with, worked out while the device is busy.

A mask depends on the token before it, which the host learns one step late. So as soon as a step's tokens are drawn, a
thread of its own waits for them, advances the answers and prepares the masks of the next step, while that step's
forward pass runs; the runner waits for the masks only before it draws. Grammars are compiled on yet another thread,
before a request enters the scheduler. Nothing here costs requests without a constraint anything.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from perilune.core.constraint import Constraint
from perilune.core.errors import CheckpointError, EngineError
from perilune.core.plan import Work
from perilune.engine.sampler import on_device, to_host
from perilune.ops.mask_logits import mask_logits
from perilune.text.enforcer import Enforcer
from perilune.text.matcher import GrammarError, Vocabulary, Words, forbid


class Session:
    """One request's answer. Touched by one thread at a time: whoever has waited for `job`."""

    def __init__(self, enforcer: Enforcer, words: int) -> None:
        self.enforcer = enforcer
        self.mask: Words = np.zeros(words, np.uint32)  # for output token number `draw`
        self.draw = -1
        self.job: Future[None] | None = None
        self.error: str | None = None

    def prepare(self, draw: int, left: int) -> None:
        """Fills the mask for output token number `draw`, when `left` tokens are left, it included."""
        try:
            self.enforcer.fill(self.mask, left)
        except GrammarError as e:
            self.error = f"the answer cannot go on as its grammar wants: {e}"
        self.draw = draw

    def advance(self, token: int, draw: int, left: int) -> None:
        """Takes output token number `draw`, and prepares for the next one."""
        if self.error is not None:
            return
        try:
            self.enforcer.advance(token)
        except GrammarError as e:
            self.error = f"the answer does not follow its grammar: {e}"
            return
        if left > 1:
            self.prepare(draw + 1, left - 1)


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

    def compile(self, constraint: Constraint, prompt: tuple[int, ...]) -> "Future[Session]":
        """The answer's beginning; the future raises EngineError if it cannot be."""
        return self._compiler.submit(self._compile, constraint, prompt[-1])

    def open(self, rid: int, session: Session) -> None:
        self._sessions[rid] = session

    def drop(self, rid: int) -> None:
        """Forgets a request; unknown ids are ignored."""
        self._sessions.pop(rid, None)

    def close(self) -> None:
        self._sessions.clear()
        self._compiler.shutdown(cancel_futures=True)
        self._worker.shutdown(cancel_futures=True)

    def mask(self, logits: Tensor, work: tuple[Work, ...]) -> Tensor:
        """The logits [S, V] float32 with -inf for what row i's request may not choose; `logits` stays as it is.

        Waits for the masks that are still being worked out, not for the device. A request for which nothing is left
        to choose is not masked: `refusals` has it.
        """
        held = self._held(work)
        if not held:
            return logits
        words = -(-logits.shape[1] // 32)
        masks = np.full((len(held), words), 0xFFFFFFFF, np.uint32)
        for row, (_, w, session) in zip(masks, held):
            if session.job is not None:
                session.job.result()
                session.job = None
            elif session.error is None:
                session.prepare(w.draw, w.left)
            if session.error is not None:
                continue
            assert session.draw == w.draw, f"request {w.rid}: a mask for draw {session.draw} at draw {w.draw}"
            given = session.mask[:words]
            if w.draw < w.params.min_tokens:
                given = given.copy()
                for token in w.params.stop_token_ids:
                    if token < 32 * len(given):
                        forbid(given, token)
            if not given.any():
                session.error = f"min_tokens is {w.params.min_tokens}, but the answer's form is complete before"
                continue
            row[:] = 0
            row[: len(given)] = given
        bits = on_device(masks.view(np.int32), logits.device)
        if len(held) == len(work):
            return mask_logits(logits, bits)
        rows = on_device(np.array([i for i, _, _ in held]), logits.device)
        return logits.index_copy(0, rows, mask_logits(logits.index_select(0, rows), bits))

    def settle(self, tokens: Tensor, work: tuple[Work, ...]) -> Tensor:
        """The tokens [S] int64 to take for those drawn from what `mask` returned last.

        They differ, and the host waits for the device, only near the end of a request's tokens.
        """
        held = self._held(work)
        if not held:
            return tokens
        if any(session.enforcer.tight for _, _, session in held):
            drawn = tokens.tolist()
            for i, w, session in held:
                if session.enforcer.tight and session.error is None:
                    drawn[i] = session.enforcer.settle(drawn[i], w.left)
            tokens = on_device(np.array(drawn), tokens.device)
        host = to_host(tokens)
        arrived = None
        if tokens.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        for i, w, session in held:
            session.job = self._worker.submit(_advance, session, host, i, w, arrived)
        return tokens

    def refusals(self, work: tuple[Work, ...]) -> dict[int, str]:
        """Why requests cannot go on, by rid, after `mask`."""
        return {w.rid: session.error for _, w, session in self._held(work) if session.error is not None}

    def _held(self, work: tuple[Work, ...]) -> list[tuple[int, Work, Session]]:
        if not self._sessions:
            return []
        found = ((i, w, self._sessions.get(w.rid)) for i, w in enumerate(work))
        return [(i, w, session) for i, w, session in found if session is not None]

    def _compile(self, constraint: Constraint, last: int) -> Session:
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            known = self._vocabulary
            opened = last == known.tokenizer.special_id("<think>")
            return Session(Enforcer(known, constraint, opened=opened), known.words)
        except (GrammarError, CheckpointError) as e:
            raise EngineError(f"the constraint cannot be enforced: {e}") from e


def _advance(session: Session, host: Tensor, row: int, work: Work, arrived: "torch.cuda.Event | None") -> None:
    if arrived is not None:
        arrived.synchronize()
    session.advance(int(host[row]), work.draw, work.left)
