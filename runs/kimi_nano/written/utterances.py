"""Requests and dialogues of people with their values marked: tool calls, JSON objects, and questions about a text.

Sources: SNIPS voice commands (sonos/nlu-benchmark, CC0), requests to a robot at home (xliuhw/NLU-Evaluation-Data, CC BY
4.0; its first training set), the training split of Schema-Guided Dialogue
(google-research-datasets/dstc8-schema-guided-dialogue, CC BY-SA 4.0), what people wrote to book a table
(PolyAI-LDN/task-specific-datasets, CC BY 4.0; Restaurant8k's training split) and the requests of intents.py. Replies
have the form of perilune.tasks: a value is copied as the sentence has it, or is the schema's word for it.

Records: {"family", "source", "text", "marks": [[slot, first, end], ...]}, for tools also "intent", and "said": {slot:
value} for what is meant without being quoted; an empty intent is one that no tool of intents.py serves. Tables: "tools"
(the intents' descriptions and slots), "values" (some values of every slot, which replace others) and "requests" (some
records of requests, which are joined to others).
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.tasks.calls import REFUSAL, joined
from perilune.tasks.extraction import copied, or_null, prompt_messages, wide_prompt
from perilune.tasks.fields import Field, written
from perilune.tasks.problem import Problem, Reply, ToolCall, pick, user
from perilune.tasks.tools import how_many, opening, others
from perilune.tasks.words import made_up
from runs.kimi_nano.written import intents

SNIPS, HOME, DIALOGUES = "nlu-benchmark", "NLU-Evaluation-Data", "dstc8-schema-guided-dialogue"
TABLES = "task-specific-datasets"
MOST_VALUES = 60  # values kept of a slot
MOST_REQUESTS = 1500  # requests kept to be joined to another
LONGEST_TEXT = 700  # characters
REPLACED = 0.45  # share of marked values that are replaced
WINDOWS = 3  # passages taken from a dialogue
REFUSED = 0.1  # of requests joined to others: 0.3 taught a model to refuse calls that a declared tool could make

# Marks of SNIPS that say nothing by themselves ("this", "close to"), and pieces without a mark.
LEFT_OUT = {"object_select", "spatial_relation", "object_part_of_series_type", "current_location",
            "party_size_description", "sort", "_"}  # fmt: skip
# A request for a tool of one domain may mean another of the same domain: services are grouped widely.
DOMAINS = {
    "BookRestaurant": "Restaurants", "GetWeather": "Weather",
    **dict.fromkeys(("Movies", "Media", "Music", "PlayMusic", "AddToPlaylist"), "media"),
    **dict.fromkeys(("SearchCreativeWork", "SearchScreeningEvent", "RateBook"), "media"),
    **dict.fromkeys(("Hotels", "Homes", "Travel"), "places"), **dict.fromkeys(("Events", "Calendar"), "events"),
    **dict.fromkeys(("Buses", "Flights", "Trains", "RentalCars", "RideSharing", "transport"), "journeys"),
    **dict.fromkeys(("audio", "music", "play", "news"), "media"), "calendar": "events", "datetime": "events",
    **dict.fromkeys(("takeaway", "cooking"), "Restaurants"), "weather": "Weather", "alarm": "events",
    **dict.fromkeys(("email", "social"), "messages"), "lists": "events",
}  # fmt: skip
# Intents of HOME that a tool could serve, and what the tool does.
AT_HOME = {
    "alarm_query": "list alarms", "alarm_remove": "delete alarm", "alarm_set": "set alarm",
    "audio_volume_down": "lower volume", "audio_volume_mute": "mute sound", "audio_volume_up": "raise volume",
    "calendar_query": "list appointments", "calendar_remove": "delete appointment", "calendar_set": "add appointment",
    "cooking_recipe": "find recipe", "datetime_convert": "convert time", "datetime_query": "get time",
    "email_addcontact": "add contact", "email_query": "check mail", "email_querycontact": "find contact",
    "email_sendemail": "send mail", "iot_cleaning": "start vacuum", "iot_coffee": "make coffee",
    "iot_hue_lightchange": "set light color", "iot_hue_lightdim": "dim light", "iot_hue_lightoff": "turn off light",
    "iot_hue_lighton": "turn on light", "iot_hue_lightup": "brighten light", "iot_wemo_off": "switch off device",
    "iot_wemo_on": "switch on device", "lists_createoradd": "add to list", "lists_query": "read list",
    "music_query": "identify song",
    "music_settings": "set player", "news_query": "get news", "play_audiobook": "play audiobook",
    "play_game": "play game", "play_music": "play music", "play_podcasts": "play podcast", "play_radio": "play radio",
    "qa_currency": "get exchange rate", "qa_definition": "define word", "qa_stock": "get stock price",
    "social_post": "post message", "takeaway_order": "order food", "takeaway_query": "find takeaway",
    "transport_query": "find connection", "transport_taxi": "book taxi", "transport_ticket": "buy ticket",
    "transport_traffic": "get traffic", "weather_query": "get weather",
}  # fmt: skip
_COUNTED = re.compile(r"number|size|rating|seats|passengers|tickets|travelers|adults|rooms|days")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMERALS = {word: i for i, word in enumerate(_NUMBERS, 1)}

Marks = list[list[Any]]
Table = Mapping[str, Any]

# ---- reading -------------------------------------------------------------------------------------------------------


def read(root: Path) -> Iterator[dict[str, Any]]:
    """Tables first, then the records of each repository that is there."""
    tools: dict[str, Any] = {}
    records = [
        *_snips(root / SNIPS, tools), *_home(root / HOME, tools), *_dialogues(root / DIALOGUES, tools),
        *_intents(root / intents.CLINC, tools), *_bookings(root / TABLES, tools),
    ]  # fmt: skip
    if not records:
        return
    pools: dict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        for slot, first, end in record["marks"]:
            pools[slot].setdefault(record["text"][first:end])
    values = {slot: list(found)[:: max(1, len(found) // MOST_VALUES)][:MOST_VALUES] for slot, found in pools.items()}
    yield {"table": "tools", "tools": tools}
    yield {"table": "values", "values": values}
    requests = [r for r in records if r["family"] == "tools_multi" and r["intent"]]
    yield {"table": "requests", "requests": requests[:: max(1, len(requests) // MOST_REQUESTS)]}
    yield from records


def _domain(name: str) -> str:
    """The domain of a service or of an intent of SNIPS."""
    return DOMAINS.get(name.split("_")[0], name.split("_")[0])


def _snips(root: Path, tools: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for file in sorted(root.glob("2017-06-custom-intent-engines/*/train_*_full.json")):
        for intent, sentences in json.loads(file.read_text("utf-8", errors="replace")).items():
            found = [_marked(sentence["data"], "entity") for sentence in sentences]
            tools[intent] = ["", _domain(intent), {slot: ["", []] for _, marks in found for slot, _, _ in marks}]
            for text, marks in found:
                if marks and "\ufffd" not in text:
                    yield from _of_request(SNIPS, text, marks, intent, {})


def _home(root: Path, tools: dict[str, Any]) -> Iterator[dict[str, Any]]:
    folder = "CrossValidation/out4ApiaiReal/*/CrossValidation/KFold_1/merged/intents"
    for name, does in AT_HOME.items():
        for file in sorted(root.glob(f"{folder}/{name}.json")):
            found = [_marked(said["data"], "alias") for said in json.loads(file.read_text())["userSays"]]
            intent = f"home:{does.title().replace(' ', '')}"
            slots = Counter(slot for _, marks in found for slot, _, _ in marks)
            known = {slot: ["", []] for slot, n in slots.items() if n > 1}
            tools[intent] = [does.capitalize(), _domain(name), known]
            for text, marks in found:
                if text and all(slot in known for slot, _, _ in marks):
                    yield from _of_request(HOME, text, marks, intent, {})


def _intents(root: Path, tools: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for text, tool, domain in intents.read(root):
        intent = tool and f"{intents.SERVICE}:{tool}"
        if tool:
            tools[intent] = [tool.replace("_", " ").capitalize(), domain, {}]
        yield from _of_request(intents.CLINC, text, [], intent, {})


_BOOKING: Final = re.compile(  # a new booking, not a change of one
    r"(?!.*(cancel|chang|already|instead|earlier|later))(.*\b(i|we|you) (please )?|.*\b(need|want|like) to |(please )?)"
    r"(book|reserve|(need|want|like) a (table|reservation|booking)) ",
    re.IGNORECASE,
)
_PEOPLE: Final = re.compile(rf"(\d+|{'|'.join(_NUMBERS)})( people| persons?| guests| of us)?", re.IGNORECASE)


def _bookings(root: Path, tools: dict[str, Any]) -> Iterator[dict[str, Any]]:
    file, intent = root / "span_extraction" / "restaurant8k" / "train_0.json", "Tables:ReserveTable"
    for said in json.loads(file.read_text("utf-8")) if file.is_file() else ():
        slots = ("number_of_people", "date", "time", "first_name", "last_name")
        tools[intent] = ["Book a table at a restaurant", "Restaurants", {s: ["", []] for s in slots}]
        text, marks = said["userInput"]["text"], []
        for label in said.get("labels", ()):
            slot, first, end = label["slot"], label["valueSpan"].get("startIndex", 0), label["valueSpan"]["endIndex"]
            end = first + len(text[first:end].rstrip(" .,!?"))
            if slot == "time" and (half := re.match(r" ?[ap]\.?m\b", text[end:], re.IGNORECASE)):
                end += half.end()
            if counted := _PEOPLE.fullmatch(text[first:end]):  # "at 7" is left out: a number, or a text?
                slot, end = slots[0] if slot == "people" else "", first + counted.end(1)
            marks.append([slot, first, end])
        asks = "context" not in said and _BOOKING.match(text)
        if (asks or len(marks) > 1) and all(m[0] in slots and text.count(text[m[1] : m[2]]) == 1 for m in marks):
            made = _of_request(TABLES, text, marks, intent, {})
            yield from (record for record in made if asks or record["family"] == "json_extract")


def _marked(pieces: list[dict[str, str]], key: str) -> tuple[str, Marks]:
    """The text of the pieces of a sentence, and where those are that `key` marks."""
    text, marks = "", []
    for piece in pieces:
        part = piece["text"] if text else piece["text"].lstrip()
        if piece.get(key, "_") not in LEFT_OUT and part.strip():
            first = len(text) + len(part) - len(part.lstrip())
            marks.append([piece[key], first, first + len(part.strip())])
        text += part
    return text.rstrip(), marks


def _dialogues(root: Path, tools: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = root / "train" / "schema.json"
    if not schema.is_file():
        return
    choices: dict[str, dict[str, list[str]]] = {}
    for service in json.loads(schema.read_text()):
        name, slots = service["service_name"], {s["name"]: s for s in service["slots"]}
        choices[name] = {s: d["possible_values"] for s, d in slots.items() if d["is_categorical"]}
        for intent in service["intents"]:
            asked = [*intent["required_slots"], *intent["optional_slots"]]
            tools[f"{name}:{intent['name']}"] = [
                intent["description"], _domain(name),
                {s: [slots[s]["description"], choices[name].get(s, [])] for s in asked},
            ]  # fmt: skip
    for file in sorted((root / "train").glob("dialogues_*.json")):
        for dialogue in json.loads(file.read_text()):
            turns = []
            for turn in dialogue["turns"]:
                text, frames = " ".join(turn["utterance"].split()), turn["frames"]
                if text != turn["utterance"] or len(frames) != 1:
                    turns.append((text, []))
                    continue
                frame = frames[0]
                marks = [[s["slot"], s["start"], s["exclusive_end"]] for s in frame["slots"]]
                turns.append((text, marks))
                if turn["speaker"] == "USER" and any(a["act"] == "INFORM_INTENT" for a in frame["actions"]):
                    yield from _asked(text, marks, frame, tools, choices[frame["service"]])
            yield from _passages(turns, Random(dialogue["dialogue_id"]))


def _asked(
    text: str, marks: Marks, frame: dict[str, Any], tools: dict[str, Any], choices: dict[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """A user's first request of an intent, if its tool has all that is said."""
    intent = f"{frame['service']}:{frame['state']['active_intent']}"
    marked, said = {slot for slot, _, _ in marks}, {}
    for action in frame["actions"]:
        slot, values = action["slot"], action["canonical_values"]
        if action["act"] != "INFORM" or slot in marked:
            continue
        if slot not in choices or len(values) != 1 or values[0] not in choices[slot]:
            return  # "dontcare", or said without a mark
        said[slot] = values[0]
    known = tools[intent][2] if intent in tools else {}
    if all(slot in known for slot in (*marked, *said)):
        yield from _of_request(DIALOGUES, text, marks, intent, said)


