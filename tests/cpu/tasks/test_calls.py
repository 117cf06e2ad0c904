"""Calls: thoughts that quote the request, calls asked for in rows."""

import random
import re
from itertools import pairwise

from perilune.tasks import catalog, tools
from perilune.tasks.composed.chores import chore, handed
from perilune.tasks.composed.errands import errand, puzzle, thanks
from perilune.tasks.families import problems


def test_a_thought_about_a_call_begins_with_words_of_the_request() -> None:
    for split in ("heldout", "structural", "wide"):
        for p in problems("tool_call", split, 60, thinking=True) + problems("tools_multi", split, 60, thinking=True):
            last = p.messages[-1]
            if last["role"] != "user" or not p.reply.tool_calls:
                continue
            names = [call.name for call in p.reply.tool_calls]
            lines = p.reply.reasoning.split("\n")
            quotes = [a for a, b in pairwise(lines) if b in names]
            assert len(quotes) == len(names), p
            places = [last["content"].find(quote) for quote in quotes]
            assert -1 not in places, (quotes, last)
            assert places == sorted(places) and len(set(places)) == len(places), (quotes, last)


def test_calls_in_rows_have_their_words_in_order() -> None:
    rng = random.Random(5)
    seen = 0
    for entry in catalog.ENTRIES:
        tool = tools.catalog_tool(rng, entry)
        for count in (2, 3):
            if made := tools.in_rows(rng, tool, count):
                text, requests = made
                assert len(requests) == count == len({str(r.call.arguments) for r in requests})
                places = [text.find(r.opening) for r in requests]
                assert places == sorted(set(places)) and places[0] == 0, (text, requests)
                for r in requests:
                    assert set(r.call.arguments) == set(tool.spec["function"]["parameters"]["required"])
                seen += 1
    assert seen > 100


def test_calls_that_go_on_name_what_changes() -> None:
    rng = random.Random(6)
    seen = 0
    for entry in catalog.ENTRIES * 2:
        if made := tools.going_on(rng, tools.catalog_tool(rng, entry), 3):
            text, requests = made
            assert "\0" not in text and len({str(r.call.arguments) for r in requests}) == 3
            places = [text.find(r.opening) for r in requests]
            assert places == sorted(set(places)) and -1 not in places, (text, requests)
            first = requests[0].call.arguments
            for r in requests[1:]:
                assert first.keys() == r.call.arguments.keys()
                assert 1 <= sum(first[k] != v for k, v in r.call.arguments.items()) <= 2
            seen += 1
    assert seen > 100


def test_values_have_the_form_of_the_description() -> None:
    forms = {"24 hour": r"\d\d:\d\d", "letter language": "[a-z]{2}", "ISO 4217": "[A-Z]{3}"}
    seen = set()
    for p in problems("tool_call", "train", 2000, thinking=True):
        specs = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in p.tools}
        for name, value in [pair for call in p.reply.tool_calls for pair in call.arguments.items()]:
            about = specs[p.reply.tool_calls[0].name][name].get("description", "")
            found = [form for words, form in forms.items() if words in about]
            assert all(re.fullmatch(form, value) for form in found), p
            seen.update(found)
    assert len(seen) == 3


def test_a_call_is_due_after_a_result_if_its_condition_holds() -> None:
    rng = random.Random(7)
    stages = set()
    for _ in range(400):
        text, past, thought, due, answer, _ = chore(rng)
        stages.add((len(past), len(due), answer[:8]))
        assert bool(due) != bool(answer), text
        assert all(request.opening.lower() in (text + thought).lower() for request in due), text
        if len(past) == 1 and "error" not in thought and (said := re.search(r"(more|less) than (\S+),", text)):
            got, limit = float(re.findall(r": (\S+)\n", thought)[0]), float(said[2])
            assert bool(due) == (got > limit if said[1] == "more" else got < limit), text
    assert stages >= {(0, 1, ""), (1, 1, ""), (1, 3, ""), (2, 1, ""), (1, 0, "The tool"), (2, 0, "Done.")}


def test_errands_name_the_values_of_their_calls() -> None:
    rng = random.Random(8)
    pronouns = 0
    for count in (1, 2, 3, 4) * 100:
        text, requests, _ = errand(rng, count)
        assert not set(text) & set("\0\1\2{}<>*~") and count == len(requests) == len({str(r.call) for r in requests})
        places = [text.find(r.opening) for r in requests]
        assert min(places) >= 0, (text, requests)
        for r in requests:
            assert set(r.call.arguments) == set(r.tool.spec["function"]["parameters"]["required"])
            for f in r.tool.required:
                if f.kind == "title" and not r.tool.iso and len(value := r.call.arguments[f.name]) > 3:
                    assert value.isupper() or value.lower() in text.lower(), (text, r)  # EUR may be "euros"
        pronouns += len(re.findall(r"\b(it|there)\b", text)) > 0
    assert pronouns > 20
    assert all(tools and "{" not in text for text, tools in (thanks(rng) for _ in range(50)))


def test_no_two_tools_of_a_problem_have_one_name() -> None:
    for family in ("tool_call", "tools_multi"):
        for p in problems(family, "train", 400, thinking=True):
            names = [t["function"]["name"] for t in p.tools]
            assert len(set(names)) == len(names) and {c.name for c in p.reply.tool_calls} <= set(names)


def test_a_found_thing_is_used_and_a_told_value_is_the_asked_one() -> None:
    rng = random.Random(9)
    used = 0
    for _ in range(300):
        text, past, thought, due, answer, calls = handed(rng)
        assert bool(due) != bool(answer) and all(r.opening.lower() in text.lower() for r in due), text
        if past and due:
            found = re.findall(r': "?([^"]+)"?$', thought)[0]
            assert found in map(str, due[0].call.arguments.values()), (thought, due)
            used += 1
        elif past and answer != "Done.":
            assert thought.split(": ", 1)[1].strip('"') in answer, (text, calls)
    assert used > 50


def test_a_question_about_a_meaning_has_its_words_and_no_call() -> None:
    rng = random.Random(10)
    for _ in range(100):
        text, question, tools = puzzle(rng)
        assert question in text and tools and not set(text) & set("{}<>\0\1\2")
