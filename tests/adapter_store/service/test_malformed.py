"""Adapters that must not come in: each the right status, the culprit named, and no trace left."""

from __future__ import annotations

import json

import pytest
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from safetensors.torch import load_file

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.adapters import save_adapter
from tests.support.store.served import Served

pytestmark = pytest.mark.slow

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def tensors(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    good = {"A": torch.ones(4, 16), "B": torch.ones(16, 4)}
    return {f"{PREFIX}{k}.weight": t for k, t in {**good, **changed}.items() if t is not None}


def truncated(folder) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-7])


def huge_header(folder) -> None:
    (folder / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def pickled(folder) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def not_json(folder) -> None:
    (folder / CONFIG).write_text("{")


CASES = {
    "missing B": ({"tensors": tensors(B=None)}, None, "q_proj"),
    "ranks differ": ({"tensors": tensors(B=torch.ones(16, 3))}, None, "q_proj"),
    "NaN": ({"tensors": tensors(A=torch.full((4, 16), torch.nan))}, None, "lora_A"),
    "infinity": ({"tensors": tensors(B=torch.full((16, 4), torch.inf))}, None, "lora_B"),
    "integers": ({"tensors": tensors(A=torch.ones(4, 16, dtype=torch.int8))}, None, "I8"),
    "unknown tensor": ({"tensors": {**tensors(), "surprise": torch.ones(1)}}, None, "surprise"),
    "unused module": ({"tensors": tensors(), "target_modules": ["k_proj"]}, None, "q_proj"),
    "rank too high": ({"rank": 65}, None, "65"),
    "biases that are lost": ({"bias": "all"}, None, "bias"),
    "a saved module that is lost": ({"modules_to_save": ["norm"]}, None, "modules_to_save"),
    "DoRA without magnitudes": ({"use_dora": True}, None, "lora_magnitude_vector"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, None, "use_bdlora"),
    "pissa": ({"init_lora_weights": "pissa"}, None, "init_lora_weights"),
    "unknown key": ({"new_magic": 3}, None, "new_magic"),
    "not LoRA": ({"peft_type": "IA3"}, None, "peft_type"),
    "truncated": ({}, truncated, WEIGHTS),
    "huge header": ({}, huge_header, WEIGHTS),
    "pickle": ({}, pickled, "adapter_model.bin"),
    "no JSON": ({}, not_json, CONFIG),
}


@pytest.fixture(scope="module")
def strict_store(serve_shared) -> Served:
    """One store for all cases: it holds nothing after any of them."""
    return serve_shared(max_rank=64)


@pytest.mark.parametrize("case", CASES)
def test_malformed_adapters(strict_store, shared_folder, refused, case):
    fields, change, culprit = CASES[case]
    client = strict_store.client
    folder = save_adapter(shared_folder / case, ("q_proj",), **fields)
    if change is not None:
        change(folder)
    refusal = refused("INVALID_ARGUMENT", culprit)
    with refusal:
        client.register("a", folder)
    status = rpc_status.from_call(refusal.error)
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert info.metadata["subject"] == bad_request.field_violations[0].field != ""
    with refused("INVALID_ARGUMENT", culprit):
        client.upload("a", {path.name: path.read_bytes() for path in folder.iterdir()})
    assert list(client.stub.ListAdapters(pb.ListAdaptersRequest()).adapters) == []
    assert list((shared_folder / "data" / "blobs").iterdir()) == []
    assert client.stub.GetStoreStatus(pb.GetStoreStatusRequest()).revision == 0


def test_too_large(serve, make_adapter, refused):
    client = serve(max_file_bytes=500).client
    folder = make_adapter(("q_proj",))
    with refused("RESOURCE_EXHAUSTED", WEIGHTS, "500"):
        client.register("a", folder)
    with refused("RESOURCE_EXHAUSTED", WEIGHTS, "500"):
        client.upload("a", {path.name: path.read_bytes() for path in folder.iterdir()})


def test_config_with_duplicate_keys(client, make_adapter, refused):
    folder = make_adapter(("q_proj",))
    fields = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(fields)[:-1] + ', "r": 9}')
    with refused("INVALID_ARGUMENT", CONFIG):
        client.register("a", folder)


