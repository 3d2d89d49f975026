"""Three replicas of the inference service behind a real Envoy, and behind the client's own hashing:
adapters stay with their replica, and a replica that is killed takes along only what it had."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadout import Client
from loadout._routing.replicas import rank
from loadout.errors import StreamLost, Unavailable
from loadout.retry import RetryPolicy
from loadout.types import Chunk
from tests.support.deploy.envoy import Envoy, round_robin
from tests.support.deploy.scaling import WOKEN_BY
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.routed import PROMPT, Routed, adapters_of_w4, ask, hit_share, play

NUM_ADAPTERS, NUM_SLOTS = 100, 16
"""Half of W4's, of its adapters and of what a replica holds."""
NUM_ADAPTERS_OF_W4 = 200
NUM_KEYS, NUM_KEYS_OF_CLIENT = 24, 12
LONG_TOKENS = 450
GATEWAY = Path(__file__).parents[2] / "deploy" / "gateway"
VLLM = re.compile(r"vllm:\w+")
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def system(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("routed")
    with Routed(zoos("llama"), folder, max_loras=NUM_SLOTS) as made:
        yield made


@pytest.fixture(scope="module")
def names(system: Routed) -> list[str]:
    return system.register(NUM_ADAPTERS)


@pytest.fixture(scope="module")
def envoy(system: Routed) -> Iterator[Envoy]:
    with Envoy(system.folder / "envoy", list(system.replicas)) as made:
        made.wait_healthy(system.replicas.keys())
        yield made


def test_requests_are_counted_when_there_is_no_replica(tmp_path: Path) -> None:
    """The series that the component keda-scale-to-zero starts a replica by. The caller is told at
    once."""
    series = f'{WOKEN_BY}{{envoy_http_conn_manager_prefix="inference"}}'
    with Envoy(tmp_path / "envoy", ["127.0.0.1:1"]) as made:
        assert made.count(series) == 0
        with (
            Client(inference=made.address, retry=ONCE) as client,
            pytest.raises(StreamLost, match="no healthy upstream"),
        ):
            client.complete(PROMPT, adapter="french", max_tokens=1)
        assert made.count(series) == 1


def test_what_the_gateway_s_picker_reads_is_exported(system: Routed, names: list[str]) -> None:
    play(list(system.replicas), names[:30])
    files = [path for path in GATEWAY.rglob("*") if path.is_file()]
    named = {name for file in files for name in VLLM.findall(file.read_text())}
    assert len(named) >= 4
    for metrics in system.scrapes():
        assert named <= {sample.name for sample in metrics.samples}


@pytest.mark.slow
def test_adapters_stay_with_their_replica_and_are_found_there(
    system: Routed, names: list[str], envoy: Envoy
) -> None:
    check_found_at_home(system, names, envoy, num_warm=60, num_counted=90)


@pytest.mark.long
def test_so_they_do_at_the_size_of_w4(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    with (
        Routed(zoos("llama"), tmp_path) as system,
        Envoy(tmp_path / "envoy", list(system.replicas)) as envoy,
    ):
        envoy.wait_healthy(system.replicas.keys())
        names = system.register(NUM_ADAPTERS_OF_W4)
        check_found_at_home(system, names, envoy, num_warm=200, num_counted=500)


def check_found_at_home(
    system: Routed, names: list[str], envoy: Envoy, num_warm: int, num_counted: int
) -> None:
    replicas = list(system.replicas)
    wanted = adapters_of_w4(names, alpha=1.0, num=num_warm + num_counted)
    with Envoy(system.folder / "round-robin", replicas, round_robin) as plain:
        blind = hit_share(system, plain.address, wanted, num_warm)
        assert share_at_home(plain, len(wanted)) < 0.8

    by_envoy = hit_share(system, envoy.address, wanted, num_warm)
    assert by_envoy >= 1.5 * blind, (by_envoy, blind)
    assert share_at_home(envoy, len(wanted)) >= 0.99
    assert {replica for _, replica in envoy.served()} == set(replicas)

    before = system.generated()
    by_client = hit_share(system, replicas, wanted, num_warm)
    assert by_client >= 1.5 * blind, (by_client, blind)
    expected = Counter(home(replicas, name)[0] for name in wanted)
    assert system.generated() - before == expected, "every one at its first choice"


def share_at_home(envoy: Envoy, num_calls: int) -> float:
    """Returns the share of requests that went where most of their adapter's requests did."""
    envoy.wait(lambda: len(envoy.served()) >= num_calls)
    counts: dict[str, Counter[str]] = {}
    for key, replica in envoy.served():
        counts.setdefault(key, Counter())[replica] += 1
    # An adapter with one request says nothing.
    several = [each for each in counts.values() if each.total() > 1]
    return sum(max(each.values()) for each in several) / sum(each.total() for each in several)


@dataclass
class Running:
    """A long generation that has begun."""

    name: str
    stream: Iterator[Chunk]
    num_tokens: int

    def finish(self) -> bool:
        """False if it was lost."""
        try:
            self.num_tokens += sum(len(chunk.token_ids) for chunk in self.stream)
        except StreamLost:
            return False
        assert self.num_tokens == LONG_TOKENS
        return True


def begin(client: Client, name: str) -> Running:
    stream = client.generate(
        PROMPT, adapter=name, max_tokens=LONG_TOKENS, temperature=0.0, ignore_eos=True
    )
    return Running(name, stream, len(next(stream).token_ids))


def home(replicas: Sequence[str], name: str) -> list[str]:
    return rank(replicas, f"default/{name}")


@pytest.mark.slow
def test_a_hot_adapter_spills_over(system: Routed, names: list[str], envoy: Envoy) -> None:
    hot, replicas = names[0], list(system.replicas)
    with Client(inference=envoy.address) as client:
        start = len(envoy.served())
        running = [begin(client, hot) for _ in range(10)]
        assert all(each.finish() for each in running)
        envoy.wait(lambda: len(envoy.served()) == start + 10)
        counts = Counter(replica for _, replica in envoy.served()[start:])
        assert len(counts) == 2
        assert max(counts.values()) < 10 * 0.75

    first, second, _ = home(replicas, hot)
    with Client(inference=replicas) as busy:
        running = [begin(busy, hot) for _ in range(12)]
        assert load_of(busy) == {first: 8, second: 4}
        # Another client knows of it by what the replicas publish.
        with Client(inference=replicas) as other:
            until(lambda: load_of(other) == {first: 8, second: 4})
            found = begin(other, hot)
            assert load_of(other) == {first: 8, second: 5}
            assert found.finish()
        assert all(each.finish() for each in running)


def load_of(client: Client) -> dict[str, int]:
    """Returns the load of each replica that has any."""
    return {each.address: each.num_requests for each in client.replicas() if each.num_requests}


def keys_at(replica: str, homes: dict[str, str]) -> list[str]:
    """Returns the keys that live there. Up to three streams of each replica stay at home: of more,
    some would spill over, because chance (the ports) gives one replica most of the keys."""
    return [name for name, found in homes.items() if found == replica]


def lose_one(
    system: Routed, client: Client, homes: dict[str, str], placed: Callable[[], dict[str, str]]
) -> None:
    """Kills a replica under running streams: these are lost, and no others, and no later request.
    `placed` sends one with every adapter, and says where they went."""
    dead = homes[next(iter(homes))]
    replicas = [*(system.replicas.keys() - {dead}), dead]  # last: its streams must not end before
    streamed = [name for replica in replicas for name in keys_at(replica, homes)[:3]]
    running = [begin(client, name) for name in streamed]
    lost_names = keys_at(dead, homes)[:3]
    assert 0 < len(lost_names) < len(running)
    system.kill(dead)
    for name in homes:
        ask(client, name)
    assert [each.name for each in running if not each.finish()] == lost_names
    # By now, or soon, all know that it is dead.
    until(lambda: dead not in placed().values())
    found = placed()
    stayed = {name: replica for name, replica in homes.items() if replica != dead}
    assert {name: found[name] for name in stayed} == stayed, "no other key moves"
    assert dead not in found.values()
    system.restart(dead)
    until(lambda: placed() == homes)


@pytest.mark.slow
def test_envoy_moves_only_the_keys_of_a_killed_replica(
    system: Routed, names: list[str], envoy: Envoy
) -> None:
    keys = {f"default/{name}": name for name in names[:NUM_KEYS]}
    # What is asked while a replica is dying must be answered without help of the client.
    with Client(inference=envoy.address, retry=ONCE) as client:

        def placed() -> dict[str, str]:
            start = len(envoy.served())
            for name in keys.values():
                ask(client, name)
            envoy.wait(lambda: keys.keys() <= dict(envoy.served()[start:]).keys())
            found = dict(envoy.served()[start:])
            return {name: found[key] for key, name in keys.items()}

        homes = placed()
        assert placed() == homes
        lose_one(system, client, homes, placed)


@pytest.mark.slow
def test_clients_move_only_the_keys_of_a_killed_replica(system: Routed, names: list[str]) -> None:
    replicas = list(system.replicas)
    keys = names[:NUM_KEYS_OF_CLIENT]
    with Client(inference=replicas) as client:

        def placed() -> dict[str, str]:
            found = {}
            before = system.generated()
            for name in keys:
                ask(client, name)
                after = system.generated()
                [found[name]] = after - before
                before = after
            return found

        homes = placed()
        assert homes == {name: home(replicas, name)[0] for name in keys}
        lose_one(system, client, homes, placed)


# The last two leave less of the system than they found.


@pytest.mark.slow
def test_nobody_behind_envoy_notices_a_drain(
    system: Routed, names: list[str], envoy: Envoy
) -> None:
    keys = names[:NUM_KEYS]
    with Client(inference=envoy.address, retry=ONCE) as client:
        start = len(envoy.served())
        running = [begin(client, name) for name in keys[:9]]
        for name in keys:
            ask(client, name)
        asked = {f"default/{name}" for name in keys}
        envoy.wait(lambda: asked <= dict(envoy.served()[start:]).keys())
        homes = dict(envoy.served()[start:])
        drained = homes[f"default/{keys[0]}"]
        own = [name for name in keys if homes[f"default/{name}"] == drained]
        system.drain(drained)

        def is_sent_on() -> bool:
            """What it refuses goes to another one, until Envoy's health check finds out, which on a
            busy machine may be first."""
            for name in own:
                ask(client, name)
            return drained not in envoy.healthy() or max(envoy.attempts("OK")[start:]) == 2

        until(is_sent_on)
        assert all(each.finish() for each in running), "what runs is finished"
        system.wait_ended(drained)


@pytest.mark.slow
def test_envoy_sends_on_what_was_refused_and_not_what_failed(
    system: Routed, names: list[str], envoy: Envoy
) -> None:
    """Without a store all replicas answer UNAVAILABLE, after a wait if the name is known."""
    system.kill_store()
    # A call that meets the replica that has drained meanwhile may go to another one.
    alive = {address for address, replica in system.replicas.items() if replica.is_alive}
    envoy.wait_healthy(alive)
    start = len(envoy.attempts("Unavailable"))
    with (
        Client(inference=envoy.address, retry=ONCE) as client,
        pytest.raises(Unavailable) as caught,
    ):
        ask(client, "nobody-has-asked-for-this")
    assert caught.value.reason == "STORE_UNAVAILABLE"
    envoy.wait(lambda: len(envoy.attempts("Unavailable")) > start)
    assert envoy.attempts("Unavailable")[start:] == [1]
