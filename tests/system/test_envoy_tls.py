"""The Envoy configuration with TLS, before an inference service that has TLS and tokens: callers,
calls and health checks are encrypted, and tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadout import Client, TlsConfig, errors
from loadout.retry import RetryPolicy
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.deploy.envoy import Envoy
from tests.support.models.zoo import Zoo
from tests.system.guarded import Inference, serve_base

ONCE = RetryPolicy(max_attempts=1)
NAME = "inference-replicas"
"""The Service that the component cert-manager has certificates for."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def certificates(authority: Authority, tmp_path: Path) -> Path:
    """Envoy's, as a Secret is mounted: its own, which callers see, and who signs the replicas'."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    chain, key = authority.issue("envoy")
    for name, path in (("tls.crt", chain), ("tls.key", key), ("ca.crt", authority.path)):
        (folder / name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def inference(zoos: Callable[[str], Zoo], authority: Authority) -> Iterator[Inference]:
    chain, key = authority.issue("inference", NAME)
    running = serve_base(
        zoos("llama").model_dir,
        tls_cert_file=chain,
        tls_key_file=key,
        policy_file=write_policy(authority.folder, token_lines("backend", ["caller"])),
    )
    yield running
    running.stop()


def test_tls_and_tokens_pass_through_envoy(
    inference: Inference, authority: Authority, certificates: Path, tmp_path: Path
) -> None:
    address, tls = inference.server.address, TlsConfig(authority.path)
    with Envoy(tmp_path / "envoy", [address], certificates=certificates) as envoy:
        with Client(envoy.address, token=token_of("backend"), tls=tls) as client:
            assert client.complete("hello", max_tokens=2, temperature=0.0).token_ids
            with pytest.raises(errors.NotFound):  # by the other cluster
                client.complete("hello", adapter="nobody")
        refused(envoy.address, tls, errors.Unauthenticated)
        for stranger in (TlsConfig(Authority(tmp_path, "other").path), None):
            refused(envoy.address, stranger, errors.StreamLost)


def refused(address: str, tls: TlsConfig | None, error: type[Exception]) -> None:
    """Who has no token, or cannot tell whom it speaks to."""
    with Client(address, tls=tls, retry=ONCE) as client, pytest.raises(error):
        client.server_info()


def test_envoy_speaks_only_to_replicas_that_it_can_trust(
    inference: Inference, authority: Authority, certificates: Path, tmp_path: Path
) -> None:
    token, tls = token_of("backend"), TlsConfig(authority.path)
    (certificates / "ca.crt").write_bytes(Authority(tmp_path, "other").pem)
    address = inference.server.address
    with (
        Envoy(tmp_path / "envoy", [address], certificates=certificates) as envoy,
        Client(envoy.address, token=token, tls=tls, retry=ONCE) as client,
        pytest.raises(errors.StreamLost, match="no healthy upstream"),
    ):
        client.server_info()
