"""How people put a request: politeness, openings and ends, careless spelling, numbers in words.

`phrase` works on the form of a request, before values are filled in, so that no value is ever misspelt. A form is
plain text with `{name}` places. Forms kept from training are never made: a phrase that would begin with one is not
used.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Final

from perilune.tasks.problem import pick


def parted(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


# Before and after any request.
_BEFORE: Final = parted(
    "Hi, |Hi! |Hello, |Hello! |Hey, |hey |Hey there, |Good morning! |Good evening, |Dear assistant, |Quick question: "
    "|One question: |A question: |Excuse me, |Sorry to bother you, |ok, |Ok so |So, |Right, |Well, |Now, |Next: "
    "|Also, |Question: |Task: |Hmm, |I need some help. |Help me please. |Can you help me? |Could you help me with "
    "this? |I am stuck. |My homework says: |My son asks: |Just checking: |For my records: |This is urgent. |Morning, "
    "|Hi there! |Hey kimi, |Quickly: |I was wondering: |Tell me, |Be so kind: |Be quick: |I'm in a hurry. |Let's see. "
    "|First of all, |No long talk please. |Small favour: |pls |yo, "
)
_AFTER: Final = parted(
    " Thanks!| Thanks.| Thank you!| Thank you very much.| thanks| thx| Thanks a lot!| Cheers!| Many thanks.| Thanks "
    "in advance.| Please.| please| Please be quick.| It is urgent.| asap| Take your time.| I need it today.| I am in "
    "a hurry.| No explanation needed.| Just the answer.| Only the answer, please.| Please be careful.| Please check "
    "it twice.| I would be grateful.| :)| That would help me a lot.| I am not sure myself.| Best regards, Tom|"
    "\n\nThanks\nAnna| Cheers, Max| I cannot do it in my head.| Nothing else.| ok?| Appreciate it.| If you can.| ty|"
    " Ta!"
)
# Sentences that do not matter.
_CHATTER: Final = parted(
    "I'm at work right now.|My phone is almost dead.|It has been a long day.|I hope you are well.|We are moving house "
    "this week.|My sister told me to ask you.|I never was good at this.|The children are asleep already.|I have been "
    "thinking about it all morning.|We are planning a trip.|I'm writing this on the train.|My boss needs it by five.|"
    "There is so much to do today.|I asked my colleague but no one knew.|It's for a school project.|I just got back "
    "from lunch.|My husband thinks I'm wrong.|We had a little argument about it.|I want to be sure.|I lost my "
    "calculator.|I'm new here.|This is my first time here.|I'm helping a friend.|It is for the office.|I need to know "
    "it before the meeting.|The weather is awful here.|My dog is barking, sorry.|I'm cooking at the same time.|I'm "
    "not in the mood for long answers.|I promised to sort this out today.|It keeps bothering me.|Long story short.|"
    "You helped me last week as well.|I'd rather do it today than tomorrow.|We are a small team.|I tried it twice "
    "already.|I keep getting different results.|It's nothing urgent.|It is getting late.|I've got five minutes."
)
# Before an imperative ("add 3 and 4"), the first letter made small.
_ASKING: Final = parted(
    "Please {}|please {}|Can you {}?|Could you {}?|Would you {}?|Can you please {}?|can u {}|Would you please {}?|"
    "Could you kindly {}?|Kindly {}|I'd like you to {}|I want you to {}|Would you mind helping me to {}?|Would you be "
    "able to {}?|Go ahead and {}|You should {}|Help me to {}|I need you to please {}|Let's {}|Is it possible to {}?|"
    "Try to {}|pls {}|{} please|{}, please|{} for me|{} for me please|{}, would you?|{}, thanks|{} now|My boss wants "
    "me to {}|I have to {}|I must {}|I was asked to {}|I'm trying to {}|Could you possibly {}?|just {}"
)
_PLACE: Final = re.compile(r"\{[^}]*\}")
_WORD: Final = re.compile(r"(?<![\w{\"'`])[A-Za-z]{4,}(?![\w}\"'`])")
_NEAR: Final = dict(zip("abcdefghijklmnopqrstuvwxyz", "svxsdfghujklnbipqeftyicysx"))
_ONES: Final = parted(
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen"
)
_TENS: Final = parted("-|-|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety")


_SYMBOL: Final = re.compile(r"<(\w+)>")


def expand(rng: Random, rules: Mapping[str, Sequence[str]], text: str) -> str:
    """`text` with every <symbol> replaced by one of the symbol's alternatives, which may hold symbols too."""
    while "<" in text and _SYMBOL.search(text):
        text = _SYMBOL.sub(lambda m: pick(rng, rules[m[1]]), text)
    return text