def _of_request(source: str, text: str, marks: Marks, intent: str, said: dict[str, str]) -> Iterator[dict[str, Any]]:
    if len({slot for slot, _, _ in marks}) < len(marks) or "{" in text:
        return  # a slot with two values
    record = {"source": source, "text": text, "marks": marks, "intent": intent, "said": said}
    if marks or said or source in (HOME, intents.CLINC):
        if intent:
            yield {"family": "tool_call", **record}
        yield {"family": "tools_multi", **record}
    if marks and source in (SNIPS, HOME, TABLES):
        yield {"family": "json_extract", "source": source, "text": text, "marks": marks}


def _passages(turns: list[tuple[str, Marks]], rng: Random) -> Iterator[dict[str, Any]]:
    """Some turns after one another as a text, each slot with one value."""
    for _ in range(WINDOWS):
        first = rng.randrange(len(turns))
        text, marks, seen = "", [], dict[str, str]()
        for said, found in turns[first : first + 1 + rng.randrange(3)]:
            at = len(text) + bool(text)
            text = f"{text} {said}" if text else said
            marks += [[slot, at + begin, at + end] for slot, begin, end in found]
        fits = all(seen.setdefault(slot, text[a:b].lower()) == text[a:b].lower() for slot, a, b in marks)
        once = {slot: [slot, a, b] for slot, a, b in reversed(marks)}
        if fits and 0 < len(once) and len(text) <= LONGEST_TEXT and "{" not in text:
            record = {"source": DIALOGUES, "text": text, "marks": sorted(once.values(), key=lambda m: int(m[1]))}
            yield {"family": "json_extract" if rng.random() < 0.65 else "doc_questions", **record}


