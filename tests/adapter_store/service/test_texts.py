"""The tokenizer and the chat template beside an adapter: recorded, versioned, read, forgotten."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from adapter_store.checkpoint import text_files
from contract.tokenizer_extract import TokenizerExtract
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.models import tokenizer_files as tokenizers
from tests.support.store.adapters import all_targets, random_tensors
from tests.support.store.catalogs import connected
from tests.support.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def sha256(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def text_of(client: Any, digest: str) -> bytes:
    return client.stub.GetText(pb.GetTextRequest(digest=digest)).content


@pytest.fixture
def folder(make_adapter: Any) -> Path:
    """An adapter with a tokenizer, and a template in its configuration."""
    made = make_adapter(("q_proj",))
    backend = tokenizers.with_tokens(tokenizers.byte_level(), ["<|im_end|>"])
    return tokenizers.save(backend, made, TEMPLATE, eos_token="<|im_end|>")


def test_what_lies_beside_an_adapter_is_recorded_with_its_version(serve, folder, tmp_path):
    client = serve().client
    registered = client.register("a", folder)
    adapter, [warning] = registered.adapter, registered.warnings
    assert "its chat template does not use add_generation_prompt" in warning  # unsloth#4178
    assert adapter.chat_template_digest == sha256(TEMPLATE)
    assert text_of(client, adapter.chat_template_digest).decode() == TEMPLATE
    content = text_of(client, adapter.tokenizer_digest)
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == adapter.tokenizer_digest
    extract = TokenizerExtract.from_bytes(content)
    assert [each.content for each in extract.added_tokens] == [*tokenizers.SPECIALS, "<|im_end|>"]
    assert extract.roles["eos_token"] == "<|im_end|>"
    assert [file.name for file in adapter.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    (blob,) = (tmp_path / "data" / "blobs").iterdir()
    assert sorted(path.name for path in blob.iterdir()) == [file.name for file in adapter.files]
    assert client.register("a", folder).adapter.version == 1


def test_another_template_or_tokenizer_is_another_version_of_the_same_weights(serve, folder):
    client = serve().client
    first = client.register("a", folder).adapter
    (folder / "chat_template.jinja").write_text("other")  # counts before the configuration's
    second = client.register("a", folder).adapter
    assert (second.version, second.digest) == (2, first.digest)
    assert second.tokenizer_digest == first.tokenizer_digest
    assert second.chat_template_digest == sha256("other")
    tokenizers.edit(folder, lambda found: found["added_tokens"].pop())
    tokenizers.edit(folder, lambda found: found.update(eos_token="</s>"), "tokenizer_config.json")
    third = client.register("a", folder).adapter
    assert (third.version, third.digest) == (3, first.digest)
    assert third.tokenizer_digest != first.tokenizer_digest
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    fourth = client.register("a", folder).adapter
    assert (fourth.version, fourth.tokenizer_digest, fourth.chat_template_digest) == (4, "", "")
    assert [client.get(f"a@{version}").chat_template_digest for version in (1, 2, 3, 4)] == [
        sha256(TEMPLATE),
        sha256("other"),
        sha256("other"),
        "",
    ]
    rolled = client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="a", version=1))
    assert rolled.adapter.chat_template_digest == sha256(TEMPLATE)


def test_labels_of_a_head_are_versions_and_no_part_of_the_content(serve, make_adapter):
    """A config of another number of labels is of the model that the adapter was trained on."""
    client = serve().client
    names = [t.name for t in all_targets() if t.name.endswith("q_proj")]
    head = {"base_model.model.score.weight": torch.ones(2, 64)}
    tensors = random_tensors(dict.fromkeys(names, 4)) | head
    folder = make_adapter(
        ("q_proj",), tensors=tensors, modules_to_save=["score"], task_type="SEQ_CLS"
    )

    def register(id2label):
        (folder / "config.json").write_text(json.dumps({"id2label": id2label}))
        return client.register("a", folder).adapter

    first = register({"0": "sad", "1": "happy"})
    assert (first.version, list(first.class_labels)) == (1, ["sad", "happy"])
    assert "config.json" not in [file.name for file in first.files]
    assert register({"0": "sad", "1": "happy"}).version == 1
    second = register({"0": "bad", "1": "good"})
    assert (second.version, second.digest) == (2, first.digest)
    assert list(client.get("a@1").class_labels) == ["sad", "happy"]
    third = register({"0": "a", "1": "b", "2": "c"})
    assert (third.version, list(third.class_labels)) == (3, [])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["config.json"] = json.dumps({"id2label": {"0": "x", "1": "y"}}).encode()
    assert list(client.upload("sent", files).adapter.class_labels) == ["x", "y"]


@pytest.mark.parametrize("rows", [0, 2, 1024, 1025])
def test_only_heads_are_warned_about_labels(serve, make_adapter, rows):
    """Trainers save a config beside every adapter, whole weights of another kind beside some."""
    client = serve().client
    names = [t.name for t in all_targets() if t.name.endswith("q_proj")]
    whole = {"base_model.model.score.weight": torch.ones(rows, 64)} if rows else {}
    tensors = random_tensors(dict.fromkeys(names, 4)) | whole
    fields = {"modules_to_save": ["score"], "task_type": "SEQ_CLS"} if rows else {}
    folder = make_adapter(("q_proj",), tensors=tensors, **fields)
    (folder / "config.json").write_text('{"id2label": {"0": "a"}, "id2label": {"0": "b"}}')
    made = client.register("a", folder)
    assert list(made.adapter.class_labels) == []
    may_classify = 0 < rows <= 1024
    assert ["duplicate key" in each for each in made.warnings] == [True] * may_classify


def test_uploads_bring_theirs_along(serve, folder):
    client = serve().client
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    sent = client.upload("sent", files).adapter
    read = client.register("read", folder).adapter
    assert sent.tokenizer_digest == read.tokenizer_digest != ""
    assert sent.chat_template_digest == read.chat_template_digest != ""


def test_texts_survive_a_restart_and_go_with_their_last_version(serve, folder, tmp_path):
    store = serve()
    first = store.client.register("a", folder).adapter
    store.client.register("b", folder)
    store.stop()
    store = serve(delete_grace_seconds=0, collect_seconds=0.01)
    client = store.client
    digests = (first.chat_template_digest, first.tokenizer_digest)
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    until(lambda: is_gone(client, "a"))
    assert all(text_of(client, digest) for digest in digests)
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="b"))
    until(lambda: count_texts(tmp_path) == 0)
    for digest in digests:
        with pytest.raises(grpc.RpcError, match=digest):
            text_of(client, digest)


def count_texts(folder: Path) -> int:
    with connected(folder / "data" / "catalog.sqlite3") as conn:
        return conn.exec_driver_sql("SELECT count(*) FROM texts").scalar_one()


def is_gone(client: Any, name: str) -> bool:
    """Returns whether a deleted name's versions are collected."""
    try:
        client.stub.ListVersions(pb.ListVersionsRequest(name=name))
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.NOT_FOUND
    return False