_MARKS: Final = str.maketrans("?.!,:;", "      ")


@lru_cache(maxsize=65536)
def bare(form: str) -> str:
    """A form without punctuation and capitals, to compare forms by."""
    return " ".join(form.lower().translate(_MARKS).split())


def lined(text: str) -> dict[str, tuple[str, ...]]:
    """Forms by kind: a line for each, its forms separated by `|`."""
    rows = [line.partition(": ") for line in text.strip().split("\n")]
    return {kind: parted(forms) for kind, _, forms in rows}


def typo(rng: Random, form: str) -> str:
    """One word of four letters or more misspelt by one edit; places and quoted words stay as they are."""
    found = [m.span() for m in _WORD.finditer(form) if not m[0].isupper()]
    if not found:
        return form
    begin, end = pick(rng, found)
    at, how = begin + 1 + int(rng.random() * (end - begin - 2)), rng.random()
    if how < 0.35:  # two letters in the wrong order
        return form[:at] + form[at + 1] + form[at] + form[at + 2 :]
    if how < 0.6:  # one missing
        return form[:at] + form[at + 1 :]
    if how < 0.8:  # one twice
        return form[:at] + form[at] + form[at:]
    return form[:at] + _NEAR.get(form[at], "e") + form[at + 1 :]  # the key beside it


_OPPOSITES: Final = {"bigg": "small", "larg": "small", "great": "small", "high": "low", "more": "less", "max": "min",
    "top": "bottom"}  # fmt: skip


def opposite(form: str) -> str:
    """A form that asks for the largest one made one for the smallest."""
    return re.sub("|".join(_OPPOSITES), lambda m: _OPPOSITES[m[0]], form)


def small(text: str) -> str:
    """The first letter made small, unless it is the word I or a capitalised abbreviation."""
    if text[:2] in ("I ", "I'") or (text[:2].isalpha() and text[:2].isupper()):
        return text
    return text[:1].lower() + text[1:]


def capital(text: str) -> str:
    """The first letter made a capital; the others stay as they are."""
    return text[:1].upper() + text[1:]


def enumerated(texts: Sequence[str], last: str = " and ") -> str:
    """One or more texts with commas between them, and `last` before the last: "a, b and c"."""
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + last + texts[-1]


def singular(noun: str) -> str:
    if noun.endswith("ies") and len(noun) > 4 and noun != "cookies":
        return noun[:-3] + "y"
    if noun.endswith(("lves", "rves", "eaves", "oaves")):
        return noun[:-3] + "f"
    return noun.removesuffix("es" if noun.endswith(("xes", "ches", "shes", "toes", "goes")) else "s")


_ARTICLE: Final = re.compile(r"\b([Aa]) \{(\w+)\}")
_COUNTED: Final = re.compile(r"\{(\w+)\} (day|week|hour|month|year|night|minute|page|item|letter)s\b")


