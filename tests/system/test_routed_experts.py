"""Router replay: requests return the experts that their tokens have chosen, as transformers chooses
them, whatever else the engine does."""

from __future__ import annotations

import itertools
import json
import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from inference_svc.core import BatchRow, Request, SamplingParams, Sequence
from inference_svc.engine.compute.routed_pages import RoutedPages
from inference_svc.model.architectures import load_description
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.results.routed_experts import ExpertLayers, RoutedExperts, joined_experts
from loadout import types
from loadout.errors import InvalidArgument
from tests.support.inference.results import parts_of, wanted_of
from tests.support.models.parity import prompts
from tests.support.models.zoo import Zoo
from tests.support.pairs import PATHS, by_path
from tests.system.engines import Running
from tests.system.services import Services

KINDS = ("qwen3-moe", "gpt-oss")
BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
ADAPTER = "r16"
"""Changes routers and experts."""
COUNT = 24


def choices(zoo: Zoo, adapter: str, token_ids: list[int]) -> np.ndarray:
    """What the routers of transformers choose, [tokens, layers, chosen]."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, out: found.append(out[2]))
        for module in zoo.reference.modules()
        if type(module).__name__.lower().endswith(("topkrouter", "textrouter"))
    ]
    zoo.logits(adapter, token_ids, torch.float32)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy()


def pieces_of(running: Running, request_id: str) -> list[RoutedExperts]:
    running.result(request_id)
    return parts_of(running.outputs[request_id], RoutedExperts)


def routed(running: Running, request_id: str) -> np.ndarray:
    """All of a request's choices, from its first token on."""
    [whole] = joined_experts(pieces_of(running, request_id), 1 << 30)
    assert whole.first_position == 0
    shape = whole.num_tokens, whole.num_layers, whole.num_chosen
    return np.frombuffer(whole.experts, f"<u{whole.bytes_per_id}").reshape(shape)


def ask(running: Running, name: str, prompt: list[int], adapter: str = "", **options: Any) -> None:
    options = {"max_tokens": COUNT, "return_routed_experts": True} | options
    running.submit(name, prompt, adapter, **options)


