"""Ranks that are killed or stopped under load, again and again: nothing hangs, every request is
answered, and the server serves after its next start."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from loadout import Client, errors
from loadout.prometheus import scrape
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.services import Services

NUM_RANKS, NUM_REQUESTS = 2, 6
FLAGS = ("--base-model", "llama")
SHAPES = (("--tensor-parallel", "2"), ("--pipeline-parallel", "2"))
RUNNING = "loadout_inference_requests_running"
FAULTS = [signal.SIGKILL] * 16 + [signal.SIGSTOP] * 4
END_S = {signal.SIGKILL: 20.0, signal.SIGSTOP: 60.0}
"""How soon all requests are answered, and all processes gone."""


def processes(services: Services) -> list[psutil.Process]:
    """Returns the engine's process, which is rank 0, and the ones of the other ranks."""
    text = services.inference.log_path.read_text()
    found = [psutil.Process(int(pid)) for pid in re.findall(r"rank \d+ is process (\d+)", text)]
    others = found[1 - NUM_RANKS :]  # since the last start
    return [psutil.Process(others[0].ppid()), *others]


def ask_until_it_fails(services: Services, adapter: str) -> str:
    """Asks again and again; returns the error of the request that is not complete, or that nobody
    listens for it any more."""
    try:
        while True:
            ask(services, adapter)
    except (errors.Unavailable, errors.StreamLost) as error:
        return str(error)


def ask(services: Services, adapter: str) -> None:
    chunks = services.client.generate(
        [5, 6, 7], adapter=adapter, max_tokens=200, ignore_eos=True, temperature=0.0
    )
    assert sum(len(chunk.token_ids) for chunk in chunks) == 200


def check_fault(services: Services, fault: signal.Signals, chosen: random.Random) -> None:
    """Has a rank end or hang while all work; returns when none is left."""
    ranks = processes(services)
    victim = chosen.choice(ranks if fault == signal.SIGKILL else ranks[1:])
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        names = ["", "r3", "r16"] * (NUM_REQUESTS // 3)
        answers = [threads.submit(ask_until_it_fails, services, name) for name in names]
        until(lambda: scrape(services.inference_metrics).one(RUNNING) > 1)
        os.kill(victim.pid, fault)
        found = [each.result(END_S[fault]) for each in answers]
    if victim.pid != ranks[0].pid:
        how = "was ended by SIGKILL" if fault == signal.SIGKILL else "does not answer"
        assert any(f"rank {ranks.index(victim)} {how}" in each for each in found), found
    _, alive = psutil.wait_procs(ranks, END_S[fault])
    assert not alive
    until(lambda: not services.inference.is_alive, 30)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_faults_of_ranks(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    """Ranks of one stage, and stages, take turns."""
    chosen, shapes = random.Random(0), cycle(SHAPES)
    flags = (*FLAGS, "--max-model-len", "240", "--adapter-wait-seconds", "60")
    with Services(zoos("llama"), tmp_path, inference_flags=(*flags, *next(shapes))) as services:
        for name in ("r3", "r16"):
            services.client.register(name, services.source(name))
        for fault in chosen.sample(FAULTS, len(FAULTS)):
            began_s = time.monotonic()
            check_fault(services, fault, chosen)
            ended_s = time.monotonic()
            services.inference_flags = (*flags, *next(shapes))
            services.start_inference()
            services.client.close()
            services.client = Client(services.inference_address, services.store_address)
            ask(services, "r3")
            took_s = ended_s - began_s, time.monotonic() - ended_s
            print("{}: ended after {:.1f} s, served {:.1f} s later".format(fault.name, *took_s))
