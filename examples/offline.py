"""Conversations and raw completions in this process, without a server.

python examples/offline.py
"""

from perilune import LLM, SamplingParams

QUESTIONS = [f"What is {a} + {b}?" for a, b in ((12, 30), (347, 589), (1024, 976))]

with LLM("kimi-nano") as llm:
    for question in QUESTIONS:
        answer = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0))
        print(question, "->", answer.content)
    # Raw text; all prompts are computed in the same steps.
    prompts = ["def add(a, b):", "import json"]
    for prompt, done in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))):
        print(repr(prompt), "->", repr(done.text), done.finish_reason)
