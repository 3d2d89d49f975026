"""Both services as processes under a policy, for callers that mean harm."""

from __future__ import annotations

import itertools
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.support.access.policies import ROOT, token_lines, write_policy
from tests.support.forks import WATCHFUL, ForkedProcess
from tests.support.machine.peak_memory import grown_mib

READY_S = 120.0
GRACE_S = 40.0
TOKENS = (
    token_lines("victim", ["reader", "publisher", "caller"], ["team-v"]),
    token_lines("attacker", ["reader", "publisher", "caller"], ["team-x"]),
    token_lines("server", ["server"], ["team-x"]),
)


class Attacked:
    """A service that runs until the context ends; `memory_mib` and others look at its process."""

    def __init__(self, name: str, folder: Path, flags: list[str]) -> None:
        ready = folder / f"{name}.json"
        policy = write_policy(folder, ROOT, *TOKENS)
        command = [
            *("env", WATCHFUL, sys.executable, "-m", *flags, "--policy-file", str(policy)),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--ready-file", str(ready)),
        ]
        self._process = ForkedProcess(name, command, folder, ready)
        self.folder = folder
        self.address = self._process.wait_ready(READY_S)["grpc"]

    def stop(self) -> None:
        log = self._process.log_path
        assert self._process.stop(GRACE_S) == 0, log.read_text()[-2000:]

    def grown_mib(self) -> AbstractContextManager[list[float]]:
        """See `peak_memory.grown_mib`."""
        return grown_mib(self._process.pid)

    @contextmanager
    def without_files(self) -> Iterator[None]:
        """Lets the process open no further file while the context lasts."""
        pid = self._process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = set(os.listdir(f"/proc/{pid}/fd"))
        first_free = next(number for number in itertools.count() if str(number) not in used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, limits[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def attacked_store(folder: Path, *flags: str) -> Attacked:
    data = ["--data-dir", str(folder / "data"), "--source-roots", str(folder)]
    return Attacked("store", folder, ["adapter_store", *data, *flags])


def attacked_inference(folder: Path, model_dir: Path) -> Attacked:
    model = ["--model", str(model_dir), "--base-model", "llama", "--num-threads", "1"]
    memory = ["--kv-memory", "8MiB", "--adapter-memory", "8MiB", "--max-model-len", "256"]
    return Attacked("inference", folder, ["inference_svc", *model, *memory])