# ---- problems ------------------------------------------------------------------------------------------------------


def problem(record: dict[str, Any], rng: Random, tables: Table) -> Problem:
    """A training problem of the record's family."""
    text, found = _varied(record, rng, tables["values"]["values"])
    key = ("written", record["source"], record["family"], text)
    if record["family"] == "json_extract":
        return _object(text, found, key, rng)
    if record["family"] == "doc_questions":
        return _question(text, found, key, rng)
    tools = tables["tools"]["tools"]
    if not record["intent"]:  # tools of intents.py, one of a domain
        drawn = rng.choices([i for i in tools if i.startswith(intents.SERVICE)], k=1 + int(rng.random() * 8))
        specs = tuple(declared(rng, i, tools, {})[0] for i in {tools[i][1]: i for i in drawn}.values())
        reply = Reply(f"{opening(text)}\nnone", REFUSAL)
        return Problem("tools_multi", "train", key, (user(text),), reply, specs)
    asked = _Asked(record, text, found, rng, tools)
    if record["family"] == "tool_call":
        reply = Reply(asked.trace(asked.text), "", (asked.call,))
        return Problem("tool_call", "train", key, (user(asked.text),), reply, asked.declared(rng, [asked]))
    requests = tables["requests"]["requests"]
    second = next((r for _ in range(99) if tools[(r := pick(rng, requests))["intent"]][1] != asked.domain), None)
    if second is None or rng.random() < REFUSED:
        reply = Reply(f"{opening(asked.text)}\nnone", REFUSAL)
        return Problem("tools_multi", "train", key, (user(asked.text),), reply, asked.declared(rng, []))
    # The second request is of another domain, so that each can mean only its own tool.
    both = [asked, _Asked(second, *_varied(second, rng, tables["values"]["values"]), rng, tools)]
    prompt = joined(rng, [one.text for one in both], [one.call for one in both], "train")
    reply = Reply("\n".join([one.trace(prompt) for one in both]), "", tuple(one.call for one in both))
    return Problem("tools_multi", "train", key, (user(prompt),), reply, asked.declared(rng, both))


