"""OpenAI's Agents SDK over both routes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from agents.result import RunResultBase
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

from tests.agents import flow

pytestmark = [pytest.mark.agents, pytest.mark.processes]

MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def settings(choice: str | None = None) -> ModelSettings:
    """A small model may not end its thoughts."""
    return ModelSettings(
        temperature=0,
        max_tokens=flow.MAX_TOKENS,
        tool_choice=choice,
        reasoning=Reasoning(effort="none"),
    )


async def run(agent: Agent, asked: Any, *, is_streamed: bool = False) -> RunResultBase:
    if not is_streamed:
        return await Runner.run(agent, asked)
    result = Runner.run_streamed(agent, asked)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds
    return result


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_flow_with_two_tools(kind: type[Model], is_streamed: bool, url: str) -> None:
    """The SDK makes each choice once, and lets the model answer then."""

    async def use(client: AsyncOpenAI) -> None:
        asked: Any = flow.QUESTION
        for choice in ("get_weather", "get_time", "required"):
            agent = Agent(
                name="guide",
                instructions="You help travellers.",
                tools=[function_tool(each) for each in flow.TOOLS],
                model=kind(flow.ADAPTER, client),
                model_settings=settings(choice),
            )
            result = await run(agent, asked, is_streamed=is_streamed)
            assert result.final_output
            called = [name for name, _ in flow.CALLED]
            assert called[:2] == ["get_weather", "get_time"][: len(called)]
            asked = [*result.to_input_list(), {"role": "user", "content": flow.QUESTION}]
        assert len(flow.CALLED) >= 3

    flow.run(url, use)


class ThenAnswers(AgentHooks[Any]):
    """Lets the model answer after its first call: a small one might call tools again and again."""

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        agent.model_settings = replace(agent.model_settings, tool_choice="none")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_an_answer_with_a_type(
    kind: type[Model], has_tools: bool, is_streamed: bool, url: str
) -> None:
    """Alone, and after a call of a tool: the SDK sends its form with the tools each time."""

    async def use(client: AsyncOpenAI) -> None:
        agent = Agent(
            name="guide",
            instructions=flow.ASK_FOR_JSON,
            tools=[function_tool(each) for each in flow.TOOLS] if has_tools else [],
            output_type=flow.Weather,
            model=kind(flow.ADAPTER, client),
            model_settings=replace(
                settings("get_weather" if has_tools else None), parallel_tool_calls=False
            ),
            reset_tool_choice=False,
            hooks=ThenAnswers(),
        )
        result = await run(agent, flow.QUESTION, is_streamed=is_streamed)
        assert isinstance(result.final_output, flow.Weather)
        flow.check_called(*["get_weather"] * has_tools)

    flow.run(url, use)


def test_one_agent_hands_over_to_another(url: str) -> None:
    """To hand over is a call of a tool, whose schema is the SDK's."""

    async def use(client: AsyncOpenAI) -> None:
        model = OpenAIChatCompletionsModel(flow.ADAPTER, client)
        guide = Agent(name="guide", model=model, model_settings=settings())
        desk = Agent(
            name="desk", handoffs=[guide], model=model, model_settings=settings("required")
        )
        assert (await run(desk, flow.QUESTION)).last_agent.name == "guide"

    flow.run(url, use)
