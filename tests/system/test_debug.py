"""`loadout debug` of real services whose settings, files and environment are full of secrets."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadout import Client
from loadout.cli.__main__ import main
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.models.zoo import Zoo
from tests.system.secretive import HELD, LOOK_SECRET, fail_with
from tests.system.services import Services

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAenvironment1",
    "AWS_SECRET_ACCESS_KEY": "environment-secret-2",
    "AWS_SESSION_TOKEN": "environment-secret-3",
    "HF_TOKEN": "hf_environment_secret4",
    "PGPASSWORD": "environment-secret-5",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=environment-secret-6",
    "HTTPS_PROXY": "http://someone:environment-secret-7@127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}
IN_REQUESTS = (*LOOK_SECRET.values(), "x-environment-secret-2")
PROMPT = "prompt-secret-11 "
SECRETS = [f"secret-{number}" for number in (*range(2, 8), 11)]
SECRETS += [*HELD, "AKIAenvironment1", "secret4"]
TOKENS = ("root", "server", "operator-a")

INFERENCE = {
    *("config.json", "versions.json", "errors.json", "store.json", "engine.json"),
    *("slots.json", "residency.json", "queue.json", "metrics.txt", "stacks.txt"),
}
STORE = {"config.json", "versions.json", "errors.json", "work.json", "catalog.json", "metrics.txt"}


class Secretive:
    """The services, and clients of them by the names of tokens."""

    def __init__(self, folder: Path, zoo: Zoo) -> None:
        self.authority = Authority(folder)
        cert, self.key = self.authority.issue("service")
        root = token_lines("root", ["admin", "caller", "operator"], ["*"])
        operator = token_lines("operator-a", ["operator"])
        policy = write_policy(folder, root, token_lines("server", ["server"], ["*"]), operator)
        self.token_file = folder / "server-token"
        self.token_file.write_text(token_of("server"))
        flags = ("--policy-file", str(policy), "--tls-cert-file", str(cert))
        flags += ("--tls-key-file", str(self.key))
        to_store = ("--store-token-file", str(self.token_file))
        to_store += ("--store-tls-ca-file", str(self.authority.path))
        self.services = Services(
            zoo, folder / "services", store_flags=flags, inference_flags=(*flags, *to_store)
        )

    def client(self, name: str) -> Client:
        return self.services.secure_client(token_of(name), self.authority.path)

    def command(self, *arguments: str) -> int:
        places = ("--inference", self.services.inference_address)
        places += ("--store", self.services.store_address)
        return main(["debug", "--tls-ca-file", str(self.authority.path), *places, *arguments])


@pytest.fixture(scope="module")
def secretive(zoos: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secretive]:
    made = Secretive(tmp_path_factory.mktemp("secretive"), zoos("llama"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with made.services:
            yield made


def members(path: Path) -> dict[str, bytes]:
    """By their paths below the archive's one folder; each that says so is JSON."""
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            assert member.isfile()
            folder, _, name = member.name.partition("/")
            assert folder.startswith("loadout-debug-")
            file = archive.extractfile(member)
            assert file is not None
            found[name] = file.read()
            if name.endswith(".json"):
                json.loads(found[name])
    return found


def test_an_archive_has_everything_but_secrets(
    secretive: Secretive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("LOADOUT_TOKEN", token_of("root"))
    services = secretive.services
    out = tmp_path / "debug.tar.gz"
    with secretive.client("root") as client:
        digest = client.register("team-a/mine", services.source("r16")).adapter.digest
        for text in IN_REQUESTS:
            fail_with(client, text, PROMPT)
        going = client.generate(
            PROMPT * 3, adapter="team-a/mine", request_id="slow", max_tokens=180, ignore_eos=True
        )
        next(going)
        assert secretive.command("--out", str(out)) == 0
        going.close()
    assert out.stat().st_mode & 0o077 == 0
    assert capfd.readouterr().err == ""
    found = members(out)
    wanted = {"client.json", *(f"inference/{name}" for name in INFERENCE)}
    assert set(found) == wanted | {f"store/{name}" for name in STORE}
    held = [*SECRETS, *map(token_of, TOKENS), secretive.key.read_text().splitlines()[1]]
    for name, content in found.items():
        for secret in held:
            assert secret.encode() not in content, f"{secret} is in {name}"

    def of(name: str) -> Any:
        return json.loads(found[name])

    assert of("inference/config.json")["settings"]["store_token_file"] == str(secretive.token_file)
    assert "tls_key_file" in of("store/config.json")["set"]
    assert "torch" in of("inference/versions.json")["packages"]
    [image] = of("inference/residency.json")["tiers"]["device"]["images"]
    assert (image["digest"], image["names"]) == (digest, ["team-a/mine"])
    arena = of("inference/slots.json")["memories"]["device"]
    taken = [*arena["extents"], *arena["free_ranges"]]
    assert sum(each["bytes"] for each in taken) == arena["capacity_bytes"]
    for sequence in of("inference/queue.json")["running"]:  # it may have ended by now
        assert (sequence["request_id"], sequence["digest"]) == ("slow", digest)
        assert sequence["num_prompt_tokens"] > 0
    reasons = {row["reason"] for row in of("inference/errors.json")["errors"]}
    assert "INVALID_ARGUMENT" in reasons
    assert any(row["request_id"] == "failing" for row in of("inference/errors.json")["errors"])
    assert any(row["method"] == "RegisterAdapter" for row in of("store/errors.json")["errors"])
    assert of("store/catalog.json")["catalog"]["adapters"] == 1
    assert b"loadout_store_adapters 1.0" in found["store/metrics.txt"]
    assert b"loadout_inference_tier_images" in found["inference/metrics.txt"]
    for thread in (b"MainThread", b"loadout-engine"):
        assert b"thread " + thread in found["inference/stacks.txt"]


def test_an_archive_names_refusals_and_services_that_are_down(
    secretive: Secretive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    out = tmp_path / "debug.tar.gz"
    monkeypatch.setenv("LOADOUT_TOKEN", token_of("operator-a"))
    assert secretive.command("--out", str(out)) == 1
    found = members(out)
    assert set(found) == {"client.json", "inference.missing.txt", "store.missing.txt"}
    assert b"this call covers all tenants" in found["inference.missing.txt"]
    assert b"PermissionDenied" in found["store.missing.txt"]
    monkeypatch.setenv("LOADOUT_TOKEN", token_of("root"))
    assert secretive.command("--out", str(out), "--store", "127.0.0.1:1") == 0
    found = members(out)
    assert "inference/slots.json" in found
    assert b"127.0.0.1:1" in found["store.missing.txt"]
    assert "store at 127.0.0.1:1: StreamLost" in capfd.readouterr().err
    replicas = f"{secretive.services.inference_address},127.0.0.1:1"
    assert secretive.command("--out", str(out), "--inference", replicas) == 0
    found = members(out)
    assert {"inference-0/slots.json", "inference-1.missing.txt", "store/work.json"} <= set(found)
    replicas = f"127.0.0.1:1,{secretive.services.store_address}"
    assert secretive.command("--out", str(out), "--store", replicas) == 0
    found = members(out)
    assert {"store-0.missing.txt", "store-1/work.json", "inference/slots.json"} <= set(found)
