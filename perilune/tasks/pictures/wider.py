"""What training alone has beyond the plain scenes: questions put together from parts, and words of any spelling.

Structural problems have labels that training lacks. A model that saw few words reads the nearest of these (Edit for
Exit); what it needs are many spellings.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from perilune.tasks.problem import pick
from perilune.tasks.wordings import bare, capital, expand, phrase
from perilune.tasks.words import any_word, made_up

WIDER_SHARE: Final = 0.6  # of training's questions
PHRASED_SHARE: Final = 0.3  # with an opening, an end, or careless spelling
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
RULES: Final[Mapping[str, Sequence[str]]] = {
    "say": ("Tell me", "Say", "Give me", "Name", "Read out", "Find", "Let me know", "State", "Show me", "I need"),
    "know": ("Tell me", "Say", "Find out", "Let me know", "I want to know", "Check", "Can you tell me"),
    "value": ("value", "number", "figure", "amount", "count", "entry", "score", "reading", "total"),
    "of": ("of", "for", "beside", "next to", "given for", "printed for", "shown for", "that goes with", "belonging to"),
    "pic": ("picture", "image", "chart", "table", "graph", "list", "screenshot", "photo"),
    "shows": ("show", "give", "list", "have", "print", "hold", "report"),
    "gives": ("shows", "gives", "lists", "has", "prints", "says", "holds"),
    "see": ("see", "find", "spot", "count", "make out", "notice"),
    "here": ("here", "in it", "in this <pic>", "in the <pic>", "on the <pic>"),
    "can": ("can", "could", "should", "must", "do", "may"),
    "press": ("press", "click", "click on", "tap", "push", "hit", "choose", "select"),
    "button": ("button", "control", "key", "button"),
    "label": ("label", "text", "word", "name", "caption"),
    "bar": ("bar", "bar", "column", "one", "letter"),
    "high": ("tallest", "highest", "longest", "largest", "biggest", "greatest", "topmost"),
    "low": ("shortest", "lowest", "smallest", "least", "littlest", "tiniest", "least high"),
    "up": (
        "rises the farthest", "goes up the most", "climbs highest", "stretches furthest", "gets furthest up",
        "stands above the others", "has the most", "beats the others", "is higher than the rest",
    ),
    "down": (
        "rises the least", "goes up the least", "stays lowest", "is nearest to the ground", "has the fewest",
        "is below all others", "is not as high as the others", "is smaller than the rest", "gets up the least",
    ),
}  # fmt: skip
VALUE: Final = (
    "<say> the <value> <of> {name}.", "What is the <value> <of> {name}?", "What does the <pic> <shows> for {name}?",
    "What <value> does the <pic> <shows> for {name}?", "<know> what the <pic> <gives> for {name}.", "{name}: <value>?",
    "In the <pic>, what is the <value> <of> {name}?", "Which <value> is <of> {name}?", "<know> how much {name} has.",
)  # fmt: skip
HIGHEST: Final = (
    "Which <bar> <up>?", "<say> the <bar> that <up>.", "<say> the <high> <bar>.", "<know> which <bar> <up>.",
    "What is the <label> of the <high> <bar>?", "Which <bar> is the <high> <here>?", "The <high> <bar>?",
)  # fmt: skip
LOWEST: Final = tuple(form.replace("<up>", "<down>").replace("<high>", "<low>") for form in HIGHEST)
COUNT: Final = (
    "<know> how many {what} there are.", "<say> the count of {what}.", "What is the number of {what} <here>?",
    "How many {what} <can> you <see> <here>?", "Count all the {what} you <see>.", "<know> how many {what} are <here>.",
    "Will you count the {what} <here>?", "The number of {what} <here>?", "<say> how many {what} you <see>.",
)  # fmt: skip
MORE: Final = (
    "<know> whether there are more {a} or {b}.", "Which do you <see> more of, {a} or {b}?",
    "Can you <see> more {a} or {b} <here>?",
)  # fmt: skip
COLOUR: Final = (
    "<say> the colour of the {shape}.", "What colour is the {shape} <here>?", "<know> what colour the {shape} has.",
    "What is the {shape}'s color?",
)  # fmt: skip
ONE: Final = (
    "What <can> I <press> <here>?", "Which <button> <can> I <press>?", "<say> the <label> of the <button>.",
    "What is there to <press>?", "Which <button> does the <pic> <shows>?", "What <label> does the <button> have?",
    "<know> what is on the <button>.", "What would you <press> <here>?",
)  # fmt: skip
SIDE_OF: Final = (
    "What <can> I <press> on the {side}?", "Which <button> is on the {side} <here>?",
    "<say> the <label> of the {side} <button>.", "<know> what is on the {side} <button>.",
    "What <label> does the <button> on the {side} have?", "Which <button> would I <press> on the {side}?",
)  # fmt: skip
READ: Final = ("<say> the <label> <here>.", "<know> what the <pic> <gives>.", "Which <label> do you <see> <here>?")


def asked(rng: Random, split: str, plain: Sequence[str], new: Sequence[str], wider: Sequence[str] = ()) -> str:
    """The form of a question: one of `new` in structural problems, of `plain` in others. Training has many more, of
    `wider` too, but none that begins with one of `new`."""
    form = pick(rng, new if split == "structural" else plain)
    if split != "train":
        return form
    kept = tuple(map(bare, new))
    if wider and rng.random() < WIDER_SHARE:
        made = capital(expand(rng, RULES, pick(rng, wider)))
        form = form if bare(made).startswith(kept) else made
    return phrase(rng, form, kept) if rng.random() < PHRASED_SHARE else form


def label(rng: Random, known: Sequence[str], kept: Sequence[str], most: int = 8) -> str:
    """A word of at most `most` letters: known ones, real ones (words.learn), made-up ones, any letters. None contains
    one of `kept`, in lower case."""
    while True:
        roll = rng.random()
        if roll < 0.85:
            word = pick(rng, known) if roll < 0.15 else made_up(rng) if roll < 0.7 else any_word(rng)
        else:
            word = "".join(pick(rng, LETTERS) for _ in range(2 + int(rng.random() * 6)))
        if len(word) <= most and word.isascii() and not any(one in word.lower() for one in kept):
            return word


def cased(rng: Random, word: str) -> str:
    roll = rng.random()
    return capital(word) if roll < 0.7 else word.upper() if roll < 0.8 else word
