"""What the documents name exists: metrics, settings, flags, environment variables, make targets,
commands, calls and links."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from adapter_store.config import StoreSettings
from adapter_store.metrics import definitions as store_metrics
from bench.gpu_run import __main__ as gpu_run
from inference_svc.config import InferenceSettings
from inference_svc.metrics import definitions as inference_metrics
from loadout import Client
from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.cli.app import app
from loadout.inference.v1 import inference_pb2
from servicekit.settings.describe import Setting, describe

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "deploy").rglob("*.md")),
    )
}
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")
ELSEWHERE = {
    # Of programs that are not ours: kubectl, PostgreSQL's, docker, Envoy, pip.
    "--from-file", "--previous", "--format", "--file", "--exit-on-error", "--single-transaction",
    "--no-owner", "--dbname", "--env-file", "--build", "--config-yaml",
    "--index-url", "--constraint", "--no-deps", "--upgrade", "--require-hashes", "--requirement",
    "--no-require-hashes", "--rm",
    # Of vLLM.
    "--enable-lora", "--max-lora-rank",
    # Of modules that are run with `python -m`; their own --help names them.
    "--device-memory", "--rank", "--systems", "--help", "--help-all", "--cert", "--key", "--pid",
    "--ca", "--server-name", "--service", "--timeout", "--engine", "--filter", "--max-adapters",
}  # fmt: skip


@cache
def metrics() -> set[str]:
    definitions = (store_metrics.DEFINITIONS, inference_metrics.DEFINITIONS)
    names = {each.name for service in definitions for each in service.values()}
    return {f"{name}{suffix}" for name in names for suffix in SUFFIXES}


@cache
def settings() -> list[Setting]:
    """Returns those of both services."""
    return [*describe(StoreSettings), *describe(InferenceSettings)]


@cache
def flags() -> set[str]:
    """Returns the flags of both services, of every command, and of the GPU run."""
    found = {flag for setting in settings() for flag in setting.flags}
    found |= {"--shrink"}  # of tools.house
    found |= gpu_run.make_parser()._option_string_actions.keys()
    command = typer.main.get_command(app)
    for each in (command, *command.commands.values()):
        for parameter in each.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found | ELSEWHERE


@cache
def variables() -> set[str]:
    """Returns the variables of the settings, and those that commands read."""
    names = {setting.variable for setting in settings()}
    folders = [ROOT / name for name in ("loadout", "kernels", "inference_svc")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    quoted = re.compile(r"\"(LOADOUT_[A-Z_]+)\"")
    return names.union(*(quoted.findall(path.read_text()) for path in sources))


def named(pattern: str) -> Iterator[tuple[str, str]]:
    for page, text in PAGES.items():
        for name in re.findall(pattern, text):
            yield page, name


def unknown(pattern: str, known: set[str]) -> list[tuple[str, str]]:
    found = set(named(pattern))
    assert found, "nothing is named in that way any more"
    return sorted(each for each in found if each[1] not in known)


def test_metrics() -> None:
    pattern = r"\b(loadout_(?:store|inference)_[a-z_]+|vllm:[a-z_]+[a-z])\b"
    assert [each for each in unknown(pattern, metrics()) if not each[1].endswith("_")] == []


def test_flags() -> None:
    assert unknown(r"(?<![\w-])(--[a-z][a-z0-9-]+)\b", flags()) == []


def test_environment_variables() -> None:
    assert unknown(r"\b(LOADOUT_[A-Z0-9_]*[A-Z0-9])\b", variables()) == []


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert unknown(r"`make ([a-z-]+)", targets) == []


def test_commands() -> None:
    commands = set(typer.main.get_command(app).commands)
    assert unknown(r"(?m)(?:`|^)loadout ([a-z]+)\b", commands) == []


def test_calls() -> None:
    """Whatever is written like a call of the services is one."""
    services = (
        adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"],
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    )
    calls = {method for service in services for method in service.methods_by_name}
    pattern = (
        r"`((?:Get|List|Register|Upload|Delete|Rollback|Pin|Unpin|Pull|Watch|Load|Unload)[A-Z]\w+)`"
    )
    messages = {*adapter_store_pb2.DESCRIPTOR.message_types_by_name}
    messages |= {*inference_pb2.DESCRIPTOR.message_types_by_name}
    assert unknown(pattern, calls | messages) == []


def test_python_page_has_every_method() -> None:
    methods = {name for name, _ in inspect.getmembers(Client, inspect.isfunction)}
    page = PAGES["docs/python.md"]
    missing = {name for name in methods if not re.search(rf"(?:`|\.){name}\b", page)}
    assert {name for name in missing if not name.startswith("_")} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    """Files that are there, and headings that they have."""
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve() if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}
