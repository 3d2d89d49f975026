"""`python -m loadout.health` against servers that serve, drain, and are not there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from loadout.health.__main__ import main
from tests.support.access.certificates import Authority

SERVICE = "loadout.some.v1.Service"


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def served(authority) -> Iterator[tuple[str, str, health.HealthServicer]]:
    """Addresses without and with TLS of one server, and its health."""
    status = health.HealthServicer()
    status.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    chain, key = authority.issue("server", "adapter-store")
    pair = (key.read_bytes(), chain.read_bytes())
    plain = server.add_insecure_port("127.0.0.1:0")
    secure = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{plain}", f"127.0.0.1:{secure}", status
    server.stop(0).wait()


def test_a_server_that_serves(served):
    plain, _, _ = served
    assert main([plain]) == 0
    assert main([plain, "--service", SERVICE]) == 0


def test_a_server_that_drains(served, capsys):
    plain, _, status = served
    status.enter_graceful_shutdown()
    assert main([plain, "--service", SERVICE]) == 1
    assert f"{plain}: not serving" in capsys.readouterr().err


def test_a_service_that_there_is_not(served, capsys):
    plain, _, _ = served
    assert main([plain, "--service", "loadout.other.v1.Service"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_nobody_there(served, capsys):
    assert main(["127.0.0.1:1", "--timeout", "1"]) == 1
    assert "127.0.0.1:1: " in capsys.readouterr().err


def test_tls(served, authority, tmp_path, capsys):
    _, secure, _ = served
    ca = ["--ca", str(authority.path)]
    assert main([secure, *ca]) == 0
    assert main([secure, *ca, "--server-name", "adapter-store"]) == 0
    assert main([secure, *ca, "--server-name", "stranger", "--timeout", "1"]) == 1
    other = Authority(tmp_path, "other")
    assert main([secure, "--ca", str(other.path), "--timeout", "1"]) == 1
    assert main([secure, "--timeout", "1"]) == 1, "without TLS nobody answers"
    capsys.readouterr()


def test_a_file_that_there_is_not(served, tmp_path, capsys):
    _, secure, _ = served
    assert main([secure, "--ca", str(tmp_path / "none.pem")]) == 1
    assert "--ca, --cert or --key: " in capsys.readouterr().err


def test_a_server_that_asks_for_certificates(authority, tmp_path, capsys):
    status = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    chain, key = authority.issue("server")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), chain.read_bytes())], authority.pem, require_client_auth=True
    )
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        ca = ["--ca", str(authority.path)]
        chain, key = authority.issue("probe")
        assert main([address, *ca, "--cert", str(chain), "--key", str(key)]) == 0
        assert main([address, *ca, "--timeout", "1"]) == 1
        capsys.readouterr()
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("flags", [["--ca", "a", "--cert", "b"], ["--cert", "b", "--key", "c"]])
def test_a_certificate_needs_its_key_and_an_authority(flags, capsys):
    with pytest.raises(SystemExit):
        main(["127.0.0.1:1", *flags])
    assert "--cert" in capsys.readouterr().err
