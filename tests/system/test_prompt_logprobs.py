"""Log probabilities of prompts: those of transformers and peft, however the prompt is computed.

For every family of models: test_parity."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
import torch

from inference_svc.backends.native import program as native_program
from inference_svc.results.logprobs import PackedLogprobs, packed_token_bytes
from loadout import types
from loadout.errors import InvalidArgument
from loadout.prometheus import scrape
from tests.support.machine.peak_memory import grown_mib
from tests.support.models.parity import prompts
from tests.support.models.zoo import Zoo, make_model
from tests.support.pairs import PATHS
from tests.system.prompt_scores import ask, check, scores
from tests.system.services import Services

BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
ADAPTER = "r16"
PAGE_SIZE = 16
PROMPT = prompts(5, seed=3)[4]
"""300 tokens."""


CHUNKS = (1, PAGE_SIZE, 100, len(PROMPT) - 1, len(PROMPT), 512)
QUICK_TORCH = (PAGE_SIZE, 512)


@pytest.mark.parametrize(
    ("chunk", "native"),
    [
        pytest.param(chunk, native, marks=marks, id=f"{chunk}-{path}")
        for path, native in PATHS.items()
        for chunk in CHUNKS
        for marks in [() if native or chunk in QUICK_TORCH else pytest.mark.long]
    ],
)
def test_chunks_and_prefixes_change_nothing(
    zoos: Callable[[str], Zoo], start: Callable, chunk: int, native: bool
) -> None:
    compare(zoos("llama"), start, max_prefill_chunk=chunk, native_kernels=native)


@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.long)])
def test_stages_score_as_one_process(
    zoos: Callable[[str], Zoo], start: Callable, native: bool
) -> None:
    settings = {"max_prefill_chunk": 100, "pipeline_parallel": 2, "native_kernels": native}
    compare(zoos("llama"), start, **settings)


def compare(zoo: Zoo, start: Callable, **settings: Any) -> None:
    running = start(zoo, max_model_len=512, max_sequences=7, **settings)
    expected = zoo.logits(ADAPTER, PROMPT, torch.float32)
    running.submit("before", PROMPT, ADAPTER, max_tokens=1)
    running.result("before")
    ask(running, "scored", PROMPT, ADAPTER, prompt_logprobs=3, max_tokens=2)
    check(scores(running, "scored"), PROMPT, expected, 3)
    tokens, last = running.result("scored")
    assert last.usage.cached_prompt_tokens == 0
    assert len(tokens) == 2
    # Its pages are others' to share.
    running.submit("after", PROMPT, ADAPTER, max_tokens=2)
    assert running.result("after")[0] == tokens
    assert running.result("after")[1].usage.cached_prompt_tokens == (len(PROMPT) - 1) // 16 * 16
    running.check_idle()


@BACKENDS
def test_preempted_requests_score_each_token_once(
    zoos: Callable[[str], Zoo], start: Callable, native: bool
) -> None:
    zoo, count = zoos("llama"), 60
    page_bytes = 2 * 2 * 2 * 32 * 16 * 4
    running = start(
        zoo, max_model_len=128, native_kernels=native, max_prefill_chunk=8, kv_bytes=12 * page_bytes
    )
    asked = [prompt[:60] for prompt in prompts(6, seed=7) if len(prompt) > 1]
    with running.together():
        for index, prompt in enumerate(asked):
            ask(running, str(index), prompt, max_tokens=count, prompt_logprobs=index)
    for index, prompt in enumerate(asked):
        check(scores(running, str(index)), prompt, zoo.logits("", prompt, torch.float32), index)
    assert running.engine.built.engine.scheduler.num_preemptions > 0
    running.check_idle()


@BACKENDS
def test_long_prompts_with_many_take_what_is_returned(
    tmp_path: Path, start: Callable, native: bool
) -> None:
    """Of a vocabulary that has more than are returned. The logits of the prompt, and what is found
    of them, are never there at once."""
    vocab_size, num_tokens, top_k = 2048, 3000, 1024
    lengths = {"vocab_size": vocab_size, "max_position_embeddings": num_tokens + 1}
    model = make_model("llama", tmp_path, **lengths)
    running = start(
        *(Zoo("llama", tmp_path, None, {}),),
        max_model_len=num_tokens + 1,
        max_batch_tokens=num_tokens,
        max_prefill_chunk=num_tokens,
        native_kernels=native,
    )
    prompt = np.random.default_rng(0).integers(3, vocab_size, num_tokens).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    running.submit("before", prompt[::-1], max_tokens=1)
    running.result("before")
    with grown_mib(os.getpid()) as grown:
        ask(running, "scored", prompt, prompt_logprobs=top_k)
        running.result("scored")
    returned_mib = num_tokens * packed_token_bytes(top_k) / 2**20
    logits_mib = num_tokens * vocab_size * 4 / 2**20
    assert grown[0] < returned_mib + logits_mib
    check(scores(running, "scored"), prompt, expected, top_k)


@pytest.fixture(scope="module")
def serving(zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Both services with an adapter, and a client of HTTP."""
    flags = ("--http", "127.0.0.1:0", "--max-batch-tokens", "40", "--max-sequences", "8")
    with Services(
        zoos("llama"), tmp_path_factory.mktemp("scores"), inference_flags=flags
    ) as services:
        services.client.register(ADAPTER, str(services.zoo.adapter_dirs[ADAPTER]))
        ready = json.loads((services.folder / "inference.json").read_text())
        with httpx2.Client(base_url=f"http://{ready['http']}", timeout=60) as http:
            yield Serving(services, http)
        services.check_exit_codes()


