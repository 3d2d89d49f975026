"""pydantic-ai over both routes."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.openai import OpenAIProvider

from tests.agents import flow

pytestmark = [pytest.mark.agents, pytest.mark.processes]

MODELS = (OpenAIChatModel, OpenAIResponsesModel)
SETTINGS = OpenAIChatModelSettings(
    temperature=0, max_tokens=flow.MAX_TOKENS, openai_reasoning_effort="none"
)
"""A small model may not end its thoughts."""


def first_both_tools(context: RunContext[None]) -> OpenAIChatModelSettings:
    """Returns the settings of each of the model's answers: it calls one tool, then the other."""
    names = {1: "get_weather", 2: "get_time"}
    name = names.get(context.run_step)
    choice: Any = [name] if name else "none"
    return OpenAIChatModelSettings(**SETTINGS, tool_choice=choice)


def agent_of(kind: Any, client: AsyncOpenAI, **options: Any) -> Agent[None, Any]:
    model = kind(flow.ADAPTER, provider=OpenAIProvider(openai_client=client))
    return Agent(model, **{"model_settings": SETTINGS, **options})


async def run(agent: Agent[None, Any], *, is_streamed: bool) -> Any:
    if not is_streamed:
        return (await agent.run(flow.QUESTION)).output
    async with agent.run_stream(flow.QUESTION) as result:
        return await result.get_output()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_flow_with_two_tools(kind: Any, is_streamed: bool, url: str) -> None:
    async def use(client: AsyncOpenAI) -> None:
        agent = agent_of(kind, client, tools=flow.TOOLS, model_settings=first_both_tools)
        assert await run(agent, is_streamed=is_streamed)
        flow.check_called("get_weather", "get_time")

    flow.run(url, use)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_an_answer_with_a_type(kind: Any, is_streamed: bool, url: str) -> None:
    async def use(client: AsyncOpenAI) -> None:
        agent = agent_of(
            kind, client, output_type=NativeOutput(flow.Weather), instructions=flow.ASK_FOR_JSON
        )
        assert isinstance(await run(agent, is_streamed=is_streamed), flow.Weather)

    flow.run(url, use)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("output", [flow.Weather, NativeOutput(flow.Weather)], ids=["call", "form"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_answer_with_a_type_follows_calls(
    kind: Any, output: Any, is_streamed: bool, url: str
) -> None:
    """As the call of another tool, and as a form, which goes with the tools in each request."""

    async def use(client: AsyncOpenAI) -> None:
        agent = agent_of(
            kind,
            client,
            tools=flow.TOOLS,
            output_type=output,
            instructions=flow.ASK_FOR_JSON,
            model_settings=first_both_tools,
        )
        assert isinstance(await run(agent, is_streamed=is_streamed), flow.Weather)
        flow.check_called("get_weather", "get_time")

    flow.run(url, use)


def test_the_model_has_to_call_one_of_some_tools(url: str) -> None:
    """The framework sends the others, too, and which ones are allowed."""

    async def use(client: AsyncOpenAI) -> None:
        called: list[str] = []

        def get_news() -> str:
            called.append("get_news")
            return "none"

        def choice(context: RunContext[None]) -> OpenAIChatModelSettings:
            some: Any = [*flow.FUNCTIONS] if context.run_step == 1 else "none"
            return OpenAIChatModelSettings(**SETTINGS, tool_choice=some, parallel_tool_calls=False)

        agent = agent_of(
            OpenAIChatModel, client, tools=[get_news, *flow.TOOLS], model_settings=choice
        )
        assert await run(agent, is_streamed=False)
        assert (len(flow.CALLED), called) == (1, [])

    flow.run(url, use)
