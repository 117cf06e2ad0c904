"""What a request may ask of the choice of its tokens, and that it gets it whatever else is going on."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perilune import LLM, SamplingParams
from perilune.core.errors import RequestError
from perilune.core.messages import Submit
from perilune.core.sampling import MAX_BIASED, best, candidates, sibling
from perilune.core.step import Work
from perilune.engine import sampler, wire
from perilune.engine.penalties import MIN_ROWS, Adjuster
from perilune.ops.harness import registry
from perilune.ops.sampling.penalize import PROMPT, penalize
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer
from tests import oracle
from tests.cpu.engine.test_engine import CONFIG

PROMPTS = oracle.random_prompts(5, [9, 40, 17, 3, 33, 21])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> oracle.Checkpoint:
    return oracle.make(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def llm(tiny: oracle.Checkpoint) -> Iterator[LLM]:
    with LLM(tiny.path, **CONFIG) as llm:
        yield llm


# ---- params


@pytest.mark.parametrize(
    "field, value",
    [
        ("presence_penalty", 2.01),
        ("presence_penalty", None),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10.5),
        ("repetition_penalty", "1"),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_tokens", 9),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: "5"}),
        ("logit_bias", {1: True}),
        ("logit_bias", {-1: 5}),
        ("logit_bias", {"one": 5}),
        ("logit_bias", {1.5: 5}),
        ("logit_bias", [(1, 2), (1, 3)]),
        ("logit_bias", [(1, 2, 3)]),
        ("logit_bias", 5),
        ("logit_bias", "5"),
        ("logit_bias", dict.fromkeys(range(MAX_BIASED + 1), 1)),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**63]),
        ("stop", ["x" * 1025]),
        ("stop", ["x"] * 17),
        ("top_k", 2**63),
        ("top_k", 10**400),
        ("min_tokens", 10**400),
        ("max_tokens", 2**64),
        ("seed", -(10**400)),
        ("prompt_logprobs", 10**400),
        ("temperature", 10**400),
        ("top_p", math.inf),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{"max_tokens": 8, field: value})
    assert error.value.param == field and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_bounds_are_inside_and_bias_may_be_a_mapping() -> None:
    pairs: Any = {"7": -100, 3: 100.0}
    params = SamplingParams(presence_penalty=-2, frequency_penalty=2, min_tokens=4, max_tokens=4, logit_bias=pairs)
    assert params.logit_bias == ((7, -100.0), (3, 100.0)) and params.penalized
    assert params.ending_with([5]).logit_bias == params.logit_bias
    assert len(SamplingParams(logit_bias=[(i, 1) for i in range(MAX_BIASED)]).logit_bias) == MAX_BIASED
    assert not SamplingParams(logit_bias=pairs, min_tokens=3).penalized
    params.check_ids(8)
    with pytest.raises(RequestError, match="names token 7; this model's ids end at 6"):
        params.check_ids(7)


def test_the_engine_process_gets_them_whole() -> None:
    params = SamplingParams(logit_bias={5: -3}, repetition_penalty=1.5, min_tokens=2, presence_penalty=1)
    most = 2**63 - 1
    assert SamplingParams(stop="x" * 1024).stop == ("x" * 1024,)
    largest = SamplingParams(top_k=most, seed=most, min_tokens=most, max_tokens=most, stop_token_ids=(most,))
    frame = wire.encode([Submit(1, (1,), largest)])
    assert wire.decode(frame[wire.HEADER.size :]) == [Submit(1, (1,), largest)]
    frame = wire.encode([Submit(1, (1,), params)])
    assert wire.decode(frame[wire.HEADER.size :]) == [Submit(1, (1,), params)]


def test_candidates_and_their_seeds() -> None:
    assert (candidates(3), candidates(2, 5), candidates(128)) == (3, 5, 128)
    for n, best_of, param in (
        (0, None, "n"),
        (129, None, "n"),
        (True, None, "n"),
        (3, 2, "best_of"),
        (10**400, None, "n"),
        (1, 10**400, "best_of"),
        (1, 0, "best_of"),
    ):
        with pytest.raises(RequestError, match=param) as error:
            candidates(n, best_of)
        assert error.value.param == param
    params = SamplingParams(seed=-7, top_k=5)
    seeds = [sibling(params, i).seed for i in range(1000)]
    assert seeds[0] == -7 and len(set(seeds)) == 1000 and all(0 <= s < 2**63 for s in seeds[1:])
    assert sibling(params, 3) == SamplingParams(seed=seeds[3], top_k=5)
    # The output of splitmix64 for seed 0 is published; its lowest bit is dropped.
    assert sibling(SamplingParams(seed=0), 1).seed == 0xE220A8397B1DCDAF >> 1
    assert sibling(SamplingParams(), 3) == SamplingParams()


def test_best_goes_by_the_mean() -> None:
    assert best([[-1.0, -1.0], [-1.5], [], [-0.5, -0.5, -2.0], [-1.0]], 5) == [0, 3, 4, 1, 2]
    assert best([[-2.0], [-1.0]], 1) == [1]


def work(slot: int, draw: int, params: SamplingParams, history: tuple[int, ...] = ()) -> Work:
    return Work(0, slot, 0, (1,), (0,), True, draw, params, seed=slot + 1, history=history)


def expected(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    """One row, said plainly."""
    x = logits.double().clone()
    for t in {*prompt, *output}:
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t, times in Counter(output).items():
        x[t] -= params.frequency_penalty * times + params.presence_penalty
    for t, bias in params.logit_bias:
        x[t] += bias
    if len(output) < params.min_tokens:
        x[[t for t in params.stop_token_ids if t < len(x)]] = -math.inf
    return x.float()


class Waits(TorchDispatchMode):
    """Fails on whatever makes the host wait for a GPU: reading a value, or a shape that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert not any(w in name for w in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")), name
        if name.startswith(("aten::index.", "aten::index_put")):
            assert all(i is None or i.dtype == torch.int64 for i in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


PENALIZED = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
MIXED = [
    PENALIZED,
    SamplingParams(top_k=5, top_p=0.9),
    SamplingParams(logit_bias={3: 4.0, 9: -100.0}, min_tokens=2, stop_token_ids=(9, 11), temperature=0.0),
    SamplingParams(repetition_penalty=0.7, logit_bias={3: -2.0}, min_tokens=3, stop_token_ids=(3, 70), min_p=0.1),
    SamplingParams(frequency_penalty=-1.5, temperature=0.5),
]


# ---- adjuster


V = 64


def test_against_the_plain_words_over_steps_and_slots() -> None:
    """Histories are given at the start and after a "preemption"; in between tokens are counted on the device."""
    g = torch.Generator().manual_seed(1)
    adjuster = Adjuster(8)
    prompts = [torch.randint(V, (6,), generator=g).tolist() for _ in MIXED]
    outputs: list[list[int]] = [[] for _ in MIXED]
    slots = [7, 0, 3, 5, 1]
    for step in range(6):
        logits = torch.randn(len(MIXED), V, generator=g) * 3
        before = logits.clone()
        if step == 3:
            slots = [2, 0, 3, 7, 5]  # everybody moves, some to rows that were others'
        fresh = step in (0, 3)
        batch = tuple(
            work(slot, len(o), p, (*prompt, *o) if fresh and p.penalized else ())
            for slot, o, p, prompt in zip(slots, outputs, MIXED, prompts)
        )
        adjusted = adjuster.adjust(logits, batch)
        assert torch.equal(logits, before)
        for row, got in enumerate(adjusted):
            want = expected(logits[row], prompts[row], outputs[row], MIXED[row])
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        tokens = torch.randint(8, (len(MIXED),), generator=g)
        adjuster.count(tokens)
        for output, token in zip(outputs, tokens.tolist()):
            output.append(token)


def test_nobody_asks_nobody_pays() -> None:
    adjuster, logits = Adjuster(8), torch.randn(2, V)
    batch = tuple(work(i, 3, SamplingParams(min_tokens=3, stop_token_ids=(1,))) for i in range(2))
    assert adjuster.adjust(logits, batch) is logits
    adjuster.count(torch.tensor([1, 2]))
    assert adjuster._counts is None and not adjuster._rows and not adjuster._terms


def test_memory_is_bounded_by_the_slots() -> None:
    adjuster, held = Adjuster(6), []
    for slot in (5, 3, 5, 0, 1, 2, 4, 3, 0):
        adjuster.adjust(torch.randn(1, V), (work(slot, 0, PENALIZED, (1, 2)),))
        held.append(len(adjuster._counts))  # type: ignore[arg-type]
    assert held[0] == MIN_ROWS and held[-1] == 6 and held == sorted(held)


@torch.inference_mode()
def test_the_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, adjuster = torch.randn(len(MIXED), V), Adjuster(8)
    batches = [
        tuple(work(i, d, p, (1, 2, 3) if p.penalized and not d else ()) for i, p in enumerate(MIXED)) for d in (0, 1)
    ]

    def forbidden(*_: Any) -> None:
        raise AssertionError("the host reads a tensor")

    for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    with Waits(), registry.using({"sample": "torch", "argmax": "torch"}):
        for batch in batches:
            tokens = sampler.sample_tokens(adjuster.adjust(logits, batch), batch)
            sampler.finite(logits)
            adjuster.count(tokens)
    with pytest.raises(AssertionError, match="reads a tensor"):
        bool(tokens[0] == 0)
    with pytest.raises(AssertionError, match="mask"), Waits():
        logits[logits > 0]


def test_all_numbers_of_a_step_travel_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    there = sampler.on_device
    monkeypatch.setattr(sampler, "on_device", lambda a, d: (copies.append(a.size), there(a, d))[1])
    batch = tuple(work(i, 1, p) for i, p in enumerate(MIXED))
    sampler.sample_tokens(torch.randn(len(MIXED), V), batch)
    assert copies == [6 * len(MIXED)]
    sampler.sample_tokens(torch.randn(1, V), batch[2:3])
    assert len(copies) == 1  # greedy needs none


def test_a_masked_token_is_never_chosen() -> None:
    params = [SamplingParams(min_tokens=1, stop_token_ids=(2,), temperature=t) for t in (0.0, 1.0, 50.0)]
    logits = torch.zeros(3, 4)
    logits[:, 2] = 50.0
    batch = tuple(work(i, 0, p) for i, p in enumerate(params))
    for impl in ("torch", "reference"):
        with registry.using({"sample": impl, "argmax": impl}):
            assert 2 not in sampler.sample_tokens(Adjuster(3).adjust(logits, batch), batch).tolist()


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.zeros(4, 9)
    logits[1, 3], logits[2] = float("nan"), float("-inf")
    logits[3, 5] = 9.0
    logits[3, 2] = float("-inf")
    for temperatures in ((0.0,) * 4, (1e-3,) * 4, (0.0, 1e-3, 0.0, 1e-3)):
        batch = tuple(work(i, 0, SamplingParams(temperature=t)) for i, t in enumerate(temperatures))
        drawn = sampler.sample_tokens(logits, batch).tolist()
        assert drawn[0] >= 0 and drawn[1:] == [sampler.FAILED, sampler.FAILED, 5]


def test_prompt_flag_does_not_count_as_generated() -> None:
    counts = torch.tensor([[PROMPT, PROMPT + 2, 1, 0]], dtype=torch.int32)
    one = torch.ones(1)
    got = penalize(torch.tensor([[4.0, 4.0, -4.0, 4.0]]), counts, torch.tensor([0]), one * 0.5, one, one * 2)
    assert got.tolist() == [[2.0, 2.0 - 2.0 - 0.5, -8.0 - 1.0 - 0.5, 4.0]]


# ---- engine


REQUESTS = (
    SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    SamplingParams(seed=1, presence_penalty=2.0, frequency_penalty=1.0, top_p=0.9),
    SamplingParams(seed=2, top_k=20),
    SamplingParams(seed=3, repetition_penalty=0.5, temperature=0.7),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=4, frequency_penalty=-2.0, logit_bias={7: 5.0}, min_tokens=7, stop_token_ids=(7,)),
)


def requests(tokens: int = 30) -> list[SamplingParams]:
    return [replace(p, max_tokens=tokens) for p in REQUESTS]


def test_greedy_with_penalties_agrees_with_transformers(tiny: oracle.Checkpoint, llm: LLM) -> None:
    params = replace(REQUESTS[0], max_tokens=12)
    for prompt in PROMPTS[:3]:
        (got,) = llm.generate(prompt, params)
        output: list[int] = []
        for _ in range(12):
            output.append(int(expected(tiny.logits([*prompt, *output])[-1], prompt, output, params).argmax()))
        assert list(got.token_ids) == output


def test_alone_batched_cached_chunked_and_preempted_alike(
    tiny: oracle.Checkpoint, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = requests(60)
    alone = [llm.generate(p, q)[0] for p, q in zip(PROMPTS, params)]
    tokens = [c.token_ids for c in alone]
    assert len(set(tokens)) == len(tokens)
    again = llm.generate(PROMPTS, params)
    assert [c.token_ids for c in again] == tokens
    assert again[1].cached_tokens == 32  # the prompt's blocks come from the cache, its tokens count all the same
    tight = dict(max_step_tokens=7, block_size=4, kv_blocks=32, max_num_seqs=5, max_model_len=128)
    with LLM(tiny.path, **(CONFIG | tight)) as other:
        adjuster, resumed = other._engine.runner.adjuster, set()  # type: ignore[union-attr]

        def adjust(logits: torch.Tensor, batch: tuple[Work, ...]) -> torch.Tensor:
            resumed.update(w.rid for w in batch if w.history and w.output_index and w.params.penalized)
            return Adjuster.adjust(adjuster, logits, batch)

        monkeypatch.setattr(adjuster, "adjust", adjust)
        assert [c.token_ids for c in other.generate(PROMPTS, params)] == tokens
        assert other._engine.stats().preemptions > 2 and len(resumed) > 1  # type: ignore[union-attr]
        order = [4, 2, 0, 5, 3, 1]
        mixed = other.generate([PROMPTS[i] for i in order], [params[i] for i in order])
        assert [c.token_ids for c in mixed] == [tokens[i] for i in order]


def test_a_slot_forgets_its_last_request(tiny: oracle.Checkpoint, llm: LLM) -> None:
    params = requests(8)
    with LLM(tiny.path, **(CONFIG | dict(max_num_seqs=1))) as one:
        for prompt, p in itertools.chain(zip(PROMPTS, params), zip(PROMPTS, params)):
            assert one.generate(prompt, p)[0].token_ids == llm.generate(prompt, p)[0].token_ids


def test_penalties_do_what_they_are_for(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    loop = llm.generate(PROMPTS[0], greedy)[0].token_ids
    free = llm.generate(PROMPTS[0], replace(greedy, presence_penalty=2.0, frequency_penalty=2.0))[0].token_ids
    assert len(set(free)) == len(free) > len(set(loop))
    stuck = llm.generate(PROMPTS[0], replace(greedy, frequency_penalty=-2.0))[0].token_ids
    assert len(set(stuck)) == 1


def test_no_end_before_min_tokens(llm: LLM) -> None:
    ends = tuple(range(0, 512, 2))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, stop_token_ids=ends)
        assert all(len(c.token_ids) < 10 for c in llm.generate(PROMPTS, params))
        for c in llm.generate(PROMPTS, replace(params, min_tokens=10)):
            assert not {*c.token_ids[:10]} & {*ends} and len(c.token_ids) > 10 and c.token_ids[-1] in ends


def test_bias_forces_and_forbids_and_logprobs_are_the_models_own(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=5, logprobs=20)
    (free,) = llm.generate(PROMPTS[1], greedy)
    (forced,) = llm.generate(PROMPTS[1], replace(greedy, logit_bias={77: 100}))
    assert forced.token_ids == (77,) * 5
    assert [r.logprob for r in forced.logprobs] == pytest.approx(llm.score([*PROMPTS[1], *[77] * 5])[-5:], abs=1e-5)
    assert forced.logprobs[0].top == free.logprobs[0].top and len(free.logprobs[0].top) == 20
    (without,) = llm.generate(PROMPTS[1], replace(greedy, logit_bias={free.token_ids[0]: -100}))
    assert without.token_ids[0] == free.logprobs[0].top[1][0]
    with pytest.raises(RequestError, match="names token 512"):
        llm.generate([PROMPTS[0], PROMPTS[1]], [greedy, replace(greedy, logit_bias={512: 1})])
    assert llm.generate(PROMPTS[1], greedy)[0].token_ids == free.token_ids


def test_prompt_logprobs_with_alternatives(llm: LLM, tiny: oracle.Checkpoint) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=20, logprobs=0, presence_penalty=1.0)
    (got,) = llm.generate(PROMPTS[1], params)
    logits = tiny.logits(PROMPTS[1])
    want = torch.log_softmax(logits[:-1], -1)
    assert [r.token for r in got.prompt_logprobs] == PROMPTS[1][1:]
    for record, row in zip(got.prompt_logprobs, want):
        values, ids = row.topk(20)
        assert record.logprob == pytest.approx(float(row[record.token]), abs=1e-4)
        assert [v for _, v in record.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert len({i for i, _ in record.top} & {*ids.tolist()}) >= 19
    assert [r.top for r in got.logprobs] == [(), ()]


def test_n_is_reproducible_and_its_first_is_the_request_alone(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=8, presence_penalty=1.0)
    three = llm.generate(PROMPTS[:2], params, n=3)
    assert [c.token_ids for c in three] == [c.token_ids for c in llm.generate(PROMPTS[:2], params, n=3)]
    assert len({c.token_ids for c in three}) == 6
    for p, first in zip(PROMPTS, (three[0], three[3])):
        assert llm.generate(p, params)[0].token_ids == first.token_ids
    assert llm.generate(PROMPTS[1], sibling(params, 2))[0].token_ids == three[5].token_ids
    assert len({c.token_ids for c in llm.generate(PROMPTS[0], SamplingParams(max_tokens=8), n=3)}) == 3


def test_best_of_keeps_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=8)
    everyone = llm.generate(PROMPTS[:2], replace(params, logprobs=1), n=6)
    two = llm.generate(PROMPTS[:2], params, n=2, best_of=6)
    assert [c.logprobs for c in two] == [()] * 4
    for prompt in range(2):
        group = everyone[6 * prompt : 6 * prompt + 6]
        group.sort(key=lambda c: -sum(r.logprob for r in c.logprobs) / len(c.logprobs))
        assert [c.token_ids for c in two[2 * prompt : 2 * prompt + 2]] == [c.token_ids for c in group[:2]]
    (found,) = llm.generate(PROMPTS[0], replace(params, logprobs=1), best_of=6)
    likeliest = max(everyone[:6], key=lambda c: sum(r.logprob for r in c.logprobs) / len(c.logprobs))
    assert found.token_ids == likeliest.token_ids
    # Of twelve requests together and of six the last bits differ.
    assert [r.logprob for r in found.logprobs] == pytest.approx([r.logprob for r in likeliest.logprobs], abs=1e-5)
    with pytest.raises(RequestError, match="best_of"):
        llm.generate(PROMPTS[0], params, n=3, best_of=2)


def test_a_stop_string_of_many_bytes_across_tokens() -> None:
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, {})
    text = "价格🜁世界 é"
    for stop, kept in (("🜁世", "价格"), ("界 é", "价格🜁世"), ("格", "价"), ("价", ""), ("世世", text)):
        for size in (1, 2, 3, 5, 100):
            stream = TextStream(tokenizer, (stop,))
            data = text.encode()
            out = "".join(stream.feed([*data[i : i + size]]) for i in range(0, len(data), size)) + stream.finish()
            assert (out, stream.stopped) == (kept, kept != text), (stop, size)
