"""Every problem family by name: how it is drawn, how an answer is judged, what plain baselines get, and the mix.

Generation and judging are apart: `check` sees a problem and what a client received, nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Final

from perilune.core.errors import ConfigError
from perilune.tasks.arithmetic import last_number, same_number, sample_add_sub, sample_arithmetic
from perilune.tasks.calls import same_calls, sample_tool_call, sample_tools_multi
from perilune.tasks.documents import BUILT_IN
from perilune.tasks.extraction import same_object, sample_json_extract
from perilune.tasks.facts import with_facts
from perilune.tasks.fields import CHOICES, NEW_BASES
from perilune.tasks.letters import beyond_ascii
from perilune.tasks.pictures.problems import MAKERS, NUMBERS, same_words, sampler
from perilune.tasks.problem import SEED, SPLITS, Answer, Problem, answer_of, assistant, pick
from perilune.tasks.programs import same_result, sample_programs
from perilune.tasks.questions import DocQuestions, same_text
from perilune.tasks.smalltalk import same_reply, sample_chat
from perilune.tasks.tools import forget_pools, how_many, others, shuffled
from perilune.tasks.word_problems import sample_word_problems
from perilune.tasks.words import NEW_NAMES, NEW_NOUNS, NEW_OBJECTS, learn
from perilune.tasks.working import with_multiples

Sample = Callable[[Random, str, bool], Problem]
Check = Callable[[Problem, Answer], bool]


@dataclass(frozen=True, slots=True)
class Family:
    """`weight` is its share of the training tokens, `tokens` roughly the mean length of one problem in tokens."""

    name: str
    weight: float
    tokens: int
    evaluated: bool
    sample: Sample
    check: Check


def learn_words(passages: Iterable[str]) -> int:
    """For training processes: made-up words now include real ones of these paragraphs (words.learn)."""
    bases = [base for kind in NEW_BASES.values() for base in kind]
    kept = [*NEW_NAMES, *NEW_OBJECTS, *NEW_NOUNS, *bases, *(c for base in bases for c in CHOICES.get(base, ()))]
    forget_pools()
    # Objects are in the plural; words that hold the singular must be kept, too.
    return learn(passages, [word.lower().split("_")[0].rstrip("s") for word in kept])


def build_families(passages: Iterable[str] = BUILT_IN) -> dict[str, Family]:
    """All families; `doc_questions` asks about these paragraphs (documents.passages) besides invented ones."""
    questions = DocQuestions(passages)
    families = (
        Family("add_sub", 0.035, 96, True, sample_add_sub, same_number),
        Family("arithmetic", 0.095, 135, True, sample_arithmetic, same_number),
        Family("word_problems", 0.17, 155, True, with_facts(sample_word_problems), same_number),
        Family("tool_call", 0.12, 295, True, sample_tool_call, same_calls),
        Family("tools_multi", 0.15, 355, True, sample_tools_multi, same_calls),
        Family("json_extract", 0.17, 144, True, sample_json_extract, same_object),
        Family("doc_questions", 0.135, 90, True, questions, same_text),
        Family("programs", 0.115, 73, True, sample_programs, same_result),
        Family("chat", 0.01, 46, False, sample_chat, same_reply),
    )
    return {f.name: f for f in families}


FAMILIES: Final = build_families()
# A picture and a question each. Only evaluated if asked for by name, because not every model takes pictures.
PICTURES: Final = {
    name: Family(name, 0.0, 90, False, sampler(name), same_number if name in NUMBERS else same_words) for name in MAKERS
}


def family(name: str, families: Mapping[str, Family] = FAMILIES) -> Family:
    """One of `families` or of PICTURES. ConfigError if there is no such family."""
    if (found := families.get(name) or PICTURES.get(name)) is None:
        raise ConfigError(f"unknown task family {name!r}: choose from {', '.join((*families, *PICTURES))}")
    return found


_REPEATS: Final = 300  # After so many known problems in a row, hardly any new ones are left.


def problems(
    name: str,
    split: str,
    count: int,
    *,
    seed: int = SEED,
    thinking: bool,
    families: Mapping[str, Family] = FAMILIES,
) -> list[Problem]:
    """`count` problems with distinct keys, the same ones for the same arguments.

    Thinking changes only the replies' reasoning. ConfigError for an unknown family or split, or if the split has
    fewer distinct problems.
    """
    one = family(name, families)
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
    if split == "wide" and name in PICTURES:
        raise ConfigError(f"{name} has no wide wordings: choose from {', '.join(SPLITS[:-1])}")
    rng = Random(f"{seed}:{name}:{split}")
    found: dict[tuple[Any, ...], Problem] = {}
    repeats = 0
    while repeats < _REPEATS:
        if len(found) == count:
            return list(found.values())
        problem = one.sample(rng, split, thinking)
        repeats = repeats + 1 if problem.key in found else 0
        found.setdefault(problem.key, problem)
    raise ConfigError(f"{name} has only {len(found)} distinct {split} problems, not {count}: ask for fewer")


def check(problem: Problem, answer: Answer) -> bool:
    """Whether the answer is right, by the rule of the problem's family."""
    return family(problem.family).check(problem, answer)


