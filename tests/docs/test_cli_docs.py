"""The reference in docs/cli.md is what the commands say, and every JSON output is documented."""

from __future__ import annotations

import typer.main

from loadout.cli.app import app
from tools.pages.cli_docs import OUTPUTS, PATH, render


def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run `make docs`"


def test_every_json_output_is_documented() -> None:
    commands = typer.main.get_command(app).commands
    with_json = {
        name
        for name, command in commands.items()
        if any("--json" in each.opts for each in command.params)
    }
    documented = {name for names in OUTPUTS for name in names.split(", ")}
    assert with_json == documented
