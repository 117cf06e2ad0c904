"""Which tokens may come next in an answer: by its form (a grammar: enforcer.py), allowed_token_ids and bad words."""

import copy
from collections import defaultdict

import numpy as np

from perilune.core.sampling import SamplingParams
from perilune.grammar.enforcer import Enforcer
from perilune.grammar.matcher import GrammarError, Words, forbid


class NoTokenLeft(GrammarError):
    """The request's own rules exclude every token; the text says which, in one line."""


class TokenRules:
    """allowed_token_ids and bad_word_ids of a request, which do not change while it runs.

    `words`: 32-bit words of a mask. A bad word of one token is forbidden everywhere, so it is part of the fixed mask.
    """

    def __init__(self, params: SamplingParams, words: int) -> None:
        self._fixed: Words = np.full(words, 0xFFFFFFFF, np.uint32)
        if params.allowed_token_ids is not None:
            assert isinstance(params.allowed_token_ids, bytes)
            self._fixed = np.frombuffer(params.allowed_token_ids.ljust(4 * words, b"\0")[: 4 * words], np.uint32).copy()
        self._last: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # last ids, by the ids before them
        for *before, last in params.bad_word_ids:
            if before:
                self._last[tuple(before)].append(last)
            else:
                forbid(self._fixed, last)
        self._lengths = sorted({len(before) for before in self._last})

    @property
    def reach(self) -> int:
        """How many of the last output tokens `apply` and `permits` need."""
        return self._lengths[-1] if self._lengths else 0

    def apply(self, mask: Words, tail: tuple[int, ...]) -> None:
        """Clears the bits of tokens that may not follow `tail`: the last `reach` output tokens, or all if fewer."""
        mask &= self._fixed
        for length in self._lengths:
            if length <= len(tail):
                for token in self._last.get(tail[len(tail) - length :], ()):
                    forbid(mask, token)

    def permits(self, token: int, tail: tuple[int, ...]) -> bool:
        return allowed(self._fixed, token) and not any(
            token in self._last.get(tail[len(tail) - n :], ()) for n in self._lengths if n <= len(tail)
        )


class Answer:
    """One unfinished answer. Used by one thread at a time.

    `tight`: so few tokens are left that `settle` must choose the next one, or the form may stay incomplete.
    """

    def __init__(self, enforcer: Enforcer | None, rules: TokenRules | None) -> None:
        assert enforcer is not None or rules is not None
        self.closed = False  # `settle` replaced a sampled token, because few tokens were left
        self._enforcer = enforcer
        self._rules = rules
        self._tail: tuple[int, ...] = ()

    def copy(self) -> "Answer":
        """A copy that can go on with other tokens."""
        made = copy.copy(self)
        if self._enforcer is not None:
            made._enforcer = self._enforcer.copy()
        return made

    @property
    def formed(self) -> bool:
        """Whether a grammar constrains the answer."""
        return self._enforcer is not None

    @property
    def tight(self) -> bool:
        return self._enforcer is not None and self._enforcer.tight

    @property
    def safe(self) -> bool:
        """Whether the token that `settle` would take instead of the sampled one is allowed."""
        if self._enforcer is None or self._rules is None or not self._enforcer.tight:
            return True
        return self._rules.permits(self._enforcer.fallback, self._tail)

    def fill(self, mask: Words, left: int) -> None:
        """Sets the bits of the tokens that may come next; `left` as in Enforcer.fill. GrammarError if none may."""
        if self._enforcer is None:
            mask[:] = 0xFFFFFFFF
        else:
            self._enforcer.fill(mask, left)
        if self._rules is None:
            return
        self._rules.apply(mask, self._tail)
        if not mask.any():
            form = " that the answer's form allows" if self.formed else ""
            raise NoTokenLeft(f"allowed_token_ids and bad_words leave no token{form}")
        if self._enforcer is not None and self._enforcer.imposed is not None and not self.safe:
            raise self._stuck()

    def settle(self, token: int, left: int) -> int:
        """The token to take instead of the sampled `token`, so that the answer's form is complete within `left` tokens.
        Raises GrammarError if bad words or allowed_token_ids forbid it."""
        assert self._enforcer is not None
        taken = self._enforcer.settle(token, left)
        if taken != token:
            if not self.safe:
                raise self._stuck()
            self.closed = True
        return taken

    def advance(self, token: int) -> None:
        """Appends a token to the answer. GrammarError if the form forbids it."""
        if self._enforcer is not None:
            self._enforcer.advance(token)
        if self._rules is not None and self._rules.reach:
            self._tail = (*self._tail, token)[-self._rules.reach :]

    @staticmethod
    def _stuck() -> NoTokenLeft:
        return NoTokenLeft(
            "allowed_token_ids or bad_words forbid the token with which the answer would end within max_tokens:"
            " raise max_tokens or relax them"
        )


def allowed(mask: Words, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token >> 5] >> np.uint32(token & 31) & 1)
