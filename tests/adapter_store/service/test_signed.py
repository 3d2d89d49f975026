"""Signed registrations as a caller meets them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from adapter_store.__main__ import main
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.store.adapters import all_targets, random_tensors
from tests.support.store.client import details

pytestmark = pytest.mark.slow

KEYS = {"release": Ed25519PrivateKey.generate(), "theirs": Ed25519PrivateKey.generate()}
STRICT = "[tenants.team-a]\nrequire_signature = true\n"


def key_lines(name: str, tenant: str) -> str:
    public = base64.b64encode(KEYS[name].public_key().public_bytes_raw()).decode()
    return f'[keys.{name}]\ned25519 = "{public}"\ntenants = ["{tenant}"]\n'


TOKENS = ROOT + token_lines("a", ["publisher"]) + token_lines("b", ["publisher"], ["team-b"])
TRUSTED = key_lines("release", "*") + key_lines("theirs", "team-b")


def sign(digest: str, key_id: str = "release") -> pb.Signature:
    return pb.Signature(key_id=key_id, value=KEYS[key_id].sign(digest.encode()))


def digest_of(folder) -> str:
    return open_checkpoint(folder, CheckpointLimits()).digest


@pytest.fixture
def served(serve, tmp_path):
    """team-a accepts only signed adapters."""
    return serve(policy_file=write_policy(tmp_path, TOKENS, TRUSTED, STRICT))


def send(client, how: str, name: str, folder, **fields):
    if how == "register":
        return client.register(name, folder, **fields)
    files = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
    return client.upload(name, files, **fields)


@pytest.fixture(params=["register", "upload"])
def how(request) -> str:
    return request.param


def test_a_signed_adapter_is_recorded_as_verified(served, make_adapter, how) -> None:
    client = served.connect(token_of("a"))
    folder = make_adapter()
    adapter = send(client, how, "french", folder, signature=sign(digest_of(folder))).adapter
    assert adapter.signature_state == pb.SIGNATURE_STATE_VERIFIED
    assert adapter.signed_by == "release"
    assert client.get("french") == adapter


def test_unknown_keys_that_the_operator_allows(serve, make_adapter, tmp_path, capsys) -> None:
    policy_file = write_policy(tmp_path, TOKENS, TRUSTED, STRICT)
    served = serve(policy_file=policy_file, allow_config_keys=("trainer_note",))
    folder = make_adapter(trainer_note="v3")
    assert main(["digest", str(folder)]) == 0
    digest = capsys.readouterr().out.strip()
    made = served.connect(token_of("a")).register("french", folder, signature=sign(digest))
    assert list(made.ignored_config_keys) == ["trainer_note"]
    assert made.adapter.signature_state == pb.SIGNATURE_STATE_VERIFIED


@pytest.mark.parametrize(
    ("fields", "reason", "subject"),
    [
        ({}, "SIGNATURE_REQUIRED", "signature"),
        ({"signature": sign("x", "theirs")}, "KEY_UNKNOWN", "signature.key_id"),
        (
            {"signature": pb.Signature(key_id="nobody", value=bytes(64))},
            "KEY_UNKNOWN",
            "signature.key_id",
        ),
        (
            {"signature": sign("x"), "expected_digest": "sha256:" + "0" * 64},
            "SIGNATURE_INVALID",
            "signature",
        ),
    ],
)
def test_refused_before_anything_is_fetched(
    served, tmp_path, refused, how, fields, reason, subject
) -> None:
    client = served.connect(token_of("a"))
    with refused("FAILED_PRECONDITION", "signature") as refusal:  # else NOT_FOUND
        send(client, how, "french", tmp_path / "nowhere", **fields)
    info = details(refusal.error)["ErrorInfo"]
    assert (info.reason, info.metadata["subject"]) == (reason, subject)


def test_what_cannot_be_a_signature_names_its_field(served, tmp_path, refused) -> None:
    client = served.connect(token_of("a"))
    with refused("INVALID_ARGUMENT", "signature.value: 3 bytes") as refusal:
        client.register(
            "french", tmp_path / "nowhere", signature=pb.Signature(key_id="release", value=b"abc")
        )
    assert details(refusal.error)["BadRequest"].field_violations[0].field == "signature.value"


def test_a_signature_of_other_content_leaves_nothing(
    served, make_adapter, tmp_path, refused, how
) -> None:
    client = served.connect(token_of("a"))
    signed, sent = make_adapter(folder="signed"), make_adapter(folder="sent", seed=1)
    with refused("FAILED_PRECONDITION", digest_of(sent)) as refusal:
        send(client, how, "french", sent, signature=sign(digest_of(signed)))
    assert details(refusal.error)["ErrorInfo"].reason == "SIGNATURE_INVALID"
    with refused("NOT_FOUND"):
        client.get("french")
    assert not list((tmp_path / "data" / "blobs").iterdir())


def test_a_signature_may_come_later_and_stays(served, make_adapter) -> None:
    client = served.connect(token_of("b"))
    folder = make_adapter()
    first = client.register("french", folder)
    assert first.adapter.signature_state == pb.SIGNATURE_STATE_UNSIGNED
    signed = client.register("french", folder, signature=sign(first.adapter.digest))
    assert (signed.adapter.version, signed.adapter.signed_by) == (1, "release")
    assert signed.revision == first.revision + 1  # watchers learn of it
    again = client.register("french", folder)
    assert (again.adapter, again.revision) == (signed.adapter, signed.revision)
    other = client.register("french", folder, signature=sign(first.adapter.digest, "theirs"))
    assert (other.adapter.version, other.adapter.signed_by) == (1, "theirs")
    elsewhere = client.register("german", folder)  # each name's record is signed for itself
    assert elsewhere.adapter.signature_state == pb.SIGNATURE_STATE_UNSIGNED


def test_old_version_has_its_signature(served, make_adapter) -> None:
    client = served.connect(token_of("b"))
    first, second = make_adapter(folder="1"), make_adapter(folder="2", seed=1)
    client.register("french", first, signature=sign(digest_of(first)))
    assert client.register("french", second).adapter.signed_by == ""
    back = client.register("french", first).adapter
    assert (back.version, back.signed_by) == (1, "release")


def test_what_is_not_signed_does_not_come_back(serve, tmp_path, make_adapter, refused) -> None:
    """Not by a rollback either, once the tenant accepts only signed adapters."""
    policy = write_policy(tmp_path, TOKENS, TRUSTED)
    served = serve(policy_file=policy)
    client = served.connect(token_of("a"))
    folders = [make_adapter(folder=f"{seed}", seed=seed) for seed in range(3)]
    client.register("french", folders[0])
    for folder in folders[1:]:
        client.register("french", folder, signature=sign(digest_of(folder)))
    write_policy(tmp_path, TOKENS, TRUSTED, STRICT)
    served.running.store.policies.reload()
    before = client.get("french")
    with refused("FAILED_PRECONDITION", "only signed adapters") as refusal:
        client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="french", version=1))
    assert details(refusal.error)["ErrorInfo"].reason == "SIGNATURE_REQUIRED"
    assert client.get("french") == before
    back = client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="french", version=2))
    assert (back.adapter.version, back.adapter.signed_by) == (2, "release")


def make_classifier(make_adapter, id2label) -> Path:
    """Saves an adapter with a head of two labels, which its model's configuration names."""
    names = [target.name for target in all_targets() if target.name.endswith("q_proj")]
    head = {"base_model.model.score.weight": torch.ones(2, 64)}
    tensors = random_tensors(dict.fromkeys(names, 4)) | head
    folder = make_adapter(
        ("q_proj",), tensors=tensors, modules_to_save=["score"], task_type="SEQ_CLS"
    )
    (folder / "config.json").write_text(json.dumps({"id2label": id2label}))
    return folder


