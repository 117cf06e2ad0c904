"""Questions that a paragraph in the prompt answers, by copying: the family `doc_questions`.

A paragraph belongs to one split by its hash. Structural problems word the question anew.

A thought about a paragraph repeats the question, then has the answer and the sentence that it is from. A model that
wrote the sentence first chose a wrong one more often (70 % right against 86 % without a thought): where a
sentence begins, its later words are not yet known. One that began with the answer took the first of several like
things ("the red bike is Ann's, the blue one Bo's"). Short texts (briefs.py) have thoughts of `words of the question:
answer`, without sentences.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from random import Random
from typing import Any, Final

from perilune.tasks.composed.briefs import brief, known
from perilune.tasks.composed.paragraphs import paragraph
from perilune.tasks.documents import BUILT_IN, invented, passage_key, passage_split
from perilune.tasks.problem import SPLITS, Answer, Problem, Reply, belongs, pick, plain, user, widely
from perilune.tasks.records import question as ask
from perilune.tasks.records import record
from perilune.tasks.wordings import careless, lined, phrase, small

Asked = tuple[tuple[Any, ...], str, str, str]  # what the question is about, question, trace, answer
Asker = Callable[[Random, str, bool], Asked | None]  # None: this kind of question does not fit the paragraph

_HEAD: Final = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)")
_DEFAULT: Final = re.compile(r"(\w+)=('[^']*'|[^,()\s]+)(?=,|$)")
_ADDED: Final = re.compile(r"Added in version (\d+(?:\.\d+)*)")
_WORD: Final = re.compile(r"[\w.'/-]*\w")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?]) (?=[A-Z])")
_SENTENCES: Final = re.compile(r"(?<=[.!?])(?<![MD][rs]\.) (?=[A-Z])|\n+")

PROMPTS: Final = (
    "{p}\n\n{q}", "{p}\n\n{q}", "{p}\n\nQuestion: {q}", "Read this:\n{p}\n\n{q}", "{q}\n\n{p}",
    "Text:\n{p}\n\nQuestion: {q}", "Answer from the text.\n\n{p}\n\n{q}", "Documentation:\n{p}\n\n{q}",
    "\"{p}\"\n\n{q}",
)  # fmt: skip
_MORE_PROMPTS: Final = (
    "{p} {q}", "{p}\n{q}", "{q}\n{p}", "{q} {p}", "Here is a text: {p}\n\n{q}", "{p}\n\nQ: {q}\nA:",
    "I read this: \"{p}\" {q}", "Text: {p}\nQuestion: {q}\nAnswer:", "{q}\n\nText: {p}",
    "Based on the text, {q}\n\n{p}", "According to this paragraph: {p}\n\n{q}", "{p}\n\nMy question: {q}",
    "Someone wrote:\n{p}\n\n{q}", "From the mail below: {q}\n\n{p}", "{p}\n---\n{q}", "Context: {p}\n\nQuestion: {q}",
    "{q} Here's the text: {p}", "Please read: {p}\n\nNow tell me: {q}", "Answer with a few words. {p} {q}",
    "Use only this text.\n\n{p}\n\n{q}", "Paragraph:\n{p}\n\n{q} Answer briefly.", "{p}\n\n{q} Only the answer please.",
    "> {p}\n\n{q}", "I got this mail: '{p}' {q}", "So my landlord wrote: {p}\n\n{q}",
    "read this and answer: \"{p}\" {q}", "{q} Here's the article:\n\n{p}", "{p}\n\nBased on the text above, {q}",
    "Read this and answer the question with a short phrase from the text.\n\n{p}\n\n{q}", "Passage:\n{p}\n\n{q}",
)  # fmt: skip
_FORMS: Final = lined("""
signature: What is the signature of {x}?|How is {x} called?|Give the signature of {x}.|Which arguments does {x} take?
signature new: Copy the signature of {x}.|What signature does {x} have?
default: What is the default of {y} in {x}?|Which default value does {y} have?|What is the default value of {y}?|What \
does {y} default to?
default new: Give the default value of {y}.|In {x}, what is the default of {y}?
module: Which module is {y} in?|What module provides {y}?|In which module is {y}?|Where does {y} live?
module new: Name the module of {y}.|Which module provides {y}?
first: What is the first parameter of {x}?|Which argument of {x} comes first?|Name the first argument of {x}.
first new: Name the first parameter of {x}.|Which is the first argument of {x}?
version: In which version was {x} added?|Since which version is there {x}?|When was {x} added?
version new: Which version added {x}?|In which version did {x} come?
next: Which word comes after "{y}"?|What is the next word after "{y}"?|Which word follows "{y}"?|What comes right \
after "{y}"?
next new: Name the word after "{y}".|What word follows "{y}" in the text?
before: Which word comes before "{y}"?|What is the word right before "{y}"?|Which word precedes "{y}"?
before new: Name the word before "{y}".|What word comes right before "{y}"?
sentence: Copy the sentence that begins with "{y}".|Which sentence begins with "{y}"?|Quote the sentence starting with \
"{y}".
sentence new: Give the sentence that begins with "{y}".|Which sentence starts with "{y}"?
""")  # by kind; "new": not in training


def _ask(rng: Random, kind: str, new: bool, **words: str) -> str:
    return pick(rng, _FORMS[f"{kind} new" if new else kind]).format(**words)


def _head(text: str) -> re.Match[str] | None:
    return _HEAD.fullmatch(text.split("\n", 1)[0])


def _signature(rng: Random, text: str, new: bool) -> Asked | None:
    if (head := _head(text)) is None:
        return None
    return ("signature",), _ask(rng, "signature", new, x=head[1]), head[1], head[0]


def _default(rng: Random, text: str, new: bool) -> Asked | None:
    head = _head(text)
    defaults = _DEFAULT.findall(head[2]) if head else []
    if head is None or not defaults:
        return None
    name, default = pick(rng, defaults)
    return ("default", name), _ask(rng, "default", new, x=head[1], y=name), f"{name}={default}", default


def _module(rng: Random, text: str, new: bool) -> Asked | None:
    head = _head(text)
    if head is None or "." not in head[1]:
        return None
    module, _, name = head[1].rpartition(".")
    return ("module",), _ask(rng, "module", new, x=head[1], y=name), head[1], module


def _first(rng: Random, text: str, new: bool) -> Asked | None:
    head = _head(text)
    name = re.match(r"\w+", head[2]) if head else None
    if head is None or name is None:
        return None
    return ("first",), _ask(rng, "first", new, x=head[1]), f"{head[1]}({name[0]}", name[0]


def _version(rng: Random, text: str, new: bool) -> Asked | None:
    head, added = _head(text), _ADDED.search(text)
    if head is None or added is None:
        return None
    return ("version",), _ask(rng, "version", new, x=head[1]), added[0], added[1]


def _neighbour(rng: Random, text: str, new: bool, after: bool) -> Asked | None:
    body = text.split("\n")[-1]
    words = _WORD.findall(pick(rng, _SENTENCE_END.split(body)))
    if len(words) < 4:
        return None
    everywhere = _WORD.findall(body)
    pairs = Counter(pairwise(everywhere))
    for _ in range(8):
        at = int(rng.random() * (len(words) - 2))
        pair = (words[at], words[at + 1]) if after else (words[at + 1], words[at + 2])
        answer = words[at + 2] if after else words[at]
        if pairs[pair] == 1 and " ".join(pair) in body:  # no comma between the two
            kind, quoted = ("next" if after else "before"), " ".join(pair)
            trace = f"{quoted} {answer}" if after else f"{answer} {quoted}"
            return (kind, quoted), _ask(rng, kind, new, y=quoted), trace, answer
    return None


def _next(rng: Random, text: str, new: bool) -> Asked | None:
    return _neighbour(rng, text, new, after=True)


def _before(rng: Random, text: str, new: bool) -> Asked | None:
    return _neighbour(rng, text, new, after=False)


def _sentence(rng: Random, text: str, new: bool) -> Asked | None:
    sentences = _SENTENCE_END.split(text.split("\n")[-1])
    chosen = pick(rng, sentences)
    begin = " ".join(chosen.split()[:3])
    if len(chosen) > 200 or len(chosen.split()) < 5 or sum(s.startswith(begin) for s in sentences) > 1:
        return None
    return ("sentence", begin), _ask(rng, "sentence", new, y=begin), begin, chosen


_ASKERS: Final[tuple[Asker, ...]] = (
    _signature, _default, _default, _module, _first, _version, _next, _next, _before, _sentence, _sentence,
)  # fmt: skip
_MAX_PASSAGE: Final = 1600


_AMOUNT: Final = re.compile("how (long|much|heavy|warm|far|big|high)|(what|how) "
    ".*(cost|price|fare|rent|fee|salary|amount|weigh|temperature|paid|pay)|what is "
    "(it|one)", re.IGNORECASE)  # fmt: skip


def _with_unit(text: str, question: str, answer: str) -> str:
    """12.50 -> 12.50 euros, if the question asks for an amount and the text has the unit there."""
    if not answer.replace(",", "").replace(".", "").isdigit() or not _AMOUNT.search(question):
        return answer
    found = re.search(
        rf"\$?(?<![\d,.]){re.escape(answer)}( "
        rf"(?:euros|dollars|EUR|USD|minutes|degrees|kg|km|nights|hours|kilograms|pages|GBP)\b)?",
        text,
    )
    return found[0] if found else answer


def _form(rng: Random) -> str:
    """A wording of the prompt, with places for the paragraph and the question."""
    return phrase(rng, pick(rng, PROMPTS if rng.random() < 0.4 else _MORE_PROMPTS))


def _about_record(rng: Random, split: str, thinking: bool) -> Problem:
    """A question about a text of records.py; texts belong to splits by their hash, as paragraphs do."""
    while True:
        stated = record(rng, split == "wide" and rng.random() < 0.3)
        if not belongs(passage_key(stated.text), split) or (asked := ask(rng, stated)) is None:
            continue
        question, slot, content = asked
        if content in stated.text:
            break
    content = _with_unit(stated.text, question, content)
    found = [s for s in _SENTENCES.split(stated.text) if re.search(rf"(?<!\w){re.escape(content)}(?!\w)", s)]
    prompt = _form(rng).format(p=stated.text, q=(question := careless(rng, question)))
    reply = Reply("\n".join([_answered(question, content), *found[:1]]) if thinking else "", content)
    return Problem("doc_questions", split, (*passage_key(stated.text), slot), (user(prompt),), reply, thinking=thinking)


def _about_paragraph(rng: Random, split: str, thinking: bool) -> Problem:
    """A question about a paragraph of paragraphs.py; the thought is the answer and the sentence that has it."""
    while True:
        made = paragraph(rng)
        if belongs(passage_key(made.text), split):
            break
    messages: tuple[dict[str, Any], ...] = (user(_form(rng).format(p=made.text, q=made.question)),)
    if rng.random() < 0.05:
        messages = ({"role": "system", "content": pick(rng, _TEXT_FIRST).format(p=made.text)}, user(made.question))
    key = (*passage_key(made.text), made.question)
    reply = Reply(f"{_answered(made.question, made.answer)}\n{made.trace}" if thinking else "", made.answer)
    return Problem("doc_questions", split, key, messages, reply, thinking=thinking)


def _answered(question: str, answer: str) -> str:
    return f"{question.rstrip('?.! ')}: {answer}"


def _about_brief(rng: Random, split: str, thinking: bool) -> Problem:
    """A question about a short text of briefs.py; mostly, it directly follows the text."""
    while True:
        made = brief(rng)
        if belongs(passage_key(made.text), split):
            break
    form, text, question = phrase(rng, "{p} {q}") if rng.random() < 0.6 else _form(rng), made.text, made.question
    if text[-1] == "." and question[:2] in ("Wh", "Is", "Do", "Ca") and rng.random() < 0.15:
        form, text, question = "{p} {q}", text[:-1] + pick(rng, (", so", ", and", " -")), small(question)
    messages = (user(form.format(p=text, q=careless(rng, question))),)
    reply = Reply(made.trace if thinking else "", made.answer)
    key = (*passage_key(made.text), made.question)
    return Problem("doc_questions", split, key, messages, reply, thinking=thinking)


def _about_known(rng: Random, split: str, thinking: bool) -> Problem:
    """A question of briefs.py without a text."""
    while True:
        question, trace, answer = known(rng)
        if belongs(key := ("known", question), split):
            break
    messages = (user(phrase(rng, "{q}", asking=0.0).format(q=question)),)
    return Problem("doc_questions", split, key, messages, Reply(trace if thinking else "", answer), thinking=thinking)


_TEXT_FIRST: Final = ("The user asks about this text:\n{p}", "Answer from this: {p}", "Context:\n{p}", "{p}")


class DocQuestions:
    """Samples questions about the given paragraphs and about invented ones."""

    def __init__(self, passages: Iterable[str] = BUILT_IN) -> None:
        self._passages: dict[str, list[str]] = {split: [] for split in SPLITS}
        for text in passages:
            if len(text) <= _MAX_PASSAGE:
                self._passages[passage_split(text)].append(text)
        # A few given paragraphs would be learnt by heart if they made up half of the questions.
        self._given_share = min(0.6, len(self._passages["train"]) / 1000)

    def __call__(self, rng: Random, split: str, thinking: bool) -> Problem:
        if widely(split):
            roll = rng.random()
            if roll < (0.82 if split == "train" else 0.85):
                kind = _about_paragraph if roll < 0.68 else _about_record
                if split == "train" and roll < 0.33:
                    kind = _about_known if roll < 0.1 else _about_brief
                return kind(rng, split, thinking)
        given, new = self._passages["heldout" if split == "wide" else split], split == "structural"
        while True:
            if given and rng.random() < self._given_share:
                text = pick(rng, given)
            else:
                text = invented(rng, new)
                if not belongs(passage_key(text), split):
                    continue
            asked = pick(rng, _ASKERS)(rng, text, new)
            if asked is not None:
                break
        about, question, trace, content = asked
        prompt = pick(rng, _MORE_PROMPTS if widely(split) and rng.random() < 0.5 else PROMPTS).format(
            p=text, q=question
        )
        reply = Reply(trace if thinking else "", content)
        key = (*passage_key(text), *about)
        return Problem("doc_questions", split, key, (user(prompt),), reply, thinking=thinking)


def same_text(problem: Problem, answer: Answer) -> bool:
    """The same text, but for white space and a full stop or quotes around it; and no tool was called."""
    return not answer.tool_calls and plain(answer.content) == plain(problem.reply.content)
