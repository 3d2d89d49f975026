"""Real processes of the store that are killed, and the lives that callers speak to meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import forks

START_S = 120.0
BURIAL_S = 120.0


class Life:
    """One process of a replica, from its readiness to its end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.buried = threading.Event()
        """Set once the process is gone and nothing that it asked for can still happen."""


class Replica:
    """Starts, kills and starts again one store. Used by one thread."""

    def __init__(self, index: int, folder: Path, settings: Mapping[str, Any]) -> None:
        self.index = index
        self.folder = folder
        self.log = folder / "store.log"
        self.life: Life | None = None
        self.settings = dict(settings)
        self._process: forks.Fork | None = None
        self._num_lives = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Starts a process, without waiting for it to be ready."""
        self._num_lives += 1
        settings = self.settings | {"ready_file": self._ready_file}
        environment = forks.variables("STORE", settings)
        self._process = forks.start("adapter_store", [], self.log, environment)

    def wait_ready(self) -> Life:
        """Raises AssertionError with the end of its log if the store cannot start."""
        deadline = time.monotonic() + START_S
        while not self._ready_file.exists():
            if not self.is_running or time.monotonic() > deadline:
                raise AssertionError(f"replica {self.index} did not start:\n{self.log_tail()}")
            time.sleep(0.005)
        self.life = Life(json.loads(self._ready_file.read_text())["grpc"])
        self._ready_file.unlink()
        return self.life

    def kill(self) -> None:
        """kill -9. The life is buried by whoever knows that nothing comes after it."""
        assert self._process is not None
        assert self._process.poll() is None, f"the store ended by itself:\n{self.log_tail()}"
        self._process.kill()
        self._process.wait(BURIAL_S)
        self._process = None

    def stop(self) -> None:
        """SIGTERM: an orderly end, with exit status 0."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(BURIAL_S) == 0, self.log_tail()
        self._process = None

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-40:])

    @property
    def _ready_file(self) -> Path:
        return self.folder / f"ready-{self._num_lives}.json"


class Roster:
    """Which lives may be called now. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lives: list[Life] = []
        self._is_closed = False

    def enter(self, life: Life) -> None:
        with self._changed:
            self._lives.append(life)
            self._changed.notify_all()

    def leave(self, life: Life) -> None:
        with self._changed:
            self._lives.remove(life)

    def close(self) -> None:
        """Nobody is to call any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def pick(self, rng: random.Random) -> Life | None:
        """One of the lives; waits while there is none. None: closed."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._lives or self._is_closed, START_S)
            assert ready, "no store came up"
            return None if self._is_closed else rng.choice(self._lives)
