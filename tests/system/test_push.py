"""A trainer's pushes to two replicas: from its memory to tokens under the name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from safetensors.torch import load_file

from loadout import AsyncClient, Client
from loadout.errors import InvalidArgument, NotFound, NotLoaded
from loadout.retry import RetryPolicy
from loadout.types import FinishReason
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.routed import PROMPT, Routed

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def system(zoos: Callable[[str], Zoo], tmp_path) -> Iterator[Routed]:
    with Routed(zoos("llama"), tmp_path, num_replicas=2) as made:
        yield made


@pytest.fixture
def trainer(system: Routed) -> Iterator[Client]:
    with Client(list(system.replicas), system.store_address) as client:
        yield client


@pytest.fixture
def adapter(zoos: Callable[[str], Zoo]):
    """Returns tensors and config of the zoo's adapter, with one value of its own for each step."""
    folder = zoos("llama").adapter_dirs["r16"]
    tensors = load_file(folder / "adapter_model.safetensors")
    config = (folder / "adapter_config.json").read_text()

    def make(step: int):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed[min(changed)].view(-1)[0] = step / 64
        return changed, config

    return make


def digest_at(address: str) -> str:
    """Returns the digest that a request for the plain name gets at one replica."""
    with Client(address, retry=ONCE) as client:
        done = client.complete(PROMPT, adapter="live", max_tokens=1, temperature=0.0)
    assert done.adapter is not None
    return done.adapter.digest


def test_every_replica_samples_from_what_was_pushed(system, trainer, adapter) -> None:
    revision = 0
    for step in range(6):
        pushed = trainer.push(
            "live", *adapter(step), wait="all", keep=2, base_model="llama", ephemeral=step % 2 == 0
        )
        assert {each.address for each in pushed.replicas} == set(system.replicas)
        assert (pushed.name, pushed.version) == ("default/live", step + 1)
        assert pushed.revision > revision
        revision = pushed.revision
        for address in system.replicas:
            assert digest_at(address) == pushed.digest


def test_what_a_request_uses_stays_while_newer_ones_are_pushed(system, trainer, adapter) -> None:
    """areal-project/AReaL#1193: twenty versions, of which two are kept; an answer that has begun
    ends with its own, however many come meanwhile."""
    first = trainer.push("live", *adapter(0), wait="all", base_model="llama", keep=2)
    begun = []
    for step in range(1, 21):
        stream = trainer.generate(PROMPT, adapter="live", max_tokens=200, ignore_eos=True)
        begun.append((next(stream), stream))
        trainer.push("live", *adapter(step), wait="all", keep=2)
    digests = []
    for chunk, stream in begun:
        chunks = [chunk, *stream]
        assert sum(len(chunk.token_ids) for chunk in chunks) >= 190
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        digests.append(chunk.adapter.digest)
    assert digests[0] == first.digest
    assert len(set(digests)) == 20


def test_a_replica_that_is_down_is_not_waited_for(system, trainer, adapter) -> None:
    down, up = system.replicas
    system.kill(down)
    pushed = trainer.push("live", *adapter(0), wait="all", base_model="llama")
    assert [each.address for each in pushed.replicas] == [up]
    assert list(pushed.skipped) == [down]
    assert digest_at(up) == pushed.digest
    system.kill(up)
    with pytest.raises(NotLoaded, match=r"live@2 \(sha256:.*\) is recorded") as caught:
        trainer.push("live", *adapter(1), wait="any")
    assert caught.value.reason == "NO_REPLICA"
    assert trainer.get("live").version == 2


def test_a_replica_that_cannot_load_it_is_named(system, trainer, adapter) -> None:
    """Of a rank above the servers' limit."""
    tensors, config = adapter(0)
    wide = {
        name: tensor.repeat(10, 1) if "lora_A" in name else tensor.repeat(1, 10)
        for name, tensor in tensors.items()
    }
    with pytest.raises(NotLoaded, match="rank 160") as caught:
        trainer.push(
            "live", wide, config.replace('"r": 16', '"r": 160'), wait="all", base_model="llama"
        )
    assert caught.value.subject in system.replicas
    assert trainer.get("live").rank == 160


def test_any_returns_with_the_first_and_all_have_it_soon(system, adapter) -> None:
    async def push():
        addresses = list(system.replicas)
        async with AsyncClient(addresses, system.store_address) as trainer:
            pushed = await trainer.push("live", *adapter(0), wait="any", base_model="llama")
            assert pushed.replicas
            for address in addresses:
                async with AsyncClient(address) as client:
                    while not any(
                        each.digest == pushed.digest for each in await client.residents()
                    ):
                        await asyncio.sleep(0.01)
            return pushed

    pushed = asyncio.run(push())
    assert {digest_at(address) for address in system.replicas} == {pushed.digest}


def test_a_time_to_live_ends_the_name(system, trainer, adapter) -> None:
    pushed = trainer.push("live", *adapter(0), wait="all", ttl=1, base_model="llama")
    assert pushed.registration.adapter.expire_time is not None

    def is_gone() -> bool:
        try:
            trainer.get("live")
        except NotFound:
            return True
        return False

    until(is_gone)


def test_what_cannot_be_sent_is_refused_before_it_is(trainer, adapter) -> None:
    tensors, config = adapter(0)
    with pytest.raises(InvalidArgument, match="wait"):
        trainer.push("live", tensors, config, wait="some")
    del tensors[min(tensors)]
    with pytest.raises(InvalidArgument, match="a shard is missing"):
        trainer.push("live", tensors, config)
    with pytest.raises(NotFound):
        trainer.get("live")
