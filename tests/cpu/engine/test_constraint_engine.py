"""Constraints in the engine: the real small model, hot, in batches, preempted, cancelled, with slow grammars."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig, build
from perilune.core.constraint import Constraint
from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Submit
from perilune.engine.engine import Engine
from perilune.grammar.constrain import AnswerFormat, Named, ToolChoice, constrain
from perilune.grammar.enforcer import Enforcer
from perilune.grammar.matcher import GrammarError
from perilune.text.chat import template_for
from perilune.text.stream import ChatStream, ToolArguments, ToolStart
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import parse_tools
from tests.schemas import SCHEMAS

CONFIG: dict[str, Any] = dict(device="cpu", max_model_len=512, max_num_seqs=48, threads=1)
PERSON = AnswerFormat(
    "json_schema",
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
)


def start(path: Path, **config: Any) -> Engine:
    return Engine(path, build(EngineConfig, {**CONFIG, **config}))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = start(path)
    yield engine
    engine.close()


def run(engine: Engine, requests: list[Submit]) -> dict[int, tuple[tuple[int, ...], str, str | None]]:
    """(tokens, finish_reason, error) by rid."""
    tokens: dict[int, list[int]] = {r.rid: [] for r in requests}
    ends: dict[int, tuple[str, str | None]] = {}
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for delta in engine.step():
            tokens[delta.rid] += delta.tokens
            if delta.finish_reason is not None:
                ends[delta.rid] = (delta.finish_reason, delta.error)
    assert not engine._grammars._sessions and not engine._grammars.compiling
    engine.scheduler.check_integrity()
    return {rid: (tuple(tokens[rid]), *ends[rid]) for rid in tokens}


def hot(nano: Tokenizer, seed: int, max_tokens: int, **other: Any) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=max_tokens, **other).ending_with(nano.stop_ids)


def ask(path: Path, nano: Tokenizer, text: str, tools: Any = None, thinking: bool = False) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    return tuple(template_for(path).render_ids(nano, messages, tools=tools, thinking=thinking))


def function(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "call", "parameters": schema}}


@pytest.mark.parametrize("choice, thinking", [("required", False), ("auto", True)])
def test_hot_calls_are_valid_whatever_the_schema(
    path: Path, nano: Tokenizer, engine: Engine, choice: ToolChoice, thinking: bool
) -> None:
    requests = []
    for rid, schema in enumerate(SCHEMAS):
        tools = [function(schema)]
        constraint = constrain(
            nano,
            tools=parse_tools(tools),
            choice=choice,
            first_index=3,
            thinking=thinking,
            thinking_budget=4 if thinking else None,
        )
        assert constraint is not None
        prompt = ask(path, nano, "Please call your tool now.", tools, thinking)[-200:]
        # A model bent on calling, in its thoughts too: there the mask has to hold against it.
        bias = {} if choice == "required" else {nano.special("<|tool_calls_section_begin|>"): 15.0}
        params = hot(nano, rid, max(constraint.least + 12, 70), logit_bias=bias)
        requests.append(Submit(rid, prompt, params, constraint))
    calls = 0
    for rid, (ids, reason, error) in run(engine, requests).items():
        assert error is None
        stream = ChatStream(nano, thinking=thinking, tools=parse_tools([function(SCHEMAS[rid])]), first_tool_index=3)
        events = [*stream.feed(ids), *stream.finish()]
        assert not stream.incomplete and stream.reasoning_tokens <= 5
        heads = [e.id for e in events if isinstance(e, ToolStart)]
        assert heads == [f"functions.call:{3 + i}" for i in range(len(heads))]
        assert heads or choice == "auto"
        for i in range(len(heads)):
            text = "".join(e.text for e in events if isinstance(e, ToolArguments) and e.index == i)
            jsonschema.validate(json.loads(text), SCHEMAS[rid], cls=jsonschema.Draft202012Validator)
        if heads or choice != "auto":
            # "length": a hot answer seldom comes to its end by itself within so few tokens.
            assert reason in ("stop", "length") and ids[-1] == nano.special("<|im_end|>")
        calls += len(heads)
    assert calls


def person(nano: Tokenizer) -> Constraint:
    constraint = constrain(nano, answer=PERSON)
    assert constraint is not None
    return constraint


def check_person(nano: Tokenizer, ids: tuple[int, ...]) -> None:
    jsonschema.validate(json.loads(nano.decode(ids[:-1])), PERSON.value)


def batch(path: Path, nano: Tokenizer, constraint: Constraint | None, count: int, **other: Any) -> list[Submit]:
    prompt = ask(path, nano, "Tell me about somebody.")
    return [Submit(i, prompt, hot(nano, i, 24, **other), constraint) for i in range(count)]


def test_a_seeded_request_is_the_same_alone_and_among_others(path: Path, nano: Tokenizer, engine: Engine) -> None:
    requests = batch(path, nano, person(nano), 6, top_p=0.9, presence_penalty=0.5)
    free = [Submit(10 + i, r.prompt, r.params) for i, r in enumerate(requests)]
    together = run(engine, [*requests, *free])
    assert len({together[i][0] for i in range(6)}) > 1
    for request in requests:
        check_person(nano, together[request.rid][0])
        assert run(engine, [request]) == {request.rid: together[request.rid]}
    assert run(engine, free) == {r.rid: together[r.rid] for r in free}  # the others never noticed


def test_preempted_and_chunked_requests_keep_their_place(path: Path, nano: Tokenizer, engine: Engine) -> None:
    requests = batch(path, nano, person(nano), 6)
    expected = run(engine, requests)
    length = len(requests[0].prompt)
    blocks = 2 * (length + 24) // 8 + 2
    small = start(
        path, kv_blocks=blocks, block_size=8, max_model_len=8 * blocks, max_step_tokens=16, prefix_cache=False
    )
    try:
        assert run(small, requests) == expected
        assert small.stats().preemptions > 0
    finally:
        small.close()


def test_a_slow_grammar_is_waited_for(
    path: Path, nano: Tokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = batch(path, nano, person(nano), 3)
    expected = run(engine, requests)
    fill = Enforcer.fill

    def slowly(self: Enforcer, mask: Any, left: int) -> None:
        mask[:] = np.uint32(0xFFFFFFFF)  # what must never be used
        time.sleep(0.03)
        fill(self, mask, left)

    monkeypatch.setattr(Enforcer, "fill", slowly)
    assert run(engine, requests) == expected


def test_log_probabilities_are_those_of_the_unmasked_distribution(path: Path, nano: Tokenizer) -> None:
    with LLM(path, **CONFIG) as llm:
        prompt = list(ask(path, nano, "Hello"))
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=16, logprobs=0)
        (got,) = llm.generate(prompt, params, constraint=person(nano))
        scores = llm.score([*prompt, *got.token_ids])[len(prompt) - 1 :]
        assert [r.logprob for r in got.logprobs] == pytest.approx(scores, abs=2e-2)
        assert min(scores) < -3  # nobody would have said that freely


# ---- failures


def test_room_is_checked_before_anything_runs(path: Path, nano: Tokenizer, engine: Engine) -> None:
    constraint = person(nano)
    prompt = ask(path, nano, "Hello")
    with pytest.raises(RequestError, match=f"at least {constraint.least}"):
        engine.submit(Submit(0, prompt, hot(nano, 0, constraint.least - 1), constraint))
    assert not engine.busy
    (end,) = run(engine, [Submit(0, prompt, hot(nano, 0, constraint.least), constraint)]).values()
    check_person(nano, end[0])


def test_a_request_with_nothing_left_to_choose_fails_alone(path: Path, nano: Tokenizer, engine: Engine) -> None:
    constraint = constrain(nano, answer=AnswerFormat("choice", ["yes"]))
    prompt = ask(path, nano, "Hello")
    requests = [Submit(0, prompt, hot(nano, 0, 20, min_tokens=15), constraint), *batch(path, nano, None, 2)[1:]]
    ends = run(engine, requests)
    assert ends[0][1] == "error" and "min_tokens" in (ends[0][2] or "")
    assert nano.decode(ends[0][0]) == "yes" and ends[1] == run(engine, requests[1:])[1]


def test_a_grammar_that_gives_up_fails_its_request_only(
    path: Path, nano: Tokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Enforcer.fill
    seen: list[Enforcer] = []

    def fails(self: Enforcer, mask: Any, left: int) -> None:
        seen.append(self)
        if seen.count(self) > 4 and self is seen[0]:
            raise GrammarError("too complex")
        fill(self, mask, left)

    monkeypatch.setattr(engine, "speculator", None)  # drafts are walked on copies
    requests = batch(path, nano, person(nano), 2)
    expected = run(engine, requests)
    monkeypatch.setattr(Enforcer, "fill", fails)
    ends = run(engine, requests)
    assert "too complex" in (ends[0][2] or "") and len(ends[0][0]) == 4
    assert ends[0][0] == expected[0][0][:4] and ends[1] == expected[1]


def test_a_constraint_that_does_not_compile_gets_a_delta(path: Path, nano: Tokenizer, engine: Engine) -> None:
    (end,) = run(engine, [Submit(0, (1, 2), hot(nano, 0, 9), Constraint(text=False, answer="start: x"))]).values()
    assert end[1] == "error" and "cannot be enforced" in (end[2] or "")


def test_cancelling_while_the_grammar_compiles(
    path: Path, nano: Tokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = batch(path, nano, person(nano), 1)[0]
    never: Future[Any] = Future()
    with monkeypatch.context() as m:
        m.setattr(engine._grammars._compiler, "submit", lambda *_: never)
        engine.submit(request)
        assert engine.busy and engine.step() == []
        engine.cancel(request.rid)
    assert not engine.busy


def test_the_grammar_of_a_cancelled_request_is_not_compiled(
    path: Path, nano: Tokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = batch(path, nano, person(nano), 3)
    compiled, begun, go, compile_one = list[int](), threading.Event(), threading.Event(), engine._grammars._compile

    def seen(request: Submit) -> Any:
        compiled.append(request.rid)
        begun.set()
        go.wait()
        return compile_one(request)

    monkeypatch.setattr(engine._grammars, "_compile", seen)
    engine.submit(first)
    begun.wait()
    engine.submit(second)
    for request in (first, second):
        engine.cancel(request.rid)
    go.set()
    run(engine, [third])
    assert compiled == [first.rid, third.rid]


def test_cancelling_on_the_way_frees_the_session(path: Path, nano: Tokenizer, engine: Engine) -> None:
    request = batch(path, nano, person(nano), 1)[0]
    engine.submit(request)
    while not engine.step():
        pass
    assert engine._grammars._sessions
    engine.cancel(request.rid)
    while engine.busy:
        assert engine.step() == []
    assert not engine._grammars._sessions


# ---- chat


def test_an_answer_goes_on_from_its_beginning(path: Path) -> None:
    question = {"role": "user", "content": "What is 347 + 589?"}

    def begun(content: str, **more: Any) -> list[dict[str, Any]]:
        return [question, {"role": "assistant", "content": content, **more}]

    greedy = SamplingParams(temperature=0, max_tokens=80)
    with LLM(path, **CONFIG) as llm:
        for thinking in (None, True, False):
            made = llm.chat(begun("347 + 589 = 9", partial=True), greedy, thinking=thinking)
            assert (made.reasoning, made.content, made.finish_reason) == ("", "36", "stop")
        thought = llm.chat(begun("", reasoning_content="347+589\nc3b4a7\nc5b8a9\na7+9"), greedy)
        assert thought.reasoning.startswith("+0=16\n") and "936" in thought.content
        budgeted = llm.chat(begun("", reasoning_content="347+589\n"), greedy, thinking_budget=3)
        assert 0 < len(budgeted.reasoning) <= 12 and budgeted.content
        assert llm.tokenizer is not None
        opener = llm.tokenizer.special("<think>")
        assert opener not in budgeted.token_ids, "the engine knows that the thought is open"
        hot = SamplingParams(temperature=1.5, seed=2, max_tokens=60)
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        beginning = '{\n  "sum": 9'
        made = llm.chat(begun(beginning), hot, answer=AnswerFormat("json_schema", schema))
        assert made.reasoning == "" and str(json.loads(beginning + made.content)["sum"]).startswith("9")
        called = llm.chat(begun("Let me see."), hot, tools=[function(SCHEMAS[3])], tool_choice=Named("call"))
        assert called.content == "" and len(called.tool_calls) == 1
        with pytest.raises(RequestError, match="'Sum' does not fit"):
            llm.chat(begun("Sum"), hot, answer=AnswerFormat("json_schema", schema))


def test_tools_and_forms(path: Path, nano: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Weather in Paris?"}]
    params = SamplingParams(temperature=1.5, seed=2, max_tokens=60)
    with LLM(path, **CONFIG) as llm:
        forced = llm.chat(messages, params, tools=[function(SCHEMAS[3])], tool_choice=Named("call"), thinking_budget=6)
        assert forced.finish_reason == "tool_calls" and len(forced.tool_calls) == 1
        jsonschema.validate(json.loads(forced.tool_calls[0].arguments), SCHEMAS[3])
        chosen = llm.chat(messages, params, answer=AnswerFormat("choice", ["yes", "no"]), thinking=False)
        assert chosen.content in ("yes", "no")
        with pytest.raises(RequestError, match="uniqueItems"):
            llm.chat(messages, params, answer=AnswerFormat("json_schema", {"uniqueItems": True}))
        with pytest.raises(EngineError, match="min_tokens"):
            llm.chat(
                messages,
                SamplingParams(min_tokens=30, max_tokens=40),
                answer=AnswerFormat("choice", ["yes", "no"]),
                thinking=False,
            )


# ---- closed: an answer that its grammar ended because the tokens ran out says so.


def answers(engine: Engine, requests: list[Submit]) -> dict[int, tuple[list[int], str, bool]]:
    """(tokens, finish reason, closed by the grammar) by rid."""
    tokens: dict[int, list[int]] = {r.rid: [] for r in requests}
    found = {}
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for delta in engine.step():
            tokens[delta.rid] += delta.tokens
            assert delta.error is None
            if delta.finish_reason is not None:
                found[delta.rid] = (tokens[delta.rid], delta.finish_reason, delta.closed_by_grammar)
    return found


def test_an_answer_that_runs_out_of_tokens(path: Path, nano: Tokenizer, engine: Engine) -> None:
    free = batch(path, nano, person(nano), 12)
    requests = [Submit(r.rid, r.prompt, replace(r.params, max_tokens=17), r.constraint) for r in free]
    hurried = answers(engine, requests)
    for ids, reason, closed in hurried.values():
        check_person(nano, tuple(ids))
        assert (reason, closed) in (("length", True), ("stop", False))
    assert 2 < sum(closed for _, _, closed in hurried.values()) < 12
    roomy = [Submit(r.rid, r.prompt, replace(r.params, max_tokens=200), r.constraint) for r in requests]
    calm = answers(engine, roomy)
    assert all((reason, closed) == ("stop", False) for _, reason, closed in calm.values())
    for rid, (ids, _, closed) in hurried.items():  # one that came to its end by itself is the same with more room
        assert closed == (ids != calm[rid][0])


def test_a_text_that_leaves_no_choice_is_not_closed_early(path: Path, nano: Tokenizer, engine: Engine) -> None:
    constraint = constrain(nano, answer=AnswerFormat("json_schema", {"const": {"a": 1}}))
    assert constraint is not None
    prompt = ask(path, nano, "Hello")
    for temperature in (0.0, 0.3):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=64).ending_with(nano.stop_ids)
        ((ids, reason, _),) = answers(engine, [Submit(0, prompt, params, constraint)]).values()
        assert reason == "stop"
        exact = replace(params, max_tokens=len(ids))
        if len(ids) >= constraint.least:
            assert answers(engine, [Submit(0, prompt, exact, constraint)]) == {0: (ids, "stop", False)}


@pytest.mark.parametrize("word", ["red", "no"])
def test_the_last_token_of_a_text_is_the_models_choice(path: Path, nano: Tokenizer, engine: Engine, word: str) -> None:
    constraint = constrain(nano, answer=AnswerFormat("choice", ["red", "no"]))
    assert constraint is not None and constraint.least == 2
    bias = {nano.encode(word)[0]: 100.0}
    params = SamplingParams(temperature=0.0, max_tokens=2, logit_bias=bias).ending_with(nano.stop_ids)
    ((ids, *how),) = answers(engine, [Submit(0, ask(path, nano, "Well?"), params, constraint)]).values()
    assert nano.decode(ids[:-1]) == word and how == ["stop", False]


def test_a_call_cut_short_and_a_call_not_made(path: Path, nano: Tokenizer, engine: Engine) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = [function({**schema, "additionalProperties": False})]
    constraint = constrain(nano, tools=parse_tools(tools), choice="required")
    assert constraint is not None
    prompt = ask(path, nano, "Please call your tool now.", tools)[-200:]
    long = {nano.encode("a")[0]: 30.0}  # a text that would not end
    requests = [Submit(i, prompt, hot(nano, i, constraint.least + 4, logit_bias=long), constraint) for i in range(6)]
    ends = answers(engine, requests)
    assert all(ids[-1] == nano.special("<|im_end|>") for ids, *_ in ends.values())
    assert ["length", True] in [how for _, *how in ends.values()]
    # A second call is wanted and does not fit: bias lets the first one end at once.
    ends = {nano.special("<|tool_call_begin|>"): 100.0, nano.special("<|tool_call_end|>"): 100.0}
    eager = replace(hot(nano, 1, constraint.least + 6, logit_bias=ends), temperature=0.0)
    ((ids, *how),) = answers(engine, [Submit(0, prompt, eager, constraint)]).values()
    assert ids.count(nano.special("<|tool_call_end|>")) == 1 and how == ["length", True]
    single = constrain(nano, tools=parse_tools(tools), choice="required", parallel=False)
    ((ids, *_),) = answers(engine, [Submit(0, prompt, eager, single)]).values()
    assert ids[-1] == nano.special("<|im_end|>")


def test_a_thought_in_the_way_of_the_answer(path: Path, nano: Tokenizer, engine: Engine) -> None:
    constraint = constrain(nano, answer=AnswerFormat("choice", ["yes", "no"]), thinking=True)
    assert constraint is not None
    prompt = ask(path, nano, "Well?", thinking=True)
    params = hot(nano, 2, 12, logit_bias={nano.special("</think>"): -100.0})
    ((ids, *how),) = answers(engine, [Submit(0, prompt, params, constraint)]).values()
    assert nano.special("</think>") in ids and how == ["length", True]


def test_a_free_text_that_is_cut_has_no_such_mark(path: Path, nano: Tokenizer, engine: Engine) -> None:
    for constraint in (None, Constraint()):
        request = Submit(0, ask(path, nano, "Tell me a story."), hot(nano, 5, 9), constraint)
        ((_, *how),) = answers(engine, [request]).values()
        assert how == ["length", False]


def test_the_python_api_says_so(path: Path, nano: Tokenizer) -> None:
    with LLM(path, **CONFIG) as llm:
        prompt = list(ask(path, nano, "Tell me about somebody."))
        params = SamplingParams(temperature=1.5, seed=0, max_tokens=14)
        (got,) = llm.generate(prompt, params, constraint=person(nano))
        assert got.closed_by_grammar and got.finish_reason == "length"
        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        called = llm.chat(
            [{"role": "user", "content": "Call."}],
            replace(params, max_tokens=17),
            tools=[function(schema)],
            tool_choice="required",
            thinking=False,
        )
        assert called.tool_calls and called.completion.closed_by_grammar and called.finish_reason == "length"