def agreeing(form: str, words: Mapping[str, object]) -> str:
    """The form with "an" before places that get a vowel, and no plural behind a 1."""
    if "a {" in form or "A {" in form:
        form = _ARTICLE.sub(lambda m: f"{m[1]}{'n' if str(words.get(m[2]))[:1] in 'aeioAEIO' else ''} {{{m[2]}}}", form)
    if "} " in form and any(str(word) in ("1", "one") for word in words.values()):
        form = _COUNTED.sub(lambda m: m[0][:-1] if str(words.get(m[1])) in ("1", "one") else m[0], form)
    return form


def careless(rng: Random, form: str) -> str:
    """Now and then without capitals or punctuation, or with a misspelt word."""
    roll = rng.random()
    if roll < 0.14:
        form = "".join([p if p.startswith("{") else p.lower() for p in re.split(r"(\{[^}]*\})", form)])
    if 0.07 < roll < 0.2:
        form = re.sub(r"(?<=\S)[,.!?]+(?=\s|$)", "", form)  # "6 * ? = 12" keeps its place
    if roll > 0.88:
        form = typo(rng, form)
        if roll > 0.985:
            form = typo(rng, form)
    elif roll > 0.86 and form[-1:] in ".?":
        form = form[:-1] + pick(rng, ("", "??", "!", " ?", "...", "?!"))
    return form


# Sentences that begin so are no imperatives.
_STATED: Final = re.compile(r"(I|We|My|Our|The|An?|There|It|They|Th[ai][st]|Who|What|Please|Now|F(or|rom)|[IO]n|If|Of"
    r"|Today|Only|Paragraph|Without)\b")  # fmt: skip


def phrase(rng: Random, form: str, kept: tuple[str, ...] = (), asking: float = 0.25) -> str:
    """The form as people vary it; unchanged if the result would begin with one of `kept` (`bare` forms).

    `asking` is the share of imperatives (forms that begin with a verb and end with a full stop) made polite.
    """
    made = form
    roll = rng.random()
    order = form[-1:] == "." and "?" not in form and ". " not in form and form[:1].isalpha()
    if roll < asking and order and not _STATED.match(form):
        made = pick(rng, _ASKING).replace("{}", small(form[:-1]))
        made = capital(made) if roll < 0.8 * asking else made
        if kept and bare(made).startswith(kept):
            made = form
    roll = rng.random()
    if roll < 0.16:
        made = pick(rng, _BEFORE) + (small(made) if roll < 0.08 else made)
    if roll < 0.04 or roll > 0.88:
        made += pick(rng, _AFTER)
    roll = rng.random()
    if roll < 0.09 and made[:1].isalpha():
        made = f"{pick(rng, _CHATTER)} {capital(made)}"
        made = f"{pick(rng, _CHATTER)} {made}" if roll < 0.02 else made
    elif roll < 0.12 and made[-1:] in ".?!":
        made = f"{made} {pick(rng, _CHATTER)}"
    made = careless(rng, made)
    return form if kept and bare(made).startswith(kept) else made


# ---- numbers -------------------------------------------------------------------------------------------------------


def in_words(number: int, joined: str = " and ", hyphen: str = "-") -> str:
    """0 to 999,999 in English words: 345 -> three hundred and forty-five."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (hyphen + _ONES[number % 10] if number % 10 else "")
    if number < 1000:
        rest = number % 100
        return f"{_ONES[number // 100]} hundred" + (joined + in_words(rest, joined, hyphen) if rest else "")
    rest = number % 1000
    head = f"{in_words(number // 1000, joined, hyphen)} thousand"
    return head + ((joined if rest < 100 else " ") + in_words(rest, joined, hyphen) if rest else "")


def numeral(rng: Random, number: int, words: float = 0.06) -> str:
    """A whole number as people write it: in digits mostly, at the share `words` in words, long ones with a comma."""
    roll = rng.random()
    if number >= 1000 and roll > 0.88:
        return f"{number:,}"
    if roll >= words or number < 0 or number > 999_999:
        return str(number)
    return in_words(number, " and " if roll < words / 2 else " ", "-" if roll < 0.8 * words else " ")
