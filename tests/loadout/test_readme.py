"""README.md says what is: its commands run as written, its tables are what the code has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

USUAL = {
    "127.0.0.1:7070": "store",
    "127.0.0.1:7071": "store_metrics",
    "127.0.0.1:7080": "inference",
    "127.0.0.1:7081": "inference_metrics",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like this checkout with its environment, and may be written to."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(checkout, start_up):
    first, *rest = blocks("sh")
    [command] = [line for line in first.splitlines() if line.startswith("loadout up")]
    up = start_up(*command.split()[2:], cwd=checkout)
    [shown] = blocks("text")
    # Where the usual ports are taken, the commands name the others at their end.
    pairs = zip(up.output.splitlines(), _at(up, shown).splitlines(), strict=True)
    assert all(printed.startswith(line) for printed, line in pairs), up.output
    environment = {**os.environ, **up.environment}
    outputs = [_run(_at(up, block), checkout, environment) for block in rest]
    assert "HELLO" in "".join(outputs)
    for block in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", _at(up, block)],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "HELLO" in done.stdout


def _at(up: Any, text: str) -> str:
    """`text` with the usual addresses replaced by those that this system got."""
    for usual, name in USUAL.items():
        text = text.replace(usual, up.addresses[name])
    return text


def _run(block: str, cwd: Path, environment: dict[str, str]) -> str:
    if "curl" in block and not shutil.which("curl"):
        pytest.skip("curl is not here")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_all_shell_blocks_are_marked():
    """No command hides in a block that no test runs; transcripts start with a prompt."""
    assert not blocks("bash")
    assert all(block.startswith("$ make ") for block in blocks("console"))
    assert not re.search("@[A-Z]+@", README), "a transcript is still to be filled in"


def _settings() -> dict[str, Any]:
    from adapter_store.config import StoreSettings
    from inference_svc.config import InferenceSettings

    return {"adapter store": StoreSettings, "inference service": InferenceSettings}


def _default(field: Any) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if value is None or value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def config_table(settings: Any) -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        meaning = " ".join(field.description.split())
        rows.append(f"| `{flag}` | {_default(field)} | {meaning} |")
    return "\n".join(rows)


@pytest.mark.parametrize("service", ["adapter store", "inference service"])
def test_configuration_table_is_the_code(service):
    written = re.search(
        rf"<!-- settings of the {service} -->\n(.*?)\n<!-- end -->", README, re.DOTALL
    )
    assert written, f"README.md has no table of the {service}'s settings"
    assert written[1] == config_table(_settings()[service])


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
