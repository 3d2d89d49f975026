"""Key files, signatures, and the commands that make them."""

from __future__ import annotations

import base64
import shutil
import stat
import tomllib

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from adapter_store.registration.tenant_policy import parse_policy
from loadout import types
from loadout._rpc.calls import signature_message
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.cli.__main__ import main
from loadout.errors import InvalidArgument
from loadout.signing import SigningKey, format_signature, parse_signature
from tests.support import forks

DIGEST = "sha256:" + "ab" * 32
ADAPTER = "loadout/demo/assets/adapters/upper"


def test_what_is_signed_is_the_text_of_the_digest(tmp_path) -> None:
    key = SigningKey.create(tmp_path / "release.pem")
    made = SigningKey.load(tmp_path / "release.pem").sign(DIGEST)
    assert made.key_id == key.key_id == "release"
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key.public_key))
    public.verify(made.value, DIGEST.encode("ascii"))


def test_a_key_file_is_its_owners_alone(tmp_path) -> None:
    path = tmp_path / "k.pem"
    SigningKey.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        SigningKey.create(path)
    assert path.read_bytes() == before


def test_files_that_are_no_key(tmp_path) -> None:
    other = generate_private_key(SECP256R1())
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    wrong = {
        "text": b"secret words",
        "ec": other.private_bytes(*encoding, serialization.NoEncryption()),
        "locked": other.private_bytes(*encoding, serialization.BestAvailableEncryption(b"x")),
    }
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match=name) as raised:
            SigningKey.load(tmp_path / name)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("digest", ["", "sha256:", DIGEST.upper(), DIGEST + "0", DIGEST + "\n"])
def test_only_digests_are_signed(tmp_path, digest) -> None:
    with pytest.raises(InvalidArgument, match="digest"):
        SigningKey.create(tmp_path / "k.pem").sign(digest)


def test_a_line_is_read_back(tmp_path) -> None:
    made = SigningKey.create(tmp_path / "k.pem").sign(DIGEST)
    assert parse_signature(f"{format_signature(made)}\n", "k.sig") == made
    for text in ("", "k", "k not-base64", f"{format_signature(made)} more"):
        with pytest.raises(InvalidArgument, match=r"k\.sig"):
            parse_signature(text, "k.sig")


def test_in_a_request() -> None:
    message = signature_message(types.Signature("k", b"v" * 64))
    assert message == store_pb.Signature(key_id="k", value=b"v" * 64)
    assert signature_message(None) is None


def test_keygen_prints_a_table_of_the_policy(tmp_path, capfd) -> None:
    assert main(["keygen", str(tmp_path / "release.2026.pem")]) == 0
    (name, table), *more = tomllib.loads(capfd.readouterr().out)["keys"].items()
    assert (name, more) == ("release.2026", [])
    assert table["ed25519"] == SigningKey.load(tmp_path / "release.2026.pem").public_key
    assert main(["keygen", str(tmp_path / "release.2026.pem")]) == 1
    assert "exists" in capfd.readouterr().err


def test_keygen_prints_the_tenants_of_the_key(tmp_path, capfd) -> None:
    tenants = ("--tenant", "team-a", "--tenant", "team-b")
    assert main(["keygen", str(tmp_path / "k.pem"), *tenants]) == 0
    table = capfd.readouterr().out
    assert tomllib.loads(table)["keys"]["k"]["tenants"] == ["team-a", "team-b"]
    assert parse_policy(table).keys["k"].tenants == {"team-a", "team-b"}
    assert main(["keygen", str(tmp_path / "other.pem"), "--tenant", "Team"]) == 2
    assert "--tenant" in capfd.readouterr().err
    assert not (tmp_path / "other.pem").exists()


def test_a_place_is_not_signed(tmp_path, capfd) -> None:
    SigningKey.create(tmp_path / "k.pem")
    assert main(["sign", "s3://bucket/french", "--key", str(tmp_path / "k.pem")]) == 1
    error = "loadout: s3://bucket/french: signing needs a local folder or its digest: "
    assert capfd.readouterr().err.startswith(error)


@pytest.mark.processes
def test_a_folder_is_signed_by_its_digest(tmp_path, capfd) -> None:
    key = SigningKey.create(tmp_path / "k.pem")
    with forks.forked_commands():
        assert main(["digest", ADAPTER]) == 0
        digest = capfd.readouterr().out.strip()
        assert main(["sign", ADAPTER, "--key", str(tmp_path / "k.pem")]) == 0
    assert parse_signature(capfd.readouterr().out, "stdout") == key.sign(digest)
    assert main(["sign", digest, "--key", str(tmp_path / "k.pem"), "--key-id", "other"]) == 0
    made = parse_signature(capfd.readouterr().out, "stdout")
    assert made == types.Signature("other", key.sign(digest).value)


@pytest.mark.parametrize("command", ["digest RUN", "sign RUN --key KEY", "strip RUN OUT"])
def test_what_lies_below_a_run_folder_is_said(tmp_path, capfd, command) -> None:
    SigningKey.create(tmp_path / "k.pem")
    run = tmp_path / "run"
    shutil.copytree(ADAPTER, run / "checkpoint-10")
    places = {"RUN": str(run), "KEY": str(tmp_path / "k.pem"), "OUT": str(tmp_path / "out")}
    assert main([places.get(word, word) for word in command.split()]) == 1
    captured = capfd.readouterr()
    assert "adapter_config.json does not exist, but below it are checkpoint-10;" in captured.err
    assert captured.out == ""