@pytest.mark.parametrize(
    ("kind", "path"),
    by_path(
        (
            *("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "gpt-oss", "glm4-moe", "gemma4-moe"),
            "lfm2-moe",
        )
    ),
)
def test_choices_are_the_oracles(
    zoos: Callable[[str], Zoo], start: Callable, kind: str, path: str
) -> None:
    """Of prompts and outputs, with an adapter of routers and experts and without, beside others."""
    compare(zoos(kind), start, native_kernels=PATHS[path])


@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_choices_of_stages(zoos: Callable[[str], Zoo], start: Callable, path: str) -> None:
    """Each has chosen in its own layers."""
    compare(zoos("qwen3-moe"), start, native_kernels=PATHS[path], pipeline_parallel=2)


def compare(zoo: Zoo, start: Callable, **settings: Any) -> None:
    running = start(zoo.kind, max_model_len=512, **settings)
    for adapter in ("", ADAPTER):
        for index, prompt in enumerate(prompts(3, seed=5)):
            ask(running, f"{adapter} {index}", prompt, adapter)
            running.submit(f"other {adapter} {index}", prompt, adapter, max_tokens=COUNT)
    for adapter in ("", ADAPTER):
        for index, prompt in enumerate(prompts(3, seed=5)):
            tokens = running.result(f"{adapter} {index}")[0]
            assert tokens == running.result(f"other {adapter} {index}")[0]
            wanted = choices(zoo, adapter, prompt + tokens[:-1])
            found = routed(running, f"{adapter} {index}")
            if zoo.kind == "glm4-moe":  # transformers leaves these in no order
                wanted, found = np.sort(wanted), np.sort(found)
            assert np.array_equal(found, wanted)
            assert not pieces_of(running, f"other {adapter} {index}")
            # Of a prompt that is only scored, too: it has them all.
            options = {"max_tokens": 0, "prompt_logprobs": 0}
            ask(running, f"scored {adapter} {index}", prompt, adapter, **options)
            scored = routed(running, f"scored {adapter} {index}")
            assert np.array_equal(np.sort(scored), np.sort(wanted[: len(prompt)]))
    running.check_idle()


@BACKENDS
@pytest.mark.parametrize("kind", KINDS)
def test_however_they_are_computed_they_are_the_same(
    start: Callable, kind: str, native: bool
) -> None:
    """In chunks, behind a cached prefix, and again after each preemption."""
    prompt = prompts(4, seed=6)[3]
    whole = start(kind, max_model_len=512, native_kernels=native)
    ask(whole, "whole", prompt, ADAPTER)
    wanted = routed(whole, "whole")
    assert len(wanted) == len(prompt) + COUNT - 1
    for chunk in (1, 7):
        running = start(kind, native_kernels=native, max_prefill_chunk=chunk, max_model_len=512)
        ask(running, "chunked", prompt, ADAPTER)
        assert np.array_equal(routed(running, "chunked"), wanted)
    ask(whole, "again", prompt, ADAPTER)
    assert np.array_equal(routed(whole, "again"), wanted)
    assert whole.result("again")[1].usage.cached_prompt_tokens > 0


@BACKENDS
def test_preempted_requests_return_each_position_once(
    zoos: Callable[[str], Zoo], start: Callable, native: bool
) -> None:
    zoo, count = zoos("qwen3-moe"), 60
    short = prompts(6, seed=7)
    page_bytes = 2 * 2 * 2 * 32 * 16 * 4
    running = start(
        zoo, max_model_len=128, native_kernels=native, prefix_cache=False, kv_bytes=12 * page_bytes
    )
    with running.together():
        for index, prompt in enumerate(short):
            ask(running, str(index), prompt[:30], max_tokens=count)
    for index, prompt in enumerate(short):
        tokens = running.result(str(index))[0]
        wanted = choices(zoo, "", prompt[:30] + tokens[:-1])
        assert np.array_equal(routed(running, str(index)), wanted)
        positions = [(p.first_position, p.num_tokens) for p in pieces_of(running, str(index))]
        ends = itertools.accumulate(num_tokens for _, num_tokens in positions)
        assert [first for first, _ in positions] == [0, *ends][:-1]
    assert running.engine.built.engine.scheduler.num_preemptions > 0
    running.check_idle()


@BACKENDS
def test_others_compute_the_same_bits(start: Callable, native: bool) -> None:
    """A request has the same tokens and logprobs whether or not one beside it returns experts."""
    first, second = prompts(4, seed=8)[2:]
    running = start("gpt-oss", native_kernels=native, max_model_len=512, prefix_cache=False)
    for name, asks in (("without", False), ("with", True)):
        running.submit(f"{name} other", first, ADAPTER, return_routed_experts=asks)
        running.submit(name, second, logprobs=5)
        running.result(f"{name} other")
    assert running.result("with")[0] == running.result("without")[0]
    logprobs = [parts_of(running.outputs[name], TokenLogprobs) for name in ("with", "without")]
    if native:
        assert logprobs[0] == logprobs[1]


def test_cached_prefixes_are_shared_among_those_that_ask(start: Callable) -> None:
    running, prompt = start("qwen3-moe", max_model_len=512), prompts(4, seed=9)[3]

    def num_cached(name: str, asks: bool) -> int:
        ask(running, name, prompt, return_routed_experts=asks)
        return int(running.result(name)[1].usage.cached_prompt_tokens)

    assert num_cached("plain", False) == 0
    assert num_cached("first", True) == 0, "nobody knows what the other's tokens have chosen"
    assert num_cached("second", True) > 0
    assert num_cached("plain again", False) > 0
    assert np.array_equal(routed(running, "first"), routed(running, "second"))


def test_memory_is_counted_once_it_is_used(start: Callable, zoos: Callable[[str], Zoo]) -> None:
    running = start("qwen3-moe", max_model_len=512)
    pages = running.engine.built.engine.runner.routed
    shape = load_description(zoos("qwen3-moe").model_dir).expert_layers
    assert pages.shape == shape
    assert shape.layers == (0, 1)
    assert shape.token_bytes == 2 * 3
    ask(running, "plain", [5] * 40, return_routed_experts=False)
    running.result("plain")
    assert pages.used_bytes == 0
    ask(running, "asks", [5] * 40)
    running.result("asks")
    assert 0 < pages.used_bytes < pages.capacity_bytes


@pytest.mark.parametrize("num_experts", [200, 300])
def test_pages_keep_what_was_written(num_experts: int) -> None:
    """Of rows that ask only; experts beyond 256 have two bytes."""
    shape = ExpertLayers((1, 3), num_experts, 2)
    pages = RoutedPages(shape, num_pages=4, page_size=4)
    asks, other = (
        Sequence(
            Request(
                name,
                (5,) * 7,
                SamplingParams(),
                wanted=wanted_of(return_routed_experts=name == "asks"),
            )
        )
        for name in ("asks", "other")
    )
    asks.page_ids, other.page_ids = [2, 0], [1, 3]
    rows = [BatchRow(other, 0, 3, samples=False), BatchRow(asks, 1, 5, samples=True)]
    chosen = np.random.default_rng(1).integers(0, num_experts, (2, 8, 2))
    pages.write(rows, chosen)
    found = pages.read(asks, 2, 6)
    assert found.bytes_per_id == shape.bytes_per_id == (1 if num_experts <= 256 else 2)
    client = types.RoutedExperts(2, 4, 2, 2, found.bytes_per_id, found.experts)
    assert np.array_equal(np.asarray(client.ids()), chosen[:, 4:8].swapaxes(0, 1))
    assert pages.used_bytes == 2 * 4 * shape.token_bytes
    pages.write(rows[:1], chosen[:, :3])
    assert pages.used_bytes == 2 * 4 * shape.token_bytes, "nothing of those that do not ask"


def test_a_stop_string_ends_them_with_its_token(start: Callable) -> None:
    """Positions are those of the prompt and all tokens of the answer but the last."""
    running, prompt = start("qwen3-moe", max_model_len=512), prompts(2, seed=13)[1]
    ask(running, "whole", prompt)
    tokens = running.result("whole")[0]
    ask(running, "stopped", prompt, stop_token_ids=(tokens[5],), ignore_eos=False)
    answer, last = running.result("stopped")
    assert last.usage.completion_tokens == len(answer) <= 6
    found = routed(running, "stopped")
    assert len(found) == len(prompt) + len(answer) - 1
    assert np.array_equal(found, routed(running, "whole")[: len(found)])


def test_a_model_without_experts_returns_none(start: Callable) -> None:
    """Callers are refused before that."""
    running = start("llama")
    ask(running, "dense", [5, 6, 7])
    running.result("dense")
    assert not pieces_of(running, "dense")


@pytest.fixture(scope="module")
def moe_services(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    flags = ("--http", "127.0.0.1:0", "--adapter-wait-seconds", "30")
    folder = tmp_path_factory.mktemp("routed")
    with Services(zoos("qwen3-moe"), folder, inference_flags=flags) as made:
        yield made


def test_callers_get_what_the_oracle_chooses(
    zoos: Callable[[str], Zoo], moe_services: Services
) -> None:
    """Over gRPC and HTTP, in one piece and streamed, with an adapter and without, each once."""
    zoo, client = zoos("qwen3-moe"), moe_services.client
    experts = client.server_info().experts
    assert experts is not None
    assert (experts.layers, experts.num_chosen) == ((0, 1), 3)
    shutil.copytree(zoo.adapter_dirs[ADAPTER], moe_services.sources / ADAPTER)
    client.register(ADAPTER, (moe_services.sources / ADAPTER).as_uri(), base_model="llama")
    http = f"http://{json.loads((moe_services.folder / 'inference.json').read_text())['http']}"
    for adapter, prompt in (("", prompts(3, seed=11)[2]), (ADAPTER, prompts(3, seed=12)[2])):
        answer = client.complete(
            *(prompt,),
            adapter=adapter,
            max_tokens=COUNT,
            temperature=0,
            ignore_eos=True,
            return_routed_experts=True,
        )
        wanted = choices(zoo, adapter, [*prompt, *answer.token_ids[:-1]])
        assert answer.routed_experts is not None
        assert answer.routed_experts.first_position == 0
        assert np.array_equal(np.asarray(answer.routed_experts.ids()), wanted)
        body = {
            "model": adapter or "llama",
            "prompt": prompt,
            "max_tokens": COUNT,
            "temperature": 0,
            "ignore_eos": True,
            "return_routed_experts": True,
        }
        [choice] = httpx2.post(f"{http}/v1/completions", json=body, timeout=60).json()["choices"]
        assert np.array_equal(from_json([choice["routed_experts"]]), wanted)
        with httpx2.stream("POST", f"{http}/v1/completions", json=body | {"stream": True}) as sent:
            lines = [line[6:] for line in sent.iter_lines() if line.startswith("data: {")]
        events = [json.loads(line)["choices"][0] for line in lines]
        pieces = [each["routed_experts"] for each in events if "routed_experts" in each]
        assert len(pieces) > 1
        assert np.array_equal(from_json(pieces), wanted)
    scored = client.complete(
        prompt, adapter=ADAPTER, max_tokens=0, echo=True, return_routed_experts=True
    )
    assert scored.routed_experts is not None
    assert np.array_equal(np.asarray(scored.routed_experts.ids()), wanted[: len(prompt)])
    plain = client.complete([5, 6, 7], max_tokens=4)
    assert plain.routed_experts is None


def from_json(pieces: list[dict[str, Any]]) -> np.ndarray:
    """Joins pieces of HTTP answers, which must follow one another."""
    arrays, position = [], 0
    for piece in pieces:
        assert piece["first_position"] == position
        data = np.frombuffer(b64decode(piece["data"]), piece["dtype"])
        arrays.append(data.reshape(piece["shape"]))
        position += len(arrays[-1])
    return np.concatenate(arrays)


def test_a_dense_model_refuses_by_name(services: Services) -> None:
    with pytest.raises(InvalidArgument, match="return_routed_experts: llama has no experts"):
        services.client.complete([5, 6], return_routed_experts=True)


def routed_piece(first: int, num_tokens: int) -> RoutedExperts:
    data = bytes(byte % 251 for byte in range(first * 6, (first + num_tokens) * 6))
    return RoutedExperts(first, 3, 2, 1, data)


@pytest.mark.parametrize("max_bytes", [1, 6, 13, 60, 1 << 20])
def test_pieces_are_joined_and_split_at_tokens(max_bytes: int) -> None:
    pieces = [routed_piece(4, 1), routed_piece(5, 9), routed_piece(14, 3)]
    parts = list(joined_experts(pieces, max_bytes))
    assert b"".join(part.experts for part in parts) == routed_piece(4, 13).experts
    assert [part.first_position for part in parts] == [
        4 + start for start in itertools.accumulate([0, *(part.num_tokens for part in parts)][:-1])
    ]
    assert all(len(part.experts) <= max(6, max_bytes) for part in parts)
    assert list(joined_experts([], max_bytes)) == []
    with pytest.raises(AssertionError, match="a gap"):
        list(joined_experts([pieces[0], pieces[2]], max_bytes))