def _varied(record: dict[str, Any], rng: Random, values: Mapping[str, list[str]]) -> tuple[str, dict[str, str]]:
    """The text with some marked values replaced, and the value of every marked slot."""
    text, out, at, found = record["text"], "", 0, {}
    for slot, first, end in sorted(record["marks"], key=lambda m: int(m[1])):
        value = text[first:end]
        if rng.random() < REPLACED and text.lower().count(value.lower()) == 1:
            value = _other(rng, slot, value, values.get(slot, []))
        out += text[at:first] + value
        at, found[slot] = end, value
    out += text[at:]
    if out.islower() and rng.random() < 0.5:  # spoken sentences: as people type them, a value at the beginning as it is
        out = out if any(out.startswith(value) for value in found.values()) else out[0].upper() + out[1:]
        out += pick(rng, ("", "", ".", ".", " please", "!")) if out[-1].isalnum() else ""
    return out, found


def _other(rng: Random, slot: str, value: str, known: list[str]) -> str:
    if any(c.isdigit() for c in value):
        changed = re.sub(r"[1-9]", lambda _: str(1 + int(rng.random() * 9)), value) if value.isdigit() else ""
        return changed or (pick(rng, known) if known else value)
    if value[:1].isupper() and rng.random() < 0.5:
        return " ".join([made_up(rng).capitalize() for _ in value.split()[:3]])
    return pick(rng, known) if known else value


