"""The system on one machine: S3 server, adapter store and inference service as processes."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loadout.demo.given import INFERENCE_PREFIX, STORE_PREFIX, Given
from loadout.demo.process import POLL_S, Process, ProcessFailed

READY_TIMEOUT_S = 180.0
STOP_GRACE_S = 45.0
"""A little more than the services' own grace."""

FREE_PORT = "127.0.0.1:0"

SHARE_SOCKET = "share.sock"
MAX_SOCKET_PATH = 90
"""In bytes: the system allows 107, of which the store uses some while it begins to listen."""

S3_BUCKET = "adapters"
S3_ACCESS_KEY = "demo"
S3_SECRET_KEY = "demo-secret"  # of a server that lives for one run on 127.0.0.1
S3_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """The parts to start. `s3` adds an S3 server, whose bucket S3_BUCKET the store may read.

    `source_roots` are folders that file:// sources may lie in, besides those that the store's user
    names. Further flags are handed to the services as they are; a setting that they give counts
    more than the same one here, and so does one that variables or a file give if
    `keeps_environment`. `model` is a folder or a name on the hub; one of None is given so. Where
    the inference service is told of another store, none is started.
    """

    model: Path | str | None
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
    keeps_environment: bool = False


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port each; `s3_url` is "" without an S3 server, `http` without an HTTP API, and
    `store_metrics` where another store is used, whose addresses `store` has."""

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
        self._store: Process | None = None
        only_flags = not settings.keeps_environment
        self.given_store = Given(STORE_PREFIX, settings.store_flags, only_flags)
        self.given_inference = Given(INFERENCE_PREFIX, settings.inference_flags, only_flags)

    @property
    def model(self) -> str:
        """The model's folder, or its name on the hub; "" if none is given."""
        model = self._settings.model
        return (self.given_inference.find("model") or "") if model is None else str(model)

    @property
    def other_store(self) -> str:
        """The addresses of a store that is not this system's own, "" if its own is used."""
        given = self.given_inference.find_list("store")
        own = self.given_store.find("listen") or self._settings.store_listen
        return "" if not given or own in given else ",".join(given)

    def listens(self) -> dict[str, str]:
        """Returns the addresses at which the parts will listen, by the present parts."""
        settings, store, inference = self._settings, self.given_store, self.given_inference
        found = {
            "the inference service": inference.find("listen") or settings.inference_listen,
            "its metrics": inference.find("metrics-listen") or settings.inference_metrics_listen,
            "its HTTP API": settings.http_listen or inference.find("http") or "",
        }
        if not self.other_store:
            found["the adapter store"] = store.find("listen") or settings.store_listen
            metrics = store.find("metrics-listen") or settings.store_metrics_listen
            found["the store's metrics"] = metrics
        return {what: address for what, address in found.items() if address}

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

    def pids(self) -> dict[str, int]:
        """Returns the parts' process ids by their names: "store", "inference"."""
        return {process.name: process.pid for process in self._processes}

    def warnings(self) -> list[str]:
        """Returns the warnings of the parts' start: variables that are no settings, and why a
        machine computes more slowly than it could."""
        found = [(process.name, line) for process in self._processes for line in process.warnings]
        lines = [line for _, line in found]
        if any(name == "inference" and " --" in line for name, line in found):
            lines.append("flags of the inference service, as above, go into --serve-flags")
        return lines

    def check_alive(self) -> None:
        """Raises ProcessFailed if a part ended by itself."""
        for process in self._processes:
            process.check_alive()

    def watch(self, on_store_end: Callable[[ProcessFailed], None]) -> None:
        """Never returns: raises ProcessFailed when a part ends by itself, except for the store,
        without which the inference service goes on: then it calls `on_store_end`."""
        while True:
            try:
                self.check_alive()
            except ProcessFailed as failure:
                store = self._store
                if store is None or store.is_alive:
                    raise
                self._processes.remove(store)
                self._store = None
                on_store_end(failure)
            time.sleep(POLL_S)

    def store_again(self) -> str:
        """Returns the command, for a shell, that starts the store again where it was."""
        own = {
            "data-dir": self._work_dir / "store",
            "listen": self.addresses.store,
            "metrics-listen": self.addresses.store_metrics,
            **self._share_flags("share-socket"),
        }
        flags = [word for key, value in own.items() for word in (f"--{key}", str(value))]
        prefix, flags_of_sources = self._sources(self.addresses.s3_url)
        given = [*self._settings.store_flags]
        if self.given_store.find("data-dir") is not None:
            flags = flags[2:]
        return shlex.join([*prefix, "loadout", "store", *flags_of_sources, *given, *flags])

    def _start(self) -> Addresses:
        s3_url = self._launch("s3", self._s3_command())["url"] if self._settings.s3 else ""
        if self.other_store:
            store = {"grpc": self.other_store, "metrics": ""}
        else:
            store = self._launch("store", self.store_command(s3_url))
            self._store = self._processes[-1]
        inference = self._launch("inference", self.inference_command(store["grpc"]))
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
        given = {"store": self.given_store, "inference": self.given_inference}.get(name)
        path = None if given is None else given.find("ready-file")
        return Path(path) if path else self._work_dir / f"{name}.ready.json"

    def _s3_command(self) -> list[str]:
        return [sys.executable, "-m", "loadout.demo.s3", str(self._ready_file("s3"))]

    def store_command(self, s3_url: str) -> list[str]:
        """Returns the command that runs the store."""
        settings = self._settings
        flags = self.given_store.complete(
            {
                "data-dir": self._work_dir / "store",
                "listen": settings.store_listen,
                "metrics-listen": settings.store_metrics_listen,
                "ready-file": self._ready_file("store"),
                **self._share_flags("share-socket"),
            }
        )
        prefix, sources = self._sources(s3_url)
        command = [sys.executable, "-m", "adapter_store", *flags, *sources]
        return [*prefix, *command, *settings.store_flags]

    def _sources(self, s3_url: str) -> tuple[list[str], list[str]]:
        """Returns the words before the store's command, and its flags of sources."""
        settings, flags = self._settings, []
        if settings.source_roots:
            ours = (str(root.resolve()) for root in settings.source_roots)
            roots = dict.fromkeys([*ours, *self.given_store.find_list("source-roots")])
            flags = ["--source-roots", ",".join(roots)]
        environment = {}
        if s3_url:
            buckets = dict.fromkeys(
                [f"{S3_BUCKET}@{s3_url}", *self.given_store.find_list("s3-buckets")]
            )
            flags += ["--s3-buckets", ",".join(buckets)]
            environment = {
                "AWS_ACCESS_KEY_ID": S3_ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY,
                "AWS_DEFAULT_REGION": S3_REGION,
                "NO_PROXY": "127.0.0.1",
            }
        return _environment(environment), flags

    def inference_command(self, store: str) -> list[str]:
        """Returns the command that runs the inference service with the store at these addresses."""
        settings = self._settings
        defaults: dict[str, object] = {
            "store": store,
            "listen": settings.inference_listen,
            "metrics-listen": settings.inference_metrics_listen,
            "ready-file": self._ready_file("inference"),
            **({} if self.other_store else self._share_flags("store-share-socket")),
        }
        flags = self.given_inference.complete(defaults)
        if settings.model is not None:
            flags += ["--model", str(settings.model)]
        if settings.base_model:
            flags += ["--base-model", settings.base_model]
        if settings.http_listen:
            flags += ["--http", settings.http_listen]
        command = [sys.executable, "-m", "inference_svc", *flags]
        return [*command, *settings.inference_flags]

    def _share_flags(self, key: str) -> dict[str, object]:
        """Returns the setting `key` with the path of the socket over which the parts share images;
        none where the system has no such socket, or the path is too long for one."""
        path = self.given_store.find("share-socket") or str(self._work_dir / SHARE_SOCKET)
        can_share = sys.platform == "linux" and len(os.fsencode(path)) <= MAX_SOCKET_PATH
        return {key: path} if can_share else {}

    def _stop(self) -> ProcessFailed | None:
        failure = None
        for process in reversed(self._processes):
            failure = process.failure_of(process.stop(STOP_GRACE_S)) or failure
        self._processes.clear()
        return failure


def temporary_work_dir() -> Path:
    """Returns a new folder, for the caller to remove."""
    return Path(tempfile.mkdtemp(prefix="loadout-"))


def _environment(values: dict[str, str]) -> list[str]:
    """Returns a prefix that adds to a command's environment; env(1) replaces itself with it."""
    return ["env", *(f"{name}={value}" for name, value in values.items())] if values else []