def test_a_source_outside_the_roots(client, refused):
    with refused("INVALID_ARGUMENT", "source_uri", "--source-roots"):
        client.register("a", "/etc")
    with refused("INVALID_ARGUMENT", "source_uri", "--s3-buckets"):
        request = pb.RegisterAdapterRequest(name="a", source_uri="s3://bucket/prefix")
        client.stub.RegisterAdapter(request)
    with refused("INVALID_ARGUMENT", "source_uri", "http://"):
        request = pb.RegisterAdapterRequest(name="a", source_uri="http://169.254.169.254/x")
        client.stub.RegisterAdapter(request)


@pytest.mark.processes
def test_pickled_weights_where_the_operator_allows_them(serve, make_adapter, tmp_path):
    client = serve(allow_pickle_files=True).client
    folder = make_adapter(("q_proj",))
    expected = client.register("plain", folder).adapter
    tensors = load_file(folder / WEIGHTS)
    torch.save(tensors, folder / "adapter_model.bin")
    both = client.register("both", folder).adapter
    (folder / WEIGHTS).unlink()
    registered = client.register("pickled", folder).adapter
    uploaded = client.upload("sent", {path.name: path.read_bytes() for path in folder.iterdir()})
    digests = {a.digest for a in (expected, both, registered, uploaded.adapter)}
    assert digests == {expected.digest}
    for adapter in (both, registered, uploaded.adapter):
        assert [file.name for file in adapter.files] == [CONFIG, WEIGHTS]
    (blob,) = (tmp_path / "data" / "blobs").iterdir()
    assert sorted(path.name for path in blob.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.long
@pytest.mark.processes
def test_hostile_pickle_disturbs_no_other_call(serve, make_adapter, refused, tmp_path):
    client = serve(allow_pickle_files=True).client
    folder = make_adapter(("q_proj",))
    good = client.register("good", folder).adapter
    (folder / WEIGHTS).unlink()
    torch.save({"a": {"b": torch.ones(2)}}, folder / "adapter_model.bin")
    with refused("INVALID_ARGUMENT", "adapter_model.bin", "not a map of names to tensors"):
        client.register("a", folder)
    assert client.get("good").digest == good.digest
    assert list((tmp_path / "data" / "staging").iterdir()) == []


def test_unknown_keys_that_the_operator_allows(serve, make_adapter, make_layout, refused, tmp_path):
    audit_file = tmp_path / "audit.jsonl"
    store = serve(allow_config_keys=("trainer_note", "other"), audit_file=audit_file)
    plain = make_adapter(("q_proj",), folder="plain")
    noted = make_adapter(("q_proj",), folder="noted", rank=2, trainer_note="v3", other=None)
    files = {path.name: path.read_bytes() for path in noted.iterdir()}
    made = store.client.register("noted", noted)
    sent = store.client.upload("sent", files)
    assert list(made.ignored_config_keys) == list(sent.ignored_config_keys) == ["trainer_note"]
    assert list(store.client.register("plain", plain).ignored_config_keys) == []
    with refused("INVALID_ARGUMENT", "use_qalora=True is not supported"):
        store.client.register("qalora", make_adapter(("q_proj",), folder="qa", use_qalora=True))
    store.stop()
    lines = [json.loads(line) for line in audit_file.read_text().splitlines()]
    found = [line["ignored_config_keys"] for line in lines]
    assert found == [["trainer_note"], ["trainer_note"], [], []]

    # What was let pass is served on, and no new ones are.
    client = serve().client
    layout_id = client.register_layout(make_layout())
    assert client.pull(made.adapter.digest, layout_id).is_whole
    with refused("INVALID_ARGUMENT", "trainer_note", "--allow-config-keys"):
        client.register("again", noted)