_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def _named(words: list[str], style: int) -> str:
    """An identifier of these words: snake_case (style 0), camelCase (1) or PascalCase (2)."""
    words = [w.lower() for w in words]
    if style == 1:
        return words[0] + "".join([w.capitalize() for w in words[1:]])
    return "".join([w.capitalize() for w in words]) if style == 2 else "_".join(words)


def _kind(slot: str, value: str, choices: list[str]) -> tuple[str, Any]:
    """The kind of a field with this value (fields.py), and the value in JSON."""
    if value.lower() in _NUMERALS and _COUNTED.search(slot):
        return "small", _NUMERALS[value.lower()]
    if choices and set(choices) <= {"True", "False"}:
        return "flag", value == "True"
    if value.isdigit() and str(int(value)) == value and len(value) < 7:
        return "small", int(value)
    return "title", value


def _fields(rng: Random, found: Mapping[str, Any]) -> tuple[list[Field], list[Any]]:
    """Fields and values in JSON of these slots."""
    style, fields, values = pick(rng, (0, 0, 0, 1, 1, 2)), [], []
    for slot, value in found.items():
        words = [w.lower() for w in _WORD.findall(slot)]
        kind, shown = _kind(slot, value, [])
        fields.append(Field(_named(words, style), " ".join(words), kind))
        values.append(shown)
    return fields, values


