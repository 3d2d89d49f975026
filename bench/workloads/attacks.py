"""Measures `GetAdapter` and `Generate` of one tenant during attacks of another tenant, or of a
caller without a token.

    python -m bench.workloads.attacks [--only NAME ...] [--window 8] [--rounds 3]
        [--checkout FOLDER] [--out FILE]

Both services run as processes under a policy. A tenant calls `GetAdapter` every ten milliseconds,
and four of its requests decode with its own adapter throughout. The attacker is a separate process
at the lowest priority, because its own computation is not the services' work. Quiet and attacked
windows take turns, and `Generate`'s rate is compared with the quiet windows before and after.

A tenant may use its part of the machine. For an attack by costly requests, the comparison is
therefore with as many plain requests of that tenant instead of a quiet machine, and the longest
wait for a first token counts too. The attacker that only computes shows the cost of its processor
time where two threads share a core.

Memory is the rise of each service's peak above its memory when the attack began, the worst of the
rounds. Processors are the services' use beyond the quiet window before. With --checkout, the
services run from another commit with the same flags, which gives the earlier cost of an attack.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.models import RANK, Prepared, arena_bytes, prepare, prompts
from bench.results import FOLDER, median, percentile, show, write
from bench.workloads.attackers import (
    ATTACKER,
    ATTACKERS,
    COSTLY,
    MODEL,
    PLAIN,
    SERVER,
    STRANGERS,
    Target,
)
from loadout import Client
from loadout.demo.process import Process
from loadout.types import ImageState
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.machine.peak_memory import grown_mib
from tests.support.servers.dripping import DrippingServer

VICTIM = "victim"
TOKENS = (
    ROOT,
    token_lines(VICTIM, ["reader", "publisher", "caller"], ["team-v"]),
    token_lines(ATTACKER, ["reader", "publisher", "caller"], ["team-x"]),
    token_lines(SERVER, ["server"], ["team-x"]),
    token_lines("inference", ["server"], ["*"]),
)
NUM_GENERATING, NUM_IN, NUM_OUT = 4, 32, 64
GET_PAUSE_S = 0.01
ASK_PAUSE_S = 0.1
SETTLE_S = 1.0
READY_S, GRACE_S = 120.0, 45.0
MAX_GET_P99_S, MIN_RATE = 0.1, 0.9
MAX_STRANGER_MIB = 50
MAX_FIRST_S = 2.0
"""Maximum additional wait for a first token, with costly requests instead of plain ones: 0.25 s
until another request gives up its place, and some steps."""


@dataclass(frozen=True, slots=True)
class Window:
    """A tenant's observations in a window."""

    get_p99_s: float
    get_longest_s: float
    tokens_per_s: float
    first_longest_s: float