def test_labels_are_not_read_where_signatures_are_required(served, make_adapter, how) -> None:
    """A warning says so, of an adapter that may have labels."""
    client = served.connect(token_of("a"))
    folder = make_classifier(make_adapter, {"0": "sad", "1": "happy"})
    made = send(client, how, "mood", folder, signature=sign(digest_of(folder)))
    assert list(made.adapter.class_labels) == []
    [warning] = [each for each in made.warnings if "config.json" in each]
    assert "the tenant requires signatures: its own labels are LABEL_0" in warning
    plain = make_adapter(folder="plain")
    (plain / "config.json").write_text("{}")
    assert not send(client, how, "plain", plain, signature=sign(digest_of(plain))).warnings


def test_labels_that_nobody_signed_do_not_come_back(serve, tmp_path, make_adapter, refused) -> None:
    """A publisher may have swapped them beside weights that are signed."""
    served = serve(policy_file=write_policy(tmp_path, TOKENS, TRUSTED))
    client = served.connect(token_of("a"))
    folder = make_classifier(make_adapter, {"0": "happy", "1": "sad"})
    signature = sign(digest_of(folder))
    swapped = client.register("mood", folder, signature=signature).adapter
    assert list(swapped.class_labels) == ["happy", "sad"]
    (folder / "config.json").unlink()
    client.register("mood", folder, signature=signature)
    write_policy(tmp_path, TOKENS, TRUSTED, STRICT)
    served.running.store.policies.reload()
    with refused("FAILED_PRECONDITION", "names of labels, which are not signed") as refusal:
        client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="mood", version=1))
    assert details(refusal.error)["ErrorInfo"].reason == "SIGNATURE_REQUIRED"
    assert client.get("mood").version == 2


def test_removed_key_no_longer_counts(served, tmp_path, make_adapter, refused) -> None:
    client = served.connect(token_of("a"))
    folder = make_adapter()
    signature = sign(digest_of(folder))
    client.register("french", folder, signature=signature)
    write_policy(tmp_path, TOKENS, STRICT)
    served.running.store.policies.reload()
    with refused("FAILED_PRECONDITION", "'release'"):
        client.register("german", folder, signature=signature)
    assert client.get("french").signed_by == "release"  # as it was found when it was recorded


@pytest.mark.parametrize("key", ["", "another"])
def test_removed_keys_versions_cannot_be_rolled_back_to(
    serve, tmp_path, make_adapter, refused, key
) -> None:
    """Nor once its name is another key's."""
    policy = write_policy(tmp_path, TOKENS, TRUSTED, STRICT)
    served = serve(policy_file=policy)
    client = served.connect(token_of("a"))
    for seed in range(2):
        folder = make_adapter(folder=f"{seed}", seed=seed)
        client.register("french", folder, signature=sign(digest_of(folder)))
    others = key_lines("theirs", "*").replace("keys.theirs", "keys.release") if key else ""
    write_policy(tmp_path, TOKENS, others, STRICT)
    served.running.store.policies.reload()
    with refused("FAILED_PRECONDITION", "release") as refusal:
        client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="french", version=1))
    reason = "SIGNATURE_INVALID" if key else "KEY_UNKNOWN"
    assert details(refusal.error)["ErrorInfo"].reason == reason
    assert client.get("french").version == 2


def test_an_open_store_takes_no_signature_unchecked(client, make_adapter, refused) -> None:
    folder = make_adapter()
    with refused("FAILED_PRECONDITION", "'release'"):
        client.register("french", folder, signature=sign(digest_of(folder)))