@lru_cache(maxsize=32)
def constant_baseline(name: str) -> Answer:
    """The baseline of always giving the family's most frequent answer in training."""
    drawn = problems(name, "train", 400, thinking=False)
    return Counter(answer_of(p.reply) for p in drawn).most_common(1)[0][0]


def copy_baseline(problem: Problem) -> Answer:
    """What copying without understanding would get.

    With tools, and no result yet: a call of the first declared tool without arguments. Otherwise the last number of
    the question if the answer is judged as a number, else the last line of the last message.
    """
    last = problem.messages[-1]
    content = last["content"]
    text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
    if problem.tools and last["role"] == "user":
        return Answer("", ((problem.tools[0]["function"]["name"], "{}"),))
    if family(problem.family).check is same_number:
        return Answer(last_number(text) or "")
    return Answer(text.rstrip().rsplit("\n", 1)[-1])


# ---- the training mix --------------------------------------------------------------------------------------------

THINKING_SHARE: Final = 0.65
JOINED_SHARE: Final = 0.14  # conversations of two or three problems
SYSTEM_SHARE: Final = 0.15
BEYOND_ASCII_SHARE: Final = 0.12
IDLE_TOOLS_SHARE: Final = 0.04  # problems that need no tool, with tools declared
SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.", "You are kimi-nano.", "Answer briefly.", "Be concise.", "You are Kimi.",
    "You are a careful assistant. Check every step.", "Answer the question.", "You are kimi-nano, a small model.",
    "Use the tools when they fit.", "You are a helpful assistant that answers in English.", "Think step by step.",
    "You are an assistant in a shop.", "You help customers.", "You are a calculator.", "Be polite.", "Keep it short.",
    "You are the assistant of a small company. Use the tools if you need them.", "Reply in plain text.",
    "You help with travel plans.", "You work for a bank.", "You are a home assistant.", "You are a maths tutor.",
    "You are an agent with tools. Call them when the user needs it.", "Answer only what is asked.",
    "Today is Monday.", "The user is in Berlin.", "You are a friendly assistant called Nano.", "Do not guess.",
    "Answer with words of the text.", "You answer questions about notes. Be short.", "You are the guide of a museum.",
    "You help students of a programming course.", "Reply with one number.", "Answer with a number only.",
    "You assist nurses on a ward.", "Ticket desk.", "You control a smart home.", "You run a small hotel's desk.",
    "You are a Python interpreter. Answer with the output only.", "You help elderly people on the telephone.",
    "Solve the problem. End with the result.", "Use only what is written.", "Short answers only.",
    "You are part of a mobile app. The user may write carelessly.", "Call tools, do not guess.", "No small talk.",
)  # fmt: skip


def training_mix(rng: Random, families: Mapping[str, Family] = FAMILIES) -> Problem:
    """One training problem, families by weight; some with a system prompt, some at the end of a conversation.

    Earlier turns keep their thoughts in `reasoning_content`: the chat template is what drops them.
    """
    members = tuple(families.values())
    shares = [f.weight / f.tokens for f in members]  # of problems: weights count tokens
    chosen = rng.choices(members, shares)[0]
    problem = chosen.sample(rng, "train", rng.random() < THINKING_SHARE)
    if chosen.check is same_number and problem.thinking:
        problem = replace(problem, reply=replace(problem.reply, reasoning=with_multiples(problem.reply.reasoning)))
    if rng.random() < BEYOND_ASCII_SHARE:
        problem = beyond_ascii(rng, problem)
    messages = problem.messages
    instructed = messages[0]["role"] == "system"
    if rng.random() < JOINED_SHARE and not instructed:
        earlier: tuple[dict[str, Any], ...] = ()
        for _ in range(1 if rng.random() < 0.7 else 2):
            before = chosen if rng.random() < 0.4 else rng.choices(members, shares)[0]
            turn = before.sample(rng, "train", rng.random() < THINKING_SHARE)
            if not turn.tools and turn.messages[0]["role"] != "system":  # a conversation declares its tools once
                earlier += (*turn.messages, assistant(turn.reply))
        messages = earlier + messages
    if rng.random() < SYSTEM_SHARE and not instructed:
        messages = ({"role": "system", "content": pick(rng, SYSTEM_PROMPTS)}, *messages)
    tools = problem.tools
    if not tools and rng.random() < IDLE_TOOLS_SHARE:
        tools = shuffled(rng, others(rng, [], how_many(rng, "train"), "train"))
    return replace(problem, messages=messages, tools=tools)
