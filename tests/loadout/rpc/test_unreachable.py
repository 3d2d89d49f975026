"""What a client says of a service that it cannot reach: which one, where, why, and what to do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from loadout import Client, TlsConfig, errors
from loadout._rpc.unreachable import explain
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.cli.__main__ import main
from loadout.retry import RetryPolicy
from tests.support.access.certificates import Authority
from tests.support.loadout.scripted import Server

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_server(fake_store, authority: Authority) -> Iterator[str]:
    chain, key = authority.issue("service")
    server = Server(
        lambda s: store_grpc.add_AdapterStoreServiceServicer_to_server(fake_store, s),
        credentials=grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())]),
    )
    yield server.address
    server.kill()


@pytest.fixture
def http_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def said(**arguments: object) -> str:
    """Returns the message of a call that fails."""
    with Client(retry=ONCE, timeout_s=30, **arguments) as client:  # type: ignore[arg-type]
        call: Callable[[], object] = (
            client.store_status if "store" in arguments else client.server_info
        )
        with pytest.raises(errors.LoadoutError) as caught:
            call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    address = unused_address()
    why = "cannot be reached: nothing listens there: start it, or give the address"
    assert said(store=address).startswith(f"the adapter store at {address} {why}")
    assert said(inference=address).startswith(f"the inference service at {address} {why}")
    assert main(["adapters", "--store", address]) == 1
    assert capsys.readouterr().err.startswith(f"loadout: the adapter store at {address} {why}")


def test_only_the_service_uses_tls(tls_server: str) -> None:
    message = said(store=tls_server)
    assert message.startswith(f"the adapter store at {tls_server} cannot be reached: it closed")
    assert "--tls-ca-file" in message


def test_only_the_client_uses_tls(store_server, authority: Authority) -> None:
    message = said(store=store_server.address, tls=TlsConfig(authority.path))
    assert message.startswith(f"the adapter store at {store_server.address} cannot be reached: ")
    assert "the service there does not use TLS: connect without TLS" in message


def test_another_authority(tls_server: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    message = said(store=tls_server, tls=TlsConfig(other.path))
    assert "its certificate is from an untrusted authority" in message


def test_the_port_of_http(http_server: str) -> None:
    message = said(inference=http_server)
    assert message.startswith(f"the inference service at {http_server} cannot be reached: this is")
    assert "an HTTP port: give the gRPC port, usually 7070 for the adapter store" in message


@pytest.mark.parametrize("argument", ["store", "inference"])
def test_a_web_address(argument: str) -> None:
    for url in ("http://127.0.0.1:7070", "https://127.0.0.1:7070/v1"):
        with pytest.raises(errors.InvalidArgument) as caught:
            Client(**{argument: url})
        assert str(caught.value).startswith(f"{argument}: {url} is a web address")
        assert str(caught.value).endswith("without http://, such as 127.0.0.1:7070")


def test_no_such_host() -> None:
    details = "errors resolving nowhere.example:70: [field:hostname lookup error: not found]"
    assert explain(details, "the adapter store") == (
        "the adapter store at nowhere.example:70 cannot be reached: the host is unknown; check "
        "the address"
    )


def test_the_other_services_port(store_server) -> None:
    message = said(inference=store_server.address)
    assert message.startswith("the inference service does not know this call: ")


def test_addresses_of_ipv6_are_readable() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:7070: "
    message = explain(f"{details}Failed to connect: Connection refused", "the adapter store")
    assert message.startswith("the adapter store at [::1]:7070 cannot be reached: nothing listens")


@pytest.mark.parametrize("details", ["Socket closed", "no healthy upstream", ""])
def test_what_is_no_failed_connection_stays(details: str) -> None:
    assert explain(details, "the adapter store") == details
