"""`loadout load`, `unload`, `pin`, `unpin`, `residents` and `info` of real services."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from loadout.cli.__main__ import main
from loadout.types import AdapterTier
from tests.system.services import Services


@pytest.fixture
def run(
    services: Services, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: (exit code, stdout, stderr)."""
    monkeypatch.setenv("LOADOUT_INFERENCE", services.inference_address)
    monkeypatch.setenv("LOADOUT_STORE", services.store_address)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def name(services: Services) -> str:
    services.client.register("operated", services.source("r16", "operated"))
    return "operated"


def tiers(services: Services, name: str) -> list[AdapterTier]:
    found = services.client.residents()
    return [
        each.tier
        for each in found
        if any(ref.partition("@")[0] == f"default/{name}" for ref in each.names)
    ]


def test_load_pin_unpin_unload(run: Callable, services: Services, name: str) -> None:
    code, out, err = run("load", name)
    assert (code, err) == (0, "")
    assert "default/operated" in out
    assert tiers(services, name) == [AdapterTier.DEVICE]
    assert run("pin", name, "--in", "both")[0] == 0
    assert services.client.get(name).pinned
    code, out, err = run("unload", name)
    assert (code, out) == (1, "")
    assert "pinned" in err
    assert run("unload", "--all")[0] == 0
    assert tiers(services, name) == [AdapterTier.DEVICE]
    assert run("unpin", name, "--in", "both")[0] == 0
    assert not services.client.get(name).pinned
    code, out, err = run("unload", name, "--json")
    assert (code, err) == (0, "")
    [row] = json.loads(out)
    assert row["freed_bytes"] > 0
    assert tiers(services, name) == []


def test_unload_all(run: Callable, services: Services, name: str) -> None:
    run("load", name, "--pin")
    services.client.register("other", services.source("r64", "other"))
    run("load", "other")
    assert run("unload", "--all", "--json")[0] == 0
    assert tiers(services, "other") == []
    assert tiers(services, name) == [AdapterTier.DEVICE]
    run("unpin", name)
    unloaded = run("unload", "--all")[1]  # also what other tests have left
    assert "default/operated" in unloaded
    assert " unloaded" in unloaded
    assert tiers(services, name) == []


def test_residents_and_info(run: Callable, services: Services, name: str) -> None:
    run("load", name)
    [row] = [each for each in json.loads(run("residents", "--json")[1]) if each["rank"] == 16]
    assert row["replica"] == services.inference_address
    assert row["tier"] == "device"
    assert "default/operated" in run("residents")[1]
    found = json.loads(run("info", "--json")[1])
    assert found["server"]["base_model"] == "llama"
    assert found["store"]["adapters"] >= 1


def test_what_is_not_resident_cannot_be_pinned(run: Callable, name: str) -> None:
    run("unload", name)
    code, out, err = run("pin", name)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
