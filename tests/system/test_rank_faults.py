"""Ranks that are killed or stopped under load, again and again: nothing hangs, every request is
answered, and the server serves after its next start."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest

from loadout import Client, errors
from loadout.prometheus import scrape
from tests.support.forks import engine_of
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.services import Services

NUM_REQUESTS = 6
FLAGS = (
    *("--base-model", "llama", "--max-model-len", "240", "--adapter-wait-seconds", "60"),
    *("--step-timeout-seconds", "45"),
)
RUNNING = "loadout_inference_requests_running"
END_S = {signal.SIGKILL: 20.0, signal.SIGSTOP: 90.0}
"""How soon all requests are answered, and all processes gone."""
SERVE_S = 120.0
"""How soon the next start answers a request with an adapter."""


def processes(services: Services, num_ranks: int) -> list[psutil.Process]:
    """Returns the engine's process, which is rank 0, and the ones of the other ranks."""
    text = services.inference.log_path.read_text()
    found = [psutil.Process(int(pid)) for pid in re.findall(r"rank \d+ is process (\d+)", text)]
    others = found[1 - num_ranks :]  # since the last start
    return [psutil.Process(engine_of(services.inference.pid)), *others]


def shared_files(process: str = "[0-9]*") -> set[tuple[int, int]]:
    """Returns the files in memory through which ranks exchange that a process, or any, has open."""
    found = set()
    for path in Path("/proc").glob(f"{process}/fd/*"):
        with suppress(OSError):  # it has ended
            if os.readlink(path).startswith("/memfd:loadout-ranks"):
                file = path.stat()
                found.add((file.st_dev, file.st_ino))
    return found


def ask_until_it_fails(services: Services, adapter: str) -> str:
    """Asks again and again; returns the error of the request that is not complete, or that nobody
    listens for it any more. A server that ends cancels answers that take it longer than a moment,
    as on a busy machine."""
    try:
        while True:
            ask(services, adapter)
    except (errors.Unavailable, errors.StreamLost, errors.Cancelled) as error:
        return str(error)


def ask(services: Services, adapter: str) -> None:
    chunks = services.client.generate(
        [5, 6, 7], adapter=adapter, max_tokens=200, ignore_eos=True, temperature=0.0
    )
    assert sum(len(chunk.token_ids) for chunk in chunks) == 200


def check_fault(services: Services, fault: signal.Signals, index: int, num_ranks: int) -> None:
    """Has a rank end or hang while all work; returns when none is left, and no shared memory."""
    ranks = processes(services, num_ranks)
    victim, shared = ranks[index], shared_files(str(ranks[index].pid))
    assert len(shared) == 1
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        names = ["", "r3", "r16"] * (NUM_REQUESTS // 3)
        answers = [threads.submit(ask_until_it_fails, services, name) for name in names]
        until(lambda: scrape(services.inference_metrics).one(RUNNING) > 1)
        os.kill(victim.pid, fault)
        found = [each.result(END_S[fault]) for each in answers]
    if index > 0:
        how = "was ended by SIGKILL" if fault == signal.SIGKILL else "does not answer"
        assert any(f"rank {index} {how}" in each for each in found), found
    _, alive = psutil.wait_procs(ranks, END_S[fault])
    assert not alive
    until(lambda: not services.inference.is_alive, END_S[signal.SIGSTOP])
    assert not shared & shared_files()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("count", "num_stages", "num_kills"),
    [(2, 1, 2), (1, 2, 2), (2, 2, 1)],
    ids=["ranks", "stages", "ranks of stages"],
)
def test_faults_of_each_rank(
    count: int,
    num_stages: int,
    num_kills: int,
    zoos: Callable[[str], Zoo],
    tmp_path: Path,
) -> None:
    """Twenty in all: each rank is stopped once, and killed once or twice."""
    num_ranks = count * num_stages
    shape = "--tensor-parallel", str(count), "--pipeline-parallel", str(num_stages)
    faults = [*[signal.SIGKILL] * num_kills, signal.SIGSTOP]
    with Services(zoos("llama"), tmp_path, inference_flags=(*FLAGS, *shape)) as services:
        for name in ("r3", "r16"):
            services.client.register(name, services.source(name))
        for fault, index in product(faults, range(num_ranks)):
            began_s = time.monotonic()
            check_fault(services, fault, index, num_ranks)
            ended_s = time.monotonic()
            services.start_inference()
            services.client.close()
            services.client = Client(services.inference_address, services.store_address)
            ask(services, "r3")
            end_s, serve_s = ended_s - began_s, time.monotonic() - ended_s
            what = f"{fault.name} of rank {index} of {num_ranks}"
            print(f"{what}: ended after {end_s:.1f} s, served {serve_s:.1f} s later")
            assert serve_s < SERVE_S
