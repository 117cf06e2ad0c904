"""URL MODEL MODE TASK: an agent of LangChain with the three tools."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tools import TOOLS

url, name, mode, task = sys.argv[1:]
api, _, streamed = mode.partition("-")
if api == "messages":
    model = ChatAnthropic(
        model=name, base_url=url, api_key="none", max_retries=0, max_tokens=8000,
        thinking={"type": "enabled", "budget_tokens": 4000},
    )  # fmt: skip
else:
    model = ChatOpenAI(
        model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=api == "responses"
    )
agent = create_agent(model, [tool(t) for t in TOOLS], system_prompt="You repair programs.")
asked = {"messages": [("user", task)]}
if streamed:
    for piece, _ in agent.stream(asked, stream_mode="messages"):
        if piece.type == "AIMessageChunk":
            print(piece.text, end="")
    print()
else:
    last = agent.invoke(asked)["messages"][-1]
    print(last.text)
    print(last.usage_metadata)
