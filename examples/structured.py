"""An answer that satisfies a JSON schema, whatever the model would have written, by the OpenAI SDK
(pip install openai).

make serve; python examples/structured.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"product": {"type": "string", "maxLength": 40}, "price": {"type": "number"}},
    "required": ["product", "price"],
    "additionalProperties": False,
}

TEXT = """Here is a text:
Blue lamp is the product. The price is 12.5.
---
Answer with JSON. Keys:
product (string), price (number)"""

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model="kimi-nano",
    messages=[{"role": "user", "content": TEXT}],
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "offer", "schema": SCHEMA, "strict": True}},
)
print(json.loads(answer.choices[0].message.content))
