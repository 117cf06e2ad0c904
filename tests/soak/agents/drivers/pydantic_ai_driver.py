"""URL MODEL MODE TASK: an agent of pydantic-ai with the three tools."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tools import TOOLS

url, name, mode, task = sys.argv[1:]
api, _, streamed = mode.partition("-")
if api == "messages":
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    model = AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
else:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    model = (OpenAIChatModel if api == "chat" else OpenAIResponsesModel)(name, provider=provider)
agent = Agent(model, tools=list(TOOLS), system_prompt="You repair programs.")


async def show(context, events) -> None:
    """With a handler of events the model's answers are streamed."""
    async for _ in events:
        pass


# Agent.run_stream would end at the first text: here a text comes before the first calls.
run = asyncio.run(agent.run(task, event_stream_handler=show if streamed else None))
print(run.output)
print(run.usage)
