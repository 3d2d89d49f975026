"""Every setting of both services counts, by flag, by variable and in a file: in the service's own
command, and in `loadout up`, which hands all three on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import SecretStr

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings
from loadout.cli.app import app
from loadout.cli.local.demo import up_settings
from loadout.demo.adapters import MODEL
from loadout.demo.system import System
from servicekit.settings.describe import Setting, describe
from servicekit.settings.load import load_settings
from servicekit.settings.service import ServiceSettings

Service = type[ServiceSettings]
Give = Callable[[Service, dict[str, str]], list[str]]

OTHER_STORE = "127.0.0.1:9"
VALUES = {
    "HOST:PORT": OTHER_STORE,
    "HOST:PORT,...": f"{OTHER_STORE},127.0.0.1:10",
    "BUCKET[/PREFIX],...": "bucket/prefix,other",
    "DIR,...": "/one,/other",
    "NAME,...": "one,other",
    "KEY,...": "one,other",
    "UID,...": "1000,1001",
    "HOST,...": "one.test,other.test",
    "HOST[:PORT],...": "one.test,other.test:8443",
    "s3://BUCKET[/PREFIX]": "s3://bucket/prefix",
    "DSN": "postgresql+psycopg://loadout@host/name",
    "URL": "http://127.0.0.1:4317",
    "SIZE": "96MiB",
    "NUMBER": "0.25",
    "SECONDS": "7.5",
    "N": "7",
    "DIR": "/somewhere",
    "FILE": "/somewhere/file",
    "TEXT": "something",
    "LEADER:PORT": "10.0.0.1:29500",
    "TOKEN": "a secret of machines",
}
"""Values by their form."""
NAMED = {"model": str(MODEL), "node_rank": "3"}
"""Values by their setting."""
BARE = {"", "N", "NUMBER", "SECONDS"}
"""Forms of values that a file has without quotes."""


def value_of(setting: Setting) -> str:
    if setting.is_switch:
        return "false" if setting.default == "true" else "true"
    if "|" in setting.metavar:
        return next(each for each in setting.metavar.split("|") if each != setting.default)
    return NAMED.get(setting.name) or VALUES[setting.metavar]


def values_of(service: Service, *, with_flag: bool) -> dict[str, str]:
    """Returns a value for every setting but `config`, by which the others are given; only for
    settings that have a flag, if `with_flag`."""
    return {
        setting.name: value_of(setting)
        for setting in describe(service)
        if setting.name != "config" and (setting.has_flag or not with_flag)
    }


def shown(value: Any) -> str:
    """Returns a loaded setting as it was given."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return "96MiB" if value == 96 << 20 else str(value)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LOADOUT_", "OTEL_")):
            monkeypatch.delenv(name)


@pytest.fixture(params=["flag", "variable", "file"])
def give(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Give:
    """Gives settings in one of the ways; returns the flags that this takes."""

    def by_flag(service: Service, values: dict[str, str]) -> list[str]:
        # Several machines need it, and it has no flag.
        monkeypatch.setenv("LOADOUT_INFERENCE_RENDEZVOUS_TOKEN", VALUES["TOKEN"])
        flags = {setting.name: setting.flag for setting in describe(service)}
        return [word for name, value in values.items() for word in (flags[name], value)]

    def by_variable(service: Service, values: dict[str, str]) -> list[str]:
        variables = {setting.name: setting.variable for setting in describe(service)}
        for name, value in values.items():
            monkeypatch.setenv(variables[name], value)
        return []

    def in_file(service: Service, values: dict[str, str]) -> list[str]:
        forms = {setting.name: setting.metavar for setting in describe(service)}
        path = tmp_path / "settings.toml"
        path.write_text(
            "".join(
                f"{name} = {value if forms[name] in BARE else json.dumps(value)}\n"
                for name, value in values.items()
            )
        )
        return ["--config", str(path)]

    return {"flag": by_flag, "variable": by_variable, "file": in_file}[request.param]


def by_command(service: Service, flags: list[str]) -> list[str]:
    """Returns what `loadout store` or `loadout serve` hands on to the service."""
    group = typer.main.get_command(app)
    arguments = [service.command.split()[1], *flags]
    with group.make_context("loadout", arguments) as context:
        name, command, rest = group.resolve_command(context, arguments)
        with command.make_context(name, rest, parent=context) as own:
            return list(own.args)


def by_up(service: Service, flags: list[str], folder: Path) -> list[str]:
    """Returns the flags that `loadout up` starts the service with."""
    is_store = service is StoreSettings
    chosen = {"store_flags" if is_store else "serve_flags": tuple(flags)}
    system = System(up_settings(work_dir=folder, **chosen), folder)
    command = system.store_command("") if is_store else system.inference_command("127.0.0.1:7070")
    return command[command.index("-m") + 2 :]


@pytest.mark.parametrize(
    "service", [StoreSettings, InferenceSettings], ids=lambda service: service.module
)
def test_every_setting_counts(
    service: Service, give: Give, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    way = request.node.callspec.params["give"]
    values = values_of(service, with_flag=way == "flag")
    flags = give(service, values)
    loaded = load_settings(service, flags)
    assert {name: shown(getattr(loaded, name)) for name in values} == values
    assert by_command(service, flags) == flags
    through_up = load_settings(service, by_up(service, flags, tmp_path))
    for name in values:
        # `up` adds a folder of its own to those that sources may lie in.
        found, expected = getattr(through_up, name), getattr(loaded, name)
        assert found == expected or (name == "source_roots" and {*found} > {*expected}), name


def test_no_value_is_the_default() -> None:
    """A setting that is ignored would show its default."""
    for service in (StoreSettings, InferenceSettings):
        for setting in describe(service):
            assert setting.name == "config" or value_of(setting) != setting.default


def test_options_of_up_reach_the_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And count more than variables."""
    for name in ("MODEL", "BASE_MODEL", "HTTP"):
        monkeypatch.setenv(f"LOADOUT_INFERENCE_{name}", OTHER_STORE)
    options = {"model": "org/name", "base_model": "mine", "http": "127.0.0.1:11"}
    system = System(up_settings(**options, source_roots="/one,/other", work_dir=tmp_path), tmp_path)
    assert system.model == "org/name"
    inference = system.inference_command("127.0.0.1:7070")
    found = load_settings(InferenceSettings, inference[inference.index("-m") + 2 :])
    assert {name: str(getattr(found, name)) for name in options} == options
    store = system.store_command("")
    roots = load_settings(StoreSettings, store[store.index("-m") + 2 :]).source_roots
    assert roots == (Path("/one"), Path("/other"), tmp_path / "sources")


def test_up_uses_the_store_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def other_store() -> str:
        return System(up_settings(model=MODEL, work_dir=tmp_path), tmp_path).other_store

    assert other_store() == ""
    monkeypatch.setenv("LOADOUT_INFERENCE_STORE", OTHER_STORE)
    assert other_store() == OTHER_STORE
    monkeypatch.setenv("LOADOUT_STORE_LISTEN", OTHER_STORE)
    assert other_store() == "", "it is this system's own"


def test_up_is_the_demo_without_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert up_settings(work_dir=tmp_path).s3
    monkeypatch.setenv("LOADOUT_INFERENCE_MODEL", str(MODEL))
    assert not up_settings(work_dir=tmp_path).s3
