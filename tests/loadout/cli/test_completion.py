"""Completion of commands and adapter names, as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb

pytestmark = pytest.mark.processes


@pytest.fixture
def complete(store_server, inference_server):
    """Completes a line in bash."""

    def complete(line: str, **environment: str) -> list[str]:
        words = line.split(" ")
        variables = {
            **os.environ,
            "LOADOUT_STORE": store_server.address,
            "LOADOUT_INFERENCE": inference_server.address,
            "_LOADOUT_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            **environment,
        }
        command = [sys.executable, "-m", "loadout.cli"]
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in done.stderr
        return done.stdout.split()

    return complete


def test_commands(complete):
    assert complete("loadout un") == ["unload", "unpin"]


def test_adapters_of_the_store(complete, fake_store):
    adapters = [store_pb.Adapter(name="acme/french"), store_pb.Adapter(name="acme/frisian")]
    fake_store.on("ListAdapters", store_pb.ListAdaptersResponse(adapters=adapters))
    assert complete("loadout delete fr", LOADOUT_TENANT="acme") == ["french", "frisian"]
    assert complete("loadout generate --adapter acme/fr") == ["acme/french", "acme/frisian"]
    assert complete("loadout load ") == ["french", "frisian"]
    filters = [each.filter for each in fake_store.requests["ListAdapters"]]
    assert filters == ["tenant=acme name=fr", "tenant=acme name=fr", "tenant=default"]


def test_residents(complete, fake_inference):
    names = ["default/french@2", "acme/frisian@1"]
    adapters = [pb.ResidentAdapter(names=[name]) for name in names]
    listed = pb.ListResidentAdaptersResponse(adapters=adapters)
    fake_inference.on("ListResidentAdapters", listed)
    assert complete("loadout unload fr") == ["french@2"]
    assert complete("loadout unload acme/") == ["acme/frisian@1"]


def test_a_store_that_does_not_answer_completes_nothing(complete):
    assert complete("loadout delete fr", LOADOUT_STORE="127.0.0.1:1") == []


def test_the_script_for_the_shell():
    command = [sys.executable, "-m", "loadout.cli", "--show-completion"]
    environment = {**os.environ, "SHELL": "/bin/bash"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # Without a known shell around it, the command says so.
    assert "_LOADOUT_COMPLETE" in done.stdout or "Shell" in done.stdout + done.stderr
