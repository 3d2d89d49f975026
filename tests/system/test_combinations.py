"""Requests that run with a sum of adapters, against PEFT's `add_weighted_adapter`."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inference_svc.core import MAX_PARTS, Part, Sum
from inference_svc.errors import AdapterUnusable, NoRoom
from inference_svc.results.logprobs import TokenLogprobs
from loadout import errors
from tests.support.inference.results import parts_of
from tests.support.models.zoo import SPECS, VOCAB, Zoo, make_zoo, quiet
from tests.system.engines import Running
from tests.system.services import Services

NUM_GREEDY = 64
SUMS: dict[str, tuple[tuple[str, float], ...]] = {
    "one": (("r16", 0.5),),
    "two": (("r1", 1.0), ("r16", 1.0)),
    "three": (("r33", 0.75), ("r3", 0.5), ("r64", 0.25)),
    "with an embedding": (("embed", 1.0), ("r8", 1.5)),
    "all": tuple((spec.name, 0.4) for spec in SPECS),
}
PATHS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Of its own: PEFT adds the sums to the model."""
    specs = [replace(spec, options={}) if spec.name == "r8" else spec for spec in SPECS]
    made = make_zoo("llama", tmp_path_factory.mktemp("sums"), specs)  # PEFT adds no part of a layer
    for name, parts in SUMS.items():
        adapters, weights = zip(*parts, strict=True)
        with quiet():
            made.reference.add_weighted_adapter(
                list(adapters), list(weights), f"sum {name}", combination_type="cat"
            )
    return made


def digest_of(running: Running, parts: tuple[tuple[str, float], ...]) -> Sum:
    return Sum(tuple(Part(running.digests[name], scale) for name, scale in parts))


def prompt_of(index: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(3, VOCAB, ((7, 33, 1, 18, 80)[index % 5],), generator=generator).tolist()


@PATHS
def test_sums_have_pefts_greedy_tokens(zoo: Zoo, start: Callable, *, native: bool) -> None:
    """In one batch with the base model, each adapter alone, and twice the same sum."""
    running = start(zoo, native_kernels=native, max_prefill_chunk=24)
    asked = [(f"sum {name}", digest_of(running, parts)) for name, parts in SUMS.items()]
    asked += [("sum two", asked[1][1]), ("", ""), *running.digests.items()]
    for index, (_, digest) in enumerate(asked):
        running.submit(str(index), prompt_of(index), digest)
    for index, (name, _) in enumerate(asked):
        tokens, last = running.result(str(index))
        assert last.error is None, last.error
        assert tokens == zoo.greedy(name, prompt_of(index), NUM_GREEDY, guess=tokens), (index, name)
    running.check_idle()


@PATHS
def test_a_sum_alone(zoo: Zoo, start: Callable, *, native: bool) -> None:
    running = start(zoo, native_kernels=native)
    running.submit("a", prompt_of(1), digest_of(running, SUMS["three"]))
    tokens, _ = running.result("a")
    assert tokens == zoo.greedy("sum three", prompt_of(1), NUM_GREEDY, guess=tokens)


@PATHS
def test_bf16_sums_are_computed(zoo: Zoo, start: Callable, *, native: bool) -> None:
    """A first token's probabilities are near those in fp32."""
    tops = []
    for dtype in ("float32", "bfloat16"):
        running = start(zoo, native_kernels=native, dtype=dtype)
        digest = digest_of(running, SUMS["three"])
        running.submit("a", prompt_of(1), digest, max_tokens=1, logprobs=20)
        running.result("a")
        found = parts_of(running.outputs["a"], TokenLogprobs)
        tops.append({i: p for each in found for i, p in each.top})
    shared = tops[0].keys() & tops[1].keys()
    assert len(shared) >= 15
    assert max(abs(tops[0][i] - tops[1][i]) for i in shared) < 0.15


def test_a_sum_shares_prefixes_with_none_but_its_like(zoo: Zoo, start: Callable) -> None:
    running = start(zoo)
    one, other = (("r1", 1.0), ("r3", 1.0)), (("r3", 1.0), ("r1", 1.0))
    cached = []
    for index, parts in enumerate((one, other, (("r1", 1.0), ("r3", 2.0)), one)):
        running.submit(str(index), prompt_of(1), digest_of(running, parts), max_tokens=1)
        cached.append(running.result(str(index))[1].usage.cached_prompt_tokens)
    assert cached == [0, 0, 0, 32]


def test_sums_that_never_fit_are_refused(zoo: Zoo, start: Callable) -> None:
    running = start(zoo, max_loras=2, max_lora_rank=64)
    digest = digest_of(running, SUMS["three"])
    running.submit("a", [5], digest)
    error = running.result("a")[1].error
    assert isinstance(error, NoRoom)
    assert "the 3 adapters of the request do not fit" in str(error)
    running.check_idle()


def test_a_part_that_cannot_be_loaded_ends_the_request(zoo: Zoo, start: Callable) -> None:
    running = start(zoo, max_lora_rank=16)
    parts = (("r3", 1.0), ("r64", 1.0))
    running.submit("a", [5], digest_of(running, parts))
    error = running.result("a")[1].error
    assert isinstance(error, AdapterUnusable)
    assert running.digests["r64"] in str(error)
    running.check_idle()


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.long)])
def test_random_sums_under_pressure_all_end(zoo: Zoo, start: Callable, count: int) -> None:
    """More adapters than rows, and requests that need up to all of the rows, single ones between
    them, cancelled and not: each ends, none with an error, and nothing is left. Where none can run
    because each waits for rows that others wait for, the oldest takes them once it is aged: they
    waited for a minute."""
    running = start(
        zoo, max_loras=4, max_lora_rank=64, fair_ageing_s=0.2, adapter_wait_s=60.0, kv_bytes=1 << 20
    )
    chosen, names = random.Random(0), list(running.digests)
    for index in range(count):
        parts = tuple(
            (name, chosen.choice((0.5, 1.0))) for name in chosen.sample(names, chosen.randint(1, 4))
        )
        digest = digest_of(running, parts) if len(parts) > 1 else running.digests[parts[0][0]]
        running.submit(str(index), prompt_of(index), digest, max_tokens=chosen.randint(1, 12))
        if chosen.random() < 0.15:
            running.cancel(str(chosen.randint(0, index)))
    for index in range(count):
        running.until(lambda index=index: running.is_done(str(index)), 30)
        assert running.result(str(index))[1].error is None, index
    running.check_idle()


