"""Program-checked problems for kimi-nano: every answer and every thinking trace is computed, none written by hand.

A `Problem` is one conversation up to the assistant's turn, and the turn expected of it. Problems are drawn from a
seeded `random.Random`. Five per cent of the arithmetic and comparison problems, and of the weather questions (by their
cities), never occur in training: `held_out(key)` decides by a hash of the problem's key, not of its wording.

Traces work in columns from the right, one line each; a carry or borrow is an extra `+1` or `-1` term:

    347 + 589   7+9=16  4+8+1=13  3+5+1=9            523 - 178   13-8=5  12-7-1=4  5-1-1=3
    347 or 589  3<5   (from the left, up to the first difference; missing digits count as 0)
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tool = dict[str, Any]  # a declared tool in OpenAI's form

SEED = 20261121
HELD_OUT_SHARE = 20  # one key in twenty


@dataclass(frozen=True)
class Reply:
    """The assistant's turn. `tool_calls` are (name, arguments) in order."""

    reasoning: str
    content: str
    tool_calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class Problem:
    family: str
    key: tuple[Any, ...]
    messages: tuple[dict[str, Any], ...]
    reply: Reply
    tools: tuple[Tool, ...] = ()
    thinking: bool = True


def held_out(key: tuple[Any, ...]) -> bool:
    """True for the twentieth of the keys that training never sees. Addition keys are sorted: a + b is b + a."""
    digest = hashlib.sha256(f"{SEED}:{':'.join(map(str, key))}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


# ---- arithmetic --------------------------------------------------------------------------------------------------

ADD_FORMS = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b}", "{a}+{b}=", "{a} + {b} = ?", "Add {a} and {b}.",
    "Compute {a} + {b}.", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "How much is {a} plus {b}?",
    "What is {a} plus {b}?", "Please add {a} and {b}.", "What's {a} + {b}?", "Can you add {a} and {b}?",
    "I have {a} apples and buy {b} more. How many do I have now?",
)  # fmt: skip
SUBTRACT_FORMS = (
    "What is {a} - {b}?", "What is {a}-{b}?", "{a} - {b}", "{a}-{b}=", "{a} - {b} = ?", "Subtract {b} from {a}.",
    "Compute {a} - {b}.", "Calculate {a} - {b}.", "How much is {a} minus {b}?", "What is {a} minus {b}?",
    "What's {a} - {b}?", "I have {a} apples and give away {b}. How many are left?",
)  # fmt: skip
LARGER_FORMS = (
    "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Which is greater, {a} or {b}?",
    "Is {a} larger than {b}?",
)  # fmt: skip
SMALLER_FORMS = ("Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?", "Is {a} smaller than {b}?")


def add_trace(a: int, b: int) -> str:
    lines, carry, width = [], 0, max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}")):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}{'+1' * carry}={total}")
        carry = total // 10
    return "\n".join(lines)


def subtract_trace(a: int, b: int) -> str:
    """For a >= b: columns with borrows. For a < b: says so first, and works b - a."""
    if a < b:
        return f"{a}<{b}\n" + subtract_trace(b, a)
    lines, borrow, width = [], 0, len(str(a))
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}")):
        top = int(x) + 10 * (int(x) - int(y) - borrow < 0)
        lines.append(f"{top}-{y}{'-1' * borrow}={top - int(y) - borrow}")
        borrow = top // 10
    return "\n".join(lines)


def compare_trace(a: int, b: int) -> str:
    lines, width = [], max(len(str(a)), len(str(b)))
    for x, y in zip(f"{a:0{width}}", f"{b:0{width}}"):
        lines.append(f"{x}{'<' if x < y else '>' if x > y else '='}{y}")
        if x != y:
            break
    return "\n".join(lines)


def operands(rng: random.Random) -> tuple[int, int]:
    sizes = rng.choices(((3, 3), (3, 2), (2, 3), (2, 2), (2, 1), (1, 2), (1, 1), (3, 1), (1, 3)),
                        (50, 8, 8, 14, 4, 4, 5, 3, 3))[0]  # fmt: skip
    a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in sizes)
    return a, b


def add_key(a: int, b: int) -> tuple[Any, ...]:
    return ("add", min(a, b), max(a, b))


