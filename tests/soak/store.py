"""The crash test: a store killed with -9 at random moments must have kept every promise.

    python -m tests.soak.store --kills 200 [--seed N]

Callers register, upload, delete and pull meanwhile. After each restart all that was answered with
success is there, and all else is there whole or not at all; in the end the history has no gap,
every image is right byte for byte, nothing lies around that no record needs, and the accounts of
both tiers are exact. The seed is printed: with it, the same calls and moments are drawn again,
though not how the threads take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine

from adapter_store.config import Settings
from adapter_store.store import open_store
from tests.soak.callers import Caller
from tests.soak.calls import Calls
from tests.soak.contents import make_contents
from tests.soak.leftovers import check_accounts, wait_until_clean
from tests.soak.model import check_history
from tests.soak.replicas import Life, Replica, Roster
from tests.soak.watcher import Watcher

NUM_CALLERS = 5
NUM_CONTENTS = 15
START_KILLS = 0.2  # the share of kills that come while the store starts
START_SECONDS = 0.5
LIFE_SECONDS = 1.5
CALM_SECONDS = 1.5
JOIN_SECONDS = 120.0


class Soak:
    """One run, under `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._roster = Roster()
        self.contents = make_contents(folder / "sources", NUM_CONTENTS)
        self.callers = [
            Caller(index, seed, self._roster, self.contents) for index in range(NUM_CALLERS)
        ]
        self.watcher = Watcher(seed, self._roster)
        self.replica = Replica(0, folder / "replica-0", self._arguments())

    def run(self, kills: int) -> str:
        """Gives a line about what was done. Raises AssertionError for a broken promise."""
        workers = [*self.callers, self.watcher]
        for worker in workers:
            worker.thread.start()
        try:
            for _ in range(kills):
                self._live_and_die()
            self._live(CALM_SECONDS)
        finally:
            self._roster.close()
        for worker in workers:
            worker.thread.join(JOIN_SECONDS)
            assert not worker.thread.is_alive(), f"{worker.thread.name} hangs"
        self._check_callers()
        self._check_store()
        self.replica.stop()
        asyncio.run(self._check_inside())
        return (
            f"{kills} kills, {sum(caller.num_calls for caller in self.callers)} calls, "
            f"{sum(caller.num_lost for caller in self.callers)} of them without an answer, "
            f"{sum(caller.num_pulls for caller in self.callers)} pulls, "
            f"{len(self.watcher.seen)} events watched"
        )

    def _arguments(self) -> list[str]:
        return [
            f"--source-roots={self._folder / 'sources'}",
            "--delete-grace-seconds=0",
            "--collect-seconds=0.2",
            "--bookmark-seconds=0.2",
            "--compile-workers=1",
            "--memory-bytes=4MiB",
            "--disk-cache-bytes=12MiB",
            "--log-level=INFO",
        ]

    def _live_and_die(self) -> None:
        if self._random.random() < START_KILLS:
            self.replica.spawn()
            time.sleep(self._random.uniform(0, START_SECONDS))
            self.replica.kill()
            return
        life = self._live(self._random.uniform(0, LIFE_SECONDS))
        self._roster.leave(life)
        self.replica.kill()
        life.buried.set()

    def _live(self, seconds: float) -> Life:
        self.replica.spawn()
        life = self.replica.wait_ready()
        self._roster.enter(life)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_callers()
            time.sleep(min(left, 0.1))
        return life

    def _check_callers(self) -> None:
        for worker in [*self.callers, self.watcher]:
            if worker.error is not None:
                raise AssertionError(
                    f"{worker.thread.name}: {worker.error!r}\n{self.replica.log_tail()}"
                ) from worker.error

    def _check_store(self) -> None:
        """From outside, through the contract and the folders."""
        assert self.replica.life is not None
        with closing(Calls(self.replica.life.address)) as calls:
            for caller in self.callers:
                caller.settle(calls)
            promises = [promises for caller in self.callers for promises in caller.promises]
            events, newest = calls.events()
            check_history(promises, events, newest)
            self.watcher.check(events)
            assert calls.names() == sorted(p.name for p in promises if p.state.current)
            self._check_images(calls, {v.digest for p in promises for v in p.state.live.values()})
        engine = create_engine(f"sqlite:///{self._data_dir / 'catalog.sqlite3'}")
        try:
            wait_until_clean(self._data_dir, engine)
        finally:
            engine.dispose()

    def _check_images(self, calls: Calls, digests: set[str]) -> None:
        layout_id = calls.register_layout()
        by_digest = {content.digest: content for content in self.contents}
        for digest in sorted(digests):
            header, data = calls.pull(digest, layout_id)
            assert data == by_digest[digest].image(header), f"{digest}: wrong bytes"
            found = calls.get(digest)
            assert found is not None
            assert [state.layout_id for state in found.layout_states] == [layout_id]

    async def _check_inside(self) -> None:
        """From inside, over what the last process left: every image once more, then accounts."""
        async with open_store(Settings(data_dir=self._data_dir, memory_bytes=4 << 20)) as store:
            for digest in store.catalog.blob_digests():
                for layout_id in store.catalog.layout_ids():
                    async with store.images.hold((digest, layout_id)):
                        pass
            await store.ahead.idle()
            check_accounts(store, self._data_dir)

    @property
    def _data_dir(self) -> Path:
        return self.replica.folder / "data"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loadout-soak-") as folder:
        result = Soak(Path(folder), options.seed).run(options.kills)
    print(f"{result}, in {time.monotonic() - start:.0f} s: every promise was kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