def test_digests_of_sums_tell_them_apart() -> None:
    parts = tuple(Part(f"sha256:{index:064x}", 0.1 * index) for index in range(MAX_PARTS))
    assert Sum(parts) != Sum(parts[::-1])
    assert Sum(parts) != Sum(parts[:-1])
    assert str(Sum((Part("sha256:a", 0.5), Part("sha256:b")))) == (
        "sum:sha256:a*0x1.0000000000000p-1 + sha256:b*0x1.0000000000000p+0"
    )


def registered(services: Services, zoo: Zoo, *names: str) -> None:
    for name in names:
        folder = services.sources / f"sum-{name}"
        if not folder.exists():
            shutil.copytree(zoo.adapter_dirs[name], folder)
            services.client.register(f"sum-{name}", f"file://{folder}")


def test_both_services_sum_adapters(zoo: Zoo, services: Services) -> None:
    """From the references to the response, which names what they resolved to."""
    registered(services, zoo, "r33", "r3", "r64")
    parts = [(f"sum-{name}", scale) for name, scale in SUMS["three"]]
    greedy = {"max_tokens": NUM_GREEDY, "temperature": 0.0, "ignore_eos": True}
    done = services.client.complete(prompt_of(1), adapters=parts, **greedy)
    assert list(done.token_ids) == zoo.greedy(
        "sum three", prompt_of(1), NUM_GREEDY, guess=done.token_ids
    )
    assert done.adapter is None
    found = [(each.name, each.scale) for each in done.adapters]
    assert found == [(f"default/{name}@1", scale) for name, scale in parts]
    assert all(each.digest.startswith("sha256:") for each in done.adapters)


@pytest.mark.parametrize(
    ("adapters", "kind", "message"),
    [
        (["sum-r3", "gone"], errors.NotFound, "gone"),
        (["sum-r3", "other/r3"], errors.NotFound, "other/r3"),
        (["sum-r3", "sum-r3"], errors.InvalidArgument, "adapters[1].ref must be another"),
        (["sum-r3", "sum-r3@1"], errors.InvalidArgument, "are the same adapter: name it once"),
        (["sum-r3", ""], errors.InvalidArgument, "adapters[1].ref must be an adapter's"),
        ([("sum-r3", float("nan"))], errors.InvalidArgument, "adapters[0].scale must be"),
        ([("sum-r3", 101.0)], errors.InvalidArgument, "from -100 to 100"),
        ([f"a{i}" for i in range(9)], errors.InvalidArgument, "at most 8"),
    ],
    ids=str,
)
def test_invalid_sums_are_refused_by_name(
    zoo: Zoo,
    services: Services,
    adapters: Any,
    kind: type[errors.LoadoutError],
    message: str,
) -> None:
    registered(services, zoo, "r3")
    with pytest.raises(kind) as caught:
        services.client.complete([5], adapters=adapters, max_tokens=1)
    assert message in str(caught.value)


def test_one_adapter_or_several(zoo: Zoo, services: Services) -> None:
    registered(services, zoo, "r3")
    with pytest.raises(errors.InvalidArgument, match="adapters must be empty"):
        services.client.complete([5], adapter="sum-r3", adapters=["sum-r3"], max_tokens=1)
