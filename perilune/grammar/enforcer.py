"""The token masks of one answer, by which it satisfies its constraint and ends within its token budget.

    OPEN -- <think> --> THINK -- </think> --> START
    START -- text --> TEXT       START, TEXT -- section begin --> SECTION      START -- structured answer --> ANSWER
    SECTION, BETWEEN -- call begin --> HEADER -- argument begin --> ARGUMENTS -- call end --> BETWEEN
    BETWEEN -- section end --> END        TEXT, ANSWER, END -- end token --> DONE

A structured answer that the prompt has begun (Constraint.begun) starts in ANSWER.

A grammar selects the tokens in ANSWER and ARGUMENTS. In other phases all text tokens are allowed, or a few markers.
Control tokens are allowed only where the diagram has them.

A structure that has begun ends within the tokens that are left. A completion is a list of tokens that ends the answer
from here. One more token of the answer makes the shortest completion at most `leap` (Constraint.leap) tokens longer:
1. While more than `_completion_bound` + leap tokens are left, any allowed token is safe, and nothing is searched.
2. With fewer, `_forced` searches a completion. While up to its length + leap are left, `tight` is set: one token (a key
   with a long value) could make every completion too long. `settle` replaces such a token by `_completion[0]`.
3. When only its length is left, `settle` replaces every token by `_completion[0]`, unless the sampled one ends the
   text. The mask still allows other tokens: a result that differs from the sampled one shows that the tokens ran out.
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
        self._thought_tokens = 0  # tokens of the thought
        self._calls = 0
        self._next_calls: dict[int, list[int]] = {}  # cache of `_another_call` by `_calls`
        self._typed = b""  # text of the call header so far, functions.NAME:COUNTER
        self._matcher: Matcher | None = None
        self._text_completion: list[int] = []  # last one found of the matcher's text alone, perhaps some tokens ago
        self._completion: list[int] | None = None  # of the answer from here; None: not searched yet
        self._shortest = False  # whether a full search has found nothing shorter than `_completion`
        self._completion_bound = 0  # upper bound on the tokens of the shortest completion
        self._no_completion = False  # True: none was found for the matcher's text, so the answer may be cut off
        self._rest: list[int] = []  # tokens that must follow, once llguidance has reached its limits
        self._vetted: tuple[int, list[int]] | None = None  # (token that `settle` accepted, the text's completion then)
        # (token, left - len(_completion)) that `settle` has refused
        self._refused: frozenset[tuple[int, int]] = frozenset()
        self.tight = False  # whether the next token has to go through `settle`
        self.imposed: int | None = None  # what `settle` returns unless the sampled token ends the text
        if constraint.begun:
            assert self._answer is not None and self.phase is Phase.START
            if rest := self._answer.begin(constraint.begun):
                raise GrammarError(f"the answer's beginning does not fit it: {rest!r:.80}")
            self._enter(Phase.ANSWER, self._answer)
            self._completion_bound = len(self.shortest())

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
                return self._complete(_find_completion(self._matcher, self._text_completion))

    def fill(self, mask: Words, left: int) -> None:
        """Sets the bits of the tokens that may come next; at most `left` tokens are left, the next one included.

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
        assert self._completion
        imposed = self._completion[0]
        try:
            self._fill_phase(mask, left, forced=True)
        except GrammarError:
            mask[:] = 0
        forbid(mask, imposed)
        self.tight, self.imposed = bool(mask.any()), imposed
        permit(mask, imposed)

    @property
    def fallback(self) -> int:
        """The token with which `settle` replaces one that does not fit; only while `tight`."""
        assert self.tight
        if self.imposed is not None:
            return self.imposed
        assert self._completion
        return self._completion[0]

    def _fill_phase(self, mask: Words, left: int, *, forced: bool = False) -> None:
        """`forced`: in HEADER, allow names that do not fit `left`, because `settle` replaces the token."""
        match self.phase:
            case Phase.OPEN:
                permit(mask, self._think_begin)
            case Phase.THINK:
                budget = self._constraint.thinking_budget
                if budget is None or self._thought_tokens < budget:
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
        completion = self._completion
        assert completion
        if token == completion[0]:
            return token
        matcher = self._matcher or self._answer
        assert matcher is not None
        if self._vocabulary.tokenizer.is_special(token):
            return token  # a marker that ends the text, or that begins a section for which there was room
        if (token, left - len(completion)) in self._refused:  # a search in a deeply nested text takes up to 0.2 s
            return completion[0]
        trial = matcher.copy()
        try:
            fits = trial.advance(token)
        except GrammarError:
            fits = False
        if not fits:
            return completion[0]
        room = left - 1 - (1 if self.phase is Phase.START else len(self._closing()))
        inner = _find_completion(trial, self._text_completion, room)
        if inner is None or len(inner) > room:
            self._refused |= {(token, left - len(completion))}
            return completion[0]
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
        completion, self._completion = self._completion, None
        before = self.phase
        self._step(token)
        if self._vetted is not None and self._vetted[0] == token:
            self._text_completion = self._vetted[1]
        self._vetted = None
        if completion and completion[0] == token:
            self._completion = completion[1:]
            self._completion_bound = len(self._completion)
            if self._matcher is not None:
                self._text_completion = self._completion[: max(len(self._completion) - len(self._closing()), 0)]
            return
        self._shortest, self._refused = False, frozenset()
        if self.phase is before and self._matcher is not None:
            self._completion_bound += max(self._constraint.leap, 1)
        elif self.phase is Phase.ANSWER:  # one token into it
            self._completion_bound = len(self._text_completion) + 1 + max(self._constraint.leap, 1)
        elif self.phase is Phase.HEADER:  # in single bytes: encoding 50 headers takes milliseconds
            sizes = (len(self._header(name)) + len(self._arguments(name)) for name in self._named())
            self._completion_bound = min(sizes) - len(self._typed)
        elif self.phase is not Phase.THINK or before is not Phase.THINK:
            self._completion_bound = len(self.shortest())

    # ---- phases

    def _step(self, token: int) -> None:
        text = not self._vocabulary.tokenizer.is_special(token)
        match self.phase:
            case Phase.OPEN if token == self._think_begin:
                self._enter(Phase.THINK)
            case Phase.THINK if token == self._think_end:
                self._enter(Phase.START)
            case Phase.THINK if text:
                self._thought_tokens += 1
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
        self._text_completion = matcher.from_start if matcher is not None else []
        self._no_completion, self._refused = False, frozenset()

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
        """Whether only the first token of `_completion` may come next. Sets `tight` where `settle` is needed."""
        leap = max(self._constraint.leap, 1)
        if self._no_completion or left > self._completion_bound + leap:
            return False
        if self._completion is None:
            self._completion = self.shortest()
            self._completion_bound = len(self._completion)
        if not self._completion:
            return False
        if left <= len(self._completion) and not self._shortest and self._matcher is not None:
            found = self._matcher.completion()
            if found is not None and len(found) < len(self._text_completion):
                self._completion = self._complete(found)
                self._completion_bound = len(self._completion)
            self._shortest = True
        if left <= len(self._completion):
            return True
        started = self.phase is Phase.START and self._answer is not None
        self.tight = (started or self._matcher is not None) and left <= len(self._completion) + leap
        return False

    def _complete(self, inner: list[int] | None) -> list[int]:
        """The completion of the answer; `inner`: that of the matcher's text, None if there is none."""
        if inner is None:
            self._no_completion = True
            return []
        self._text_completion = inner
        return [*inner, *self._closing()]

    def _closing(self) -> list[int]:
        """The tokens from the end of the matcher's text to the end of the answer."""
        return [self._end] if self.phase is Phase.ANSWER else [self._call_end, self._section_end, self._end]

    def _from_start(self) -> list[int]:
        if self._constraint.text:
            return []
        ways = [[self._section_begin, *self._another_call()]] if self._tools else []
        if self._answer is not None:
            ways.append([*self._answer.from_start, self._end])
        return min(ways, key=len)

    def _another_call(self) -> list[int]:
        if self._calls not in self._next_calls:
            calls = ([self._call_begin, *self._through(name)] for name in self._tools)
            self._next_calls[self._calls] = min(calls, key=len)
        return self._next_calls[self._calls]

    def _through(self, name: str) -> list[int]:
        """Tokens of a shortest call of this tool and of the answer's end, from the place in the call's header."""
        typed = self._typed if self.phase is Phase.HEADER else b""
        return [*self._vocabulary.encode(self._header(name)[len(typed) :]), *self._arguments(name)]

    def _arguments(self, name: str) -> list[int]:
        """Tokens of the shortest arguments for this tool and of the answer's end, after the call's header."""
        return [self._argument_begin, *self._tools[name].from_start, self._call_end, self._section_end, self._end]

    def _header(self, name: str) -> bytes:
        return f"functions.{name}:{self._constraint.first_index + self._calls}".encode()

    def _named(self) -> list[str]:
        """The tools with a header that begins with `_typed`."""
        return [name for name in self._tools if self._header(name).startswith(self._typed)]


def _find_completion(matcher: Matcher, earlier: list[int], room: int | None = None) -> list[int] | None:
    """A completion of the matcher's text: `earlier` adapted, or else a searched one, which takes longer.

    It has more than `room` tokens only if no shorter one was found.
    """
    found = matcher.adapted(earlier, room)
    return matcher.completion(room or 0) if found is None else found
