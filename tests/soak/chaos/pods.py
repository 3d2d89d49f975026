"""Processes as Kubernetes would run them: whatever ends is started again at its address."""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.soak.chaos.ledger import Fault
from tests.support import forks
from tests.support.forks import Fork, variables

READY_S = 120.0
GRACE_S = 45.0
TICK_S = 0.02
LOG_LINES = 40
ENGINE = "process_main"
"""In the command of the engine's process."""


Handle = subprocess.Popen[bytes] | Fork


class Pod:
    """One service. Listens at free ports at first, and at the same ones ever after.

    `targets` are the processes that faults may hit.
    """

    targets: tuple[str, ...] = ()

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.settings = dict(settings)
        self.addresses: dict[str, str] = {}
        self.is_ready = False
        self.num_starts = 0
        self._ready_file = folder / f"{name}.ready.json"
        self._handle: Handle | None = None
        self._is_excused = False
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        self.is_ready = self._is_excused = False
        self.num_starts += 1
        settings = self.settings | {"ready-file": self._ready_file}
        self._handle = self._spawn(settings)

    def check(self) -> None:
        """Starts it again if it has ended; sees when it is ready. Raises AssertionError if it has
        ended although no fault hit it."""
        assert self._handle is not None
        code = self._handle.poll()
        if code is not None:
            assert self._is_excused, f"{self.name} ended by itself with {code}:\n{self.log_tail()}"
            self.start()
        elif not self.is_ready and self._ready_file.exists():
            with suppress(json.JSONDecodeError):  # it is being written
                self._become_ready(json.loads(self._ready_file.read_text()))

    def _become_ready(self, addresses: dict[str, str]) -> None:
        assert self.addresses in ({}, addresses), f"{self.name} listens elsewhere: {addresses}"
        self.addresses = addresses
        for key, setting in self._listens().items():
            self.settings[setting] = addresses[key]
        self.is_ready = True

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not self.is_ready:
            assert time.monotonic() < deadline_s, f"{self.name} is not ready:\n{self.log_tail()}"
            time.sleep(TICK_S)
            self.check()

    def pid_of(self, target: str) -> int | None:
        """Returns None for one that is not there just now."""
        assert self._handle is not None
        return self._handle.pid if self._handle.poll() is None else None

    def kill(self, target: str) -> bool:
        """kill -9. Returns whether there was anything to kill."""
        pid = self.pid_of(target)
        if pid is None:
            return False
        self._is_excused = True
        # Of the one that ends: what starts in its place writes another.
        self._ready_file.unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def stop(self) -> None:
        """SIGTERM: an orderly end, with exit status 0."""
        assert self._handle is not None
        with suppress(ProcessLookupError):
            os.kill(self._handle.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        while (code := self._handle.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(TICK_S)
        if code is None:
            os.kill(self._handle.pid, signal.SIGKILL)
        assert code == 0 or self._is_excused, f"{self.name} ended with {code}:\n{self.log_tail()}"

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_LINES:])

    def _listens(self) -> dict[str, str]:
        """Returns which setting has which address of the ready file."""
        return {"grpc": "listen", "metrics": "metrics-listen"}

    def _spawn(self, settings: Mapping[str, Any]) -> Handle:
        raise NotImplementedError


class StorePod(Pod):
    targets = ("store",)

    def _spawn(self, settings: Mapping[str, Any]) -> Handle:
        return forks.start("adapter_store", [], self.log, variables("STORE", settings))


class InferencePod(Pod):
    """Its engine is a process of its own: without it the front ends, and without the front the
    engine does. `is_forked`: both are forks, which start at once."""

    targets = ("front", "engine")

    def __init__(
        self, name: str, folder: Path, settings: Mapping[str, Any], *, is_forked: bool
    ) -> None:
        super().__init__(name, folder, settings)
        self._is_forked = is_forked

    def pid_of(self, target: str) -> int | None:
        front = super().pid_of(target)
        if target == "front" or front is None:
            return front
        if self._is_forked:
            with suppress(AssertionError):  # it has none just now
                return forks.engine_of(front)
            return None
        with suppress(psutil.Error):
            for child in psutil.Process(front).children():
                if any(ENGINE in word for word in child.cmdline()):
                    return child.pid
        return None

    def _listens(self) -> dict[str, str]:
        return super()._listens() | {"http": "http"}

    def _spawn(self, settings: Mapping[str, Any]) -> Handle:
        if self._is_forked:
            return forks.start("inference_svc", [], self.log, variables("INFERENCE", settings))
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "inference_svc"],
                env={**os.environ, **variables("INFERENCE", settings)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )


class Faults:
    """Kills and stops at random, and starts again, until it is told to end. One thread's.

    `settle` is called with a pod whose store was killed, before that starts again.
    """

    KILL_SHARE = 0.4
    SHORT_S, CALM_S, CALM_SHARE = (0.2, 1.5), (5.0, 8.0), 0.4
    """Times until the next fault."""
    STOP_S = (0.1, 6.0)

    def __init__(self, pods: Sequence[Pod], seed: int, is_over: Callable[[], bool]) -> None:
        self.counts: Counter[str] = Counter()
        self._pods = pods
        self._random = random.Random(f"{seed}/faults")
        self._is_over = is_over
        self._stopped: list[tuple[float, int, float]] = []
        self._ended: list[Fault] = []
        self._broken: dict[Pod, float] = {}

    def run(self, seconds: float) -> None:
        now_s = time.monotonic()
        end_s, next_s = now_s + seconds, now_s + 1.0
        while (now_s := time.monotonic()) < end_s and not self._is_over():
            self._tick(now_s)
            if now_s >= next_s:
                self._cause(now_s)
                calm = self._random.random() < self.CALM_SHARE
                next_s = now_s + self._random.uniform(*(self.CALM_S if calm else self.SHORT_S))
            time.sleep(TICK_S)
        self._mend()

    def times(self) -> list[Fault]:
        """Returns all that have ended."""
        return list(self._ended)

    def _tick(self, now_s: float) -> None:
        while self._stopped and self._stopped[0][0] <= now_s:
            _, pid, since_s = heapq.heappop(self._stopped)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._ended.append(Fault(since_s, now_s))
        for pod in self._pods:
            pod.check()
            if pod.is_ready and pod in self._broken:
                self._ended.append(Fault(self._broken.pop(pod), now_s))

    def _cause(self, now_s: float) -> None:
        pod = self._random.choice(self._pods)
        target = self._random.choice(pod.targets)
        if not pod.is_ready and self._random.random() < 0.8:
            return  # mostly lets it start
        if self._random.random() < self.KILL_SHARE:
            if pod.kill(target):
                self.counts[f"kill {target}"] += 1
                self._broken.setdefault(pod, now_s)
                pod.is_ready = False
            return
        pid = pod.pid_of(target)
        if pid is not None and pid not in {each for _, each, _ in self._stopped}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.counts[f"stop {target}"] += 1
                until_s = now_s + self._random.uniform(*self.STOP_S)
                heapq.heappush(self._stopped, (until_s, pid, now_s))

    def _mend(self) -> None:
        """Lets all go on, and waits until all are ready."""
        self._stopped = [(0.0, pid, since_s) for _, pid, since_s in self._stopped]
        deadline_s = time.monotonic() + READY_S
        while self._stopped or self._broken:
            self._tick(time.monotonic())
            slow = list(self._broken)
            assert time.monotonic() < deadline_s, [f"{p.name}:\n{p.log_tail()}" for p in slow]
            time.sleep(TICK_S)
