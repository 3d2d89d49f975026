"""The system on one machine: S3 server, adapter store and inference service as processes."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loadout.demo.process import POLL_S, Process, ProcessFailed

READY_TIMEOUT_S = 180.0
STOP_GRACE_S = 45.0
"""A little more than the services' own grace."""

FREE_PORT = "127.0.0.1:0"

S3_BUCKET = "adapters"
S3_ACCESS_KEY = "demo"
S3_SECRET_KEY = "demo-secret"  # of a server that lives for one run on 127.0.0.1
S3_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """What to start. `s3` adds an S3 server, whose bucket S3_BUCKET the store may read.

    `source_roots` are the folders that file:// sources may lie in. Further flags are handed to
    the services as they are. Without `http_listen` there is no HTTP API.
    """

    model: Path
    base_model: str = ""
    s3: bool = False
    source_roots: tuple[Path, ...] = ()
    store_listen: str = FREE_PORT
    store_metrics_listen: str = FREE_PORT
    inference_listen: str = FREE_PORT
    inference_metrics_listen: str = FREE_PORT
    http_listen: str = ""
    store_flags: tuple[str, ...] = ()
    inference_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port each; `s3_url` is "" without an S3 server, and `http` without an HTTP API."""

    store: str
    store_metrics: str
    inference: str
    inference_metrics: str
    s3_url: str
    http: str = ""


class System:
    """Starts the parts on entry; ends them on exit, in reverse order.

    Leaving it raises ProcessFailed if a part did not exit with 0, unless another exception is on
    its way. Logs and the store's data lie in `work_dir`.
    """

    addresses: Addresses

    def __init__(self, settings: SystemSettings, work_dir: Path) -> None:
        self._settings = settings
        self._work_dir = work_dir.resolve()
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        self._work_dir.mkdir(parents=True, exist_ok=True)
        try:
            self.addresses = self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = self._stop()
        if failure is not None and kind is None:
            raise failure

    def check_alive(self) -> None:
        """Raises ProcessFailed if a part ended by itself."""
        for process in self._processes:
            process.check_alive()

    def watch(self) -> None:
        """Never returns: raises ProcessFailed when a part ends by itself."""
        while True:
            self.check_alive()
            time.sleep(POLL_S)

    def _start(self) -> Addresses:
        s3_url = self._launch("s3", self._s3_command())["url"] if self._settings.s3 else ""
        store = self._launch("store", self._store_command(s3_url))
        inference = self._launch("inference", self._inference_command(store["grpc"]))
        return Addresses(
            store=store["grpc"],
            store_metrics=store["metrics"],
            inference=inference["grpc"],
            inference_metrics=inference["metrics"],
            s3_url=s3_url,
            http=inference.get("http", ""),
        )

    def _launch(self, name: str, command: Sequence[str]) -> dict[str, str]:
        process = Process(name, command, self._work_dir, self._ready_file(name))
        self._processes.append(process)
        return process.wait_ready(READY_TIMEOUT_S)

    def _ready_file(self, name: str) -> Path:
        return self._work_dir / f"{name}.ready.json"

    def _s3_command(self) -> list[str]:
        return [sys.executable, "-m", "loadout.demo.s3", str(self._ready_file("s3"))]

    def _store_command(self, s3_url: str) -> list[str]:
        settings = self._settings
        flags = {
            "--data-dir": self._work_dir / "store",
            "--listen": settings.store_listen,
            "--metrics-listen": settings.store_metrics_listen,
            "--ready-file": self._ready_file("store"),
        }
        if settings.source_roots:
            flags["--source-roots"] = ",".join(
                str(root.resolve()) for root in settings.source_roots
            )
        environment = {}
        if s3_url:
            flags |= {"--s3-buckets": S3_BUCKET, "--s3-endpoint-url": s3_url}
            environment = {
                "AWS_ACCESS_KEY_ID": S3_ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY,
                "AWS_DEFAULT_REGION": S3_REGION,
                "NO_PROXY": "127.0.0.1",
            }
        command = [sys.executable, "-m", "adapter_store", *_flat(flags.items())]
        return [*_environment(environment), *command, *settings.store_flags]

    def _inference_command(self, store: str) -> list[str]:
        settings = self._settings
        flags = {
            "--model": settings.model.resolve(),
            "--store": store,
            "--listen": settings.inference_listen,
            "--metrics-listen": settings.inference_metrics_listen,
            "--ready-file": self._ready_file("inference"),
        }
        if settings.base_model:
            flags["--base-model"] = settings.base_model
        if settings.http_listen:
            flags["--http"] = settings.http_listen
        command = [sys.executable, "-m", "inference_svc", *_flat(flags.items())]
        return [*command, *settings.inference_flags]

    def _stop(self) -> ProcessFailed | None:
        failure = None
        for process in reversed(self._processes):
            failure = process.failure_of(process.stop(STOP_GRACE_S)) or failure
        self._processes.clear()
        return failure


def temporary_work_dir() -> Path:
    """Returns a new folder, for the caller to remove."""
    return Path(tempfile.mkdtemp(prefix="loadout-"))


def _flat(flags: Iterable[tuple[str, object]]) -> list[str]:
    return [str(word) for flag in flags for word in flag]


def _environment(values: dict[str, str]) -> list[str]:
    """Returns a prefix that adds to a command's environment; env(1) replaces itself with it."""
    return ["env", *(f"{name}={value}" for name, value in values.items())] if values else []
