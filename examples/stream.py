"""An answer as it is written, reasoning first, by the OpenAI SDK (pip install openai).

make serve; python examples/stream.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
stream = client.chat.completions.create(
    model="kimi-nano",
    messages=[{"role": "user", "content": "What is 347 + 589?"}],
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
thought = False
for chunk in stream:
    for choice in chunk.choices:
        reasoning = getattr(choice.delta, "reasoning_content", None)  # what thinking models add to OpenAI's fields
        answer = choice.delta.content or ""
        print(reasoning or ("\n\n" if thought and answer else "") + answer, end="", flush=True)
        thought = bool(reasoning) or (thought and not answer)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
