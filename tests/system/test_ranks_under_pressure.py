"""Ranks answer as one process does, whatever happens around a request: little memory, prompts in
chunks, common prefixes, more adapters than fit, and cancelled requests."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadout._rpc.stream import Stream
from loadout.errors import InvalidArgument
from loadout.prometheus import scrape
from loadout.types import Chunk
from tests.support.models.zoo import VOCAB, AdapterSpec, Zoo
from tests.support.wait import until
from tests.system.kinds import ADDED, PARTS, SUM, TOKENS, UNSHARED, Kinds, make_kinds
from tests.system.services import Services

NUM_TOKENS = 64
ADAPTERS = ("", "r1", "r3", "r8", "r16", "r33", "embed")
PAGES_BYTES = {"llama": 14 * 4096, **dict.fromkeys(("qwen3", "qwen3-moe"), 14 * 8192)}
PAGES_BYTES["qwen3_5"] = 14 * 4096
"""Of a rank: of 16 tokens each, fewer than two requests have."""
PRESSURE = ("--max-model-len", "160", "--max-sequences", "6", "--max-batch-tokens", "7")
STAGES = ("--pipeline-parallel", "2")
SHARDED = "--fully-sharded-loras"
Ask = tuple[str, list[int]]


@pytest.mark.parametrize(
    ("kind", "count", "more"),
    [
        ("llama", 2, ()),
        pytest.param("llama", 4, (), marks=pytest.mark.long),
        pytest.param("llama", 2, (SHARDED,), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, (), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 4, (), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, ("--expert-parallel", "2"), marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, (), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, (SHARDED,), marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, (SHARDED,), marks=pytest.mark.long),
        ("llama", 1, STAGES),
        pytest.param("llama", 2, STAGES, marks=pytest.mark.long),
        pytest.param("llama", 2, (*STAGES, SHARDED), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 1, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3_5", 1, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, STAGES, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_any_company_leaves_the_tokens_of_ranks(
    kind: str, count: int, more: tuple[str, ...], zoos: Callable[[str], Zoo], tmp_path: Path
) -> None:
    """Greedy in fp32: the tokens are PEFT's."""
    zoo, chosen = zoos(kind), random.Random(count)
    asks: list[Ask] = []
    for name in ADAPTERS:
        prompt = [chosen.randrange(5, 128) for _ in range(40)]
        asks += [(name, prompt), (name, [*prompt, *prompt[:9]])]
    with serve(zoo, tmp_path, ("--tensor-parallel", str(count), *more)) as services:
        for name in filter(None, ADAPTERS):
            services.client.register(name, services.source(name))
        found = answers_of(services, asks, chosen)
    for (name, prompt), tokens in zip(asks, found, strict=True):
        assert tokens == zoo.greedy(name, prompt, NUM_TOKENS, guess=tokens), name
    assert services.exit_codes == [0, 0]


SHAPES: dict[str, tuple[str, ...]] = {
    "TP 2": ("--tensor-parallel", "2"),
    "TP 4": ("--tensor-parallel", "4"),
    "PP 2": STAGES,
    "TP 2 x PP 2": ("--tensor-parallel", "2", *STAGES),
    "TP 2, fully sharded": ("--tensor-parallel", "2", SHARDED),
    "TP 4, fully sharded": ("--tensor-parallel", "4", SHARDED),
    "TP 2 x PP 2, fully sharded": ("--tensor-parallel", "2", *STAGES, SHARDED),
}
EXPERTS = ("--tensor-parallel", "2", "--expert-parallel", "2")
OF_EXPERTS = {
    "EP 2": EXPERTS,
    "EP 2 x PP 2": (*EXPERTS, *STAGES),
    "EP 2, fully sharded": (*EXPERTS, SHARDED),
}
CELLS = [
    *(("qwen3", shape) for shape in SHAPES),
    *(("qwen3_5", shape) for shape in SHAPES if "TP 4" not in shape),  # it has two key heads
    *(("qwen3-moe", shape) for shape in SHAPES | OF_EXPERTS),
]


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kinds", "shape"), CELLS, indirect=["kinds"])
def test_all_kinds_in_any_company(kinds: Kinds, shape: str, tmp_path: Path) -> None:
    """A dense model, a hybrid and a mixture: adapters of every kind that each may have, and a sum
    of two. Greedy in fp32: the tokens are the ones of transformers and PEFT."""
    flags, chosen = (SHAPES | OF_EXPERTS)[shape], random.Random(shape)
    names = [each for each in kinds.names if SHARDED not in flags or each not in UNSHARED]
    asks: list[Ask] = []
    for name in names:
        prompt = kinds.prompt_of(name, [chosen.randrange(20, 128) for _ in range(40)])
        asks += [(name, prompt), (name, [*prompt, *prompt[:9]])]
    more = ("--max-added-tokens", str(len(ADDED)), *flags)
    with serve(kinds, tmp_path, more) as services:
        for name in kinds.adapter_dirs:
            services.client.register(label(name), services.source(name, label(name)))
        found = answers_of(services, asks, chosen)
    for (name, prompt), tokens in zip(asks, found, strict=True):
        expected = kinds.of(name).greedy(name, prompt, NUM_TOKENS, guess=tokens)
        assert tokens == expected, name or "base"
    assert services.exit_codes == [0, 0]


