"""Callers in a pod of the cluster, from the begin to the end of a `with` block."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.containers.cluster import Cluster
from tools.containers.engine import environment
from tools.containers.images import CPU_IMAGE

SCRIPT = Path(__file__).parent / "load.py"
END_S = 120.0


class Callers:
    """All adapters have been served when the block begins. `texts`, by adapter, each with its
    count, and `failures` are known when it has ended. An adapter of no name is the base model."""

    def __init__(self, cluster: Cluster, *adapters: str, token: str = "") -> None:
        self._options = [*cluster.run_options(token), "--interactive"]
        self._adapters = adapters
        self.texts: dict[str, dict[str, int]] = {}
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        mount = f"{SCRIPT}:/mnt/load.py:ro"
        command = ["python", "/mnt/load.py", *self._adapters]
        self._process = subprocess.Popen(
            ["podman", "run", *self._options, "--volume", mount, CPU_IMAGE, *command],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "served\n"
        return self

    def __exit__(self, *_: object) -> None:
        output, _error = self._process.communicate(timeout=END_S)
        result: dict[str, Any] = json.loads(output)
        self.texts, self.failures = result["texts"], result["failures"]

    @property
    def answered(self) -> int:
        return sum(count for texts in self.texts.values() for count in texts.values())
