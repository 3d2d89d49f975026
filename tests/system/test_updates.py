"""One adapter that a trainer updates again and again while callers generate with it."""

from __future__ import annotations

import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loadout import Client
from loadout.demo.process import Process
from loadout.retry import RetryPolicy
from loadout.types import Completion, Registration
from tests.support.forks import ForkedProcess
from tests.support.machine.own_memory import own_bytes
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.engines import Running
from tests.system.services import Services

pytestmark = pytest.mark.processes

NAME, KEEP, CALLERS = "live", 5, 6
VARIANTS = ("r1", "r16", "r33", "r64")
"""The adapters of the zoo that the versions are, in turn: what a version generates tells it from
those before and after it."""
LENGTHS = (2, 16, 120)
"""Tokens of a request. The longest goes on through many updates."""
PROMPT = [ord(char) for char in "some prompt"]
STALE_S = 1.0
"""How long after a registration its name may mean the version before."""
GROWTH = 1.05
NO_RETRY = RetryPolicy(max_attempts=1)
STORE_FLAGS = ("--delete-grace-seconds", "2")
STORE_ENVIRONMENT = {
    "LOADOUT_STORE_COLLECT_SECONDS": "0.25",
    "LOADOUT_STORE_EVENT_RETENTION": "32",  # the history is full when it is first measured
}


@dataclass
class Trainer:
    """Registers version after version of one name, each of a content of its own: the last bits of
    one weight differ, which no generated token shows."""

    client: Client
    zoo: Zoo
    folder: Path
    registrations: list[Registration] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def update(self) -> None:
        number = len(self.registrations)
        folder = self.folder / VARIANTS[number % len(VARIANTS)]
        if not folder.exists():
            shutil.copytree(self.zoo.adapter_dirs[folder.name], folder)
        with (folder / "adapter_model.safetensors").open("r+b") as weights:
            weights.seek(-4, 2)  # the last number's low bytes
            weights.write(number.to_bytes(2, "little"))
        done = self.client.register(NAME, folder, base_model="llama", keep=KEEP)
        assert done.adapter.version == number + 1
        self.registrations.append(done)
        self.times_s.append(time.monotonic())

    def newest(self, age_s: float = 0.0) -> int:
        """Returns the number of the newest version that was registered so long ago; 0: none."""
        before_s = time.monotonic() - age_s
        return sum(1 for registered_s in list(self.times_s) if registered_s <= before_s)


@dataclass
class Callers:
    """Generate with the name until they are told to stop. What one gets is of a version that is
    not too old, and that version's alone."""

    client: Client
    trainer: Trainer
    expected: dict[str, list[int]]
    stopped: threading.Event = field(default_factory=threading.Event)
    going: threading.Event = field(default_factory=threading.Event)
    num_done: int = 0

    def __post_init__(self) -> None:
        self.going.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No request begins meanwhile."""
        self.going.clear()
        try:
            yield
        finally:
            self.going.set()

    def run(self, number: int) -> None:
        dice = random.Random(number)
        while not self.stopped.is_set():
            self.going.wait()
            reads_own = dice.random() < 0.5
            oldest = self.trainer.newest(0.0 if reads_own else STALE_S)
            revision = self.trainer.registrations[oldest - 1].revision if reads_own else 0
            done = self.client.complete(
                PROMPT,
                adapter=NAME,
                min_revision=revision,
                max_tokens=dice.choice(LENGTHS),
                temperature=0.0,
                ignore_eos=True,
            )
            self._check(done, oldest)
            self.num_done += 1

    def _check(self, done: Completion, oldest: int) -> None:
        assert done.adapter is not None
        version = int(done.adapter.name.partition("@")[2])
        assert version >= oldest, f"version {version} was stale: {oldest} was registered before"
        tokens = self.expected[VARIANTS[(version - 1) % len(VARIANTS)]]
        assert list(done.token_ids) == tokens[: len(done.token_ids)]
        # The trainer may not have the answer of its registration yet.
        until(lambda: len(self.trainer.registrations) >= version)
        assert done.adapter.digest == self.trainer.registrations[version - 1].adapter.digest


def expected_tokens(zoo: Zoo, running: Running) -> dict[str, list[int]]:
    """Returns what the oracle generates with each variant, which an engine guesses."""
    count = max(LENGTHS)
    for name in VARIANTS:
        running.submit(name, PROMPT, name, max_tokens=count)
    guesses = {name: running.result(name)[0] for name in VARIANTS}
    return {name: zoo.greedy(name, PROMPT, count, guess) for name, guess in guesses.items()}


def disk_bytes(folder: Path) -> int:
    """Returns the bytes of all files; files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def measured(services: Services) -> dict[str, int]:
    """Returns bytes by what holds them, once the collector has removed what is deleted: sources
    first, of an image its hashes last."""
    folder = services.folder / "store"
    until(lambda: len(list((folder / "blobs").iterdir())) <= KEEP)
    until(lambda: len(list((folder / "images").rglob("*.sha256"))) <= KEEP)
    return {
        "store": own_bytes(services.store.pid),
        "inference": own_bytes(services.inference.pid),
        "disk": disk_bytes(folder),
    }


