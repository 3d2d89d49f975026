"""A store and an inference service as real processes, over real channels."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from loadout import Client, TlsConfig
from loadout.demo.process import Process
from loadout.prometheus import scrape
from loadout.retry import RetryPolicy
from tests.support.forks import ForkedProcess
from tests.support.models.zoo import Zoo
from tests.support.store.catalogs import make_data_folder

READY_S = 120.0
GRACE_S = 40.0


@dataclass
class Services:
    """Starts both on entry, on free ports. `folder` keeps the store's data and the logs."""

    zoo: Zoo
    folder: Path
    store_flags: tuple[str, ...] = ()
    inference_flags: tuple[str, ...] = ("--adapter-wait-seconds", "3")
    exit_codes: list[int] = field(default_factory=list)
    store_listen: str = "127.0.0.1:0"
    process: type[Process] = ForkedProcess

    def __enter__(self) -> Self:
        self.sources = self.folder / "sources"
        self.sources.mkdir(parents=True)
        self.start_store()
        self.start_inference()
        self.client = Client(inference=self.inference_address, store=self.store_address)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        for process in (self.inference, self.store):
            if process.is_alive:
                self.exit_codes.append(process.stop(GRACE_S))

    def start_store(self) -> None:
        """The first time on a free port, later on the same, as a restarted service would."""
        data = make_data_folder(self.folder / "store")
        command = [
            *(sys.executable, "-m", "adapter_store", "--listen", self.store_listen),
            *("--metrics-listen", "127.0.0.1:0", "--data-dir", str(data)),
            *("--source-roots", str(self.sources), "--ready-file", str(self.folder / "store.json")),
            *self.store_flags,
        ]
        self.store = self.process("store", command, self.folder, self.folder / "store.json")
        found = self.store.wait_ready(READY_S)
        self.store_address, self.store_metrics = found["grpc"], found["metrics"]
        self.store_listen = self.store_address

    def start_inference(self) -> None:
        ready = self.folder / "inference.json"
        command = [
            *(sys.executable, "-m", "inference_svc", "--model", str(self.zoo.model_dir)),
            *("--base-model", "llama", "--store", self.store_address, "--num-threads", "1"),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--kv-memory", "8MiB", "--adapter-memory", "8MiB", "--max-model-len", "256"),
            *("--ready-file", str(ready), *self.inference_flags),
        ]
        self.inference = self.process("inference", command, self.folder, ready)
        found = self.inference.wait_ready(READY_S)
        self.inference_address, self.inference_metrics = found["grpc"], found["metrics"]
        self.http_address = found.get("http", "")

    def secure_client(self, token: str, ca_file: Path) -> Client:
        """Of services with TLS and a policy; what fails is not tried again."""
        return Client(
            inference=self.inference_address,
            store=self.store_address,
            token=token,
            tls=TlsConfig(ca_file),
            retry=RetryPolicy(max_attempts=1),
        )

    def num_waiting(self) -> int:
        """Returns how many requests wait for their adapter."""
        metrics = scrape(self.inference_metrics)
        return int(metrics.one("loadout_inference_requests_waiting_for_adapter"))

    def kill_store(self) -> None:
        os.kill(self.store.pid, signal.SIGKILL)
        self.store.stop(GRACE_S)

    def check_exit_codes(self) -> None:
        for process in (self.inference, self.store):
            assert process.stop(GRACE_S) == 0, process.log_path.read_text()[-2000:]

    def source(self, adapter: str, name: str = "") -> str:
        """A file:// URI of a copy of the zoo's adapter, to be changed at will."""
        folder = self.sources / (name or adapter)
        if not folder.exists():
            shutil.copytree(self.zoo.adapter_dirs[adapter], folder)
        return f"file://{folder}"
