"""URL MODEL MODE TASK: a loop around litellm.completion with the three tools; litellm's messages are kept."""

import json
import sys

import litellm
from tools import TOOLS

url, name, mode, task = sys.argv[1:]
api, _, streamed = mode.partition("-")
texts = {
    "read_file": {"path": {"type": "string"}},
    "replace_in_file": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "run_check": {},
}
tools = [
    {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": tool.__doc__,
            "parameters": {"type": "object", "properties": texts[tool.__name__], "required": [*texts[tool.__name__]]},
        },
    }
    for tool in TOOLS
]
by_name = {tool.__name__: tool for tool in TOOLS}
where = {"model": f"hosted_vllm/{name}", "api_base": f"{url}/v1"}
if api == "messages":
    where = {"model": f"anthropic/{name}", "api_base": url, "max_tokens": 8000}
messages = [{"role": "user", "content": task}]
while True:
    asked = {**where, "api_key": "none", "num_retries": 0, "messages": messages, "tools": tools}
    if streamed:
        chunks = [*litellm.completion(**asked, stream=True, stream_options={"include_usage": True})]
        answer = litellm.stream_chunk_builder(chunks, messages=messages)
    else:
        answer = litellm.completion(**asked)
    message = answer.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = by_name[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
print(answer.usage)
