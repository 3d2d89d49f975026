"""Commands about one replica refuse several: any of them might answer."""

from __future__ import annotations

from typing import Any

import pytest

from loadout._routing import addresses
from loadout.cli.__main__ import main
from loadout.cli.connection import only_replica

COMMANDS = [["top", "--once"], ["profile"], ["residents"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_list_is_refused(command: list[str], capfd: Any) -> None:
    assert main([*command, "--inference", "127.0.0.1:1, 127.0.0.1:2"]) == 1
    assert capfd.readouterr().err == (
        "loadout: --inference: 127.0.0.1:1, 127.0.0.1:2 has 2 replicas, but this command needs "
        "one: choose one of 127.0.0.1:1, 127.0.0.1:2\n"
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_so_is_a_name_of_several(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(addresses, "lookup", lambda host, port: ["10.0.0.2", "10.0.0.1"])
    assert main([*command, "--inference", "replicas.test:7080"]) == 1
    assert "choose one of 10.0.0.1:7080, 10.0.0.2:7080" in capfd.readouterr().err


def test_one_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, port: str) -> list[str]:
        raise OSError

    assert only_replica("127.0.0.1:7080") == "127.0.0.1:7080"
    monkeypatch.setattr(addresses, "lookup", lambda host, port: ["10.0.0.1"])
    assert only_replica("one.test:7080") == "one.test:7080"
    monkeypatch.setattr(addresses, "lookup", fail)
    assert only_replica("unknown.test:7080") == "unknown.test:7080"
