"""Tensors that lie sharded over two ranks, real processes, are pushed as one adapter."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.loadout.push.sharded_rank import NUM_RANKS, whole
from tests.support import forks
from tests.support.wait import TIMEOUT_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WEIGHTS = "adapter_model.safetensors"


def run(folder: Path, store: str, *pushes: str) -> list[list[str]]:
    """Returns the outcomes of each rank, one for each push, which is of a client and a fault."""
    arguments = (str(folder / "rendezvous"), store, *pushes)
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        ranks = [
            pool.submit(forks.run, "tests.loadout.push.sharded_rank", str(rank), *arguments)
            for rank in range(NUM_RANKS)
        ]
        found = [rank.result(TIMEOUT_S) for rank in ranks]
    assert [each.returncode for each in found] == [0] * NUM_RANKS, found
    return [json.loads(each.stdout.splitlines()[-1]) for each in found]


def test_all_ranks_get_the_same_and_the_store_gets_whole_tensors(
    fake_store, store_server, tmp_path
) -> None:
    """From either client."""
    digests = ["sha256:1", "sha256:2"]
    adapters = [pb.Adapter(name="default/a", digest=digest) for digest in digests]
    fake_store.on("UploadAdapter", *(pb.UploadAdapterResponse(adapter=each) for each in adapters))
    found = run(tmp_path, store_server.address, "blocking none", "async none")
    assert found == [digests] * NUM_RANKS
    received = fake_store.requests["UploadAdapter"]
    assert len(received) == len(digests)
    for messages in received:
        assert messages[0].meta.ephemeral
        chunks = [each.chunk for each in messages[1:] if each.chunk.file_name == WEIGHTS]
        found = load(b"".join(chunk.data for chunk in chunks))
        for name, values in whole().items():
            assert found[name].equal(values)


FAULTS = {
    "missing": "InvalidArgument: .* without its lora_B",
    "dtype": "InvalidArgument: .* has dtype int32",
    "config": "LoadoutError: rank 1 failed: RuntimeError: no such field",
    "empty": "InvalidArgument: tensors: the mapping is empty",
}


def test_an_error_before_anything_is_sent_is_that_of_all_ranks(
    fake_store, store_server, tmp_path
) -> None:
    """And the ranks push on."""
    found = run(tmp_path, store_server.address, *(f"blocking {fault}" for fault in FAULTS))
    assert found[0] == found[1]
    for outcome, message in zip(found[0], FAULTS.values(), strict=True):
        assert re.match(message, outcome)
    assert "UploadAdapter" not in fake_store.requests


def test_a_store_that_is_not_there_is_an_error_on_all_ranks(store_server, tmp_path) -> None:
    store_server.kill()
    found = run(tmp_path, store_server.address, "blocking none")
    assert found[0] == found[1]
    assert "StreamLost" in found[0][0]
