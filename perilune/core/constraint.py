"""What the tokens of one answer must look like: made by grammar/constrain.py, enforced by engine/masks.py."""

from dataclasses import dataclass

from perilune.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Constraint:
    """The shape of one answer, in plain values that travel as msgpack.

    thinking         the answer begins with a thought, which only `</think>` ends
    thinking_budget  tokens of the thought after which only `</think>` is allowed; None: no bound
    text             free text may be the answer, or come before tool calls
    tools            (name, grammar of the arguments) of the tools that may be called; none: no tool can be called
    parallel         more than one call may be made
    first_index      counter of the answer's first call, `functions.NAME:COUNTER`
    answer           grammar of a structured answer; None if there is none to give
    begun            the part of the structured answer that the prompt already holds; no thought is expected then
    least            tokens that the shortest answer takes, its end token included; 0 where any length will do
    leap             most bytes by which one more token can lengthen the shortest completion of an argument or answer
    param            the request field that the error names when `least` does not fit
    group            requests of one group share compiled grammars; other groups cannot learn of them by timing

    The grammars are llguidance's, in text form. Where tools and `answer` are both there, the model chooses.
    """

    thinking: bool = False
    thinking_budget: int | None = None
    text: bool = True
    tools: tuple[tuple[str, str], ...] = ()
    parallel: bool = True
    first_index: int = 0
    answer: str | None = None
    begun: str = ""
    least: int = 0
    leap: int = 0
    param: str | None = None
    group: str = ""

    def check_room(self, room: int) -> None:
        """Raises RequestError unless the shortest answer fits `room` tokens (max_tokens, or what the context holds)."""
        if room < self.least:
            raise RequestError(
                f"max_tokens too small for {self.param or 'this answer'}: {room} tokens are left, and the shortest"
                f" answer needs at least {self.least}",
                param="max_tokens",
            )
