"""A running store in this process, over real channels."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapter_store.app import RunningStore, running_store
from adapter_store.config import StoreSettings
from servicekit.rpc import interceptor
from tests.support.store.client import Client
from tests.support.wait import TIMEOUT_S

QUIET_S = 0.02
"""How long a store that stops waits for further calls: its tests have ended theirs by then."""


class Served:
    """A running store on a thread's own event loop."""

    def __init__(self, settings: StoreSettings) -> None:
        self._ready = threading.Event()
        self._settings = settings
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        if self._error is not None:
            self._thread.join()
            raise self._error
        self._clients: list[Client] = []
        self.client = self.connect()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with running_store(self._settings) as self.running:
                self.running: RunningStore
                self._ready.set()
                await self._stop.wait()
        except BaseException as error:
            self._error = error
            self._ready.set()

    def connect(self, token: str = "", credentials=None) -> Client:
        """A client that is closed when the store stops."""
        self._clients.append(Client(self.running.grpc_address, token, credentials))
        return self._clients[-1]

    def run(self, coroutine):
        """Runs a coroutine on the store's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def idle(self) -> None:
        """Waits until everything wanted ahead is made."""
        self.run(self.running.store.precompiler.wait_idle())

    def begin_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_stop()
        for client in self._clients:
            client.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def read_metrics(store: Served) -> dict[tuple[str, ...], float]:
    """The values of a store's own metrics, by name and the values of their labels."""
    url = f"http://{store.running.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    return {
        (sample.name.removeprefix("loadout_store_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("loadout_store_")
    }


@contextmanager
def serving(folder):
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(interceptor, "QUIET_SECONDS", QUIET_S)

        def start(**settings) -> Served:
            values = {
                "listen": "127.0.0.1:0",
                "metrics_listen": "127.0.0.1:0",
                "data_dir": folder / "data",
                "source_roots": (folder,),
                "compile_workers": 1,
                "grace_seconds": 5,
                **settings,
            }
            served = Served(StoreSettings(**values))
            stack.callback(served.stop)
            return served

        yield start
