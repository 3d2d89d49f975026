"""`loadout load`, `unload`, `pin`, `unpin`, `residents`, `inspect` and `info` of real services."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from loadout.cli.__main__ import main
from loadout.types import AdapterTier
from tests.support.models.zoo import ALL
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


def test_info_shows_threads_and_speed(run: Callable, services: Services) -> None:
    """As the server says them, each note in a row of its own."""
    server = services.client.server_info()
    code, out, err = run("info")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["inference", "threads", str(server.num_threads)] in rows
    assert server.num_threads > 0
    assert server.processor is not None
    [shown] = [" ".join(row[2:]) for row in rows if row[:2] == ["inference", "processor"]]
    assert shown.startswith(f"{server.processor.name}: {server.processor.num_cores} core")
    found = json.loads(run("info", "--json")[1])["server"]
    assert found["speed_notes"] == list(server.speed_notes)
    assert sum(row[:2] == ["inference", "speed"] for row in rows) == len(server.speed_notes) > 0


def test_inspect(run: Callable, services: Services, name: str) -> None:
    run("load", name)
    [row] = json.loads(run("inspect", name, "--json")[1])
    assert row["replica"] == services.inference_address
    assert row["adapter"]["tier"] == "device"
    inspected = services.client.inspect(name)
    assert len(inspected.targets) == len(row["targets"]) == 2 * len(ALL)
    assert {target.name.rpartition(".")[2] for target in inspected.targets} == set(ALL)
    assert {(target.layer, target.rank) for target in inspected.targets} == {(0, 16), (1, 16)}
    assert sum(extent.num_bytes for extent in inspected.extents) == inspected.adapter.num_bytes
    assert sum(target.num_bytes for target in inspected.targets) <= inspected.adapter.num_bytes
    of_groups = [target for group in inspected.groups for target in group.targets]
    assert of_groups == [target.name for target in inspected.targets]
    assert inspected.launches == sum(group.launches for group in inspected.groups) > 0
    code, out, err = run("inspect", name)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    first = [line for line in lines if line[:2] == ["0-1", "self_attn.q_proj"]]
    assert first[0][2:6] == ["linear", "16", "a,", "b"]
    assert out.splitlines()[-1].startswith(f"8 groups, {inspected.launches} operations per decode")
    run("unload", name)
    code, out, err = run("inspect", name)
    assert (code, out) == (1, "")
    advice = f"`loadout load {name}` loads it (ADAPTER_NOT_FOUND)"
    assert err == f"loadout: adapter {name} is not resident; {advice}\n"


def test_what_is_not_resident_cannot_be_pinned(run: Callable, name: str) -> None:
    run("unload", name)
    code, out, err = run("pin", name)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