@pytest.mark.parametrize("count", [1, 2])
def test_callers_name_tokens_that_an_adapter_adds(count: int, tmp_path: Path) -> None:
    """In prompts and as ends of answers; tokens of no model are refused by their field."""
    own = [AdapterSpec(TOKENS, 4, ["q_proj"])]
    kinds = make_kinds("llama", tmp_path / "kinds", own=own)
    prompt = kinds.prompt_of(TOKENS, range(20, 40))
    flags = ("--base-model", kinds.kind, "--max-model-len", "160", "--tensor-parallel", str(count))
    flags += ("--max-added-tokens", str(len(ADDED)))
    greedy: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with Services(kinds, tmp_path, inference_flags=flags) as services:
        client = services.client
        client.register("tokens", services.source(TOKENS, "tokens"))
        found = client.complete(prompt, adapter="tokens", stop_token_ids=ADDED[:1], **greedy)
        with pytest.raises(InvalidArgument, match=r"stop_token_ids must be below 130; 130 is no"):
            client.complete(prompt, adapter="tokens", stop_token_ids=[VOCAB + 2], **greedy)
        with pytest.raises(InvalidArgument, match=r"no token 129.* knows 128 tokens"):
            client.complete(prompt, **greedy)
    expected = kinds.of(TOKENS).greedy(TOKENS, prompt, greedy["max_tokens"])
    if ADDED[0] in expected:
        expected = expected[: expected.index(ADDED[0]) + 1]
    assert list(found.token_ids) == expected


def label(name: str) -> str:
    """Returns the name in the store of an adapter of this kind."""
    return re.sub("[^a-z0-9_]", "-", name)


def serve(zoo: Zoo, folder: Path, flags: tuple[str, ...]) -> Services:
    """Returns services whose ranks have little memory, so that requests wait for it."""
    by_name = dict(pairwise(flags))
    count, pages_bytes = int(by_name.get("--tensor-parallel", "1")), PAGES_BYTES[zoo.kind]
    if STAGES[0] in flags:  # one of two has all layers of a hybrid with keys and values
        pages_bytes = pages_bytes * (1 + (zoo.kind == "qwen3_5")) // count
    settings = (
        *("--base-model", zoo.kind, "--max-loras", "2", "--kv-memory", str(pages_bytes)),
        *("--adapter-wait-seconds", "240", *PRESSURE, *flags),
    )
    return Services(zoo, folder, inference_flags=settings)


def answers_of(services: Services, asks: list[Ask], chosen: random.Random) -> list[list[int]]:
    """Asks all at once, and others that leave: before they run, while they wait for their adapter,
    within their prompt, or after some tokens. Returns the answers, once all have ended, requests
    were preempted, and adapters and prefixes evicted and found again.

    The engine is paused until all are in the queue and the first has left it: a busy machine may
    end each before the next comes."""
    chosen.shuffle(asks)
    left = [
        (ask, chosen.choice([0, 0, 1, 9]), chosen.choice([0.0, 0.1, 1.0, 3.0]))
        for ask in chosen.sample(asks, len(asks) // 2)
    ]
    services.client.pause()
    with ThreadPoolExecutor(len(asks) + len(left)) as threads:
        answers = [threads.submit(answer, services, ask, NUM_TOKENS) for ask in asks]
        until(lambda: num_waiting(services) == len(asks))
        with stream(services, asks[0]):
            until(lambda: num_waiting(services) > len(asks))
        until(lambda: num_waiting(services) == len(asks))
        services.client.resume()
        leaving = [threads.submit(answer, services, *one) for one in left]
        for each in leaving:
            each.result(600)
        found = [each.result(600) for each in answers]
    for _ in range(2):  # the second finds the first one's pages
        assert answer(services, asks[0], NUM_TOKENS) == found[0]
    check_ends(services, len(asks) + 2, [0, *(num_tokens for _, num_tokens, _ in left)])
    metrics = scrape(services.inference_metrics)
    for name in ("preemptions", "tier_evictions", "cached_prompt_tokens"):
        assert metrics.sum(f"loadout_inference_{name}_total") > 0, name
    return found


def num_waiting(services: Services) -> int:
    """Returns the number of requests in the queue."""
    return int(scrape(services.inference_metrics).one("loadout_inference_requests_waiting"))


def check_ends(services: Services, num_whole: int, left: list[int]) -> None:
    """Each request is counted by its end; one whose client left as cancelled, unless the client was
    late. A server may never hear of one that was left before its first token."""
    num_cancelled = 0.0

    def all_ended() -> bool:
        nonlocal num_cancelled
        metrics, name = scrape(services.inference_metrics), "loadout_inference_requests_total"
        num_cancelled = metrics.sum(name, finish_reason="cancelled")
        num_late = metrics.sum(name, finish_reason="length") - num_whole
        assert metrics.sum(name) == num_whole + num_late + num_cancelled, "no other end"
        return num_late >= 0 and sum(map(bool, left)) <= num_late + num_cancelled <= len(left)

    until(all_ended)
    assert num_cancelled > 0


def answer(services: Services, ask: Ask, num_tokens: int, wait_s: float = 0.0) -> list[int]:
    """Returns the first tokens of an answer, of which no more are wanted then. If none are, leaves
    after so long."""
    found: list[int] = []
    with stream(services, ask) as chunks:
        if not num_tokens:
            time.sleep(wait_s)
        for chunk in chunks if num_tokens else ():
            found += chunk.token_ids
            if len(found) >= num_tokens:
                break
    return found


def stream(services: Services, ask: Ask) -> Stream[Chunk]:
    name, prompt = ask
    is_sum = name == SUM
    return services.client.generate(
        prompt,
        adapter="" if is_sum else label(name),
        adapters=PARTS if is_sum else (),
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
