"""Pictures and videos in Python, without a server, with a model that sees (Kimi K2.5 to K2.7, kimi-nano).

python examples/pictures.py MODEL FILE [FILE ...]       videos need: pip install 'perilune[video]'
"""

import sys
from pathlib import Path

from perilune import LLM, SamplingParams

VIDEOS = (".mp4", ".mov", ".webm", ".mkv", ".avi", ".gif")

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, *names = sys.argv[1:]
parts = []
for name in names:
    kind = "video" if Path(name).suffix.lower() in VIDEOS else "image"
    parts.append({"type": kind, kind: name})  # a path; bytes, a data: URL or a PIL image do as well
question = {"type": "text", "text": "Describe what you see in two sentences."}

with LLM(model) as llm:
    answer = llm.chat([{"role": "user", "content": [*parts, question]}], SamplingParams(temperature=0, max_tokens=300))
    print(answer.content)
