"""The token masks of one answer, by which it satisfies its constraint and ends within its token budget.

    OPEN -- <think> --> THINK -- </think> --> START
    START -- text --> TEXT       START, TEXT -- section begin --> SECTION      START -- structured answer --> ANSWER
    SECTION, BETWEEN -- call begin --> HEADER -- argument begin --> ARGUMENTS -- call end --> BETWEEN
    BETWEEN -- section end --> END        TEXT, ANSWER, END -- end token --> DONE

A structured answer that the prompt has begun (Constraint.begun) starts in ANSWER.

A grammar selects the tokens in ANSWER and ARGUMENTS. In other phases all text tokens are allowed, or a few markers.
Control tokens are allowed only where the diagram has them.

A structure that has begun ends within the tokens that are left. A completion (`_way`) is a list of tokens that ends the
answer from here:
1. While more than `_most` + leap tokens are left, any allowed token is safe, and nothing is searched.
2. Below that, `_forced` searches a completion. Up to leap tokens above its length, `tight` is set: one token (a key
   with a long value) could make every completion too long. `settle` replaces such a token by `_way[0]`.
3. At the completion's length, `settle` replaces every token by `_way[0]`, unless the sampled one ends the text.
   Replacing instead of masking shows that the tokens ran out: the result differs from the sampled token.
If llguidance reaches its limits, the structure is completed at once (`_rest`).
"""

import copy
import enum

from perilune.core.constraint import Constraint
from perilune.grammar.matcher import GrammarError, Matcher, Vocabulary, Words, forbid, permit


class Phase(enum.Enum):
    OPEN = enum.auto()
    THINK = enum.auto()
    START = enum.auto()
    TEXT = enum.auto()
    SECTION = enum.auto()
    HEADER = enum.auto()
    ARGUMENTS = enum.auto()
    BETWEEN = enum.auto()
    ANSWER = enum.auto()
    END = enum.auto()
    DONE = enum.auto()


