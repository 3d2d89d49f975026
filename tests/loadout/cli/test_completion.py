"""Completion of commands and adapter names, as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.cli.__main__ import main
from loadout.inference.v1 import inference_pb2 as pb

BASH = {"_LOADOUT_COMPLETE": "complete_bash"}


@pytest.fixture
def complete(store_server, inference_server, capfd):
    """Completes a line in bash: in this process, by what the command does for the shell."""

    def complete(line: str, **environment: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        servers = {
            "LOADOUT_STORE": store_server.address,
            "LOADOUT_INFERENCE": inference_server.address,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**BASH, **words, **servers, **environment}.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit):
                main([])
        found = capfd.readouterr()
        assert found.err == ""
        return found.out.split()

    return complete


@pytest.mark.processes
def test_the_shell_is_answered():
    words = {"COMP_WORDS": "loadout un", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "loadout.cli"],
        env={**os.environ, **BASH, **words},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["unload", "unpin"], "")


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
    assert complete("loadout unload fr") == complete("loadout inspect fr") == ["french@2"]
    assert complete("loadout unload acme/") == ["acme/frisian@1"]


def test_a_store_that_does_not_answer_completes_nothing(complete):
    assert complete("loadout delete fr", LOADOUT_STORE="127.0.0.1:1") == []


@pytest.mark.processes
def test_the_script_for_the_shell():
    command = [sys.executable, "-m", "loadout.cli", "--show-completion"]
    environment = {**os.environ, "SHELL": "/bin/bash"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # Without a known shell around it, the command says so.
    assert "_LOADOUT_COMPLETE" in done.stdout or "Shell" in done.stdout + done.stderr
