"""The model calls a function of this program and answers with its result, by the OpenAI SDK (pip install openai).

make serve; python examples/tools.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> dict[str, object]:
    return {"city": city, "sky": "sunny", "celsius": 21}


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
messages = [{"role": "user", "content": "Get the weather for city: Paris."}]
while True:
    answer = client.chat.completions.create(model="kimi-nano", messages=messages, tools=[TOOL], temperature=0)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))  # with its reasoning, which the next turn is to see
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
print(message.content)
