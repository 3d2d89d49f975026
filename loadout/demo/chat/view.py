"""The answers side by side, as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadout.demo.chat.ask import Answer, ask_all

BASE_TITLE = "base model"
CURSOR = "▍"


def show(console: Console, address: str, question: str, adapters: Sequence[str]) -> list[Answer]:
    """Asks the base model and the adapters, and returns their answers; on a terminal the answers
    grow as their tokens arrive. Raises LoadoutError."""
    answers = [Answer(""), *map(Answer, adapters)]
    if not console.is_terminal:
        asyncio.run(ask_all(address, question, answers, lambda: None))
        console.print(table(question, answers))
        return answers
    with Live(table(question, answers), console=console, auto_refresh=False) as live:

        def changed() -> None:
            live.update(table(question, answers), refresh=True)

        asyncio.run(ask_all(address, question, answers, changed))
    return answers


def table(question: str, answers: Sequence[Answer]) -> Table:
    """Returns a table with a column for each answer, and its time to first token."""
    shown = Table(title=Text(question, style="bold"), title_justify="left", expand=True)
    for answer in answers:
        shown.add_column(Text(answer.adapter or BASE_TITLE), ratio=1, overflow="fold")
    shown.add_row(*(Text(each.text + CURSOR * (not each.is_complete)) for each in answers))
    shown.add_section()
    shown.add_row(*(Text(first_token(each), style="dim") for each in answers))
    return shown


def first_token(answer: Answer) -> str:
    if answer.first_token_s is None:
        return ""
    return f"first token {answer.first_token_s * 1000:.0f} ms"
