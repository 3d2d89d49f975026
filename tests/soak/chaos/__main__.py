"""Chaos: store, engine and front are killed and stopped at random under eight tenants' work.

    python -m tests.soak.chaos --seconds 600 [--catalog sqlite|postgresql] [--seed N]

Both services run as processes under a policy; over PostgreSQL the store has two replicas that share
an S3 bucket. kill -9 and SIGSTOP, with SIGCONT after a random time, hit the store, the front and
the engine's process; whatever ends is started again at its address, as Kubernetes does. Each tenant
registers, pushes, rolls back and deletes, and asks over gRPC and HTTP. In the end every answer has
had the tokens of its digest, as transformers computes them; everything acknowledged is in the
catalog's history, and nothing that nobody asked for; no answer was older than the revision asked
for, nor than what a second without a fault must have shown; and calls have failed only in ways that
are documented. The seed is printed: with it, the same faults and calls are drawn again, though not
how processes take turns.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadout import Client
from loadout.types import EventKind
from tests.soak.chaos.adapters import NAME, RANK, Known, make_known
from tests.soak.chaos.ledger import Event, Verdict, judge, without_fault
from tests.soak.chaos.pods import Faults, InferencePod, Pod, StorePod
from tests.soak.chaos.tenants import (
    BY_GRPC,
    BY_HTTP,
    EPHEMERAL,
    NUM_TENANTS,
    Book,
    Reader,
    Where,
    Writer,
)
from tests.soak.shared_ground import SharedGround
from tests.soak.storage import Ground, SqliteGround
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.wait import until

NUM_CONTENTS = 24
JOIN_S = 60.0
CALM_S = 120.0
SHOWN = 10
GROUNDS: dict[str, Callable[[], Ground]] = {"sqlite": SqliteGround, "postgresql": SharedGround}
ANYWHERE = {"listen": "127.0.0.1:0", "metrics-listen": "127.0.0.1:0", "log-level": "warning"}
STORE = ANYWHERE | {"collect-seconds": 0.5, "compile-workers": 1}
INFERENCE = ANYWHERE | {
    "http": "127.0.0.1:0",
    "base-model": NAME,
    "dtype": "float32",
    "num-threads": 1,
    "max-model-len": 128,
    "max-loras": 8,
    "max-rank": RANK,
    "kv-memory": "16MiB",
    "adapter-memory": "1MiB",
}


class Chaos:
    """One run over `ground`, its files under `folder`, with `num_contents` different adapters.
    `is_forked`: the inference service is a fork, as the stores are."""

    def __init__(
        self,
        ground: Ground,
        folder: Path,
        seed: int,
        num_contents: int = NUM_CONTENTS,
        *,
        is_forked: bool = False,
    ) -> None:
        self._ground, self._folder, self._seed = ground, folder, seed
        self._is_forked = is_forked
        self._tenants = [f"team-{number}" for number in range(NUM_TENANTS)]
        self.book = Book()
        self._known: Known = make_known(folder, num_contents)
        self._failures: list[str] = []
        policy = write_policy(
            folder,
            ROOT,
            token_lines("inference", ["server"], ["*"]),
            *(
                token_lines(tenant, ["reader", "publisher", "caller"], [tenant])
                for tenant in self._tenants
            ),
        )
        self._common = {"policy-file": policy}
        self.stores = [self._store(index) for index in range(ground.num_replicas)]
        for pod in self.stores:
            pod.start()
        for pod in self.stores:
            pod.wait_ready()
        self.inference = self._inference()
        self.inference.start()
        self.inference.wait_ready()
        self.pods: list[Pod] = [*self.stores, self.inference]
        self.faults = Faults([*self.stores, *[self.inference] * 2], seed, self._has_failed)

    def run(self, seconds: float) -> Verdict:
        """Raises AssertionError for a process that ends by itself or an end that does not come."""
        threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in self._works()
        ]
        for thread in threads:
            thread.start()
        try:
            self.faults.run(seconds)
        finally:
            self.book.is_over.set()
        for thread in threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), f"{thread.name} hangs"
        assert not self._failures, "\n".join(self._failures)
        self._ask_for_all()
        histories = [self._events(pod) for pod in self.stores]
        assert histories[1:] in ([], histories[:1]), "the replicas' histories differ"
        verdict = judge(
            histories[0],
            self.book.written,
            self.book.answers,
            self.faults.times(),
            [f"{tenant}/{EPHEMERAL}" for tenant in self._tenants] if len(self.stores) == 1 else [],
        )
        self._check_current(verdict, histories[0])
        self.book.unexpected += without_fault(self.book.failed, self.faults.times())
        for pod in reversed(self.pods):
            pod.stop()
        return verdict

    def close(self) -> None:
        """Kills whatever still runs."""
        for pod in self.pods:
            for target in pod.targets:
                pod.kill(target)

    def summary(self, verdict: Verdict) -> str:
        """Returns what was done and found, a line each."""
        lines = [
            f"{what}: {count}"
            for counts in (self.faults.counts, verdict.counts, self.book.errors)
            for what, count in sorted(counts.items())
        ]
        lines += [f"starts of {pod.name}: {pod.num_starts}" for pod in self.pods]
        for what, found in (
            ("lost", verdict.lost),
            ("stale", verdict.stale),
            ("wrong", verdict.wrong),
            ("errors of other kinds", self.book.unexpected),
        ):
            lines += [f"{what}: {len(found)}", *(f"  {line}" for line in found[:SHOWN])]
        return "\n".join(lines)

    def _works(self) -> list[tuple[str, Callable[[], None]]]:
        known = self._known.by_digest()
        works: list[tuple[str, Callable[[], None]]] = []
        for tenant in self._tenants:
            writer = Writer(tenant, self._where, self._known.contents, self._seed, self.book)
            works.append((f"{tenant} writes", writer.run))
            for by in (BY_GRPC, BY_HTTP):
                reader = Reader(tenant, by, self._where, known, self._seed, self.book)
                works.append((f"{tenant} asks over {by}", reader.run))
        return works

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._failures.append(f"{threading.current_thread().name}: {traceback.format_exc()}")

    def _has_failed(self) -> bool:
        return bool(self._failures)

    def _ask_for_all(self) -> None:
        """Each name once more, now that nothing is broken: all get an answer."""
        known = self._known.by_digest()
        for name in sorted(self.book.known):
            tenant = name.partition("/")[0]
            for by in (BY_GRPC, BY_HTTP):
                reader = Reader(tenant, by, self._where, known, self._seed + 1, self.book)
                self._ask_until_answered(reader, name)
                reader.close()

    def _ask_until_answered(self, reader: Reader, name: str) -> None:
        until(
            lambda: reader.ask(name, needs_revision=True),
            CALM_S,
            lambda: f"{name} has no answer: {self.book.errors}",
        )

    def _events(self, pod: Pod) -> list[Event]:
        """Returns the whole history."""
        with self._root(pod) as client:
            newest = client.store_status().revision
            found: list[Event] = []
            while len(found) < newest:
                for event in client.watch(len(found), timeout_s=CALM_S):
                    if event.kind is not EventKind.BOOKMARK:
                        digest = event.digest if event.version else ""
                        found.append(Event(event.revision, event.name, event.version, digest))
                    if event.revision >= newest:
                        break
        return found

    def _check_current(self, verdict: Verdict, events: list[Event]) -> None:
        """Each name is what its last event says, at each replica."""
        last = {event.name: event for event in events}
        for pod in self.stores:
            with self._root(pod) as client:
                listed = {each.name: each for each in client.list()}
                for name, event in last.items():
                    found = listed.get(name)
                    if (found.version if found else 0) != event.version:
                        verdict.lost.append(f"{pod.name}: {name} is {found}, after {event}")

    def _root(self, pod: Pod) -> Client:
        return Client(store=pod.addresses["grpc"], token=token_of("root"), timeout_s=CALM_S)

    @property
    def _where(self) -> Where:
        stores = [pod.addresses["grpc"] for pod in self.stores]
        return Where(stores, self.inference.addresses["grpc"], self.inference.addresses["http"])

    def _store(self, index: int) -> StorePod:
        name = f"store-{index}"
        own: dict[str, Any] = self._ground.settings(index, self._folder / name / "data")
        settings = STORE | self._common | {"source-roots": self._folder / "sources"}
        settings |= {key.replace("_", "-"): value for key, value in own.items()}
        return StorePod(name, self._folder / name, settings)

    def _inference(self) -> InferencePod:
        token_file = self._folder / "token"
        token_file.write_text(token_of("inference"))
        addresses = ",".join(pod.addresses["grpc"] for pod in self.stores)
        settings = INFERENCE | self._common | {"store": addresses}
        settings |= {"model": self._known.model_dir, "store-token-file": token_file}
        folder = self._folder / "inference"
        return InferencePod("inference", folder, settings, is_forked=self._is_forked)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--catalog", choices=sorted(GROUNDS), default="sqlite")
    parser.add_argument("--folder", type=Path, help="keep files here (default: a temporary folder)")
    parser.add_argument("--contents", type=int, default=NUM_CONTENTS, help="different adapters")
    parser.add_argument(
        "--forked", action="store_true", help="the inference service starts at once, as a fork"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loadout-chaos-") as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        with GROUNDS[options.catalog]() as ground:
            chaos = Chaos(ground, folder, options.seed, options.contents, is_forked=options.forked)
            try:
                verdict = chaos.run(options.seconds)
            finally:
                chaos.close()
    print(chaos.summary(verdict))
    is_good = verdict.is_good and not chaos.book.unexpected
    said = "nothing was lost, stale or wrong" if is_good else "PROMISES WERE BROKEN"
    print(f"{options.catalog}, in {time.monotonic() - start_s:.0f} s: {said}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
