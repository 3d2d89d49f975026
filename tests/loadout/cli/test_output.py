"""What the commands print."""

from __future__ import annotations

from loadout.cli.output import new_table, table_console


def test_tables_show_text_as_it_is(capsys):
    cells = ("name is not of the form [a-z0-9][a-z0-9._-]{0,62}", "sha256:key: [/red]")
    table = new_table("error", "subject")
    table.add_row(*cells)
    table_console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["error", "subject"], " ".join(cells).split()]