class Tenant:
    """Calls the services throughout; `observe` returns its observations of the next seconds."""

    def __init__(self, store: str, inference: str, vocab: int) -> None:
        token = token_of(VICTIM)
        self._client = Client(store=store, inference=inference, token=token, timeout_s=None)
        self._prompt = prompts(1, NUM_IN, vocab)[0]
        self._over = threading.Event()
        self._gets: list[float] = []
        self._num_tokens = 0
        self._waits_since: float | None = None  # for a first token
        self._first: list[float] = []
        self._threads = [
            threading.Thread(target=self._get),
            threading.Thread(target=self._ask),
            *(threading.Thread(target=self._generate) for _ in range(NUM_GENERATING)),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def observe(self, seconds: float) -> Window:
        num_gets, num_tokens, start_s = len(self._gets), self._num_tokens, time.monotonic()
        num_first = len(self._first)
        time.sleep(seconds)
        now_s = time.monotonic()
        elapsed_s = now_s - start_s
        gets = self._gets[num_gets:] or [elapsed_s]
        rate = (self._num_tokens - num_tokens) / elapsed_s
        since_s = self._waits_since
        still_waiting = [] if since_s is None else [now_s - since_s]
        # The pause between two requests is short and has no observation.
        first = max([*self._first[num_first:], *still_waiting], default=ASK_PAUSE_S)
        return Window(percentile(gets, 99), max(gets), rate, first)

    def _get(self) -> None:
        while not self._over.wait(GET_PAUSE_S):
            start_s = time.monotonic()
            self._client.get("team-v/mine")
            self._gets.append(time.monotonic() - start_s)

    def _ask(self) -> None:
        """Sends short requests to measure the time to a first token."""
        while not self._over.wait(ASK_PAUSE_S):
            self._waits_since = start_s = time.monotonic()
            self._client.complete(self._prompt[:4], adapter="team-v/mine", max_tokens=1)
            self._first.append(time.monotonic() - start_s)
            self._waits_since = None

    def _generate(self) -> None:
        while not self._over.is_set():
            for chunk in self._client.generate(
                self._prompt, adapter="team-v/mine", max_tokens=NUM_OUT, ignore_eos=True
            ):
                self._num_tokens += len(chunk.token_ids)


class Attacked:
    """Both services, with one adapter of each tenant."""

    def __init__(
        self, prepared: Prepared, folder: Path, dripping: DrippingServer, checkout: Path
    ) -> None:
        self._checkout = checkout
        policy = write_policy(folder, *TOKENS)
        token_file = folder / "token"
        token_file.write_text(token_of("inference"))
        common = ["--policy-file", str(policy), "--log-level", "error"]
        self._processes: dict[str, Process] = {}
        store = self._start(
            "store",
            folder,
            [
                *("adapter_store", *common, "--data-dir", str(folder / "data")),
                *("--source-roots", str(prepared.model_dir.parent)),
                *("--s3-buckets", "bucket", "--s3-endpoint-url", dripping.url),
            ],
        )
        inference = self._start(
            "inference",
            folder,
            [
                *("inference_svc", *common, "--http", "127.0.0.1:0", "--store", store["grpc"]),
                *("--model", str(prepared.model_dir), "--base-model", MODEL),
                *("--store-token-file", str(token_file), "--num-threads", "1"),
                *("--max-model-len", "2048", "--max-loras", "4", "--kv-memory", str(1 << 30)),
                *("--max-rank", str(RANK), "--adapter-memory", str(arena_bytes(prepared.name, 4))),
            ],
        )
        digest, layout_id = self._register(store["grpc"], prepared)
        self.target = Target(
            store["grpc"],
            inference["grpc"],
            inference["http"],
            digest,
            layout_id,
            str(prepared.model_dir),
            str(prepared.adapters["1"]),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._processes.values()):
            failure = process.failure_of(process.stop(GRACE_S))
            if failure is not None:
                raise failure

    @contextmanager
    def grown_mib(self) -> Iterator[dict[str, float]]:
        """Yields a dictionary that gets the rise of each service's peak within the context."""
        grown: dict[str, float] = {}
        with ExitStack() as stack:
            rising = {
                name: stack.enter_context(grown_mib(process.pid))
                for name, process in self._processes.items()
            }
            yield grown
        grown.update({name: each[0] for name, each in rising.items()})

    def processor_s(self) -> dict[str, float]:
        """Returns the processor time of each service so far, including its living children."""
        return {
            name: sum(_processor_s(each) for each in [process.pid, *_children(process.pid)])
            for name, process in self._processes.items()
        }

    def _start(self, name: str, folder: Path, flags: Sequence[str]) -> dict[str, str]:
        ready = folder / f"{name}.json"
        free = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
        environment = ["AWS_ACCESS_KEY_ID=k", "AWS_SECRET_ACCESS_KEY=s"]
        there = ["env", "-C", str(self._checkout), *environment]
        command = [*there, sys.executable, "-m", *flags, *free, "--ready-file", str(ready)]
        self._processes[name] = Process(name, command, folder, ready)
        return self._processes[name].wait_ready(READY_S)

    @staticmethod
    def _register(store: str, prepared: Prepared) -> tuple[str, str]:
        """Registers the tenants' adapters, and returns the digest and layout id for the attacker's
        pulls."""
        with Client(store=store, token=token_of("root")) as client:
            for name, adapter in (("team-v/mine", "0"), ("team-x/theirs", "1")):
                client.register(name, f"file://{prepared.adapters[adapter]}")
            while True:
                found = client.get("team-x/theirs")
                if found.layout_states and found.layout_states[0].state is ImageState.READY:
                    return found.digest, found.layout_states[0].layout_id
                time.sleep(0.05)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended in between
            found += map(int, (task / "children").read_text().split())
    return found


@contextmanager
def attacking(name: str, target: Target) -> Iterator[None]:
    """Runs an attacker at the lowest priority until the context ends."""
    command = ["nice", "-n", "19", sys.executable, "-m", "bench.workloads.attackers", name]
    arguments = json.dumps(dataclasses.asdict(target))
    process = subprocess.Popen([*command, arguments], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        if name in COSTLY or name.startswith(PLAIN):
            time.sleep(SETTLE_S)  # until its requests have begun
        yield
        assert process.poll() is None, f"{name} ended by itself"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def measure(name: str, attacked: Attacked, tenant: Tenant, seconds: float) -> dict[str, float]:
    """Measures an attack between two quiet windows, or a costly one between two windows with plain
    requests."""
    with _plain(name, attacked.target):
        start_s = attacked.processor_s()
        before = tenant.observe(seconds / 2)
        before_s = attacked.processor_s()
    with attacked.grown_mib() as grown, attacking(name, attacked.target):
        time.sleep(SETTLE_S)
        settled_s = attacked.processor_s()
        during = tenant.observe(seconds)
        during_s = attacked.processor_s()
    time.sleep(SETTLE_S)
    with _plain(name, attacked.target):
        after = tenant.observe(seconds / 2)
    quiet = (before.tokens_per_s + after.tokens_per_s) / 2
    return {
        "quiet_get_p99_s": max(before.get_p99_s, after.get_p99_s),
        "get_p99_s": during.get_p99_s,
        "get_longest_s": during.get_longest_s,
        "tokens_per_s": during.tokens_per_s,
        "rate": during.tokens_per_s / quiet,
        "first_longest_s": during.first_longest_s,
        "more_first_s": during.first_longest_s - max(before.first_longest_s, after.first_longest_s),
        **{f"{service}_grown_mib": each for service, each in grown.items()},
        **{
            f"{service}_more_processors": (during_s[service] - settled_s[service]) / seconds
            - (before_s[service] - start_s[service]) / (seconds / 2)
            for service in grown
        },
    }


def _plain(name: str, target: Target) -> AbstractContextManager[None]:
    """Returns a context in which a costly attack's plain requests already run."""
    return attacking(f"{PLAIN}{name}", target) if name in COSTLY else nullcontext()


def summarize(name: str, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns medians (of memory the maximum), and whether the limits hold."""
    found: dict[str, Any] = {
        key: (max if key.endswith("_mib") else median)([each[key] for each in rounds])
        for key in rounds[0]
    }
    found["rounds"] = list(rounds)
    grown = max(found["store_grown_mib"], found["inference_grown_mib"])
    found["holds"] = (
        found["get_p99_s"] <= MAX_GET_P99_S
        and found["rate"] >= MIN_RATE
        and (name not in STRANGERS or grown <= MAX_STRANGER_MIB)
        and (name not in COSTLY or found["more_first_s"] <= MAX_FIRST_S)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ATTACKERS, default=list(ATTACKERS))
    parser.add_argument("--window", type=float, default=8.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkout", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=FOLDER / "attacks.json")
    args = parser.parse_args()
    prepared = prepare(MODEL, 2)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.only}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        dripping = DrippingServer()
        stack.callback(dripping.close)
        attacked = stack.enter_context(Attacked(prepared, folder, dripping, args.checkout))
        target = attacked.target
        tenant = stack.enter_context(Tenant(target.store, target.inference, prepared.vocab))
        tenant.observe(SETTLE_S)  # until the adapter is loaded
        for _ in range(args.rounds):
            for name in args.only:
                rounds[name].append(measure(name, attacked, tenant, args.window))
                print(name, rounds[name][-1], flush=True)
    result = {name: summarize(name, each) for name, each in rounds.items()}
    columns = (
        *("get_p99_s", "rate", "first_longest_s", "store_grown_mib", "inference_grown_mib"),
        *("store_more_processors", "inference_more_processors", "holds"),
    )
    show(
        f"attacks, medians of {args.rounds} rounds",
        (
            *("attack", "GetAdapter p99, s", "Generate's rate", "first token, s"),
            *("store, MiB", "inference, MiB"),
            *("store, processors", "inference, processors", "holds"),
        ),
        [(name, *(each[key] for key in columns)) for name, each in result.items()],
    )
    write(args.out, "attacks", {"attacks": result})


if __name__ == "__main__":
    main()
