"""Two tools, a question that needs both, and an answer with a type, for every client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, Field

ADAPTER = "assistant"
"""The model that all clients name."""
QUESTION = "What is the weather in Rome, and what time is it there?"
ASK_FOR_JSON = 'Answer as JSON, such as {"city": "Bern", "degrees": 12}.'
MAX_TOKENS = 400
"""A small model may write all the space that a form allows between its parts."""

City = Literal["Bern", "Rome"]


class Weather(BaseModel):
    """The weather of a city."""

    city: City
    degrees: Annotated[int, Field(ge=0, le=40)]


CALLED: list[tuple[str, str]] = []
"""Names of the tools that a client called, with their argument."""


def get_weather(city: City) -> str:
    """Returns the weather in a city."""
    CALLED.append(("get_weather", city))
    return f"20 degrees in {city}"


def get_time(city: City) -> str:
    """Returns the time in a city."""
    CALLED.append(("get_time", city))
    return "12:30"


FUNCTIONS = {each.__name__: each for each in (get_weather, get_time)}
TOOLS = tuple(FUNCTIONS.values())


def check_called(*names: str) -> None:
    """Checks the calls of tools in their order; the model chose the cities."""
    assert tuple(name for name, _ in CALLED) == names
    assert all(city in ("Bern", "Rome") for _, city in CALLED)


def run(url: str, use: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    """Runs `use` with OpenAI's client, which it gives to a framework, in an event loop."""

    async def run_it() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await use(client)

    asyncio.run(run_it())