def _object(text: str, found: dict[str, str], key: tuple[Any, ...], rng: Random) -> Problem:
    slots = list(found)
    rng.shuffle(slots)
    if len(slots) > 1 and rng.random() < 0.4:
        slots = slots[: 1 + int(rng.random() * len(slots))]
    fields, values = _fields(rng, {slot: found[slot] for slot in slots})
    absent = rng.random() < 0.12
    if absent:
        name = pick(rng, ("discount", "nickname", "deadline", "invoice_number", "weight", "colour", "passport_number"))
        at = int(rng.random() * (len(fields) + 1))
        fields.insert(at, Field(name, name.replace("_", " "), "title"))
        values.insert(at, None)
    prompt = or_null(rng, wide_prompt(rng, text, fields, typed=rng.random() < 0.2), absent)
    content = json.dumps({f.name: v for f, v in zip(fields, values)}, ensure_ascii=False)
    reasoning = "\n".join([copied(f, v) for f, v in zip(fields, values)])
    return Problem("json_extract", "train", key, prompt_messages(prompt), Reply(reasoning, content))


_QUESTIONS: Final = (
    "What is the {l}?", "What {l} is mentioned?", "Which {l} is it?", "Tell me the {l}.", "what is the {l}", "{l}?",
    "Give me the {l}.", "Which {l} does the text name?", "What does the text say about the {l}?", "What's the {l}?",
    "Please name the {l}.", "Do you know the {l}?", "I need the {l}.", "Which {l} do they talk about?",
)  # fmt: skip
PLACED: Final = (
    "{t}\n\n{q}", "{t} {q}", "{q}\n\n{t}", "Text: {t}\nQuestion: {q}", "Read this and answer.\n{t}\n{q}", '"{t}" {q}',
    "{t}\n{q}", "Conversation: {t}\n\n{q} Answer briefly.", "{q} {t}", "Here is a transcript: {t}\n{q}",
)  # fmt: skip


def _question(text: str, found: dict[str, str], key: tuple[Any, ...], rng: Random) -> Problem:
    slot = pick(rng, list(found))
    label, answer = " ".join(_WORD.findall(slot)).lower(), found[slot]
    at = text.find(answer)
    begin = max([text.rfind(mark, 0, at) + len(mark) for mark in (". ", "? ", "! ") if mark in text[:at]], default=0)
    end = min([i + 1 for mark in ".?!" if (i := text.find(f"{mark} ", at + len(answer))) >= 0], default=len(text))
    prompt = pick(rng, PLACED).format(t=text, q=pick(rng, _QUESTIONS).format(l=label))
    return Problem(
        "doc_questions", "train", key, (user(prompt),), Reply(f"{answer}\n{text[begin:end].strip()}", answer)
    )


class _Asked:
    """A request, the tool that it is for as a prompt declares it, and its call."""

    def __init__(
        self, record: dict[str, Any], text: str, found: dict[str, str], rng: Random, tools: Mapping[str, Any]
    ) -> None:
        self.text, self._tools, self._intent = text, tools, record["intent"]
        self.domain = tools[self._intent][1]
        choices = {slot: values for slot, (_, values) in tools[self._intent][2].items()}
        self.spec, fields = declared(rng, self._intent, tools, found | record["said"])
        self._fields = fields
        given = {**found, **record["said"]}
        self.call = ToolCall(
            self.spec["function"]["name"],
            {f.name: _kind(slot, given[slot], choices[slot])[1] for slot, f in fields.items() if slot in given},
        )

    def trace(self, prompt: str) -> str:
        """As Request.trace (perilune.tasks.tools)."""
        begin = opening(self.text)
        at = prompt.lower().find(begin.lower())
        lines = [begin if at < 0 else prompt[at : at + len(begin)], self.call.name]
        for f in self._fields.values():
            given = f.name in self.call.arguments
            lines.append(
                f"{f.name}: {f.trace_type} {written(self.call.arguments[f.name])}" if given else f"{f.name}: -"
            )
        return "\n".join(lines)

    def declared(self, rng: Random, asked: "list[_Asked]") -> tuple[dict[str, Any], ...]:
        """The tools of a prompt: those that are asked for, others of other domains, generated ones."""
        specs = [one.spec for one in asked]
        taken = {self.domain, *(one.domain for one in asked)}
        service = self._intent.split(":")[0]
        certain = service not in ("home", intents.SERVICE)
        if asked and certain and rng.random() < 0.4:  # found, but not booked
            siblings = [i for i in self._tools if i.split(":")[0] == service and ":" in i and i != self._intent]
            specs += [declared(rng, pick(rng, siblings), self._tools, {})[0]] if siblings else []
        more = max(0, how_many(rng, "train") - len(specs)) or int(not specs)
        known = list(self._tools)
        valued = [i for i in known if self._tools[i][2]] or known  # intents.py has more tools than the others
        for _ in range(more):
            intent = pick(rng, known if rng.random() < 0.35 else valued)
            if self._tools[intent][1] not in taken and rng.random() < 0.6:
                taken.add(self._tools[intent][1])
                specs.append(declared(rng, intent, self._tools, {})[0])
            else:
                near = " ".join([i for i in known if self._tools[i][1] in taken]).lower() + self.text.lower()
                made = [t.spec for t in others(rng, [], 2, "train") if not t.entry and t.noun not in near]
                specs += made[:1]
        names = {s["function"]["name"]: s for s in reversed(specs)}
        kept = list(names.values())
        rng.shuffle(kept)
        return tuple(kept)


