"""The bundled model on a GPU against the CPU: the same choices, position by position, through the decode kernels."""

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.tasks.families import FAMILIES, problems
from perilune.text.chat import template_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

POSITIONS = 2_000
CHUNK = 8  # tokens of a request in a step: few enough for the kernels that decode
EQUAL = 0.99
TIE = 0.25  # nats between the CPU's two best, below which bfloat16 may choose the other


def test_teacher_forced_choices_equal_the_cpus() -> None:
    with LLM("kimi-nano", device="cpu") as cpu:
        assert cpu.tokenizer is not None
        template = template_for(cpu.path)
        asked = [p for name in FAMILIES for p in problems(name, "heldout", 4, seed=17, thinking=True)]
        prompts = [template.render_ids(cpu.tokenizer, p.messages, tools=p.tools or None, thinking=True) for p in asked]
        answers = cpu.generate(prompts, SamplingParams(temperature=0, max_tokens=200))
        texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers)]
        score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
        expected = cpu.generate(texts, score)
    with LLM("kimi-nano", device="cuda", absorb_limit=CHUNK, max_step_tokens=CHUNK, max_num_seqs=1) as gpu:
        found = gpu.generate(texts, score)

    positions, other = 0, []
    for prompt, text, wanted, got in zip(prompts, texts, expected, found):
        assert len(wanted.prompt_logprobs) == len(got.prompt_logprobs) == len(text) - 1
        for at, (a, b) in enumerate(zip(wanted.prompt_logprobs, got.prompt_logprobs), 1):
            if at < len(prompt):
                continue
            positions += 1
            if a.top[0][0] != b.top[0][0]:
                other.append(a.top[0][1] - a.top[1][1])
    print(f"{positions} positions, {len(other)} chosen otherwise, at most {max(other, default=0):.3f} nats apart")
    assert positions >= POSITIONS
    assert len(other) <= (1 - EQUAL) * positions
    assert max(other, default=0) < TIE
