"""Services that are killed and ended while they work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadout import Client, errors
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.services import GRACE_S, Services

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [ord(char) for char in "some prompt"]


@pytest.fixture(scope="module")
def system(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    """For the tests in their order: each leaves it whole, but the last, which ends it."""
    with Services(zoos("llama"), tmp_path_factory.mktemp("faults")) as made:
        yield made


def complete(services: Services, adapter: str, tokens: int = 8) -> list[int]:
    done = services.client.complete(PROMPT, adapter=adapter, max_tokens=tokens, **GREEDY)
    return list(done.token_ids)


def try_to_complete(services: Services, adapter: str) -> list[int] | None:
    """Returns None while the adapter's store is not found again."""
    try:
        return complete(services, adapter)
    except (errors.Unavailable, errors.StreamLost):
        return None


def register_all(services: Services) -> dict[str, str]:
    zoo = services.zoo
    return {
        name: services.client.register(name, services.source(name)).adapter.digest
        for name in zoo.adapter_dirs
    }


def test_the_store_is_killed_while_adapters_are_pulled(system: Services) -> None:
    """Resident adapters and the base go on; others end UNAVAILABLE in time, or succeed if the
    store is back; after the restart the catalog is whole."""
    services = system
    digests = register_all(services)
    zoo = services.zoo
    for name in ("r1", "r16"):
        assert complete(services, name) == zoo.greedy(name, PROMPT, 8)

    with ThreadPoolExecutor(8) as pool:
        pulling = [pool.submit(complete, services, name) for name in ("r3", "r8")]
        services.kill_store()
        began = time.monotonic()
        waiting = pool.submit(complete, services, "r64")
        assert complete(services, "") == zoo.greedy("", PROMPT, 8)
        assert complete(services, "r16") == zoo.greedy("r16", PROMPT, 8)
        with pytest.raises(errors.Unavailable):
            waiting.result()
        assert time.monotonic() - began < 60
        for name, future in zip(("r3", "r8"), pulling, strict=True):
            error = future.exception()
            if error is None:
                assert future.result() == zoo.greedy(name, PROMPT, 8)
            else:
                assert isinstance(error, errors.Unavailable)

        late = pool.submit(complete, services, "r33")
        until(lambda: services.num_waiting() or late.done())
        services.start_store()
        with Client(store=services.store_address) as client:
            assert {a.name.split("/")[1]: a.digest for a in client.list()} == digests
        if late.exception() is None:  # in time or not, it was answered; now it must work
            assert late.result() == zoo.greedy("r33", PROMPT, 8)
    for name in ("r33", "r64"):
        found = until(lambda name=name: try_to_complete(services, name), 120, "never recovered")
        assert found == zoo.greedy(name, PROMPT, 8, guess=found)


def test_sigterm_of_the_store_under_load(system: Services) -> None:
    """Registrations in progress end properly: what was answered is there after a restart."""
    services = system
    answered: dict[str, str] = {}
    stop = threading.Event()

    def work(worker: int) -> None:
        for number in range(1000):
            name = f"w{worker}-{number}"
            try:
                done = services.client.register(name, services.zoo.adapter_dirs["r16"])
            except (errors.Unavailable, errors.StreamLost):
                return
            answered[name] = done.adapter.digest
            if stop.is_set():
                return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(answered) >= 4)
    assert services.store.stop(GRACE_S) == 0
    stop.set()
    for thread in threads:
        thread.join(60)
    assert answered
    services.start_store()
    with Client(store=services.store_address) as client:
        found = {a.name.split("/")[1]: a.digest for a in client.list()}
    assert answered.items() <= found.items()


def test_sigterm_finishes_what_was_accepted(system: Services) -> None:
    """Under load every accepted request ends properly, later ones are refused, exit 0."""
    services = system
    register_all(services)
    started = threading.Barrier(13)
    outcomes: list[list[int]] = []

    def run(index: int) -> None:
        chunks = iter(services.client.generate(PROMPT, adapter="r16", max_tokens=120, **GREEDY))
        tokens = list(next(chunks).token_ids)
        started.wait(60)
        outcomes.append(tokens + [token for chunk in chunks for token in chunk.token_ids])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    started.wait(60)
    os.kill(services.inference.pid, signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    expected = services.zoo.greedy("r16", PROMPT, 120, guess=outcomes[0])
    assert outcomes == [expected] * 12
    assert services.inference.stop(GRACE_S) == 0
    with pytest.raises((errors.Unavailable, errors.StreamLost)):
        services.client.complete(PROMPT, max_tokens=1, timeout_s=5.0)
    services.check_exit_codes()


def test_a_pull_succeeds_if_the_store_is_back_in_time(
    zoos: Callable[[str], Zoo], tmp_path: Path
) -> None:
    """The name was known; the adapter's bytes were not here yet."""
    patient = ("--adapter-wait-seconds", "60")
    with Services(zoos("llama"), tmp_path, inference_flags=patient) as services:
        client = services.client
        client.register("r16", services.source("r16"))
        client.complete(PROMPT, adapter="r16", max_tokens=1, **GREEDY)
        client.unload("r16")
        services.kill_store()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.complete, PROMPT, adapter="r16", max_tokens=8, **GREEDY)
            until(services.num_waiting)
            assert not waiting.done()
            services.start_store()
            assert list(waiting.result().token_ids) == services.zoo.greedy("r16", PROMPT, 8)
        services.check_exit_codes()
