"""Commands in this process, against scripted servers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main

from loadout.cli.__main__ import main


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """Typer makes them anew for each run, of all signatures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def run(capfd, monkeypatch, store_server, inference_server):
    """Runs one command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("LOADOUT_STORE", store_server.address)
    monkeypatch.setenv("LOADOUT_INFERENCE", inference_server.address)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run
