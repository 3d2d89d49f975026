"""Both services as real processes that send their spans to a receiver of ours and log JSON, and an
application that calls them within spans of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from loadout import Client
from loadout.types import ImageState
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.models.zoo import Zoo
from tests.support.servers.otlp import Receiver
from tests.support.wait import until
from tests.system.services import Services

ROOT = token_lines("root", ["admin", "publisher", "caller", "operator"], ["*"])
SERVER = token_lines("server", ["server"], ["*"])
CALLER = token_lines("caller", ["reader", "caller"], ["*"])
S3_SECRET = "s3-secret-that-nobody-may-read"
ENVIRONMENT = {
    "OTEL_BSP_SCHEDULE_DELAY": "50",
    "AWS_ACCESS_KEY_ID": "access-key-id",
    "AWS_SECRET_ACCESS_KEY": S3_SECRET,
}


class Observed(Services):
    """`app` makes the application's spans, below which `client` makes its own."""

    def __init__(self, zoo: Zoo, folder: Path, receiver: Receiver) -> None:
        self.receiver = receiver
        token = folder / "server-token"
        token.write_text(token_of("server"))
        both = (
            *("--policy-file", str(write_policy(folder, ROOT, SERVER, CALLER))),
            *("--otlp-endpoint", receiver.endpoint, "--log-format", "json"),
        )
        # Nothing listens there: what is signed with the secret key fails.
        s3 = ("--s3-buckets", "adapters", "--s3-endpoint-url", "http://127.0.0.1:9")
        own = ("--http", "127.0.0.1:0", "--store-token-file", str(token))
        store_flags = (*both, *s3, "--log-level", "DEBUG")
        inference_flags = (*both, *own, "--log-level", "debug", "--max-loras", "2")
        super().__init__(zoo, folder, store_flags, inference_flags)
        provider = TracerProvider(resource=Resource({"service.name": "app"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(receiver.endpoint)))
        self.provider, self.app = provider, provider.get_tracer("app")

    def __enter__(self) -> Self:
        super().__enter__()
        self.client.close()
        self.client = self.connect()
        self.http_address = json.loads((self.folder / "inference.json").read_text())["http"]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.provider.shutdown()

    def connect(self, **options: Any) -> Client:
        """Returns a client; its calls are traced unless `options` say otherwise."""
        addresses = {"inference": self.inference_address, "store": self.store_address}
        defaults = {"token": token_of("root"), "tracing": self.provider}
        return Client(**addresses, **(defaults | options))

    def plain(self) -> Client:
        """Returns a client whose calls are in no trace."""
        return self.connect(tracing=False)

    def register(self, name: str, adapter: str) -> str:
        """Registers the zoo's `adapter`, and returns its digest once it is compiled."""
        with self.plain() as client:
            digest = client.register(name, self.source(adapter)).adapter.digest
            until(
                lambda: (
                    [each.state for each in client.get(name).layout_states] == [ImageState.READY]
                )
            )
        return digest

    @contextmanager
    def request(self) -> Iterator[str]:
        """Begins a span of the application, and gives the id of its trace."""
        with self.app.start_as_current_span("app") as span:
            yield f"{span.get_span_context().trace_id:032x}"

    @contextmanager
    def frozen_store(self) -> Iterator[None]:
        """Stops the store's process: its connections stay, and nothing comes."""
        os.kill(self.store.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.store.pid, signal.SIGCONT)
