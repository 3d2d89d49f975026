"""Both services as an operator runs them for two tenants: processes, policy, tokens and mTLS."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadout import Client, TlsConfig, errors
from loadout.cli.__main__ import main
from loadout.retry import RetryPolicy
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.services import Services

TENANTS = {"team-a": "r16", "team-b": "r64"}
"""Each calls its adapter `mine`; behind it lies this one of the zoo."""
SERVER = token_lines("server", ["server"], list(TENANTS))
TEAM_A = [
    token_lines("publisher-a", ["publisher"]),
    token_lines("caller-a", ["caller"]),
    token_lines("operator-a", ["operator"]),
]
TEAM_B = [token_lines("all-b", ["publisher", "caller", "operator"], ["team-b"])]
LEAVER = token_lines("leaver", ["caller"])
PROMPT = "What is the capital of nowhere"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "timeout_s": 60}


class Guarded:
    """The running services, and clients of them by the names of tokens."""

    def __init__(self, folder: Path, zoo: Zoo) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        cert, key = self.authority.issue("service")
        self.own = self.authority.issue("client")
        self.policy = write_policy(folder, SERVER, *TEAM_A, *TEAM_B, LEAVER)
        token = folder / "server-token"
        token.write_text(token_of("server"))
        flags = [
            *("--policy-file", str(self.policy), "--tls-cert-file", str(cert)),
            *("--tls-key-file", str(key), "--tls-client-ca-file", str(self.authority.path)),
            *("--reload-seconds", "0"),
        ]
        to_store = [
            *("--store-token-file", str(token), "--store-tls-ca-file", str(self.authority.path)),
            *("--store-tls-cert-file", str(self.own[0]), "--store-tls-key-file", str(self.own[1])),
        ]
        self.audit = folder / "inference-audit.jsonl"
        self.services = Services(
            zoo,
            folder / "services",
            store_flags=(
                *(*flags, "--audit-file", str(folder / "store-audit.jsonl")),
                *("--log-level", "DEBUG"),
            ),
            inference_flags=(
                *(*flags, *to_store, "--audit-file", str(self.audit)),
                *("--log-level", "debug"),
            ),
        )
        self._clients: list[Client] = []

    def client(self, token: str | None, *, shows_certificate: bool = True) -> Client:
        files = (self.authority.path, *(self.own if shows_certificate else (None, None)))
        self._clients.append(
            Client(
                inference=self.services.inference_address,
                store=self.services.store_address,
                token=token,
                tls=TlsConfig(*files),
                retry=RetryPolicy(max_attempts=1),
            )
        )
        return self._clients[-1]

    def audit_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture(scope="module")
def guarded(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path_factory.mktemp("guarded"), zoos("llama"))
    with guarded.services:
        yield guarded
        guarded.close()


@pytest.fixture(scope="module")
def clients(guarded: Guarded) -> dict[str, Client]:
    names = ("publisher-a", "caller-a", "operator-a", "all-b", "leaver")
    return {name: guarded.client(token_of(name)) for name in names}


@pytest.fixture(scope="module")
def digests(guarded: Guarded, clients: dict[str, Client]) -> dict[str, str]:
    """Each tenant's publisher has registered `mine`: one fetched, one uploaded."""
    services = guarded.services
    return {
        "team-a": clients["publisher-a"].register("mine", services.source("r16")).adapter.digest,
        "team-b": clients["all-b"]
        .register("mine", services.zoo.adapter_dirs["r64"])
        .adapter.digest,
    }


@pytest.mark.parametrize("tenant", TENANTS)
def test_each_tenant_generates_with_its_own(
    guarded: Guarded, clients: dict[str, Client], digests: dict[str, str], tenant: str
) -> None:
    client = clients["caller-a" if tenant == "team-a" else "all-b"]
    ids = list(PROMPT.encode())
    oracle = guarded.services.zoo.greedy(TENANTS[tenant], ids, 8)
    for ref in ("mine", "mine@1", f"{tenant}/mine", digests[tenant]):
        done = client.complete(ids, adapter=ref, max_tokens=8, **GREEDY)
        assert (list(done.token_ids), done.adapter.digest) == (oracle, digests[tenant]), ref
    assert client.complete(ids, max_tokens=1, **GREEDY).adapter is None
    assert client.server_info().base_model == "llama"