@pytest.fixture
def services(
    request: pytest.FixtureRequest,
    zoos: Callable[[str], Zoo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Services]:
    for name, value in STORE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Services(zoos("llama"), tmp_path, store_flags=STORE_FLAGS, process=request.param) as made:
        yield made


@pytest.fixture
def client(services: Services) -> Iterator[Client]:
    """What fails is not tried again: it must not fail."""
    with Client(services.inference_address, services.store_address, retry=NO_RETRY) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("services", "num_before", "num_updates", "max_growth"),
    # Multiples of the number of variants: what is kept then has the same bytes. Memory is warm
    # after some fifty updates; before, it may grow more.
    [
        (ForkedProcess, 8, 16, 1.1),
        pytest.param(Process, 52, 1000, GROWTH, marks=pytest.mark.long),
    ],
    indirect=["services"],
    ids=["forks", "processes"],
)
def test_updates_while_callers_generate(
    services: Services,
    client: Client,
    start: Callable[..., Running],
    num_before: int,
    num_updates: int,
    max_growth: float,
) -> None:
    zoo = services.zoo
    expected = expected_tokens(zoo, start(zoo))
    trainer = Trainer(client, zoo, services.folder / "trained")
    trainer.update()
    callers = Callers(client, trainer, expected)
    with ThreadPoolExecutor(CALLERS) as pool:
        running = [pool.submit(callers.run, number) for number in range(CALLERS)]
        try:
            while len(trainer.registrations) < num_updates:
                trainer.update()
                if len(trainer.registrations) == num_before:
                    with callers.paused():
                        before = measured(services)
                if any(each.done() for each in running):
                    break
            with callers.paused():
                after = measured(services)
        finally:
            callers.stopped.set()
        for each in running:
            each.result()
    growth = {what: after[what] / before[what] for what in before}
    print(f"{callers.num_done} requests in {num_updates} updates; growth {growth}")
    assert callers.num_done > num_updates
    assert max(growth.values()) <= max_growth, (before, after)
    _check_what_is_left(client, trainer)


def _check_what_is_left(client: Client, trainer: Trainer) -> None:
    newest = len(trainer.registrations)
    live = [each.version for each in client.versions(NAME) if each.delete_time is None]
    assert live == list(range(newest, newest - KEEP, -1))
    done = client.complete(PROMPT, adapter=NAME, max_tokens=1)
    current, *others = sorted(client.residents(), key=lambda each: each.superseded)
    assert done.adapter is not None
    assert (current.digest, current.superseded) == (done.adapter.digest, False)
    assert others, "nothing old is left to be seen"
    assert all(each.superseded for each in others)
    assert all(f"default/{NAME}@" in each.label for each in others)
