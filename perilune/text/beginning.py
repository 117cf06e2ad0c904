"""Answers that begin in the prompt: the client's last message is the assistant's and is to be continued.

Four spellings ask for it: `partial: true` in the message (Kimi), `prefix: true` in it (DeepSeek), the request field
`continue_final_message` (vLLM), or no field at all. OpenAI gives a last message of the assistant's no meaning; here it
is continued, as at Anthropic: a model that begins anew after an unfinished message answers another question.
`continue_final_message: false` or `partial: false` asks for a new message.

The answer holds only what is new: bounds on tokens, the thinking budget, stop strings and log-probabilities concern
only new text, and the beginning counts as prompt. A form (a schema, a choice) applies to both together. The beginning
is encoded by itself, control tokens disabled: if it ends inside a word or in a space, the last token boundary is one
that the model rarely saw in training. A whole word without a trailing space is the safest end.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.core.errors import RequestError
from perilune.text.family import Member
from perilune.text.history import Turn
from perilune.text.tools import show


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The part of the answer that is in the prompt.

    given      the client's last message is the beginning; False: the answer is a new message
    thinks     a thought is still to come, or goes on
    opened     the prompt ends inside the thought
    reasoning  text of the thought so far
    content    text of the answer so far; the thought, if there is one, is closed
    """

    given: bool
    thinks: bool
    opened: bool
    name: str = "assistant"
    reasoning: str = ""
    content: str = ""


def beginning(
    member: Member,
    messages: Sequence[Mapping[str, Any]],
    turn: Turn,
    *,
    thinking: bool,
    continued: bool | None,
    default: bool,
) -> Beginning:
    """How the answer to `messages` begins. `turn`: the last of them, as history.read_turns reads it.

    `thinking`: the model will think unless the thought is over. `continued`: whether the request's fields ask to
    continue the last message; None: the message's own field decides, or, for an assistant's message without one,
    `default`. RequestError for a message that cannot be continued.
    """
    last = f"messages[{len(messages) - 1}]"
    if not _wanted(messages, last, continued, default):
        return Beginning(given=False, thinks=thinking, opened=thinking and member.opens_thought)
    if messages[-1].get("role") != "assistant":
        raise RequestError(
            "the last message must be the assistant's to be continued",
            param="continue_final_message" if continued else f"{last}.partial",
        )
    if messages[-1].get("tool_calls"):
        raise RequestError(
            f"{last}.tool_calls: a message with tool calls cannot be continued: answer every call with a tool message",
            param=f"{last}.tool_calls",
        )
    if any(not isinstance(part, str) for part in turn.parts):
        raise RequestError(
            f"{last}.content: a message with pictures cannot be continued: end the messages with the user's",
            param=f"{last}.content",
        )
    if member.thinking == "never":
        if turn.reasoning and not turn.content:
            raise _no_thought(f"{member.name} does not think")
        return Beginning(given=True, thinks=False, opened=False, name=turn.name, content=turn.content)
    return _of_thinker(member, turn, thinking)


def _of_thinker(member: Member, turn: Turn, thinking: bool) -> Beginning:
    apart = turn.with_thought_apart()
    if apart.content or (apart is not turn and "</think>" in turn.content):
        reasoning = apart.reasoning if thinking else ""  # else dropped, as in earlier turns
        return Beginning(
            given=True, thinks=False, opened=False, name=turn.name, reasoning=reasoning, content=apart.content
        )
    if apart.reasoning and not thinking:
        raise _no_thought("thinking is switched off")
    opened = thinking and (member.opens_thought or bool(apart.reasoning))
    return Beginning(given=True, thinks=thinking, opened=opened, name=turn.name, reasoning=apart.reasoning)


def _wanted(messages: Sequence[Mapping[str, Any]], last: str, continued: bool | None, default: bool) -> bool:
    for i, message in enumerate(messages):
        for field in ("partial", "prefix"):
            where, said = f"messages[{i}].{field}", message.get(field)
            if not isinstance(said, bool | None):
                raise RequestError(f"{where} must be true or false, not {show(said)}", param=where)
            if said and i < len(messages) - 1:
                raise RequestError(f"{where}: only the last message can be continued", param=where)
            if said is not None and i == len(messages) - 1:
                if continued is not None and continued is not said:
                    raise RequestError(
                        f"{where} and the request's fields contradict each other about continuing {last}: send one",
                        param=where,
                    )
                continued = said
    return default and messages[-1].get("role") == "assistant" if continued is None else continued


def _no_thought(why: str) -> RequestError:
    return RequestError(
        f"the last message is a thought and no answer yet, but {why}: send the beginning of the answer itself",
        param="messages",
    )


_JSON_PIECE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[ \t\n\r]+|[^" \t\n\r]+', re.DOTALL)
_PUNCTUATION = '{}[],:"'


def compact(text: str) -> str:
    """The beginning of a JSON text without white space outside of strings, for grammars of compact JSON.

    White space is kept between two numbers or words, and after one at the end.
    """
    pieces = _JSON_PIECE.findall(text)
    made: list[str] = []
    for i, piece in enumerate(pieces):
        before = made[-1][-1] if made else "{"
        after = pieces[i + 1][0] if i + 1 < len(pieces) else ""
        separates = before not in _PUNCTUATION and (not after or after not in _PUNCTUATION)
        if not piece.isspace() or separates:
            made.append(piece)
    return "".join(made)
