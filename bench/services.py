"""Runs both services as real processes, as `loadout up` does, with methods for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from bench.models import arena_bytes
from bench.store.process import CHANNEL_OPTIONS
from loadout import Client
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from loadout.demo.system import System, SystemSettings
from loadout.prometheus import Metrics, scrape
from loadout.types import ImageState, Registration

READY_TIMEOUT_S = 120.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Wanted:
    """Limits of the inference service; `store_bytes` is the store's memory for images.

    The store reads the model's parent folder, and `source_root`.
    """

    model_dir: Path
    base_model: str
    max_resident: int
    max_rank: int
    max_sequences: int
    max_len: int
    num_threads: int
    prefix_cache: bool = True
    prefetch: bool = False
    """Off, because it would reload adapters that `set_resident` has unloaded."""
    store_bytes: int = 1 << 30
    adapter_bytes: int = 0
    """The inference service's memory for adapters; 0 means enough for `max_resident`."""
    source_root: Path | None = None

    def inference_flags(self) -> list[str]:
        flags = {
            "--num-threads": self.num_threads,
            "--max-sequences": self.max_sequences,
            "--max-model-len": self.max_len,
            "--max-loras": self.max_resident,
            "--max-rank": self.max_rank,
            "--adapter-memory": self.adapter_bytes
            or arena_bytes(self.base_model, self.max_resident, self.max_rank),
            "--kv-memory": 2 << 30,
            "--dtype": "bfloat16",
            "--device": "cpu",
            "--log-level": "warning",
        }
        words = [str(word) for flag in flags.items() for word in flag]
        words += [] if self.prefetch else ["--no-prefetch"]
        return words if self.prefix_cache else [*words, "--no-prefix-cache"]


class Services:
    """Runs a store and an inference service on free ports, within the context.

    Raises loadout's errors, and ProcessFailed if a service does not start or end properly.
    """

    def __init__(self, wanted: Wanted, folder: Path) -> None:
        prepared = wanted.model_dir.parent.resolve()
        roots = (prepared, *([wanted.source_root] if wanted.source_root else []))
        settings = SystemSettings(
            wanted.model_dir,
            wanted.base_model,
            source_roots=roots,
            store_flags=(
                *("--image-memory", str(wanted.store_bytes)),
                *("--disk-cache-bytes", str(64 << 30)),
                *("--log-level", "warning"),
            ),
            inference_flags=tuple(wanted.inference_flags()),
        )
        self._system = System(settings, folder / "system")

    def __enter__(self) -> Self:
        self._system.__enter__()
        addresses = self._system.addresses
        self.inference, self.store = addresses.inference, addresses.store
        self.client = Client(inference=self.inference, store=self.store, timeout_s=None)
        self.kernels = self.client.server_info().kernels
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.client.close()
        self._system.__exit__(kind, error, traceback)

    def register(self, name: str, folder: Path, *, compiled: bool = True) -> Registration:
        """Registers a local folder; with `compiled` waits for its image."""
        registration = self.client.register(name, f"file://{folder.resolve()}")
        if compiled:
            self.wait_compiled(name)
        return registration

    def pull_once(self, name: str) -> None:
        """Pulls an image as the inference service does, so that it is in the store's memory."""
        adapter = self.client.get(name)
        with grpc.insecure_channel(self.store, CHANNEL_OPTIONS) as channel:
            stub = pb_grpc.AdapterStoreServiceStub(channel)
            for state in adapter.layout_states:
                request = pb.PullAdapterRequest(digest=adapter.digest, layout_id=state.layout_id)
                for _ in stub.PullAdapter(request):
                    pass

    def wait_compiled(self, name: str) -> None:
        """Waits for the image of an adapter. Raises TimeoutError."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            states = self.client.get(name).layout_states
            if states and all(state.state is ImageState.READY for state in states):
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"the image of {name} was not compiled")

    def set_resident(self, names: Iterable[str]) -> None:
        """Loads these adapters onto the device, and unloads all others from the service."""
        digests = {self.client.get(name).digest: name for name in names}
        for digest in {resident.digest for resident in self.client.residents()} - digests.keys():
            self.client.unload(digest)
        for name in digests.values():
            self.client.load(name)

    def metrics(self) -> Metrics:
        """Returns the metrics of the inference service."""
        return scrape(self._system.addresses.inference_metrics)
