"""URL MODEL MODE TASK: an agent of openai-agents with the three tools."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from tools import TOOLS

url, name, mode, task = sys.argv[1:]
api, _, streamed = mode.partition("-")
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
model = (OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel)(model=name, openai_client=client)
tools = [function_tool(tool) for tool in TOOLS]
agent = Agent(name="repairer", instructions="You repair programs.", model=model, tools=tools)


async def main() -> None:
    if streamed:
        run = Runner.run_streamed(agent, task)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, task)
    print(run.final_output)
    print(run.context_wrapper.usage)


asyncio.run(main())
