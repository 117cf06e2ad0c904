"""Text completions: prompts of every kind, echo, log-probabilities, the best of several."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perilune.core.messages import Delta
from tests.serving import BYTES, CHAT, HELLO, TEXT, FakeEngine, Served, serve, served


@served()
async def test_completions_takes_text_ids_and_lists_of_both(s: Served) -> None:
    for prompt, count in (("ab", 1), ([97, 98], 1), (["ab", "ab"], 2), ([[97, 98], [97, 98], [97, 98]], 3)):
        for stream in (False, True):
            body = {"prompt": prompt, "stream": stream}
            reply = await s.client.post(TEXT, body)
            assert reply.status == 200, reply.text
            texts = [""] * count
            ends = [None] * count
            for answer in reply.chunks if stream else [reply.json]:
                assert answer["object"] == "text_completion"
                for c in answer["choices"]:
                    texts[c["index"]] += c["text"]
                    ends[c["index"]] = ends[c["index"]] or c["finish_reason"]
            assert texts == ["Hello"] * count and ends == ["stop"] * count
            assert all(p == [97, 98] for p, _ in s.engine.seen)
            if not stream:
                assert reply.json["usage"]["prompt_tokens"] == 2 * count
                assert reply.json["usage"]["completion_tokens"] == 6 * count
    assert s.params.max_tokens == 16


@served()
async def test_token_ids_come_as_they_were_generated(s: Served) -> None:
    ended = [*b"Hello", BYTES.special("<|im_end|>")]
    both = (await s.client.post(TEXT, {"prompt": ["ab", "c"], "return_token_ids": True})).json["choices"]
    assert [c["token_ids"] for c in both] == [ended] * 2, "the end token is one of them"
    assert [c["prompt_token_ids"] for c in both] == [[97, 98], [99]]
    cut = (await s.client.post(TEXT, {"prompt": "ab", "max_tokens": 2, "return_token_ids": True})).json
    assert cut["choices"][0]["token_ids"] == [*b"He"]
    assert "token_ids" not in (await s.client.post(TEXT, {"prompt": "ab"})).json["choices"][0]
    streamed = await s.client.post(TEXT, {"prompt": "ab", "stream": True, "return_token_ids": True})
    choices = [chunk["choices"][0] for chunk in streamed.chunks]
    assert [t for c in choices for t in c["token_ids"]] == ended
    assert [c.get("prompt_token_ids") for c in choices] == [[97, 98]] + [None] * (len(choices) - 1)


@served()
async def test_completions_prompts_may_hold_control_tokens(s: Served) -> None:
    await s.client.post(TEXT, {"prompt": "<|im_user|>x"})
    assert s.engine.seen[-1][0] == [BYTES.special("<|im_user|>"), ord("x")]
    await s.client.post(CHAT, {"messages": [{"role": "user", "content": "<|im_end|>"}]})
    assert s.engine.seen[-1][0].count(BYTES.special("<|im_end|>")) == 1, "content must not become control tokens"


def test_several_completions_and_the_best_of_them() -> None:
    class Varied(FakeEngine):
        """Candidate number i of every four answers with the i-th text: later letters are less likely."""

        async def generate(self, prompt: Any, params: Any, *others: Any) -> AsyncGenerator[Delta, None]:
            self.answer = ("zz", "aa", "mm", "ab")[len(self.seen) % 4]
            async for delta in super().generate(prompt, params, *others):
                yield delta

    async def test(s: Served) -> None:
        answer = (await s.client.post(TEXT, {"prompt": ["x", "y"], "n": 4})).json
        assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(("zz", "aa", "mm", "ab") * 2))
        assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 8 * 3
        chunks = (await s.client.post(TEXT, {"prompt": ["x", "y"], "n": 2, "stream": True})).chunks
        texts = [""] * 4
        for c in chunks:
            texts[c["choices"][0]["index"]] += c["choices"][0]["text"]
        assert texts == ["zz", "aa", "mm", "ab"]
        answer = (await s.client.post(TEXT, {"prompt": "x", "n": 2, "best_of": 4})).json
        assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [(0, "aa", None), (1, "ab", None)]
        assert answer["usage"]["completion_tokens"] == 4 * 3
        assert s.params.logprobs == 0

    serve(test, engine=Varied, max_waiting=20)


@served()
async def test_prompt_logprobs_are_spelled_by_id(s: Served) -> None:
    answer = (await s.client.post(TEXT, {"prompt": "né", "prompt_logprobs": 1})).json
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {"195": {"logprob": -1.95, "rank": 1, "decoded_token": "\ufffd"}},
        {"169": {"logprob": -1.69, "rank": 1, "decoded_token": "\ufffd"}},
    ]
    bare = (await s.client.post(TEXT, {"prompt": "né", "prompt_logprobs": 0})).json
    assert bare["choices"][0]["prompt_logprobs"][1]["195"]["rank"] is None
    both = {"prompt": "né", "prompt_logprobs": 2, "logprobs": 1, "echo": True}
    choice = (await s.client.post(TEXT, both)).json["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 2 and len(choice["logprobs"]["top_logprobs"][1]) == 1
    chat = (await s.client.post(CHAT, {"messages": HELLO, "prompt_logprobs": 0, "n": 2})).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["prompt_logprobs"][0] is None
    assert [p.prompt_logprobs for _, p in s.engine.seen[-2:]] == [0, None]


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_echo_and_logprobs(s: Served, stream: bool) -> None:
    body = {"prompt": "né", "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
    reply = await s.client.post(TEXT, body)
    answers = reply.chunks if stream else [reply.json]
    text = "".join(a["choices"][0]["text"] for a in answers)
    table: dict[str, list[Any]] = {}
    for a in answers:
        for name, column in (a["choices"][0]["logprobs"] or {}).items():
            table.setdefault(name, []).extend(column)
    assert text == "néHe"
    assert table["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", "H", "e"]
    assert table["text_offset"] == [0, 1, 1, 2, 3]
    assert table["token_logprobs"] == [None, -1.95, -1.69, -0.72, -1.01]
    assert table["top_logprobs"] == [
        None,
        {"bytes:\\xc3": -1.95},
        {"bytes:\\xa9": -1.69},
        {"H": -0.72},
        {"e": -1.01},
    ]
    assert answers[-1]["choices"][0]["finish_reason"] == "length"


@served(answer="a<|im_user|>b")
async def test_offsets_skip_tokens_without_text(s: Served) -> None:
    choice = (await s.client.post(TEXT, {"prompt": "x", "logprobs": 0})).json["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "<|im_user|>", "b"]
    assert [[*top] for top in choice["logprobs"]["top_logprobs"]] == [["a"], ["<|im_user|>"], ["b"]]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]
    body = {"prompt": [65, 200, 66, 200], "echo": True, "max_tokens": 1, "logprobs": 0}
    choice = (await s.client.post(TEXT, body)).json["choices"][0]
    assert choice["text"] == "A\ufffdB\ufffda" and choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


@served()
async def test_echo_alone_generates_nothing(s: Served) -> None:
    answer = (await s.client.post(TEXT, {"prompt": [104, 105], "echo": True, "max_tokens": 0, "logprobs": 0})).json
    choice = answer["choices"][0]
    assert choice["text"] == "hi" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.05]
    assert answer["usage"]["completion_tokens"] == 0
    assert (await s.client.post(TEXT, {"prompt": "x", "max_tokens": 0})).error["param"] == "max_tokens"


@served()
async def test_completion_stream_with_usage_and_stop(s: Served) -> None:
    body = {"prompt": "a", "stop": ["lo"], "stream": True, "stream_options": {"include_usage": True}}
    chunks = (await s.client.post(TEXT, body)).chunks
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "Hel"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == 1
    assert s.engine.cancelled == [0]
