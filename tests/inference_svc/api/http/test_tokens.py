"""/inference/v1/generate, and token ids in place of texts in the other routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference_svc.core import SamplingParams
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.inference.front import Front
from tests.support.inference.results import wanted_of
from tests.support.inference.serving import digest_of
from tests.support.models.tokenizers import EOS

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7]


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_tokens_in_and_out(serve_http) -> None:
    async def body(front: Front) -> None:
        request = {
            "request_id": "mine",
            "model": "upper",
            "token_ids": PROMPT,
            "sampling_params": {"n": 2, "max_tokens": 9, "seed": 5, "logprobs": 0, "min_tokens": 1},
            "cache_salt": "s",
            "priority": -3,
        }
        answer = await front.post(GENERATE, request)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        found = answer.json()
        assert (found["request_id"], found["model"]) == ("mine", "upper@1")
        assert found["system_fingerprint"] == digest_of("upper")
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        for choice in found["choices"]:
            assert (choice["token_ids"], choice["finish_reason"]) == ([*PROMPT, EOS], "stop")
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in (*PROMPT, 1)]
            assert {entry["logprob"] for entry in content} == {-0.5}
        assert found["usage"]["prompt_tokens"] == 3
        first, second = front.engine.submitted
        assert first.sampling == SamplingParams(max_tokens=9, min_tokens=1, seed=5)
        assert first.wanted == wanted_of(logprobs=0)
        assert second.sampling.seed == 6
        assert first.request_id.startswith("mine-0-")
        assert (first.priority, first.key) == (-3, digest_of("upper"))
        assert first.prompt_token_ids == tuple(PROMPT)
        assert first.cache_seed == "default/default/s"

    serve_http(body, store=True)


def test_least_of_a_body(serve_http) -> None:
    """No model is the base model, and 16 tokens are the limit, as vLLM's."""

    async def body(front: Front) -> None:
        request = {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True}}
        found = (await front.post(GENERATE, request, headers={"x-request-id": "header"})).json()
        assert (found["model"], found["system_fingerprint"]) == ("base", None)
        assert found["request_id"] == "header"
        [choice] = found["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (16, "length")
        assert choice["logprobs"] is None

    serve_http(body)


def test_stream_has_the_same_content(serve_http) -> None:
    async def body(front: Front) -> None:
        request = {
            "token_ids": PROMPT,
            "sampling_params": {"logprobs": 1},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        *parts, last = events_of((await front.post(GENERATE, request)).text)
        choices = [part["choices"][0] for part in parts]
        assert [token for choice in choices for token in choice["token_ids"]] == [*PROMPT, EOS]
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in (*PROMPT, 1)]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
            "stop"
        ]
        assert last["usage"]["completion_tokens"] == len(PROMPT) + 1

    serve_http(body)


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"token_ids": "abc"}, "token_ids", "must be a list of token ids"),
        ({"token_ids": [1, -2]}, "token_ids", "must be a list of token ids"),
        ({"token_ids": []}, "token_ids", "must have at least one token"),
        ({"token_ids": [1 << 40]}, "token_ids", "this model knows 87 tokens"),
        ({"request_id": "a b"}, "request_id", "must be 1 to 128 visible ASCII characters"),
        ({"features": {}}, "features", "must be null"),
        ({"sampling_params": None}, "sampling_params", "must be an object"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "unknown field"),
        ({"sampling_params": {"top_p": 2.0}}, "sampling_params.top_p", "at most 1"),
        ({"sampling_params": {"output_kind": 1}}, "sampling_params.output_kind", "must be 2"),
        (
            {"sampling_params": {"structured_outputs": {}}},
            "sampling_params.structured_outputs",
            "one of json, json_object, regex, choice, grammar",
        ),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens", "at least 1"),
        ({"stream_options": {}}, "stream_options", "only with stream set"),
        ({"max_tokens": 3}, "max_tokens", "unknown field"),
    ],
)
def test_bad_bodies_name_the_field(
    serve_http, changes: dict[str, Any], param: str, words: str
) -> None:
    async def body(front: Front) -> None:
        answer = await front.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {}} | changes)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert words in error["message"]

    serve_http(body)


def test_callers_alone_may_generate(serve_http, tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path, token_lines("caller", ["caller"]), token_lines("operator", ["operator"])
    )

    async def body(front: Front) -> None:
        request = {"token_ids": PROMPT, "sampling_params": {}}
        for name, status in (("", 401), ("operator", 403), ("caller", 200)):
            headers = {"authorization": f"Bearer {token_of(name)}"} if name else {}
            answer = await front.post(GENERATE, request, headers=headers)
            assert answer.status_code == status

    serve_http(body, policy_file=policy)


# --- the other routes -----------------------------------------------------------------------------


def test_completions_have_the_prompts_ids_and_name_tokens_by_theirs(serve_http) -> None:
    async def body(front: Front) -> None:
        request = {
            "model": "base",
            "prompt": [PROMPT, [8]],
            "n": 2,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        choices = (await front.post("/v1/completions", request)).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT] * 2 + [[8]] * 2
        logprobs = choices[0]["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{i}" for i in (*PROMPT, EOS)]
        assert logprobs["top_logprobs"][0] == {"token_id:5": -0.5}
        parts = events_of((await front.post("/v1/completions", request | {"stream": True})).text)
        told = [part["choices"][0] for part in parts if "prompt_token_ids" in part["choices"][0]]
        assert sorted((c["index"], c["prompt_token_ids"]) for c in told) == [
            *((0, PROMPT), (1, PROMPT), (2, [8]), (3, [8])),
        ]
        del request["return_token_ids"]
        choices = (await front.post("/v1/completions", request)).json()["choices"]
        assert "prompt_token_ids" not in choices[0]

    serve_http(body)


def test_chats_have_the_prompts_ids_once(serve_http) -> None:
    async def body(front: Front) -> None:
        request = {
            "model": "base",
            "messages": [{"role": "user", "content": "hi"}],
            "n": 2,
            "logprobs": True,
            "max_tokens": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = (await front.post("/v1/chat/completions", request)).json()
        prompt = list(front.engine.submitted[0].prompt_token_ids)
        assert answer["prompt_token_ids"] == prompt
        for choice in answer["choices"]:
            assert "prompt_token_ids" not in choice
            [entry] = choice["logprobs"]["content"]
            assert entry["token"] == f"token_id:{prompt[0]}"
            assert bytes(entry["bytes"]).decode() == entry["token"]
        text = (await front.post("/v1/chat/completions", request | {"stream": True})).text
        assert [part.get("prompt_token_ids") for part in events_of(text)] == [prompt, None]

    serve_http(body)
