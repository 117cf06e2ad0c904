"""Calls: thoughts that quote the request, calls asked for in rows."""

import random
from itertools import pairwise

from perilune.tasks import catalog, tools
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
