"""Generate through both real services: the oracle's tokens, streamed, for any mix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from loadout import errors, types
from tests.system.services import Services

GREEDY = {"temperature": 0.0, "ignore_eos": True}
TEXT = "the quick brown fox"


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


@pytest.fixture(scope="module")
def registered(services: Services) -> dict[str, types.Registration]:
    """Every adapter of the zoo: half from a folder of the store's, half uploaded."""
    made = {}
    for index, name in enumerate(services.zoo.adapter_dirs):
        source = services.source(name) if index % 2 else services.zoo.adapter_dirs[name]
        made[name] = services.client.register(name, source)
    return made


def test_mix_matches_the_oracle(
    services: Services, registered: dict[str, types.Registration]
) -> None:
    names = ["", *registered]

    def run(name: str) -> list[int]:
        revision = registered[name].revision if name else 0
        chunks = services.client.generate(
            ids(TEXT), adapter=name, min_revision=revision, max_tokens=32, **GREEDY
        )
        return [token for chunk in chunks for token in chunk.token_ids]

    with ThreadPoolExecutor(len(names)) as pool:
        for name, tokens in zip(names, pool.map(run, names), strict=True):
            assert tokens == services.zoo.greedy(name, ids(TEXT), 32, guess=tokens), name or "base"


def test_last_response_has_usage_and_timings(
    services: Services, registered: dict[str, types.Registration]
) -> None:
    done = services.client.complete(TEXT, adapter="default/r16@1", max_tokens=5, **GREEDY)
    assert done.finish_reason is types.FinishReason.LENGTH
    assert done.usage == types.Usage(len(TEXT), 16, 5)  # the mix before left a page
    assert done.adapter == types.AdapterIdentity("default/r16@1", registered["r16"].adapter.digest)
    assert done.timings.first_token_seconds > 0
    assert len(done.text) == 5


def test_text_and_token_ids_are_the_same_prompt(services: Services) -> None:
    by_text = services.client.complete(TEXT, max_tokens=8, **GREEDY)
    by_ids = services.client.complete(ids(TEXT), max_tokens=8, **GREEDY)
    assert by_text.token_ids == by_ids.token_ids


def test_stop_string_across_tokens_ends_the_text(services: Services) -> None:
    whole = services.client.complete(TEXT, max_tokens=40, **GREEDY).text
    stop = whole[17:20]
    first = whole.index(stop)
    done = services.client.complete(TEXT, max_tokens=40, stop=[stop], **GREEDY)
    assert done.text == whole[:first]
    assert done.finish_reason is types.FinishReason.STOP


def test_logprobs_match_the_oracle(services: Services) -> None:
    import torch

    done = services.client.complete(TEXT, max_tokens=3, logprobs=2, **GREEDY)
    logits = services.zoo.logits("", ids(TEXT) + list(done.token_ids), torch.float32)
    expected = logits.log_softmax(-1)[len(TEXT) - 1 :]
    for index, found in enumerate(done.logprobs):
        assert found.chosen.token_id == done.token_ids[index]
        assert found.chosen.logprob == pytest.approx(
            expected[index, found.chosen.token_id].item(), abs=1e-4
        )
        assert found.top[0] == found.chosen
        assert len(found.top) == 2


def test_adapter_by_digest(services: Services, registered: dict[str, types.Registration]) -> None:
    digest = registered["r16"].adapter.digest
    by_digest = services.client.complete(TEXT, adapter=digest, max_tokens=8, **GREEDY)
    by_name = services.client.complete(TEXT, adapter="r16", max_tokens=8, **GREEDY)
    assert by_digest.token_ids == by_name.token_ids
    assert by_digest.adapter.digest == digest


@pytest.mark.parametrize(
    ("request_fields", "kind", "subject"),
    [
        ({"adapter": "nobody"}, errors.NotFound, ""),
        ({"adapter": "Bad Name"}, errors.InvalidArgument, "adapter"),
        ({"adapter": "r16@9"}, errors.NotFound, ""),
        ({"adapter": "other/r16"}, errors.NotFound, ""),
        ({"top_p": 1.5}, errors.InvalidArgument, "sampling.top_p"),
        ({"temperature": -1.0}, errors.InvalidArgument, "sampling.temperature"),
        ({"logprobs": 99}, errors.InvalidArgument, "sampling.logprobs"),
    ],
)
def test_unservable_adapters_are_refused(
    services: Services,
    registered: dict[str, types.Registration],
    request_fields: dict,
    kind: type[errors.LoadoutError],
    subject: str,
) -> None:
    with pytest.raises(kind) as caught:
        services.client.complete(TEXT, max_tokens=2, **request_fields)
    assert subject in caught.value.subject


def test_prompt_over_the_context_is_refused(services: Services) -> None:
    with pytest.raises(errors.InvalidArgument, match="at most 255"):
        services.client.complete([5] * 300, max_tokens=1)


def test_operators_list_and_move_adapters(
    services: Services, registered: dict[str, types.Registration]
) -> None:
    client = services.client
    loaded = client.load("r3")
    assert loaded.rank == 3
    assert "default/r3" in " ".join(loaded.names)
    assert client.unload("r3") == loaded.num_bytes
    assert registered["r3"].adapter.digest not in {r.digest for r in client.residents()}
    info = client.server_info()
    assert info.base_model == "llama"
    assert {use.name for use in info.memory} >= {"weights", "kv_pages", "arena"}
    state = client.get("r3").layout_states
    assert [s.layout_id for s in state] == [info.layout_id]


def test_cancelled_stream_frees_the_request(services: Services) -> None:
    stream = services.client.generate(ids(TEXT), max_tokens=200, request_id="left", **GREEDY)
    next(iter(stream))
    stream.close()
    done = threading.Event()
    for _ in range(100):
        try:
            services.client.complete(ids(TEXT), max_tokens=1, request_id="left", **GREEDY)
            return
        except errors.AlreadyExists:
            done.wait(0.02)
    raise AssertionError("the request still runs")