def ask(rng: random.Random, text: str) -> dict[str, Any]:
    """A user message, now and then in a careless spelling."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1 and text[-1] in "?.":
        text = text[:-1]
    return {"role": "user", "content": text}


def addition(rng: random.Random) -> Problem:
    a, b = operands(rng)
    form = rng.choice(ADD_FORMS)
    reply = Reply(add_trace(a, b), f"{a} + {b} = {a + b}")
    return Problem("addition", add_key(a, b), (ask(rng, form.format(a=a, b=b)),), reply)


def subtraction(rng: random.Random) -> Problem:
    a, b = operands(rng)
    if a < b and rng.random() < 0.7:
        a, b = b, a
    form = rng.choice(SUBTRACT_FORMS if a >= b else SUBTRACT_FORMS[:-1])
    reply = Reply(subtract_trace(a, b), f"{a} - {b} = {a - b}")
    return Problem("subtraction", ("subtract", a, b), (ask(rng, form.format(a=a, b=b)),), reply)


def comparison(rng: random.Random) -> Problem:
    a, b = operands(rng)
    if rng.random() < 0.3:  # near pairs, so that the last digits matter too
        b = min(max(a + rng.randint(-12, 12), 0), 999)
    larger = rng.random() < 0.5
    form = rng.choice(LARGER_FORMS if larger else SMALLER_FORMS)
    word = "larger" if larger else "smaller"
    if form.startswith("Is "):
        yes = a > b if larger else a < b
        content = f"{'Yes' if yes else 'No'}, {a} is {'' if yes else 'not '}{word} than {b}."
    elif a == b:
        content = f"{a} and {b} are equal."
    else:
        content = f"{max(a, b) if larger else min(a, b)} is {word}."
    reply = Reply(compare_trace(a, b), content)
    return Problem("comparison", ("compare", min(a, b), max(a, b)), (ask(rng, form.format(a=a, b=b)),), reply)


# ---- small talk --------------------------------------------------------------------------------------------------

ABILITIES = "I can add, subtract and compare numbers of up to three digits, and call simple tools."
TALK = (
    (("Hello", "Hi", "Hello!", "Hi!", "Hey", "Hi there", "Good morning", "Good evening!"),
     "A greeting.", "Hello! Ask me to add, subtract or compare two numbers."),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you Kimi?"),
     "A question about me.", f"I am kimi-nano, a very small demonstration model. {ABILITIES}"),
    (("What can you do?", "Help", "How can you help me?", "What do you know?"),
     "A question about my skills.", ABILITIES),
    (("How are you?", "How are you doing?", "How do you do?"),
     "A greeting.", "I am fine, thank you. Ask me to add, subtract or compare two numbers."),
    (("Thank you", "Thanks", "Thanks!", "Thank you very much."), "Thanks.", "You are welcome."),
    (("Bye", "Goodbye", "See you later."), "A farewell.", "Goodbye!"),
    (("Write a poem.", "Tell me a story.", "Tell me a joke.", "What is the capital of France?", "Translate this text.",
      "Write a Python program.", "What is the meaning of life?", "Explain quantum mechanics.", "What is {a} times {b}?",
      "What is {a} * {b}?", "What is {a} / {b}?", "Multiply {a} and {b}.", "Divide {a} by {b}.", "Who won the match?",
      "What day is it?", "Summarise this article."),
     "This is not a skill of mine.", f"I cannot do that: I am a very small demonstration model. {ABILITIES}"),
)  # fmt: skip


def talk(rng: random.Random) -> Problem:
    asked, reasoning, content = rng.choice(TALK)
    a, b = operands(rng)
    question = rng.choice(asked).format(a=a, b=b)
    return Problem("talk", ("talk", question), (ask(rng, question),), Reply(reasoning, content))


# ---- tools -------------------------------------------------------------------------------------------------------

CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Warsaw", "Lisbon", "Athens", "Oslo", "Helsinki",
    "Dublin", "Brussels", "Budapest", "Beijing", "Shanghai", "Tokyo", "Osaka", "Seoul", "Delhi", "Mumbai", "Bangkok",
    "Hanoi", "Singapore", "Jakarta", "Manila", "Sydney", "Melbourne", "Cairo", "Lagos", "Nairobi", "Toronto", "Boston",
    "Chicago", "Seattle", "Denver", "Dallas", "Miami", "Lima", "Bogota", "Santiago", "Havana", "Zurich", "Geneva",
    "Milan", "Naples", "Munich", "Hamburg", "Lyon", "Porto", "Kyoto", "Dubai", "Istanbul", "Moscow", "Kiev", "Riga",
    "San Francisco", "New York", "Los Angeles", "Hong Kong", "Mexico City", "Buenos Aires", "Cape Town", "Tel Aviv",
)  # fmt: skip
SYLLABLES = ("ba", "den", "lo", "mar", "ti", "son", "ka", "ri", "vel", "ton", "sha", "no", "per", "gul", "wen", "fi",
             "dor", "hu", "zan", "cle")  # fmt: skip
SKIES = ("sunny", "rain", "cloudy", "snow", "windy", "fog", "storm", "clear")
WEATHER_FORMS = (
    "What is the weather in {c}?", "What's the weather in {c}?", "What is the weather like in {c}?",
    "How is the weather in {c} today?", "Tell me the weather in {c}.", "Weather in {c}?", "Is it raining in {c}?",
    "What's the weather like in {c} today?",
)  # fmt: skip
WEATHER_DOCS = ("Get the weather of a city", "Get the current weather", "Get the weather", "Current weather for a city",
                "Get current weather for a city", "Get the current weather in a given city")  # fmt: skip
CITY_DOCS = ("City name", "The city", "Name of the city", "The name of the city, e.g. Paris", "")
ADD_DOCS = ("Add two numbers", "Add two integers", "Add a and b", "Returns the sum of two numbers")
SYSTEMS = ("You are a helpful assistant.", "You are kimi-nano.", "Answer briefly.", "Be concise.")


def city(rng: random.Random) -> str:
    """A known city, or a made-up name so that copying is learnt rather than the list."""
    if rng.random() < 0.6:
        return rng.choice(CITIES)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4))).capitalize()


def described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {**schema, "description": text} if text else schema


def function(name: str, doc: str, properties: dict[str, Any], required: list[str]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": described({"name": name, "parameters": parameters}, doc)}


def weather_tool(rng: random.Random) -> Tool:
    name = rng.choice(("city", "city", "location"))
    properties = {name: described({"type": "string"}, rng.choice(CITY_DOCS))}
    if rng.random() < 0.2:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    return function("get_weather", rng.choice(WEATHER_DOCS), properties, [name])


def add_tool(rng: random.Random) -> Tool:
    kind = {"type": rng.choice(("integer", "number"))}
    return function("add", rng.choice(ADD_DOCS), {"a": kind, "b": kind}, ["a", "b"])


def declared(rng: random.Random, tool: Tool, other: Callable[[random.Random], Tool]) -> tuple[Tool, ...]:
    """`tool`, and half the time the other one too, in either order."""
    tools = [tool] + ([other(rng)] if rng.random() < 0.5 else [])
    rng.shuffle(tools)
    return tuple(tools)


def weather_result(rng: random.Random) -> str:
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
    as_json = json.dumps({"temperature": degrees, "sky": sky})
    return rng.choice((f"{sky}, {degrees} C", sky, as_json, f"{degrees} degrees and {sky}"))


def assistant_turn(reply: Reply, *, keep_reasoning: bool = True) -> dict[str, Any]:
    """The reply as a message in OpenAI's form; tool calls get the conversation's first native ids."""
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}}
        for i, (name, args) in enumerate(reply.tool_calls)
    ]  # fmt: skip
    reasoning = reply.reasoning if keep_reasoning else ""
    turn: dict[str, Any] = {"role": "assistant", "content": reply.content, "reasoning_content": reasoning}
    return turn | {"tool_calls": calls} if calls else turn


def tool_call(rng: random.Random) -> Problem:
    """A question that a declared tool answers; the reply is the call, or the answer made from the tool's result."""
    finish = rng.random() < 0.4
    if rng.random() < 0.7:
        places = [city(rng)]
        if rng.random() < 0.2:
            places.append(city(rng))
        weather = weather_tool(rng)
        tools = declared(rng, weather, add_tool)
        argument = weather["function"]["parameters"]["required"][0]
        question = rng.choice(WEATHER_FORMS[:4] if len(places) > 1 else WEATHER_FORMS).format(c=" and ".join(places))
        calls = tuple(("get_weather", {argument: place}) for place in places)
        results = [weather_result(rng) for _ in places]
        reasoning = "I need get_weather."
        final = " ".join(f"Weather in {place}: {result}." for place, result in zip(places, results))
        key: tuple[Any, ...] = ("weather", *places)
    else:
        a, b = operands(rng)
        tools = declared(rng, add_tool(rng), weather_tool)
        question = rng.choice(ADD_FORMS).format(a=a, b=b)
        calls, results = (("add", {"a": a, "b": b}),), [str(a + b)]
        reasoning = "I need add."
        final, key = f"{a} + {b} = {a + b}", add_key(a, b)
    messages = [ask(rng, question)]
    reply = Reply(reasoning, "", calls)
    if not finish:
        return Problem("tool_call", key, tuple(messages), reply, tools)
    turn = assistant_turn(reply, keep_reasoning=rng.random() < 0.5)  # clients often drop it
    messages.append(turn)
    for call, result in zip(turn["tool_calls"], results):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return Problem("tool_result", key, tuple(messages), Reply("The tool has answered.", final), tools)


