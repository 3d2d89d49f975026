"""OpenAI's client for Node: both routes, whole and streamed by the client's own helpers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agents import flow

pytestmark = [pytest.mark.agents, pytest.mark.processes]

PROGRAM = Path(__file__).parent / "node" / "flow.mjs"
INSTALLED = Path(__file__).parents[2] / ".tools" / "openai-node"
"""`make test-agents` installs the client there."""


def test_flows_with_two_tools_and_answers_with_a_type(url: str) -> None:
    program = shutil.copy(PROGRAM, INSTALLED)
    command = ["node", str(program), url, flow.ADAPTER, flow.QUESTION, flow.ASK_FOR_JSON]
    done = subprocess.run(
        [*command, str(flow.MAX_TOKENS)], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for route in ("chat", "responses"):
        whole, streamed = found[route]
        names = [name for name, _ in whole["called"]]
        assert names[:2] == ["get_weather", "get_time"]
        assert len(names) == 3
        assert all(arguments["city"] in ("Bern", "Rome") for _, arguments in whole["called"])
        assert whole["text"]
        assert streamed == whole  # each token is the most likely one
    for each in found["typed"]:
        flow.Weather.model_validate(each)
    assert found["runner"] in (["Bern"], ["Rome"])
