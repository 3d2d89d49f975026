"""Settings of several machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from inference_svc.auto_settings import Machine, ModelFacts, Sizes, resolve, to_engine_config
from inference_svc.config import InferenceSettings
from inference_svc.core import Nodes
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings

TOKEN = "LOADOUT_INFERENCE_RENDEZVOUS_TOKEN"
SECRET = "0123456789abcdef"
SECOND = ("--tensor-parallel", "4", "--nnodes", "2", "--node-rank", "1")
THERE = ("--rendezvous", "10.0.0.1:29500")
FACTS = ModelFacts("float32", 4096, kv_elements_per_token=1024, kv_vectors_per_token=16)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LOADOUT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(TOKEN, SECRET)


def parse(folder: Path, *flags: str) -> InferenceSettings:
    (folder / "config.json").write_text("{}")
    return load_settings(InferenceSettings, ["--model", str(folder), *flags])


def test_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing prints the token, which may end in a line break."""
    monkeypatch.setenv(TOKEN, f"{SECRET}\n")
    settings = parse(tmp_path, *SECOND, *THERE)
    config = to_engine_config(resolve(settings, Machine(has_cuda=False), FACTS))
    assert config.nodes == Nodes(2, 1, "10.0.0.1:29500", 600.0, SECRET)
    assert config.local_ranks == range(2, 4)
    assert SECRET not in f"{settings!r} {config!r}"


def test_machines_have_the_same_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory each has for states and experts: rank 0 refuses others with other sizes."""
    facts = replace(FACTS, state_bytes=20 << 20, expert_elements_per_rank=8 << 20)
    found = []
    for node, free_bytes, limit in ((0, 1 << 40, ""), (1, 3 << 30, ""), (1, 1 << 30, "2GiB")):
        if limit:  # no flag
            monkeypatch.setenv("LOADOUT_INFERENCE_MEMORY_LIMIT", limit)
        settings = parse(tmp_path, *SECOND[:-1], str(node), *THERE)
        machine = Machine(has_cuda=False, host_free_bytes=free_bytes)
        config = to_engine_config(resolve(settings, machine, facts))
        found.append(replace(config, nodes=None, memory_limit_bytes=0))
    assert found[0] == found[1] == found[2]


def test_one_machine(tmp_path: Path) -> None:
    settings = parse(tmp_path, "--tensor-parallel", "4")
    config = to_engine_config(resolve(settings, Machine(has_cuda=False), FACTS))
    assert config.nodes is None
    assert config.local_ranks == range(4)


def test_machines_that_would_cut_stages(tmp_path: Path) -> None:
    settings = parse(
        tmp_path, "--tensor-parallel", "2", "--pipeline-parallel", "3", "--nnodes", "2", *THERE
    )
    with pytest.raises(InvalidSetting, match="--pipeline-parallel 3 and --nnodes 2: one must"):
        resolve(settings, Machine(has_cuda=False), FACTS)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "num_nodes", "local", "num_computing"),
    [(2, 3, 1, range(6), 2), (2, 4, 2, range(4, 8), 2), (4, 2, 4, range(2, 4), 2)],
)
def test_stages_of_a_machine(
    num_ranks: int,
    num_stages: int,
    num_nodes: int,
    local: range,
    num_computing: int,
    tmp_path: Path,
) -> None:
    """Whole ones, of which one computes at a time, or a part of one; its ranks are neighbours."""
    stages = ("--tensor-parallel", str(num_ranks), "--pipeline-parallel", str(num_stages))
    nodes = ("--nnodes", str(num_nodes), "--node-rank", "1", *THERE) if num_nodes > 1 else ()
    settings = parse(tmp_path, *stages, *nodes)
    config = to_engine_config(resolve(settings, Machine(has_cuda=False), FACTS))
    assert config.num_ranks == num_ranks * num_stages
    assert config.local_ranks == local
    assert config.num_computing == num_computing


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--node-rank", "1"), "--node-rank 1 is not below --nnodes 1"),
        (
            ("--tensor-parallel", "3", "--nnodes", "2", *THERE),
            "3 processes (--tensor-parallel, --pipeline-parallel) do not divide by --nnodes 2",
        ),
        (("--nnodes", "2", *THERE), "1 processes (--tensor-parallel, --pipeline-parallel) do not"),
        (
            (*SECOND, "--node-rank", "2", *THERE),
            "--node-rank 2 is not below --nnodes 2: machines are counted from 0",
        ),
        (SECOND, "--rendezvous is required with --nnodes"),
        ((*SECOND, "--rendezvous", "leader"), "--rendezvous: 'leader' is not HOST:PORT"),
        ((*SECOND, "--rendezvous", "leader:0"), "--rendezvous: leader:0 has no port"),
        ((*SECOND, "--rendezvous", "0.0.0.0:29500"), "is no address that other machines reach"),
        (
            (*SECOND, *THERE, "--rendezvous-timeout-seconds", "0"),
            "--rendezvous-timeout-seconds: must be more than 0",
        ),
        (("--nnodes", "0"), "--nnodes: must be at least 1"),
    ],
)
def test_wrong_settings(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse(tmp_path, *flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", f"{TOKEN} is required with --nnodes"),
        (" \n", f"{TOKEN} is required with --nnodes"),
        ("fifteen letters", f"{TOKEN}: must have at least 16 characters"),
    ],
)
def test_wrong_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, message: str
) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(InvalidSetting) as caught:
        parse(tmp_path, *SECOND, *THERE)
    assert str(caught.value).startswith(message)
    assert "fifteen" not in str(caught.value)


def test_the_token_is_no_flag(tmp_path: Path) -> None:
    """Others on the machine could read it there."""
    with pytest.raises(InvalidSetting, match=f"set rendezvous-token in the file .* {TOKEN}"):
        parse(tmp_path, "--rendezvous-token", SECRET)


def test_devices_of_several_machines(tmp_path: Path) -> None:
    """Each machine has one for each of its own processes."""
    settings = parse(tmp_path, *SECOND, *THERE)
    decided = Sizes(1 << 20, 0, 1 << 26, 4, 64)
    machine = Machine(True, 1, 1, num_devices=2)
    found = resolve(settings, machine, FACTS, lambda settings, machine: decided)
    assert to_engine_config(found).local_ranks == range(2, 4)
    with pytest.raises(InvalidSetting, match="each of 2 processes of a machine needs a CUDA dev"):
        resolve(settings, Machine(True, 1, 1, num_devices=1), FACTS)