def test_tenants_read_their_own_only(serve, folder, tmp_path, refused):
    policy = write_policy(
        tmp_path,
        ROOT,
        token_lines("a", ["publisher", "reader"], ["a"]),
        token_lines("b", ["publisher", "reader"], ["b"]),
    )
    store = serve(policy_file=policy)
    a, b = (store.connect(token_of(name)) for name in ("a", "b"))
    adapter = a.register("own", folder).adapter
    for digest in (adapter.tokenizer_digest, adapter.chat_template_digest):
        assert text_of(a, digest)
        with refused("NOT_FOUND"):
            text_of(b, digest)
    b.register("own", folder)
    assert text_of(b, adapter.tokenizer_digest)


def test_a_quota_counts_them(serve, folder, tmp_path, refused):
    num_bytes = sum(path.stat().st_size for path in folder.glob("adapter_*"))
    policy = write_policy(
        tmp_path, ROOT, f"[tenants.default]\nmax_bytes = {num_bytes + len(TEMPLATE) + 3000}\n"
    )
    client = serve(policy_file=policy).connect(token_of("root"))
    client.register("a", folder)
    (folder / "chat_template.jinja").write_text("x" * 3000)
    with refused("RESOURCE_EXHAUSTED", "max_bytes"):
        client.register("a", folder)


def test_copies_of_one_tokenizer_are_read_once(serve, folder, monkeypatch):
    reads = []
    read = text_files.read_text
    monkeypatch.setattr(text_files, "read_text", lambda *a: reads.append(a) or read(*a))
    client = serve().client
    for name in ("a", "b", "c"):
        fields = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**fields, "lora_alpha": ord(name)}))
        assert client.register(name, folder).adapter.version == 1
    assert len(reads) == 1


def test_the_store_answers_while_a_large_tokenizer_is_read(serve, make_adapter, monkeypatch):
    """Reading is a child process's: it holds no lock of this one's."""
    client = serve().client
    folder = make_adapter(("q_proj",))
    (folder / "tokenizer.json").write_bytes(b'{"a": [' + b"[]," * (2 << 20) + b"[]]}")

    def register() -> None:
        with pytest.raises(grpc.RpcError):
            client.register("large", folder)

    registering = threading.Thread(target=register)
    registering.start()
    num_answers = 0
    while registering.is_alive():
        client.stub.GetStoreStatus(pb.GetStoreStatusRequest(), timeout=5)
        num_answers += 1
    registering.join()
    assert num_answers > 10
