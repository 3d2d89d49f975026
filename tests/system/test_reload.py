"""Certificates and a policy that change as Secrets do in pods, under real processes at work."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from loadout import Client, errors
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from servicekit.settings.addresses import split_address
from tests.support.access.certificates import Authority
from tests.support.access.policies import audit_lines, token_lines, token_of
from tests.support.forks import engine_of
from tests.support.machine.secret_volume import SecretVolume
from tests.support.models.zoo import Zoo
from tests.support.store.client import Client as StoreClient
from tests.support.wait import until
from tests.system.services import Services

pytestmark = pytest.mark.processes

SERVER = token_lines("server", ["server"], ["*"])
STAYER = token_lines("stayer", ["reader", "caller"])
LEAVER = token_lines("leaver", ["reader", "caller"])
NUM_TOKENS = 200
FLAGS = ("--reload-seconds", "0.5", "--log-format", "json")


def policy(*tokens: str) -> dict[str, bytes]:
    return {"policy.toml": "\n".join(tokens).encode()}


def certificate(pair: tuple[Path, Path]) -> dict[str, bytes]:
    return {"tls.crt": pair[0].read_bytes(), "tls.key": pair[1].read_bytes()}


class Pods:
    """Both services, whose policy and certificates are in volumes."""

    def __init__(self, folder: Path, zoo: Zoo) -> None:
        self.authority = Authority(folder)
        self.policy = SecretVolume(folder / "policy", policy(SERVER, STAYER, LEAVER))
        self.tls = SecretVolume(folder / "tls", certificate(self.authority.issue("first")))
        token = folder / "server-token"
        token.write_text(token_of("server"))
        flags = (
            *("--policy-file", str(self.policy.path / "policy.toml"), *FLAGS),
            *("--tls-cert-file", str(self.tls.path / "tls.crt")),
            *("--tls-key-file", str(self.tls.path / "tls.key")),
        )
        self.audits = [folder / "store-audit.jsonl", folder / "inference-audit.jsonl"]
        to_store = ("--store-tls-ca-file", str(self.authority.path))
        self.services = Services(
            zoo,
            folder / "services",
            store_flags=(*flags, "--audit-file", str(self.audits[0])),
            inference_flags=(
                *(*flags, *to_store, "--store-token-file", str(token)),
                *("--audit-file", str(self.audits[1])),
            ),
        )

    def addresses(self) -> list[str]:
        return [self.services.store_address, self.services.inference_address]

    def client(self, name: str) -> Client:
        return self.services.secure_client(token_of(name), self.authority.path)

    def store_client(self, name: str) -> StoreClient:
        credentials = grpc.ssl_channel_credentials(self.authority.pem)
        return StoreClient(self.services.store_address, token_of(name), credentials)


@pytest.fixture
def pods(zoos: Any, tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, zoos("llama"))
    with pods.services:
        yield pods


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def shown(address: str) -> str:
    """Returns the certificate that a new connection sees."""
    return ssl.get_server_certificate(split_address(address))


def is_refused(client: Client) -> bool:
    """Whether both services refuse the client's token; the engine need not answer."""
    for call in (client.server_info, client.list_page):
        try:
            call(timeout_s=1)
        except errors.Unauthenticated:
            continue
        except errors.DeadlineExceeded:
            pass
        return False
    return True


def test_secrets_that_change_are_taken_over(pods: Pods) -> None:
    """New connections see the renewed certificate, and a revoked token is refused, also where it
    is watching; who has a valid one keeps connections, streams and watches."""
    renewed = pods.authority.issue("renewed")
    engine = psutil.Process(engine_of(pods.services.inference.pid))
    with pods.client("stayer") as stayer, pods.client("leaver") as leaver:
        watches = {name: pods.store_client(name) for name in ("stayer", "leaver")}
        events = {
            name: each.stub.WatchAdapters(store_pb.WatchAdaptersRequest())
            for name, each in watches.items()
        }
        for each in events.values():
            next(each)
        leaver.server_info()
        stream = stayer.generate("a", max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=60)
        chunks = [next(stream)]
        with suspended(engine):
            pods.tls.replace(certificate(renewed))
            expected = renewed[0].read_text().strip()
            for address in pods.addresses():
                until(lambda: shown(address).strip() == expected)  # noqa: B023
            pods.policy.replace(policy(SERVER, STAYER))
            until(lambda: is_refused(leaver))
        with pytest.raises(grpc.RpcError) as caught:
            list(events["leaver"])
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        chunks += stream
        assert sum(len(chunk.token_ids) for chunk in chunks) == NUM_TOKENS
        for _ in range(3):
            next(events["stayer"])
        stayer.server_info()
        for each in watches.values():
            each.close()
    for path in pods.audits:
        lines = audit_lines(path)
        assert [each["result"] for each in lines if each["what"] == "ReloadPolicy"] == ["ok"]
    for process in (pods.services.store, pods.services.inference):
        logged = [json.loads(line) for line in process.log_path.read_text().splitlines()]
        reloaded = [each["setting"] for each in logged if each["message"] == "reloaded"]
        assert reloaded == ["tls_cert_file", "policy_file"]
    pods.services.check_exit_codes()