class Serving(NamedTuple):
    services: Services
    http: httpx2.Client

    def post(self, **fields: Any) -> Any:
        answer = self.http.post("/v1/completions", json={"model": ADAPTER, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()


SHORT = PROMPT[:120]
"""Three chunks."""


def arrays(packed: types.PackedLogprobs | None) -> PackedLogprobs:
    assert packed is not None
    return PackedLogprobs(
        packed.first_position,
        *(np.asarray(each) for each in (packed.token_ids, packed.logprobs, packed.ranks)),
        *(np.asarray(each) for each in (packed.top_token_ids, packed.top_logprobs)),
    )


@pytest.mark.parametrize("adapter", ["", ADAPTER])
def test_over_grpc(serving: Serving, adapter: str) -> None:
    """With all of the vocabulary, in parts; with a prefix that is cached, and with echo."""
    client, zoo = serving.services.client, serving.services.zoo
    expected = zoo.logits(adapter, SHORT, torch.float32)
    for _ in range(2):
        done = client.complete(SHORT, adapter=adapter, max_tokens=0, prompt_logprobs=1024)
        check(arrays(done.prompt_logprobs), SHORT, expected, 1024)
        assert (done.token_ids, done.text) == ((), "")
        assert done.finish_reason is types.FinishReason.LENGTH
        assert done.usage == types.Usage(len(SHORT), 0, 0)
    options: Any = {"adapter": adapter, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    plain = client.complete(SHORT, logprobs=4, **options)
    echoed = client.complete(SHORT, echo=True, logprobs=4, packed_logprobs=True, **options)
    assert echoed.token_ids == (*SHORT, *plain.token_ids)
    assert echoed.versions == plain.versions
    assert [count for _, count in plain.versions] == ([3] if adapter else [])
    assert echoed.text.endswith(plain.text)
    assert len(echoed.text) > len(plain.text)
    check(arrays(echoed.prompt_logprobs), SHORT, expected, 4)
    packed = arrays(echoed.packed_logprobs)
    assert packed.first_position == 0
    assert packed.token_ids.tolist() == list(plain.token_ids)
    assert packed.ranks.tolist() == [1, 1, 1]
    for own, top_ids, top, wanted in zip(
        *(packed.logprobs, packed.top_ids, packed.top_logprobs, plain.logprobs), strict=True
    ):
        assert abs(own - wanted.chosen.logprob) < 1e-5
        assert top_ids.tolist() == [each.token_id for each in wanted.top]
        assert np.abs(top - [each.logprob for each in wanted.top]).max() < 1e-5


def test_over_http(serving: Serving) -> None:
    expected = serving.services.zoo.logits(ADAPTER, SHORT, torch.float32).log_softmax(-1)[:-1]
    own = expected.gather(1, torch.tensor(SHORT[1:])[:, None])[:, 0]
    answer = serving.post(prompt=SHORT, max_tokens=0, prompt_logprobs=2)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    first, *scored = choice["prompt_logprobs"]
    assert first is None
    assert len(scored) == len(SHORT) - 1
    for token, entries, row, value in zip(SHORT[1:], scored, expected, own, strict=True):
        assert abs(entries[str(token)]["logprob"] - value) < 1e-4
        best = next(entry for entry in entries.values() if entry["rank"] == 1)
        assert abs(best["logprob"] - row.max()) < 1e-4
        assert set(best) == {"logprob", "rank", "decoded_token"}
    for count in (0, 1):
        for stream in (False, True):
            check_echo(serving, own.tolist(), count, stream=stream)


def check_echo(serving: Serving, own: list[float], count: int, *, stream: bool) -> None:
    fields = {"prompt": SHORT, "max_tokens": count, "echo": True, "logprobs": 1, "stream": stream}
    if stream:
        sent = serving.http.post("/v1/completions", json={"model": ADAPTER, **fields})
        chunks = [json.loads(line[6:]) for line in sent.text.split("\n\n") if line[6:7] == "{"]
        pieces = [chunk["choices"][0] for chunk in chunks]
    else:
        pieces = serving.post(**fields)["choices"]
    found: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in (piece["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["text_offset"][0] == 0
    assert {len(values) for values in found.values()} == {len(SHORT) + count}
    scored = found["token_logprobs"][1 : len(SHORT)]
    assert np.abs(np.array(scored) - own).max() < 1e-4
    for value, top in zip(scored, found["top_logprobs"][1:], strict=False):
        assert max(top.values()) >= value


def test_chats_are_scored(serving: Serving) -> None:
    messages = [{"role": "user", "content": "a b"}]
    fields = {"model": ADAPTER, "messages": messages, "max_completion_tokens": 0}
    answer = serving.http.post("/v1/chat/completions", json={**fields, "prompt_logprobs": 0})
    assert answer.status_code == 200, answer.text
    scores = answer.json()["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == answer.json()["usage"]["prompt_tokens"]


def test_bad_requests_are_refused_by_name(serving: Serving) -> None:
    client = serving.services.client
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt_logprobs": 1025}, "sampling.prompt_logprobs"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"logprobs": 1025, "packed_logprobs": True}, "sampling.logprobs"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "sampling.max_tokens"),
        ({"logprobs_mode": "cooked"}, "sampling.logprobs_mode"),
        ({"n": 129}, "n"),
    ]
    for fields, subject in refused:
        with pytest.raises(InvalidArgument) as caught:
            list(client.generate(SHORT, **fields))
        assert caught.value.subject == subject
    too_many = {"prompt": [SHORT] * 3, "max_tokens": 1, "prompt_logprobs": 1024}
    answer = serving.http.post("/v1/completions", json={"model": ADAPTER, **too_many})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


def test_several_answers_compute_the_prompt_once(serving: Serving) -> None:
    """Each answer is that of a request of its own with its seed."""
    client, services = serving.services.client, serving.services
    options: Any = {"adapter": ADAPTER, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    prompt = prompts(13, seed=11)[12][:100]
    before = computed_tokens(services)
    answers = client.sample(prompt, 5, seed=7, prompt_logprobs=0, logprobs=1, **options)
    last_page = len(prompt) - (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    assert computed_tokens(services) - before == len(prompt) + 4 * last_page
    assert [answer.usage.prompt_tokens for answer in answers] == [len(prompt), 0, 0, 0, 0]
    assert [answer.prompt_logprobs is None for answer in answers] == [False] + 4 * [True]
    for index, answer in enumerate(answers):
        alone = client.complete(prompt, seed=7 + index, logprobs=1, **options)
        assert answer.token_ids == alone.token_ids
        assert answer.text == alone.text
    assert len({answer.token_ids for answer in answers}) > 1


def computed_tokens(services: Services) -> float:
    """Returns how many tokens of prompts were not in the prefix cache."""
    metrics = scrape(services.inference_metrics)
    names = ("prompt_tokens", "cached_prompt_tokens")
    prompt, cached = (metrics.one(f"loadout_inference_{name}_total") for name in names)
    return prompt - cached


@pytest.mark.parametrize("kind", ["llama", "hunyuan"])
def test_where_there_are_too_many_programs(
    zoos: Callable[[str], Zoo], start: Callable, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then those of all groups compute the layers and the head, of adapters alone."""
    monkeypatch.setattr(native_program, "MAX_PROGRAMS", 0)
    zoo, running = zoos(kind), start(kind, max_model_len=512)
    names = ["", *running.digests]
    asked = [prompt for prompt in prompts(len(names) + 1, seed=3) if len(prompt) > 1]
    for name, prompt in zip(names, asked, strict=False):
        ask(running, name, prompt, name)
        check(scores(running, name), prompt, zoo.logits(name, prompt, torch.float32))
