"""The tables of docs/adapters.md are the store's own."""

from __future__ import annotations

import pytest

from tools.pages.adapter_docs import PATH, render, replaced

PAGE = PATH.read_text()


@pytest.mark.slow
def test_the_tables_are_up_to_date() -> None:
    assert replaced(PAGE, render()) == PAGE, "run `make docs`"


def test_a_mark_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="trainers"):
        replaced("", {"trainers": "| a |"})