class Enforcer:
    """One answer. One thread at a time.

    `opened`: the prompt ends inside <think>. Raises GrammarError if a grammar cannot be compiled and CheckpointError
    if the vocabulary lacks a marker that the constraint needs.
    """

    def __init__(self, vocabulary: Vocabulary, constraint: Constraint, *, opened: bool) -> None:
        tokenizer = vocabulary.tokenizer
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._end = vocabulary.end
        if constraint.thinking:
            self._think_begin = tokenizer.special("<think>")
            self._think_end = tokenizer.special("</think>")
        self._tools: dict[str, Matcher] = {}
        if constraint.tools:
            self._section_begin = tokenizer.special("<|tool_calls_section_begin|>")
            self._section_end = tokenizer.special("<|tool_calls_section_end|>")
            self._call_begin = tokenizer.special("<|tool_call_begin|>")
            self._argument_begin = tokenizer.special("<|tool_call_argument_begin|>")
            self._call_end = tokenizer.special("<|tool_call_end|>")
            self._tools = {name: vocabulary.compile(grammar, constraint.group) for name, grammar in constraint.tools}
        answer, group = constraint.answer, constraint.group
        self._answer = None if answer is None else vocabulary.compile(answer, group)
        assert constraint.text or self._tools or self._answer, "a constraint under which nothing can be said"
        self.phase = (Phase.THINK if opened else Phase.OPEN) if constraint.thinking else Phase.START
        self._thought = 0  # tokens of the thought
        self._calls = 0
        self._typed = b""  # text of the header so far
        self._matcher: Matcher | None = None
        self._inner: list[int] = []  # the completion of the matcher's text that was found last
        self._way: list[int] | None = None  # a completion of the answer from here
        self._shortest = False  # whether a full search has found nothing shorter than `_way`
        self._most = 0  # the shortest completion from here has at most that many tokens
        self._lost = False  # no completion of the matcher's text was found: it may be cut off
        self._rest: list[int] = []  # tokens that must follow: llguidance has reached its limits
        self._vetted: tuple[int, list[int]] | None = None
        self._refused: frozenset[tuple[int, int]] = frozenset()  # (token, left - len(_way)) that `settle` refused
        self.tight = False  # the next token has to go through `settle`
        self.imposed: int | None = None  # `settle` returns it unless the sampled token ends the text
        if constraint.begun:
            assert self._answer is not None and self.phase is Phase.START
            if rest := self._answer.begin(constraint.begun):
                raise GrammarError(f"the answer's beginning does not fit it: {rest!r:.80}")
            self._enter(Phase.ANSWER, self._answer)
            self._most = len(self.shortest())

    def copy(self) -> "Enforcer":
        """An independent copy at the same place of the answer."""
        made = copy.copy(self)
        if self._matcher is not None:
            made._matcher = self._matcher.copy()
        return made

    def shortest(self) -> list[int]:
        """A completion of the answer from here; empty where the answer may be cut off anywhere."""
        match self.phase:
            case Phase.OPEN | Phase.THINK:
                rest = self._from_start()
                markers = [self._think_begin, self._think_end] if self.phase is Phase.OPEN else [self._think_end]
                return [*markers, *rest] if rest else []
            case Phase.START:
                return self._from_start()
            case Phase.TEXT | Phase.DONE:
                return []
            case Phase.SECTION:
                return self._another_call()
            case Phase.HEADER:
                return min((self._through(name) for name in self._named()), key=len)
            case Phase.BETWEEN:
                return [self._section_end, self._end]
            case Phase.END:
                return [self._end]
            case Phase.ARGUMENTS | Phase.ANSWER:
                assert self._matcher is not None
                return self._complete(_completion(self._matcher, self._inner))

    def fill(self, mask: Words, left: int) -> None:
        """Writes the tokens that may come next, when `left` tokens at most are left for the answer, this one included.

        Raises GrammarError if nothing may come next.
        """
        try:
            self._fill(mask, left)
        except GrammarError:
            if self._matcher is None or (found := self._matcher.escape()) is None:
                raise
            self._rest = [*found, *self._closing()]
            self._fill(mask, left)

    def _fill(self, mask: Words, left: int) -> None:
        mask[:] = 0
        self.tight, self.imposed = False, None
        if self._rest:
            permit(mask, self._rest[0])
            return
        if not self._forced(left):
            self._fill_phase(mask, left)
            if not mask.any():
                raise GrammarError("nothing may come next")
            return
        assert self._way
        imposed = self._way[0]
        try:
            self._fill_phase(mask, left, forced=True)
        except GrammarError:
            mask[:] = 0
        forbid(mask, imposed)
        self.tight, self.imposed = bool(mask.any()), imposed
        permit(mask, imposed)

    @property
    def fallback(self) -> int:
        """The token by which `settle` replaces an unusable one; only while `tight`."""
        assert self.tight
        if self.imposed is not None:
            return self.imposed
        assert self._way
        return self._way[0]

    def _fill_phase(self, mask: Words, left: int, *, forced: bool = False) -> None:
        """`forced`: in HEADER, allow names that do not fit `left`, because `settle` replaces the token."""
        match self.phase:
            case Phase.OPEN:
                permit(mask, self._think_begin)
            case Phase.THINK:
                budget = self._constraint.thinking_budget
                if budget is None or self._thought < budget:
                    mask |= self._vocabulary.plain
                permit(mask, self._think_end)
            case Phase.START | Phase.TEXT:
                self._fill_start(mask, left)
            case Phase.SECTION:
                permit(mask, self._call_begin)
            case Phase.HEADER:
                for name in self._named():
                    if (rest := self._header(name)[len(self._typed) :]) == b"":
                        permit(mask, self._argument_begin)
                    else:
                        after = left - 1 - len(self._arguments(name))
                        for token in self._vocabulary.prefixes(rest):
                            behind = rest[len(self._vocabulary.tokenizer.token_bytes(token)) :]
                            if forced or len(behind) <= after or len(self._vocabulary.encode(behind)) <= after:
                                permit(mask, token)
            case Phase.BETWEEN:
                permit(mask, self._section_end)
                if self._constraint.parallel:
                    permit(mask, self._call_begin)
                    if len(self._another_call()) > left:
                        self.tight, self.imposed = True, self._section_end
            case Phase.ARGUMENTS | Phase.ANSWER:
                assert self._matcher is not None
                self._matcher.fill(mask)
                if self._matcher.complete:
                    permit(mask, self._closing()[0])
            case Phase.END | Phase.DONE:
                permit(mask, self._end)

    def settle(self, token: int, left: int) -> int:
        """The sampled token, or its replacement if the answer could not end within `left` tokens, `token` included."""
        assert self.tight
        if self.imposed is not None:
            return token if self._finishes(token, left) else self.imposed
        way = self._way
        assert way
        if token == way[0]:
            return token
        matcher = self._matcher or self._answer
        assert matcher is not None
        if self._vocabulary.tokenizer.is_special(token):
            return token  # a marker that ends the text, or that begins a section for which there was room
        if (token, left - len(way)) in self._refused:  # a search in a deeply nested text takes up to 0.2 s
            return way[0]
        trial = matcher.copy()
        try:
            fits = trial.advance(token)
        except GrammarError:
            fits = False
        if not fits:
            return way[0]
        room = left - 1 - (1 if self.phase is Phase.START else len(self._closing()))
        inner = _completion(trial, self._inner, room)
        if inner is None or len(inner) > room:
            self._refused |= {(token, left - len(way))}
            return way[0]
        self._vetted = (token, inner)
        return token

    def _finishes(self, token: int, left: int) -> bool:
        """Whether the answer's text may end with `token`, and what follows the text fits too."""
        matcher = self._matcher or (self._answer if self.phase is Phase.START else None)
        if matcher is None or self._vocabulary.tokenizer.is_special(token):
            return False
        trial = matcher.copy()
        try:
            ends = trial.advance(token) and trial.complete
        except GrammarError:
            return False
        return ends and (1 if self.phase is Phase.START else len(self._closing())) < left

    def advance(self, token: int) -> None:
        """Adds the token to the answer. Raises GrammarError if it may not come here."""
        if self._rest:
            if token != self._rest[0]:
                raise self._misfit(token)
            self._rest = self._rest[1:]
            if not self._rest:
                self._enter(Phase.DONE)
            return
        way, self._way = self._way, None
        before = self.phase
        self._step(token)
        if self._vetted is not None and self._vetted[0] == token:
            self._inner = self._vetted[1]
        self._vetted = None
        if way and way[0] == token:
            self._way = way[1:]
            self._most = len(self._way)
            if self._matcher is not None:
                self._inner = self._way[: max(len(self._way) - len(self._closing()), 0)]
            return
        self._shortest, self._refused = False, frozenset()
        if self.phase is before and self._matcher is not None:
            self._most += max(self._constraint.leap, 1)
        elif self.phase is Phase.ANSWER:  # one token into it
            self._most = len(self._inner) + 1 + max(self._constraint.leap, 1)
        elif self.phase is not Phase.THINK or before is not Phase.THINK:
            self._most = len(self.shortest())

    # ---- phases

    def _step(self, token: int) -> None:
        text = not self._vocabulary.tokenizer.is_special(token)
        match self.phase:
            case Phase.OPEN if token == self._think_begin:
                self._enter(Phase.THINK)
            case Phase.THINK if token == self._think_end:
                self._enter(Phase.START)
            case Phase.THINK if text:
                self._thought += 1
            case Phase.START | Phase.TEXT if self._tools and token == self._section_begin:
                self._enter(Phase.SECTION)
            case Phase.START if self._answer is not None and text:
                self._enter(Phase.ANSWER, self._answer.copy())
                self._step(token)
            case Phase.START | Phase.TEXT if self._constraint.text and text:
                self.phase = Phase.TEXT
            case Phase.START | Phase.TEXT if self._constraint.text and token == self._end:
                self._enter(Phase.DONE)
            case Phase.SECTION | Phase.BETWEEN if token == self._call_begin:
                self._typed = b""
                self._enter(Phase.HEADER)
            case Phase.HEADER if text:
                self._typed += self._vocabulary.tokenizer.token_bytes(token)
                if not self._named():
                    raise self._misfit(token)
            case Phase.HEADER if token == self._argument_begin:
                (name,) = (n for n in self._named() if self._header(n) == self._typed)
                self._enter(Phase.ARGUMENTS, self._tools[name].copy())
            case Phase.ARGUMENTS | Phase.ANSWER if text:
                assert self._matcher is not None
                if not self._matcher.advance(token):
                    raise self._misfit(token)
            case Phase.ARGUMENTS if token == self._call_end and self._matcher is not None and self._matcher.complete:
                self._calls += 1
                self._enter(Phase.BETWEEN)
            case Phase.ANSWER if token == self._end and self._matcher is not None and self._matcher.complete:
                self._enter(Phase.DONE)
            case Phase.BETWEEN if token == self._section_end:
                self._enter(Phase.END)
            case Phase.END | Phase.DONE if token == self._end:
                self._enter(Phase.DONE)
            case _:
                raise self._misfit(token)

    def _enter(self, phase: Phase, matcher: Matcher | None = None) -> None:
        self.phase = phase
        self._matcher = matcher
        self._inner = matcher.from_start if matcher is not None else []
        self._lost, self._refused = False, frozenset()

    def _misfit(self, token: int) -> GrammarError:
        return GrammarError(f"token {token} may not come here ({self.phase.name.lower()})")

    def _fill_start(self, mask: Words, left: int) -> None:
        if self._tools and 1 + len(self._another_call()) <= left:
            permit(mask, self._section_begin)
        if self._answer is not None and len(self._answer.from_start) < left:
            possible = self._vocabulary.plain.copy()
            self._answer.fill(possible)
            mask |= possible
            if self._answer.complete:
                permit(mask, self._end)
        if self._constraint.text:
            mask |= self._vocabulary.plain
            permit(mask, self._end)

    # ---- ends

    def _forced(self, left: int) -> bool:
        """Whether only the first token of `_way` may come next. Sets `tight` where `settle` is needed."""
        leap = max(self._constraint.leap, 1)
        if self._lost or left > self._most + leap:
            return False
        if self._way is None:
            self._way = self.shortest()
            self._most = len(self._way)
        if not self._way:
            return False
        if left <= len(self._way) and not self._shortest and self._matcher is not None:
            found = self._matcher.completion()
            if found is not None and len(found) < len(self._inner):
                self._way = self._complete(found)
                self._most = len(self._way)
            self._shortest = True
        if left <= len(self._way):
            return True
        started = self.phase is Phase.START and self._answer is not None
        self.tight = (started or self._matcher is not None) and left <= len(self._way) + leap
        return False

    def _complete(self, inner: list[int] | None) -> list[int]:
        """The completion of the answer; `inner`: that of the matcher's text, None if there is none."""
        if inner is None:
            self._lost = True
            return []
        self._inner = inner
        return [*inner, *self._closing()]

    def _closing(self) -> list[int]:
        """The tokens after the matcher's text."""
        return [self._end] if self.phase is Phase.ANSWER else [self._call_end, self._section_end, self._end]

    def _from_start(self) -> list[int]:
        if self._constraint.text:
            return []
        ways = [[self._section_begin, *self._another_call()]] if self._tools else []
        if self._answer is not None:
            ways.append([*self._answer.from_start, self._end])
        return min(ways, key=len)

    def _another_call(self) -> list[int]:
        calls = ([self._call_begin, *self._through(name)] for name in self._tools)
        return min(calls, key=len)

    def _through(self, name: str) -> list[int]:
        """Tokens from inside a header, or its beginning, through a call of this tool to the end."""
        typed = self._typed if self.phase is Phase.HEADER else b""
        return [*self._vocabulary.encode(self._header(name)[len(typed) :]), *self._arguments(name)]

    def _arguments(self, name: str) -> list[int]:
        """Tokens after a header, through the call to the end."""
        return [self._argument_begin, *self._tools[name].from_start, self._call_end, self._section_end, self._end]

    def _header(self, name: str) -> bytes:
        return f"functions.{name}:{self._constraint.first_index + self._calls}".encode()

    def _named(self) -> list[str]:
        """The tools with a header that begins with `_typed`."""
        return [name for name in self._tools if self._header(name).startswith(self._typed)]


def _completion(matcher: Matcher, earlier: list[int], room: int | None = None) -> list[int] | None:
    """A completion of the matcher's text: `earlier` adapted, or else a searched one, which takes longer.

    It has more than `room` tokens only if no shorter one was found.
    """
    found = matcher.adapted(earlier, room)
    return matcher.completion(room or 0) if found is None else found
