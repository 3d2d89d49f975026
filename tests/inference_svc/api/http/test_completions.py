"""/v1/completions as OpenAI's client sees it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from inference_svc.api.http.completions import CompletionBody, CompletionFormatter, Completions
from inference_svc.core import SamplingParams
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.text.pieces import Pieces
from inference_svc.text.prompt import Text
from loadout.inference.v1 import inference_pb2 as pb
from tests.support.inference.front import Front
from tests.support.inference.results import wanted_of
from tests.support.inference.serving import digest_of


def single(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_full_response(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.complete("the quick 😀 fox", max_tokens=40)
        assert (answer.object, answer.model) == ("text_completion", "base")
        assert answer.id.startswith("cmpl-")
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == ("the quick 😀 fox", "stop")
        assert (choice.index, choice.logprobs) == (0, None)
        assert answer.usage.prompt_tokens_details.cached_tokens == 2

    serve_http(body, kind="byte_level")


def test_stream_has_the_same_content(serve_http) -> None:
    async def body(front: Front) -> None:
        stream = await front.complete(
            "the quick fox", max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        *parts, last = [chunk async for chunk in stream]
        assert "".join(part.choices[0].text for part in parts) == "the quick fox"
        assert [p.choices[0].finish_reason for p in parts if p.choices[0].finish_reason] == ["stop"]
        assert last.usage.prompt_tokens == len("the quick fox")

    serve_http(body)


def test_every_field_is_converted(serve_http) -> None:
    async def body(front: Front) -> None:
        await front.complete(
            "a",
            model="upper",
            max_tokens=9,
            temperature=0.7,
            top_p=0.9,
            seed=5,
            stop=["x", "yz"],
            presence_penalty=-1,
            frequency_penalty=1.5,
            logprobs=3,
            extra_body={
                "min_tokens": 2,
                "top_k": 7,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "stop_token_ids": [5, 5, 6],
                "ignore_eos": True,
                "priority": -3,
                "cache_salt": "s",
            },
        )
        (request,) = front.engine.submitted
        assert request.sampling == SamplingParams(
            max_tokens=9,
            min_tokens=2,
            temperature=single(0.7),
            top_k=7,
            top_p=single(0.9),
            min_p=single(0.1),
            seed=5,
            stop=("x", "yz"),
            stop_token_ids=(5, 6),
            ignore_eos=True,
            presence_penalty=-1,
            frequency_penalty=1.5,
            repetition_penalty=single(1.2),
        )
        assert request.wanted == wanted_of(logprobs=3)
        assert (request.priority, request.cache_seed) == (-3, "default/default/s")
        assert request.key == digest_of("upper")
        assert (request.tenant, request.deadline_s) == ("default", None)

    serve_http(body, store=True)


@pytest.mark.parametrize("source", ["model", "none"])
def test_unset_fields_get_the_models_defaults(serve_http, tmp_path: Path, source: str) -> None:
    """Of both APIs, and what a request says counts more."""
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    expected = (single(0.6), 20, single(0.95)) if source == "model" else (1, 0, 1)

    async def body(front: Front) -> None:
        await front.complete("a")
        await front.chat("a")
        await front.running.generate("a")
        await front.complete("a", temperature=0, top_p=1, extra_body={"top_k": -1})
        explicit = pb.SamplingParams(temperature=0.0, top_k=0, top_p=1.0)
        await front.running.generate("a", sampling=explicit)
        found = [each.sampling for each in front.engine.submitted]
        chosen = [(each.temperature, each.top_k, each.top_p) for each in found]
        assert chosen == [expected] * 3 + [(0, 0, 1)] * 2
        info = await front.running.stub.GetServerInfo(pb.GetServerInfoRequest())
        shown = info.sampling_defaults
        assert (shown.temperature, shown.top_k, shown.top_p) == expected

    serve_http(body, generation_defaults=source)


def test_unset_fields_get_openais_defaults(serve_http) -> None:
    async def body(front: Front) -> None:
        await front.complete("a", extra_body={"top_k": -1})
        await front.complete("a")
        first, second = (request.sampling for request in front.engine.submitted)
        assert first == SamplingParams(max_tokens=16, seed=first.seed)
        assert first.seed != second.seed

    serve_http(body)


def test_forms_of_prompts(serve_http, tokenizers) -> None:
    encode = tokenizers["chars"].encode

    async def body(front: Front) -> None:
        fox, dog = encode("fox"), encode("dog")
        for prompt, texts in (
            (fox, ["fox"]),
            (["fox", "dog"], ["fox", "dog"]),
            ([fox, dog], ["fox", "dog"]),
        ):
            answer = await front.complete(prompt)
            assert [choice.text for choice in answer.choices] == texts
            assert answer.usage.prompt_tokens == 3 * len(texts)
        answer = await front.complete(["fox", "a dog"], n=2, best_of=2)
        texts = [choice.text for choice in answer.choices]
        assert texts == ["fox", "fox", "a dog", "a dog"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == len("fox") + len("a dog")

    serve_http(body)


def test_stop_strings(serve_http) -> None:
    async def body(front: Front) -> None:
        for stop in ("k b", ["k b", "zzz"]):
            answer = await front.complete("the quick brown fox", stop=stop, max_tokens=40)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the quic", "stop")
            assert answer.usage.completion_tokens == len("the quick b")

    serve_http(body)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_what_a_stop_string_withholds_has_no_logprobs(serve_http, route: str) -> None:
    """SharpAI/SwiftLM#126: neither text nor log probabilities of "own fox", whole and streamed,
    for each of two choices. With token ids there are as many log probabilities."""
    text = "brown rown own foxes"
    expected = "user<unk> brown rown " if route == "chat" else "brown rown "

    async def ask(front: Front, **fields: Any) -> Any:
        fields |= {"stop": "own fox", "n": 2, "max_tokens": 40}
        if route == "chat":
            return await front.chat(text, logprobs=True, **fields)
        return await front.complete(text, logprobs=0, **fields)

    def tokens_of(choice: Any) -> list[str]:
        if choice.logprobs is None:
            return []
        if route == "chat":
            return [entry.token for entry in choice.logprobs.content]
        return list(choice.logprobs.tokens)

    async def body(front: Front) -> None:
        answer = await ask(front)
        for choice in answer.choices:
            shown = [token for token in tokens_of(choice) if token != "<s>"]
            text_shown = choice.message.content if route == "chat" else choice.text
            assert "".join(shown) == text_shown == expected
            assert choice.finish_reason == "stop"
        found: list[list[str]] = [[], []]
        async for chunk in await ask(front, stream=True):
            (choice,) = chunk.choices
            found[choice.index] += tokens_of(choice)
        assert found == [tokens_of(choice) for choice in answer.choices]
        with_ids = await ask(front, extra_body={"return_token_ids": True})
        for choice in with_ids.choices:
            assert len(tokens_of(choice)) == len(choice.token_ids)
            assert "".join(tokens_of(choice)).endswith("own fox")

    serve_http(body)


def test_logprobs_are_parallel_lists(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.complete("fox", logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs.tokens == ["f", "o", "x", "</s>"]
        assert logprobs.token_logprobs == [-0.5] * 4
        assert logprobs.top_logprobs == [{token: -0.5} for token in logprobs.tokens]
        assert logprobs.text_offset == [0, 1, 2, 3]
        offsets = []
        async for chunk in await front.complete("fox", logprobs=0, stream=True):
            if chunk.choices[0].logprobs is not None:
                offsets += chunk.choices[0].logprobs.text_offset
        assert offsets == logprobs.text_offset

    serve_http(body)


def test_offsets_are_positions_in_the_text(serve_http, tokenizers: Any) -> None:
    """vllm#5334: with echo over emoji, whose tokens are parts of characters: each token has its own
    text, and the offset of the character that it is a part of."""
    text = "a😀ß</s>fox"
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode(text)
    pieces = [tokenizer.pieces.of(token_id) for token_id in token_ids]
    shown = [piece.shown for piece in pieces]
    whole = b"".join(shown)
    starts = [len(b"".join(shown[:index])) for index in range(len(shown))]
    expected = [len(whole[:start].decode(errors="ignore")) for start in starts]
    assert expected.count(1) > 2, "the emoji has several tokens"
    assert any(not each for each in shown), "one token is special"
    formatter = CompletionFormatter(0, tokenizer.pieces, includes_ids=False)
    tokens = [TokenLogprobs(token_id, -1.0) for token_id in token_ids]
    found = [formatter.logprobs([token]) for token in tokens]
    assert [each["text_offset"][0] for each in found] == expected
    assert [each["tokens"][0] for each in found] == [piece.text for piece in pieces]
    assert expected[-1] < len(tokenizer.decode(token_ids))

    async def body(front: Front) -> None:
        for by_id in (False, True):
            answer = await front.complete(
                text, logprobs=0, extra_body={"return_tokens_as_token_ids": by_id}
            )
            assert answer.choices[0].logprobs.text_offset[: len(expected)] == expected

    serve_http(body, kind="byte_level")


def test_chosen_token_is_among_the_top(tokenizers) -> None:
    """Even when it is not among the most likely, and none of those are requested."""
    formatter = CompletionFormatter(0, Pieces(tokenizers["chars"]), includes_ids=False)
    f, o, x = tokenizers["chars"].encode("fox")
    logprobs = formatter.logprobs(
        [
            TokenLogprobs.of(f, -3.0, (o, x), (-0.125, -0.25)),
            TokenLogprobs.of(o, -0.125, (o, x), (-0.125, -0.25)),
            TokenLogprobs(x, -4.0),
        ]
    )
    assert logprobs["top_logprobs"] == [
        {"o": -0.125, "x": -0.25, "f": -3.0},
        {"o": -0.125, "x": -0.25},
        {"x": -4.0},
    ]


def test_very_low_temperature_is_greedy(serve_http) -> None:
    """mlc-ai/mlc-llm#2070: as the page of the HTTP API says."""

    async def body(front: Front) -> None:
        for given, taken in ((1e-9, 0.0), (0.0099, 0.0), (0.01, single(0.01)), (2, 2.0)):
            await front.complete(temperature=given)
            assert front.engine.submitted[-1].sampling.temperature == taken

    serve_http(body)


