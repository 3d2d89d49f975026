"""TLS and mTLS of the HTTP API with gRPC's certificates, and their renewal."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.access.certificates import Authority
from tests.system.guarded import Inference


@pytest.fixture
def serve(serve_base: Callable[..., Inference]) -> Callable[..., Inference]:
    """`serve_base`, with the HTTP API."""
    return partial(serve_base, http="127.0.0.1:0")


def ask(inference: Inference, ca: Path | None, pair: tuple[Path, Path] | None = None) -> str:
    """Returns what a fresh client gets; without a CA it uses no TLS."""
    address = inference.server.http_address
    context: Any = True
    if ca is not None:
        context = ssl.create_default_context(cafile=ca)
        if pair is not None:
            context.load_cert_chain(*pair)
    scheme = "http" if ca is None else "https"
    with openai.OpenAI(
        base_url=f"{scheme}://{address}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.Client(verify=context),
    ) as client:
        return str(client.completions.create(model="llama", prompt="a", max_tokens=2).model)


def test_tls(serve: Any, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("service")
    inference = serve(tls_cert_file=cert, tls_key_file=key)
    assert ask(inference, authority.path) == "llama"
    for other in (Authority(tmp_path, "other").path, None):
        with pytest.raises(openai.APIConnectionError):
            ask(inference, other)
    assert ask(inference, authority.path) == "llama"


def test_mutual_tls(serve: Any, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("service")
    clients = Authority(tmp_path, "clients")
    inference = serve(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=clients.path)
    assert ask(inference, authority.path, clients.issue("good")) == "llama"
    for pair in (Authority(tmp_path, "forged").issue("bad"), None):
        with pytest.raises(openai.APIConnectionError):
            ask(inference, authority.path, pair)


def test_renewed_certificates_need_no_restart(
    serve: Any, authority: Authority, tmp_path: Path
) -> None:
    """By address, for which clients send no server name."""
    cert, key = authority.issue("service")
    clients, later = Authority(tmp_path, "clients"), Authority(tmp_path, "later")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(clients.path, trusted)
    inference = serve(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=trusted)
    assert ask(inference, authority.path, clients.issue("first")) == "llama"
    cert.write_text("nonsense")
    inference.reload()
    assert ask(inference, authority.path, clients.issue("second")) == "llama"
    renewed = Authority(tmp_path, "new")
    for source, target in zip(renewed.issue("renewed"), (cert, key), strict=True):
        shutil.copy(source, target)
    shutil.copy(later.path, trusted)
    inference.reload()
    assert ask(inference, renewed.path, later.issue("third")) == "llama"
    for ca, pair in (
        (authority.path, later.issue("fourth")),
        (renewed.path, clients.issue("fifth")),
    ):
        with pytest.raises(openai.APIConnectionError):
            ask(inference, ca, pair)
