"""A store and an inference service with SmolLM2, and an adapter whose chat template shows tools."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.agents import flow
from tests.support.models import smollm2
from tests.support.models.templates import TOOLED
from tests.system.services import Services

collect_ignore_glob = [] if find_spec("agents") else ["test_*.py"]
"""`make test-agents` installs what these tests import."""

FLAGS = (
    *("--http", "127.0.0.1:0", "--max-model-len", "4096"),
    *("--kv-memory", "256MiB", "--adapter-memory", "32MiB"),
)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("agents")
    with Services(smollm2.gguf_zoo(), folder, inference_flags=FLAGS) as made:
        source = made.source("pirate", flow.ADAPTER)
        template = Path(source.removeprefix("file://")) / "chat_template.jinja"
        template.write_text(TOOLED["qwen3"])
        made.client.register(flow.ADAPTER, source, base_model="llama")
        yield made
        made.check_exit_codes()


@pytest.fixture(scope="session")
def url(served: Services) -> str:
    return f"http://{served.http_address}/v1"


@pytest.fixture(autouse=True)
def only_our_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frameworks tell nobody of what they do: neither traces nor statistics leave this machine."""
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def watched(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_here(host):
            asked.append(str(host))
            raise socket.gaierror(f"a test does not leave this machine: {host}")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    flow.CALLED.clear()
    yield
    assert asked == []


def _is_here(host: Any) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in (None, "localhost")