def test_what_is_forbidden(
    guarded: Guarded, clients: dict[str, Client], digests: dict[str, str]
) -> None:
    publisher, caller, operator = (clients[f"{n}-a"] for n in ("publisher", "caller", "operator"))
    clients["all-b"].load("mine", timeout_s=60)
    source = guarded.services.source("r16")
    for ref in ("team-b/mine", digests["team-b"]):
        refused: list[Callable[[], Any]] = [
            lambda ref=ref: caller.complete(PROMPT, adapter=ref, **GREEDY),
            lambda ref=ref: operator.load(ref),
            lambda ref=ref: operator.unload(ref),
            lambda ref=ref: operator.pin_resident(ref),
            lambda ref=ref: publisher.get(ref),
        ]
        for call in refused:
            with pytest.raises(errors.NotFound, match=f"no adapter {ref}"):
                call()
    denied: list[Callable[[], Any]] = [
        lambda: publisher.register("team-b/new", source),
        lambda: publisher.complete(PROMPT, **GREEDY),
        lambda: publisher.residents(),
        lambda: caller.register("new", source),
        lambda: caller.load("mine"),
        lambda: operator.complete(PROMPT, adapter="mine", **GREEDY),
        lambda: guarded.client(token_of("server")).complete(PROMPT, **GREEDY),
    ]
    for call in denied:
        with pytest.raises(errors.PermissionDenied) as caught:
            call()
        assert caught.value.reason == "PERMISSION_DENIED"
    for token in (None, "nobody-knows-this"):
        unknown = guarded.client(token)
        for call in (unknown.store_status, unknown.server_info, unknown.residents):
            with pytest.raises(errors.Unauthenticated):
                call()
    bare = guarded.client(token_of("caller-a"), shows_certificate=False)
    for call in (bare.server_info, lambda: bare.get("mine")):
        with pytest.raises(errors.StreamLost):
            call()


def test_operators_change_their_own_and_the_audit_says_so(
    guarded: Guarded, clients: dict[str, Client], digests: dict[str, str]
) -> None:
    operator = clients["operator-a"]
    clients["all-b"].load("mine", timeout_s=60)
    num_before = len(guarded.audit_lines())
    operator.load("mine", pin=True, timeout_s=60)
    assert [(each.digest, each.pinned) for each in operator.residents()] == [
        (digests["team-a"], True)
    ]
    operator.unpin_resident("mine")
    operator.pin_resident(digests["team-a"])
    operator.unpin_resident("mine")
    assert operator.unload("mine") > 0
    assert operator.residents() == ()
    with pytest.raises(errors.NotFound):
        operator.unload("team-b/mine")
    with pytest.raises(errors.PermissionDenied):
        clients["caller-a"].unload("mine")
    lines = guarded.audit_lines()[num_before:]
    own = digests["team-a"]
    assert [(line["what"], line["name"], line["digest"], line["who"]) for line in lines] == [
        ("LoadAdapter", "mine", own, "operator-a"),
        ("UnpinAdapter", "mine", own, "operator-a"),
        ("PinAdapter", own, own, "operator-a"),
        ("UnpinAdapter", "mine", own, "operator-a"),
        ("UnloadAdapter", "mine", own, "operator-a"),
        ("UnloadAdapter", "team-b/mine", "", "operator-a"),
        ("UnloadAdapter", "mine", "", "caller-a"),
    ]
    assert [line["result"] for line in lines] == ["ok"] * 5 + ["refused"] * 2
    assert [line["reason"] for line in lines[5:]] == ["ADAPTER_NOT_FOUND", "PERMISSION_DENIED"]
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)


def test_the_command_with_token_and_certificates(
    guarded: Guarded,
    digests: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOADOUT_TOKEN", token_of("caller-a"))
    monkeypatch.setenv("LOADOUT_TLS_CA_FILE", str(guarded.authority.path))
    monkeypatch.setenv("LOADOUT_TLS_CERT_FILE", str(guarded.own[0]))
    monkeypatch.setenv("LOADOUT_TLS_KEY_FILE", str(guarded.own[1]))
    monkeypatch.setenv("LOADOUT_INFERENCE", guarded.services.inference_address)
    assert main(["generate", "--adapter", "mine", "--max-tokens", "4", PROMPT]) == 0
    assert main(["generate", "--adapter", "team-b/mine", PROMPT]) == 1
    assert capfd.readouterr().err == "loadout: no adapter team-b/mine (ADAPTER_NOT_FOUND)\n"


def test_sighup_reads_the_policy_again(guarded: Guarded, clients: dict[str, Client]) -> None:
    def reload(*parts: str) -> str:
        num_before = len(guarded.audit_lines())
        write_policy(guarded.folder, *parts)
        os.kill(guarded.services.inference.pid, signal.SIGHUP)
        until(lambda: len(guarded.audit_lines()) > num_before)
        line = guarded.audit_lines()[-1]
        assert line["what"] == "ReloadPolicy"
        return str(line["result"])

    clients["leaver"].server_info()
    assert reload("[tokens.x]") == "refused"
    clients["leaver"].server_info()
    assert reload(SERVER, *TEAM_A, *TEAM_B) == "ok"
    with pytest.raises(errors.Unauthenticated):
        clients["leaver"].server_info()
    clients["caller-a"].server_info()


def test_neither_log_nor_audit_holds_a_token_and_both_end_well(guarded: Guarded) -> None:
    guarded.services.check_exit_codes()
    services = guarded.services
    texts = [path.read_text() for path in (services.store.log_path, services.inference.log_path)]
    texts += [path.read_text() for path in guarded.folder.glob("*.jsonl")]
    assert all("publisher-a" in text or "operator-a" in text for text in texts)
    names = ("server", "publisher-a", "caller-a", "operator-a", "all-b", "leaver")
    for secret in ("nobody-knows-this", *map(token_of, names)):
        assert not [text for text in texts if secret in text], secret
