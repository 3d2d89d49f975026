"""LangChain over both routes: its model, and its agents."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI

from tests.agents import flow

pytestmark = [pytest.mark.agents, pytest.mark.processes]


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=flow.ADAPTER,
        base_url=url,
        api_key="none",
        temperature=0,
        max_tokens=flow.MAX_TOKENS,
        max_retries=0,
        reasoning_effort="none",  # a small model may not end its thoughts
        use_responses_api=request.param,
    )


def choice_of(request: Any) -> str:
    """Lets the model call one tool, then the other, and answer then."""
    num_answers = sum(isinstance(each, AIMessage) for each in request.messages)
    return ("get_weather", "get_time", "none")[num_answers]


@wrap_model_call
def first_both_tools(request: Any, handler: Any) -> Any:
    return handler(request.override(tool_choice=choice_of(request)))


@wrap_model_call
def first_both_tools_with_a_form(request: Any, handler: Any) -> Any:
    """The agent has no choice of tools with a form, but passes the model's settings on."""
    return handler(request.override(model_settings={"tool_choice": choice_of(request)}))


def asked(suffix: str = "") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": flow.QUESTION + suffix}]}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_flow_with_two_tools(model: ChatOpenAI, is_streamed: bool) -> None:
    agent = create_agent(model, list(flow.TOOLS), middleware=[first_both_tools])
    if is_streamed:
        pieces = [piece for piece, _ in agent.stream(asked(), stream_mode="messages")]
        assert len(pieces) > 10
        assert "".join(piece.text for piece in pieces if isinstance(piece, AIMessageChunk))
    else:
        done = agent.invoke(asked())["messages"][-1]
        assert done.text
        assert done.usage_metadata["input_tokens"] > 10
    flow.check_called("get_weather", "get_time")


def test_any_tool_is_required(model: ChatOpenAI) -> None:
    bound = model.bind_tools(flow.TOOLS, tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke(flow.QUESTION)
    [call] = whole.tool_calls
    assert call["name"] in flow.FUNCTIONS
    joined: Any = None
    for piece in bound.stream(flow.QUESTION):
        joined = piece if joined is None else joined + piece
    [streamed] = joined.tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])


def test_answers_with_a_type(model: ChatOpenAI) -> None:
    """As a form, and as the call of a tool, which is required and may stand beside others."""
    formed = model.with_structured_output(flow.Weather)
    assert isinstance(formed.invoke(f"{flow.QUESTION} {flow.ASK_FOR_JSON}"), flow.Weather)
    called = model.with_structured_output(flow.Weather, method="function_calling")
    assert isinstance(called.invoke(flow.QUESTION), flow.Weather)
    for strategy, tools in (
        (ProviderStrategy(flow.Weather), []),
        (ToolStrategy(flow.Weather), list(flow.TOOLS)),
    ):
        agent = create_agent(model, tools, response_format=strategy)
        done = agent.invoke(asked(f" {flow.ASK_FOR_JSON}"), {"recursion_limit": 8})
        assert isinstance(done["structured_response"], flow.Weather)


def test_an_answer_with_a_type_follows_calls(model: ChatOpenAI) -> None:
    """The form goes with the tools in each request."""
    agent = create_agent(
        model,
        list(flow.TOOLS),
        response_format=ProviderStrategy(flow.Weather),
        middleware=[first_both_tools_with_a_form],
    )
    done = agent.invoke(asked(f" {flow.ASK_FOR_JSON}"))
    assert isinstance(done["structured_response"], flow.Weather)
    flow.check_called("get_weather", "get_time")
