"""TLS and mTLS with real certificates, and their renewal."""

from __future__ import annotations

import logging
import shutil

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import FailedPrecondition
from tests.support.access.certificates import Authority, credentials
from tests.support.access.policies import ROOT, token_of, write_policy

pytestmark = pytest.mark.slow


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def is_reached(served, **connection) -> bool:
    """Whether a fresh connection gets an answer of health within the deadline."""
    client = served.connect(**connection)
    stub = health_pb2_grpc.HealthStub(client.channel)
    try:
        stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


def test_tls(serve, authority, tmp_path, make_adapter):
    cert, key = authority.issue("server")
    policy = write_policy(tmp_path, ROOT)
    served = serve(tls_cert_file=cert, tls_key_file=key, policy_file=policy)
    client = served.connect(token_of("root"), credentials(authority.pem))
    assert client.register("a", make_adapter()).adapter.version == 1
    assert is_reached(served, credentials=credentials(authority.pem))
    stranger = Authority(tmp_path, "other")
    assert not is_reached(served, credentials=credentials(stranger.pem))
    assert not is_reached(served)


def test_mtls(serve, authority, tmp_path):
    cert, key = authority.issue("server")
    clients = Authority(tmp_path, "clients")
    served = serve(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=clients.path)
    good = credentials(authority.pem, clients.issue("good"))
    assert is_reached(served, credentials=good)
    client = served.connect(credentials=good)
    assert client.stub.GetStoreStatus(pb.GetStoreStatusRequest()).adapters == 0
    forged = Authority(tmp_path, "forged").issue("bad")
    assert not is_reached(served, credentials=credentials(authority.pem, forged))
    assert not is_reached(served, credentials=credentials(authority.pem))


def test_renewed_certificates_need_no_restart(serve, authority, tmp_path, caplog):
    cert, key = authority.issue("server")
    served = serve(tls_cert_file=cert, tls_key_file=key)
    old, new = credentials(authority.pem), Authority(tmp_path, "new")
    kept = served.connect(credentials=old)
    kept.stub.GetStoreStatus(pb.GetStoreStatusRequest())

    def reload() -> None:
        served.run(served.running.reloader.reload())

    cert.write_text("nonsense")
    with caplog.at_level(logging.ERROR):
        reload()
    assert [record.setting for record in caplog.records] == ["tls_cert_file"]
    assert is_reached(served, credentials=old)
    for source, target in zip(new.issue("renewed"), (cert, key), strict=True):
        shutil.copy(source, target)
    reload()
    assert is_reached(served, credentials=credentials(new.pem))
    assert not is_reached(served, credentials=old)
    kept.stub.GetStoreStatus(pb.GetStoreStatusRequest())  # connections go on


@pytest.mark.parametrize(
    ("files", "subject"),
    [
        ({"tls_cert_file": "server.pem"}, "tls_key_file"),
        ({"tls_key_file": "server.key"}, "tls_cert_file"),
        ({"tls_client_ca_file": "ca.pem"}, "tls_cert_file"),
        ({"tls_cert_file": "server.pem", "tls_key_file": "other.key"}, "tls_cert_file"),
        ({"tls_cert_file": "server.key", "tls_key_file": "server.key"}, "tls_cert_file"),
        (
            {
                "tls_cert_file": "server.pem",
                "tls_key_file": "server.key",
                "tls_client_ca_file": "server.key",
            },
            "tls_client_ca_file",
        ),
    ],
)
def test_files_that_cannot_serve_keep_it_from_starting(serve, authority, tmp_path, files, subject):
    authority.issue("server")
    authority.issue("other")
    with pytest.raises(FailedPrecondition, match=f"^--{subject.replace('_', '-')}: ") as caught:
        serve(**{name: tmp_path / file for name, file in files.items()})
    assert caught.value.subject == subject


def test_a_file_that_is_not_there_is_named(serve, authority, tmp_path):
    cert, _ = authority.issue("server")
    with pytest.raises(OSError, match="nowhere"):
        serve(tls_cert_file=cert, tls_key_file=tmp_path / "nowhere")