_FINDING: Final = {
    "find": ("find", "search", "look_up", "list", "get"), "get": ("get", "fetch", "show", "find"),
    "reserve": ("reserve", "book"), "book": ("book", "reserve"), "buy": ("buy", "order", "purchase"),
    "play": ("play", "start"), "search": ("search", "find", "look_up"), "lookup": ("lookup", "find", "get"),
    "add": ("add", "put"), "rate": ("rate", "review"), "check": ("check", "get", "show"),
    "transfer": ("transfer", "send"), "schedule": ("schedule", "book", "arrange"),
}  # fmt: skip


def declared(
    rng: Random, intent: str, tools: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Field]]:
    """A tool as a prompt declares it, and its fields by slot in declared order. What is not `given` is optional."""
    said, _, slots = tools[intent]
    style = pick(rng, (0, 0, 0, 1, 1, 2))
    words = [w.lower() for w in _WORD.findall(intent.split(":")[-1])]
    words = [*pick(rng, _FINDING.get(words[0], (words[0],))).split("_"), *words[1:]]
    order = list(slots)
    if rng.random() < 0.5:
        rng.shuffle(order)
    if len(order) > 5:  # short prompts: some of the parameters that are not given are left out
        order = [s for s in order if s in given or rng.random() < 0.6]
    order.sort(key=lambda s: s not in given)
    fields, properties, described = {}, {}, rng.random()
    for slot in order:
        about, choices = slots[slot]
        parts = [w.lower() for w in _WORD.findall(slot)]
        boolean = set(choices) == {"True", "False"}
        numbers = bool(choices) and all(c.isdigit() for c in choices)
        counted = slot not in given and bool(_COUNTED.search(slot)) and not choices
        number = numbers or counted or (slot in given and _kind(slot, given[slot], [])[0] == "small")
        words_of = tuple(choices) if choices and not boolean and not numbers and rng.random() < 0.7 else ()
        kind = "flag" if boolean else "small" if number else "title"
        field = Field(_named(parts, 0 if style == 0 else 1), " ".join(parts), kind, words_of)
        fields[slot] = field
        properties[field.name] = field.schema(rng, 0.0)
        if rng.random() < described:
            properties[field.name]["description"] = about if about and rng.random() < 0.6 else f"The {field.label}"
    required = [fields[s].name for s in order if s in given and rng.random() < 0.7]
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    text = said if said and rng.random() < 0.6 else f"{' '.join(words).capitalize()}"
    function = {"name": _named(words, style), **({"description": text} if rng.random() < 0.85 else {})}
    return {"type": "function", "function": {**function, "parameters": parameters}}, fields
