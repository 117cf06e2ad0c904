"""Fields of requests that change what is asked of the engine, or what is answered."""

import pytest

from tests.cpu.server.test_fields import BODIES, COUNT, MESSAGES, RESPONSES, message
from tests.serving import BYTES, CHAT, HELLO, TEXT, Served, serve, served


@served()
async def test_a_salt_separates_the_cache_of_its_requests(s: Served) -> None:
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        for salt, keys in (({}, ()), ({"cache_salt": None}, ()), ({"cache_salt": "t 1"}, ("salt:t 1",))):
            reply = await s.client.post(path, {**BODIES[path], **salt})
            assert reply.status == 200, reply.text
            assert s.engine.cache_keys[-1] == keys
        for wrong in ("", "x" * 257, 5):
            reply = await s.client.post(path, {**BODIES[path], "cache_salt": wrong})
            assert reply.status == 400 and "cache_salt" in message(reply), reply.text
    before = len(s.engine.cache_keys)
    reply = await s.client.post(CHAT, {**BODIES[CHAT], "cache_salt": "a", "n": 2})
    assert s.engine.cache_keys[before:] == [("salt:a",)] * 2
    assert (await s.client.post(COUNT, {**BODIES[COUNT], "cache_salt": "a"})).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
@served()
async def test_masks_reach_the_engine(s: Served, path: str) -> None:
    body = {**BODIES[path], "allowed_token_ids": [9, 5, 9], "bad_words": ["no", " on"], "n": 2}
    assert (await s.client.post(path, body)).status == 200
    for _, params in s.engine.seen[-2:]:
        assert params.allowed_token_ids == bytes([32, 2]) and not params.bad_words
        wanted = ("no", " no", " on", "on")
        assert {*params.bad_word_ids} == {tuple(BYTES.encode(text)) for text in wanted}


@served()
async def test_prompts_are_truncated_on_the_left(s: Served) -> None:
    prompt = "".join(chr(33 + i % 90) for i in range(600))
    for kept, side, want in (
        (100, None, prompt[-100:]),
        (100, "right", prompt[:100]),
        (-1, None, prompt[-(512 - 20) :]),
    ):
        body = {"prompt": prompt, "truncate_prompt_tokens": kept, "truncation_side": side, "max_tokens": 20}
        reply = await s.client.post(TEXT, {**body, "echo": True, "logprobs": 0})
        assert reply.status == 200, reply.text
        assert s.prompt() == want and reply.json["usage"]["prompt_tokens"] == len(want)
        assert reply.json["choices"][0]["text"] == want + "Hello"
        assert len(reply.json["choices"][0]["logprobs"]["tokens"]) == len(want) + 5
    long = await s.client.post(TEXT, {"prompt": prompt, "max_tokens": 20})
    assert long.status == 400 and long.error["code"] == "context_length_exceeded"
    short = await s.client.post(TEXT, {"prompt": "ab", "truncate_prompt_tokens": 50, "echo": True})
    assert short.json["choices"][0]["text"] == "abHello"
    # Of a conversation the end stays: the assistant's turn begins there.
    messages = [{"role": "user", "content": prompt}]
    reply = await s.client.post(CHAT, {"messages": messages, "truncate_prompt_tokens": 60})
    assert reply.status == 200 and len(s.engine.seen[-1][0]) == 60
    assert s.prompt().endswith("<|im_end|><|im_assistant|>assistant<|im_middle|><think>")
    assert (await s.client.post(CHAT, {"messages": messages, "truncate_prompt_tokens": -1})).status == 200
    assert len(s.engine.seen[-1][0]) == 511 and s.params.max_tokens == 1


@pytest.mark.parametrize("width", [1, 3])
def test_a_stop_string_may_be_part_of_the_text(width: int) -> None:
    async def test(s: Served) -> None:
        for stop, plain, whole in (({"stop": ["lo"]}, "Hel", "Hello"), ({"stop_token_ids": [ord("l")]}, "He", "Hel")):
            for path, body in ((CHAT, {"messages": HELLO, "thinking": {"type": "disabled"}}), (TEXT, {"prompt": "a"})):
                for keep, want in ((False, plain), (True, whole)):
                    asked = {**body, **stop, "include_stop_str_in_output": keep}
                    (choice,) = (await s.client.post(path, asked)).json["choices"]
                    said = choice["message"]["content"] if path == CHAT else choice["text"]
                    assert (said, choice["finish_reason"]) == (want, "stop")
        (choice,) = (await s.client.post(TEXT, {"prompt": "a", "include_stop_str_in_output": True})).json["choices"]
        assert choice["text"] == "Hello there", "the model's own end is no text"

    serve(test, answer="Hello there", width=width)