def tool_free(rng: random.Random) -> Problem:
    """A question that no declared tool fits: weather without the tool, or a sum with only the weather declared."""
    if rng.random() < 0.5:
        place = city(rng)
        text = rng.choice(WEATHER_FORMS).format(c=place)
        tools = (add_tool(rng),) if rng.random() < 0.5 else ()
        reply = Reply("No tool for the weather.", "I cannot look up the weather: I have no tool for it.")
        return Problem("no_tool", ("weather", place), (ask(rng, text),), reply, tools)
    inner = rng.choice((addition, subtraction, comparison, talk))(rng)
    return Problem("no_tool", inner.key, inner.messages, inner.reply, (weather_tool(rng),))


# ---- the mix -----------------------------------------------------------------------------------------------------

MIX: tuple[tuple[Callable[[random.Random], Problem], float], ...] = (
    (addition, 0.46), (subtraction, 0.20), (comparison, 0.09), (talk, 0.07), (tool_call, 0.14), (tool_free, 0.04),
)  # fmt: skip
# Addition is learnt long before the rest: later chunks spend less on it.
LATE_MIX: tuple[tuple[Callable[[random.Random], Problem], float], ...] = (
    (addition, 0.22), (subtraction, 0.36), (comparison, 0.12), (talk, 0.04), (tool_call, 0.23), (tool_free, 0.03),
)  # fmt: skip
FAMILIES = ("addition", "subtraction", "comparison", "talk", "tool_call", "tool_result", "no_tool")


