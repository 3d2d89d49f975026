"""The crash test: a store killed with -9 at random moments must have kept every promise.

    python -m tests.soak.store --kills 200 [--catalog sqlite postgresql] [--seed N]

Over SQLite it is one store; over PostgreSQL two replicas that share an S3 bucket, of which one is
killed at a time. Callers register, upload, delete, roll back and pull meanwhile. After each
restart all that was answered with success is there, and all else is there whole or not at all; in
the end the history has no gap, every image is right byte for byte, nothing lies around that no
record needs, and the accounts of both tiers are exact. The seed is printed: with it, the same calls
and moments are drawn again, though not how the threads take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from adapter_store.build import open_store
from adapter_store.config import StoreSettings
from adapter_store.core import ImageKey
from tests.soak.callers import Caller
from tests.soak.calls import Calls
from tests.soak.expected_images import make_contents
from tests.soak.leftovers import check_accounts, wait_until_clean
from tests.soak.model import check_history
from tests.soak.replicas import Replica, Roster
from tests.soak.shared_ground import SharedGround
from tests.soak.storage import Ground, SqliteGround
from tests.soak.watcher import Watcher

NUM_CALLERS = 5
NUM_CONTENTS = 15
START_KILLS = 0.2  # the share of kills that come while the store starts
START_SECONDS = 0.5
LIFE_SECONDS = 1.5
CALM_SECONDS = 0.5
JOIN_SECONDS = 120.0
SETTINGS = {
    "listen": "127.0.0.1:0",
    "metrics_listen": "127.0.0.1:0",
    "delete_grace_seconds": 0,
    "collect_seconds": 0.2,
    "bookmark_seconds": 0.2,
    "compile_workers": 1,
    "image_memory": 4 << 20,
    "disk_cache_bytes": 12 << 20,
}
GROUNDS: dict[str, Callable[[], Ground]] = {"sqlite": SqliteGround, "postgresql": SharedGround}


class Soak:
    """One run over `ground`, its files under `folder`."""

    def __init__(self, ground: Ground, folder: Path, seed: int) -> None:
        self._ground = ground
        self._folder = folder
        self._random = random.Random(seed)
        self._roster = Roster()
        self.contents = make_contents(folder / "sources", NUM_CONTENTS)
        self.callers = [
            Caller(index, seed, self._roster, self.contents) for index in range(NUM_CALLERS)
        ]
        self.watcher = Watcher(seed, self._roster)
        self._workers = [*self.callers, self.watcher]
        self.replicas = [self._replica(index) for index in range(ground.num_replicas)]

    def run(self, kills: int) -> str:
        """Gives a line about what was done. Raises AssertionError for a broken promise."""
        for worker in self._workers:
            worker.thread.start()
        try:
            for replica in self.replicas:
                self._start(replica)
            for _ in range(kills):
                self._rest(self._random.uniform(0, LIFE_SECONDS))
                self._kill_and_start(self._random.choice(self.replicas))
            self._rest(CALM_SECONDS)
        finally:
            self._roster.close()
        for worker in self._workers:
            worker.thread.join(JOIN_SECONDS)
            assert not worker.thread.is_alive(), f"{worker.thread.name} hangs"
        self._check_workers()
        for replica in self.replicas:
            self._check_store(replica)
        wait_until_clean(lambda: self._ground.find_orphans([r.data_dir for r in self.replicas]))
        for replica in self.replicas:
            replica.stop()
        for replica in self.replicas:
            asyncio.run(self._check_inside(replica))
        return (
            f"{kills} kills, {sum(caller.num_calls for caller in self.callers)} calls, "
            f"{sum(caller.num_lost for caller in self.callers)} of them without an answer, "
            f"{sum(caller.num_pulls for caller in self.callers)} pulls, "
            f"{len(self.watcher.seen)} events watched"
        )

    def _replica(self, index: int) -> Replica:
        folder = self._folder / f"replica-{index}"
        settings = SETTINGS | self._ground.settings(index, folder / "data")
        return Replica(index, folder, settings | {"source_roots": str(self._folder / "sources")})

    def _start(self, replica: Replica) -> None:
        replica.spawn()
        self._roster.enter(replica.wait_ready())

    def _kill_and_start(self, replica: Replica) -> None:
        """One is killed, the others go on; at times it is killed again while it starts."""
        life = replica.life
        assert life is not None
        self._roster.leave(life)
        replica.kill()
        self._ground.settle(replica.index)
        life.buried.set()
        if self._random.random() < START_KILLS:
            replica.spawn()
            time.sleep(self._random.uniform(0, START_SECONDS))
            replica.kill()
            self._ground.settle(replica.index)
        self._start(replica)

    def _rest(self, seconds: float) -> None:
        """Lets the callers work, as long as nothing is wrong."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_workers()
            time.sleep(min(left, 0.1))

    def _check_workers(self) -> None:
        for worker in self._workers:
            if worker.error is not None:
                logs = "\n".join(replica.log_tail() for replica in self.replicas)
                raise AssertionError(
                    f"{worker.thread.name}: {worker.error!r}\n{logs}"
                ) from worker.error

    def _check_store(self, replica: Replica) -> None:
        """From outside, through the contract."""
        assert replica.life is not None
        with closing(Calls(replica.life.address)) as calls:
            for caller in self.callers:
                caller.settle(calls)
            histories = [each for caller in self.callers for each in caller.histories]
            events, newest = calls.events()
            check_history(histories, events, newest)
            self.watcher.check(events)
            assert calls.names() == sorted(p.name for p in histories if p.state.current)
            self._check_images(calls, {v.digest for p in histories for v in p.state.live.values()})

    def _check_images(self, calls: Calls, digests: set[str]) -> None:
        layout_id = calls.register_layout()
        by_digest = {content.digest: content for content in self.contents}
        for digest in sorted(digests):
            header, data = calls.pull(digest, layout_id)
            assert data == by_digest[digest].image(header), f"{digest}: wrong bytes"
            found = calls.get(digest)
            assert found is not None
            assert [state.layout_id for state in found.layout_states] == [layout_id]

    async def _check_inside(self, replica: Replica) -> None:
        """From inside, over what the last process left: every image once more, then accounts."""
        async with open_store(StoreSettings(**replica.settings)) as store:
            for digest in store.catalog.blobs.digests():
                for layout_id in store.catalog.layouts.ids():
                    async with store.images.hold(ImageKey(digest, layout_id)):
                        pass
            await store.precompiler.wait_idle()
            await store.images.wait_idle()
            check_accounts(store, replica.data_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--catalog", choices=sorted(GROUNDS), nargs="+", default=["sqlite"])
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    for catalog in options.catalog:
        start = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="loadout-soak-") as folder,
            GROUNDS[catalog]() as ground,
        ):
            result = Soak(ground, Path(folder), options.seed).run(options.kills)
        seconds = time.monotonic() - start
        print(f"{catalog}: {result}, in {seconds:.0f} s: every promise was kept", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