@served(answer="a<|im_user|>b")
async def test_special_tokens_may_be_part_of_the_text(s: Served) -> None:
    for path, body in ((CHAT, {"messages": HELLO, "thinking": {"type": "disabled"}}), (TEXT, {"prompt": "a"})):
        for skip, want in ((True, "ab"), (False, "a<|im_user|>b")):
            (choice,) = (await s.client.post(path, {**body, "skip_special_tokens": skip})).json["choices"]
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) == want
    (choice,) = (await s.client.post(TEXT, {"prompt": "a", "skip_special_tokens": False, "logprobs": 0})).json[
        "choices"
    ]
    assert choice["logprobs"]["text_offset"] == [0, 1, 12]


@served()
async def test_tokens_may_be_spelled_as_ids(s: Served) -> None:
    ask = {"return_tokens_as_token_ids": True}
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **ask}
    whole = (await s.client.post(CHAT, chat)).json["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in whole] == [f"token_id:{b}" for b in b"Hello"] and whole[0]["bytes"] == [72]
    assert whole[0]["top_logprobs"][1]["token"] == "token_id:73"
    chunks = (await s.client.post(CHAT, {**chat, "stream": True})).chunks
    entries = [e for c in chunks for e in c["choices"][0].get("logprobs", {}).get("content", [])]
    assert entries == whole
    (choice,) = (await s.client.post(TEXT, {"prompt": "a", "logprobs": 1, **ask})).json["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{b}" for b in b"Hello"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:72": -0.72}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


@served(answer="</think>Hi")
async def test_chats_give_their_token_ids(s: Served) -> None:
    ended = [BYTES.special("</think>"), *b"Hi", BYTES.special("<|im_end|>")]
    body = {"messages": HELLO, "return_token_ids": True, "n": 2}
    answer = (await s.client.post(CHAT, body)).json
    assert answer["prompt_token_ids"] == s.engine.seen[-1][0]
    assert [c["token_ids"] for c in answer["choices"]] == [ended, ended]
    chunks = (await s.client.post(CHAT, {**body, "stream": True})).chunks
    assert [c for c in chunks if "prompt_token_ids" in c] == chunks[:1]
    assert chunks[0]["prompt_token_ids"] == s.engine.seen[-1][0]
    for index in range(2):
        parts = [c["choices"][0]["token_ids"] for c in chunks if c["choices"][0]["index"] == index]
        assert [t for part in parts for t in part] == ended
    assert "token_ids" not in str((await s.client.post(CHAT, {"messages": HELLO})).json)


@served()
async def test_a_request_id_is_part_of_the_responses(s: Served) -> None:
    for path, prefix in ((CHAT, "chatcmpl"), (TEXT, "cmpl")):
        body = {**BODIES[path], "request_id": "job-7"}
        assert (await s.client.post(path, body)).json["id"] == f"{prefix}-job-7"
        assert {c["id"] for c in (await s.client.post(path, {**body, "stream": True})).chunks} == {f"{prefix}-job-7"}


@served(answer="hmm</think>Hi")
async def test_reasoning_may_be_left_out(s: Served) -> None:
    body = {"messages": HELLO, "include_reasoning": False, "stream_options": {"include_usage": True}}
    whole = (await s.client.post(CHAT, {"messages": HELLO, "include_reasoning": False})).json
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    streamed = await s.client.post(CHAT, {**body, "stream": True})
    assert "reasoning_content" not in streamed.text
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed.chunks if c["choices"]) == "Hi"


@served()
async def test_a_thought_is_bounded_by_vllms_name_too(s: Served) -> None:
    for budget, want in ((7, 7), (-1, None)):
        assert (await s.client.post(CHAT, {"messages": HELLO, "thinking_token_budget": budget})).status == 200
        constraint = s.engine.constraints[-1]
        assert (constraint.thinking_budget if constraint else None) == want


@pytest.mark.parametrize("path", [CHAT, TEXT])
@served()
async def test_usage_may_come_with_every_chunk(s: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await s.client.post(path, {**BODIES[path], "stream": True, "stream_options": options})).chunks
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and len({*counts}) > 3
    options["continuous_usage_stats"] = False
    chunks = (await s.client.post(path, {**BODIES[path], "stream": True, "stream_options": options})).chunks
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


@served()
async def test_messages_take_the_older_place_of_the_format(s: Served) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = {**BODIES[MESSAGES], "output_format": form}
    assert (await s.client.post(MESSAGES, body)).status == 200
    assert s.engine.constraints[-1] is not None and s.engine.constraints[-1].answer
    both = await s.client.post(MESSAGES, {**body, "output_config": {"format": form}})
    assert both.status == 400 and "output_format" in message(both)
