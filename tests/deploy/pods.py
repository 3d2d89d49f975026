"""Runs what a pod runs, as a process here: its command and environment, with folders and ports of
this machine in place of the pod's."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from loadout.demo.process import Process
from tests.support.deploy.manifests import Workload

START_SECONDS = 90.0


@dataclass(frozen=True)
class Places:
    """Folders of a pod -> folders here."""

    folders: dict[str, Path]

    def locate(self, value: str) -> str:
        for folder, here in self.folders.items():
            if value == folder or value.startswith(folder + "/"):
                return str(here) + value[len(folder) :]
        return value


class Pod:
    """A running process. `changes` are variables that this machine needs otherwise, `None` for
    those that it does not need. `process` is a real one, or a fork."""

    def __init__(
        self,
        workload: Workload,
        places: Places,
        work_dir: Path,
        changes: dict[str, str | None],
        process: type[Process] = Process,
    ) -> None:
        self.workload, self._places = workload, places
        prefix = {"adapter_store": "LOADOUT_STORE", "inference_svc": "LOADOUT_INFERENCE"}
        self.prefix = prefix[workload.module]
        ready_file = work_dir / "ready.json"
        environment: dict[str, str | None] = {
            name: places.locate(value) for name, value in workload.environment.items()
        }
        environment |= {
            f"{self.prefix}_LISTEN": "127.0.0.1:0",
            f"{self.prefix}_METRICS_LISTEN": "127.0.0.1:0",
            f"{self.prefix}_READY_FILE": str(ready_file),
            **changes,
        }
        variables = [f"{name}={value}" for name, value in environment.items() if value is not None]
        command = ["env", *variables, sys.executable, *workload.container["args"][1:]]
        self._process = process(workload.name, command, work_dir, ready_file)
        self._addresses: dict[str, str] = {}

    def wait_ready(self) -> None:
        self._addresses = self._process.wait_ready(START_SECONDS)

    @property
    def address(self) -> str:
        return self._addresses["grpc"]

    @property
    def metrics_url(self) -> str:
        return f"http://{self._addresses['metrics']}/metrics"

    def probe(self, kind: str) -> subprocess.CompletedProcess[str]:
        """Asks what the pod's probe asks: by its own command, or as the kubelet would."""
        probe = self.workload.probes[kind]
        if "exec" in probe:
            _, *arguments = probe["exec"]["command"]
            arguments[2] = self.address
            arguments = [self._relocated(each) for each in arguments]
        else:
            service = probe["grpc"].get("service", "")
            arguments = ["-m", "loadout.health", self.address, f"--service={service}"]
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def _relocated(self, argument: str) -> str:
        flag, equals, value = argument.partition("=")
        return flag + equals + self._places.locate(value) if equals else argument

    def stop(self) -> tuple[int, float]:
        """SIGTERM; the exit code, and the seconds that it took."""
        start = time.monotonic()
        code = self._process.stop(float(self.workload.pod["terminationGracePeriodSeconds"]))
        return code, time.monotonic() - start


SMALL: dict[str, str | None] = {
    "LOADOUT_INFERENCE_DEVICE": "cpu",
    "LOADOUT_INFERENCE_BASE_MODEL": "loadout-demo",
    "LOADOUT_INFERENCE_ADAPTER_MEMORY": "32MiB",
    "LOADOUT_INFERENCE_HOST_MEMORY": "0",
    "LOADOUT_INFERENCE_KV_MEMORY": "32MiB",
}
