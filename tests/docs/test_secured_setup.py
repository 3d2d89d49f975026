"""The steps of docs/security.md for TLS and tokens, on free ports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadout.demo.adapters import ADAPTERS, MODEL
from tests.support import forks
from tests.support.up import LITTLE_MEMORY
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SECTION = PAGE.partition("\n## Set up TLS and tokens\n")[2].partition("\n## ")[0]
MAKE, START, VARIABLES, CHECK = re.findall(r"```(?:sh|console)\n(.*?)```", SECTION, re.DOTALL)
MODEL_NAME = "Qwen3-0.6B"
VARYING = re.compile(r"sha256:[0-9a-f]+|layout [0-9a-f]+")


def shell(text: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    path = f"{forks.programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        ["bash", "-euc", text],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def started(command: str, prefix: str, cwd: Path) -> Iterator[str]:
    """Yields the service's address."""
    ready = cwd / f"{prefix}.ready"
    name = f"LOADOUT_{prefix}_"
    command = re.sub(r"--listen \S+", "--listen 127.0.0.1:0", command)
    popen = shell(
        f"exec {command}",
        cwd,
        **{f"{name}METRICS_LISTEN": "127.0.0.1:0", f"{name}READY_FILE": str(ready)},
        **LITTLE_MEMORY,
    )
    try:
        until(lambda: ready.exists() or popen.poll() is not None, what=command)
        assert popen.poll() is None, popen.communicate()[0]
        yield re.findall(r"127\.0\.0\.1:\d+", ready.read_text())[0]
    finally:
        popen.terminate()
        popen.communicate(timeout=90)


def has_layout(variables: str, cwd: Path) -> bool:
    """Whether the inference service, once ready, has registered its model's layout."""
    listing = f"{variables}LOADOUT_TOKEN_FILE=operations.token loadout layouts"
    return MODEL_NAME in shell(listing, cwd).communicate(timeout=60)[0]


@pytest.mark.slow
@pytest.mark.processes
def test_the_steps_secure_both_services(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / MODEL_NAME)
    shutil.copytree(ADAPTERS / "upper", tmp_path / "out" / "french")
    config = tmp_path / "out" / "french" / "adapter_config.json"
    config.write_text(config.read_text().replace("loadout-demo", "Qwen/Qwen3-0.6B"))
    making = shell(MAKE, tmp_path)
    output = making.communicate(timeout=90)[0]
    assert making.returncode == 0, output
    store, serve = re.findall(r"^loadout .*(?:\n  .*)*", START, re.MULTILINE)
    with (
        started(store, "STORE", tmp_path) as store_address,
        started(
            serve.replace("store.example:7070", store_address), "INFERENCE", tmp_path
        ) as inference_address,
    ):
        variables = VARIABLES.replace("store.example:7070", store_address)
        variables = variables.replace("inference.example:7080", inference_address)
        until(lambda: has_layout(variables, tmp_path), what="the service's layout")
        commands = re.findall(r"^\$ (.*)", CHECK, re.MULTILINE)
        text = f"{variables}set +e\n" + "\n".join(commands)
        output = shell(text, tmp_path).communicate(timeout=120)[0]
    shown = "".join(line for line in CHECK.splitlines(keepends=True) if line[:2] != "$ ")
    assert VARYING.sub("", output) == VARYING.sub("", shown)