def test_model_is_the_resolved_adapter(serve_http) -> None:
    async def body(front: Front) -> None:
        for name in ("upper", "default/upper", "upper@1"):
            answer = await front.complete(model=name)
            assert (answer.model, answer.system_fingerprint) == ("upper@1", digest_of("upper"))
        for name in ("base", "b"):
            answer = await front.complete(model=name)
            assert (answer.model, answer.system_fingerprint) == ("base", None)

    serve_http(body, store=True)


@pytest.mark.parametrize(("given", "adds"), [(None, True), (True, True), (False, False)])
def test_special_tokens_are_added_to_texts_unless_the_caller_has_its_own(
    given: bool | None, adds: bool
) -> None:
    """thinking-machines-lab/tinker-feedback#125: a rendered chat begins with the template's BOS."""
    body = CompletionBody(model="base", prompt=["a", "b"], add_special_tokens=given)
    assert Completions().prompts(body) == (Text("a", adds), Text("b", adds))
    if not adds:
        ids = CompletionBody(model="base", prompt=[1, 2], add_special_tokens=given)
        assert Completions().prompts(ids) == ((1, 2),)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": "x" * 64}, "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
    ({"prompt": [1, 2], "extra_body": {"add_special_tokens": True}}, "add_special_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"echo": True, "logprobs": 1, "n": 2}, "n"),
    ({"logprobs": 1025}, "logprobs"),
    ({"extra_body": {"prompt_logprobs": 1025}}, "prompt_logprobs"),
    ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
    ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
    ({"extra_body": {"logprobs_mode": "raw_logits"}}, "logprobs_mode"),
    ({"suffix": "x"}, "suffix"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.001}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1e-60}, "top_p"),
    ({"top_p": 1.0000001}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"extra_body": {"min_tokens": 17}}, "min_tokens"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ({"extra_body": {"cache_salt": "x" * 257}}, "cache_salt"),
    ({"model": "No/Such/Name"}, "model"),
    ({"model": ""}, "model"),
]


def test_errors_name_the_field(serve_http) -> None:
    """mlc-ai/mlc-llm#2070: an empty stop string, or a top_p just outside of its range, too."""

    async def body(front: Front) -> None:
        for fields, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await front.complete(**fields)
            error = caught.value
            assert (error.param, error.type, error.code) == (
                param,
                "invalid_request_error",
                "invalid_argument",
            ), fields
        assert not front.engine.submitted

    serve_http(body)
