"""Three stores over one PostgreSQL and one S3, and an inference service: all real processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
import pytest

from inference_svc.store.replicas import rank
from loadout import Client
from loadout.demo.process import Process
from loadout.prometheus import Metrics, scrape
from tests.support.forks import ForkedProcess
from tests.support.models.zoo import Zoo
from tests.support.servers.postgres import PostgresServer
from tests.system.services import GRACE_S, READY_S

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Replicated:
    """`stores` by address. A store that was killed can be started again, on the same port."""

    def __init__(self, zoo: Zoo, folder: Path, s3_url: str) -> None:
        self.zoo = zoo
        self._folder = folder
        self._sources = folder / "sources"
        self._sources.mkdir()
        self._flags = [
            *("--shared-s3", "s3://shared", "--s3-endpoint-url", s3_url),
            *("--source-roots", str(self._sources), "--compile-workers", "1"),
        ]
        self.stores: dict[str, Process] = {}
        self._numbers: dict[str, int] = {}

    def start(self) -> None:
        # The first alone: it makes the catalog's tables.
        self.start_store(0)
        started = [self._begin_store(number, "127.0.0.1:0") for number in (1, 2)]
        for number, process in enumerate(started, 1):
            self._await_store(number, process)
        ready = self._folder / "inference.json"
        command = [
            *(sys.executable, "-m", "inference_svc", "--model", str(self.zoo.model_dir)),
            *("--base-model", "llama", "--store", ",".join(self.stores), "--num-threads", "1"),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--kv-memory", "8MiB", "--adapter-memory", "8MiB", "--max-model-len", "256"),
            *("--adapter-wait-seconds", "30", "--ready-file", str(ready)),
        ]
        self.inference = ForkedProcess("inference", command, self._folder, ready)
        found = self.inference.wait_ready(READY_S)
        self._metrics_address = found["metrics"]
        self.client = Client(inference=found["grpc"], store=next(iter(self.stores)))

    def start_store(self, number: int, listen: str = "127.0.0.1:0") -> None:
        self._await_store(number, self._begin_store(number, listen))

    def _begin_store(self, number: int, listen: str) -> Process:
        name = f"store-{number}"
        ready = self._folder / f"{name}.json"
        command = [
            *(sys.executable, "-m", "adapter_store", "--listen", listen),
            *("--metrics-listen", "127.0.0.1:0", "--data-dir", str(self._folder / name)),
            *("--ready-file", str(ready), *self._flags),
        ]
        return ForkedProcess(name, command, self._folder, ready)

    def _await_store(self, number: int, process: Process) -> None:
        address = process.wait_ready(READY_S)["grpc"]
        self.stores[address], self._numbers[address] = process, number

    def kill_store(self, address: str) -> None:
        self.signal(address, signal.SIGKILL)
        self.stores[address].stop(GRACE_S)

    def restart_store(self, address: str) -> None:
        self.start_store(self._numbers[address], address)

    def signal(self, address: str, number: signal.Signals) -> None:
        os.kill(self.stores[address].pid, number)

    def stop(self) -> None:
        self.client.close()
        for process in (self.inference, *self.stores.values()):
            if process.is_alive:
                os.kill(process.pid, signal.SIGCONT)
                process.stop(GRACE_S)

    def order(self, digest: str) -> list[str]:
        """The addresses in the order in which a digest asks them."""
        return rank(self.stores, digest)

    def metrics(self) -> Metrics:
        return scrape(self._metrics_address)

    def pulls(self) -> dict[str, int]:
        """Whole images so far, by the replica that they came from."""
        metrics = self.metrics()
        name = "loadout_inference_store_pulls_total"
        return {
            address: int(metrics.sum(name, replica=address, result="done"))
            for address in self.stores
        }

    def source(self, adapter: str) -> str:
        folder = self._sources / adapter
        shutil.copytree(self.zoo.adapter_dirs[adapter], folder)
        return f"file://{folder}"


@contextmanager
def replicated(zoo: Zoo, folder: Path) -> Iterator[Replicated]:
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        database = stack.enter_context(PostgresServer())
        ready = folder / "s3.json"
        command = [sys.executable, "-m", "loadout.demo.s3", str(ready)]
        s3 = Process("s3", command, folder, ready)
        stack.callback(s3.stop, GRACE_S)
        url = s3.wait_ready(READY_S)["url"]
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="shared")
        # In the environment: it may hold a password.
        environment.setenv("LOADOUT_STORE_CATALOG_DSN", database.create_database())
        made = Replicated(zoo, folder, url)
        try:
            made.start()
            yield made
        finally:
            made.stop()
