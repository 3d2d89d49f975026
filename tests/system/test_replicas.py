"""An inference service over three store replicas, of which some die, freeze and come back."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from loadout import Client
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.replicated import Replicated, replicated

PROMPT = [ord(char) for char in "some prompt"]
TOKENS = 4


@pytest.fixture
def system(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicated]:
    with replicated(zoos("llama"), tmp_path_factory.mktemp("replicated")) as made:
        yield made


def check(system: Replicated, name: str) -> None:
    """The adapter computes what the oracle says."""
    done = system.client.complete(
        PROMPT, adapter=name, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
    )
    assert list(done.token_ids) == system.zoo.greedy(name, PROMPT, TOKENS, guess=done.token_ids)


def test_replicas_share_the_pulls_and_stand_in_for_each_other(system: Replicated) -> None:
    names = list(system.zoo.adapter_dirs)
    digests = {
        name: system.client.register(name, system.source(name)).adapter.digest for name in names
    }
    counted = Counter(system.pulls())

    def pull_all() -> dict[str, int]:
        """Whole pulls by replica, of one pull of each adapter."""
        nonlocal counted
        for name in names:
            check(system, name)
            system.client.unload(name)
        before, counted = counted, Counter(system.pulls())
        return dict(+(counted - before))

    home = {name: system.order(digest)[0] for name, digest in digests.items()}
    assert pull_all() == Counter(home.values()), "each from the replica that its digest says"

    victim = home[names[0]]
    system.kill_store(victim)
    moved = {
        name: system.order(digests[name])[1] if home[name] == victim else home[name]
        for name in names
    }
    assert pull_all() == Counter(moved.values()), "only the dead one's adapters move"
    until(lambda: healthy(system, victim) == 0)

    system.restart_store(victim)
    until(lambda: healthy(system, victim) == 1)
    assert pull_all() == Counter(home.values()), "and they move back"

    frozen = home[names[-1]]
    system.signal(frozen, signal.SIGSTOP)
    began_s = time.monotonic()
    check(system, names[-1])
    assert time.monotonic() - began_s < 20, "a machine that is silent costs a bounded delay"
    system.signal(frozen, signal.SIGCONT)
    until(lambda: healthy(system, frozen) == 1)

    other = next(address for address in system.stores if address not in (victim, frozen))
    with Client(store=other) as client:
        client.register("late", system.zoo.adapter_dirs[names[0]])
    done = system.client.complete(PROMPT, adapter="late", max_tokens=TOKENS, temperature=0.0)
    assert done.adapter.name == "default/late@1"


def healthy(system: Replicated, address: str) -> float:
    return system.metrics().one("loadout_inference_store_replicas_healthy", replica=address)