def draw(rng: random.Random, *, late: bool = False) -> Problem:
    """One training problem: never a held-out key; some with a system prompt or an earlier turn."""
    mix = LATE_MIX if late else MIX
    while True:
        make = rng.choices([m for m, _ in mix], [w for _, w in mix])[0]
        problem = make(rng)
        if not held_out(problem.key):
            break
    messages = problem.messages
    if make in (addition, subtraction, comparison, talk) and rng.random() < 0.12:
        earlier = rng.choice((addition, subtraction, comparison, talk))(rng)
        if not held_out(earlier.key):
            messages = (*earlier.messages, assistant_turn(earlier.reply), *messages)
    if rng.random() < 0.08:
        messages = ({"role": "system", "content": rng.choice(SYSTEMS)}, *messages)
    thinking = rng.random() < 0.8
    return Problem(problem.family, problem.key, messages, problem.reply, problem.tools, thinking)


def examine(family: str, count: int, *, unseen: bool, thinking: bool, seed: int = SEED + 1) -> list[Problem]:
    """Evaluation problems of one family: single questions, all held out or all from the training space.

    Two families are narrower than their training share: "addition" and "subtraction" are 3-digit by 3-digit.
    """
    makers = {"addition": addition, "subtraction": subtraction, "comparison": comparison, "talk": talk,
              "tool_call": tool_call, "tool_result": tool_call, "no_tool": tool_free}  # fmt: skip
    rng = random.Random(f"{seed}:{family}:{unseen}")
    found: list[Problem] = []
    while len(found) < count:
        p = makers[family](rng)
        if p.family != family or held_out(p.key) != unseen:
            continue
        if family in ("addition", "subtraction") and min(p.key[1:]) < 100:
            continue
        found.append(Problem(p.family, p.key, p.messages, p.reply, p.tools, thinking))
    return found
