"""Runs both services as real processes under a mixed load, which changes all exported metrics.

    with MixedLoad(folder) as load:
        load.wait_toured()
        load.run(10)

The demo's model runs on the CPU, with several tens of small random adapters and memory for few of
them, so that adapters are constantly evicted, pulled, compiled and prefetched. The load is light
enough for a machine with two cores.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.store.adapters import Shapes, make_adapter
from loadout import Client
from loadout.demo.adapters import MODEL
from loadout.demo.system import System, SystemSettings
from loadout.retry import RetryPolicy
from tools.mixed_load.base_role import Role, Scene
from tools.mixed_load.roles import BASE_MODEL, MISFIT, Caller, Operator, Trainer
from tools.prometheus import Job

NUM_ADAPTERS = 32
NUM_CONTENTS = 8
"""Number of further contents, to which names are moved."""
NUM_CALLERS = 5
RANKS = (4, 8, 16)
NUM_LAYERS = 4
SHAPES: Shapes = {
    "self_attn.q_proj": (192, 192),
    "self_attn.v_proj": (192, 64),
    "mlp.down_proj": (512, 192),
}
"""Shapes of the demo's model."""
MISFIT_SHAPES: Shapes = {"self_attn.q_proj": (64, 64)}
CALLER_PAUSE_S, OTHER_PAUSE_S = 0.05, 0.2
TOUR_TIMEOUT_S = 120.0
END_TIMEOUT_S = 90.0
POLL_S = 0.1

STORE_FLAGS = (
    *("--image-memory", "2MiB", "--disk-cache-bytes", "3MiB", "--compile-workers", "1"),
    *("--delete-grace-seconds", "1", "--log-level", "warning"),
)
INFERENCE_FLAGS = (
    *("--http", "127.0.0.1:0", "--num-threads", "1", "--device", "cpu", "--max-sequences", "8"),
    *("--adapter-memory", "1536KiB", "--host-memory", "2MiB", "--max-rank", "16"),
    *("--kv-memory", "512KiB", "--max-model-len", "512", "--adapter-wait-seconds", "60"),
    *("--metrics-adapters", "10", "--log-level", "warning"),
)


class MixedLoad:
    """Runs the services and the load within the context; `folder` keeps data and logs.

    Raises ProcessFailed if a service dies, and at the end an unexpected error of the load's
    threads.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 1,
        caller_pause_s: float = CALLER_PAUSE_S,
        store_flags: tuple[str, ...] = (),
        inference_flags: tuple[str, ...] = (),
    ) -> None:
        """Prepares the load; further flags are added to the services' own."""
        self._folder = folder
        self._seed = seed
        self._caller_pause_s = caller_pause_s
        self._sources = folder / "sources"
        self._store_file = folder / "store.toml"
        settings = SystemSettings(
            MODEL,
            BASE_MODEL,
            source_roots=(self._sources,),
            store_flags=(*STORE_FLAGS, "--config", str(self._store_file), *store_flags),
            inference_flags=(*INFERENCE_FLAGS, *inference_flags),
        )
        self._system = System(settings, folder / "system")
        self._stop = threading.Event()
        self._roles: list[Role] = []

    def __enter__(self) -> Self:
        self._sources.mkdir(parents=True)
        self._store_file.write_text("collect-seconds = 1\n")
        with ExitStack() as stack:
            self.addresses = stack.enter_context(self._system).addresses
            self.client = stack.enter_context(
                Client(
                    inference=self.addresses.inference,
                    store=self.addresses.store,
                    retry=RetryPolicy(max_attempts=1),
                )
            )
            scene = Scene(self.client, self.addresses.http, *self._furnish())
            self._start_roles(scene)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        for role in self._roles:
            role.thread.join(END_TIMEOUT_S)
        self._stack.__exit__(kind, error, traceback)
        if kind is None:
            self._raise_errors()

    @property
    def jobs(self) -> list[Job]:
        """Returns the scrape configuration, with the shipped configurations' job names."""
        return [
            Job("adapter-store", [self.addresses.store_metrics]),
            Job("inference", [self.addresses.inference_metrics]),
        ]

    def wait_toured(self, timeout_s: float = TOUR_TIMEOUT_S) -> None:
        """Waits until every action of the load has run once.

        Raises TimeoutError, and as `run`.
        """
        deadline_s = time.monotonic() + timeout_s
        for role in self._roles:
            while not role.has_toured.wait(POLL_S):
                self.check()
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{role.thread.name} has not done every action once")
        self.check()

    def run(self, seconds: float) -> None:
        """Continues the load. Raises ProcessFailed, and unexpected errors of the load's threads."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.check()
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises as `run` does."""
        self._system.check_alive()
        self._raise_errors()

    def _raise_errors(self) -> None:
        for role in self._roles:
            if role.error is not None:
                raise role.error

    def _furnish(self) -> tuple[tuple[str, ...], tuple[Path, ...]]:
        """Registers the adapters, and returns their names and folders of further content."""
        names = []
        for number in range(NUM_ADAPTERS):
            names.append(f"tuned-{number:02}")
            self.client.register(names[-1], self._make(names[-1], number).as_uri())
        misfit = self._make(MISFIT, NUM_ADAPTERS, MISFIT_SHAPES)
        self.client.register(MISFIT, misfit.as_uri())
        contents = [
            self._make(f"content-{number}", NUM_ADAPTERS + 1 + number)
            for number in range(NUM_CONTENTS)
        ]
        return tuple(names), tuple(contents)

    def _make(self, name: str, number: int, shapes: Shapes = SHAPES) -> Path:
        folder = self._sources / name
        seed, rank = 1000 * self._seed + number, RANKS[number % len(RANKS)]
        make_adapter(folder, shapes, NUM_LAYERS, rank=rank, seed=seed, base_model=BASE_MODEL)
        return folder.resolve()

    def _start_roles(self, scene: Scene) -> None:
        kinds: list[tuple[type[Role], float]] = [(Caller, self._caller_pause_s)] * NUM_CALLERS
        kinds += [(Trainer, OTHER_PAUSE_S), (Operator, OTHER_PAUSE_S)]
        for number, (kind, pause_s) in enumerate(kinds):
            seed = f"{self._seed}-{number}-{kind.__name__.lower()}"
            self._roles.append(kind(scene, seed, self._stop, pause_s))
        for role in self._roles:
            role.thread.start()
