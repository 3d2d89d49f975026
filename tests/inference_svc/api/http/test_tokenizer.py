"""/tokenize, /detokenize and /version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadout import types
from loadout.aio import AsyncClient
from loadout.errors import LoadoutError
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.inference.front import Front
from tests.support.inference.serving import MAX_MODEL_LEN

USER = {"role": "user", "content": "hi"}


def test_tokens_are_those_of_a_request(serve_http, tokenizers: Any) -> None:
    text = tokenizers["byte_level"]

    async def body(front: Front) -> None:
        async def tokens_of(fields: dict[str, Any]) -> list[int]:
            answer = await front.post("/tokenize", {"model": "base", **fields})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), MAX_MODEL_LEN)
            return list(found["tokens"])

        for options in ({}, {"add_generation_prompt": False}, {"add_special_tokens": True}):
            await front.chat(messages=[USER], extra_body=options)
            prompt = list(front.engine.submitted[-1].prompt_token_ids)
            assert await tokens_of({"messages": [USER], **options}) == prompt
            shown = (await front.post("/detokenize", {"tokens": prompt})).json()["prompt"]
            assert shown == text.hf.decode(prompt)
            assert "<s>" in shown
        await front.complete("the fox")
        assert await tokens_of({"prompt": "the fox"}) == text.encode("the fox")
        strings = await front.post("/tokenize", {"prompt": "the fox", "return_token_strs": True})
        assert "".join(strings.json()["token_strs"]) == "the fox"
        adapter = await front.post("/tokenize", {"model": "french@1", "prompt": "a"})
        assert adapter.json()["tokens"] == text.encode("a")

    serve_http(body, kind="byte_level", store=True)


def test_the_python_client_has_the_same(serve_http, tokenizers: Any) -> None:
    text = tokenizers["byte_level"]

    async def body(front: Front) -> None:
        async with AsyncClient(inference=front.running.server.address) as client:
            user = types.ChatMessage(role="user", content="hi")
            for options in ({}, {"add_generation_prompt": False}, {"add_special_tokens": True}):
                await client.complete([user], **options)
                prompt = front.engine.submitted[-1].prompt_token_ids
                assert await client.tokenize([user], **options) == prompt
                assert await client.detokenize(prompt) == text.hf.decode(prompt)
            plain = await client.tokenize("the fox", adapter="french", add_special_tokens=False)
            assert plain == tuple(text.encode("the fox", add_special_tokens=False))
            long = list(plain) * 10
            assert await client.detokenize(long, adapter="french@1") == "the fox" * 10
            for call, subject in (
                (client.tokenize("a", adapter="gone"), "adapter"),
                (client.tokenize("a" * 10_000), "prompt"),
                (client.tokenize([1, 2]), "prompt"),
                (client.detokenize([1 << 30]), "token_ids"),
                (client.detokenize([]), "token_ids"),
            ):
                with pytest.raises(LoadoutError) as caught:
                    await call
                assert caught.value.subject == subject
            with pytest.raises(TypeError, match="'n'; a chat has tools"):
                await client.tokenize("a", n=2)

    serve_http(body, kind="byte_level", store=True)


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
    ("/tokenize", {"prompt": "a" * 10_000}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages[0].role"),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"a": 1}}, 400, None),
    ("/tokenize", {"prompt": "a", "model": "gone"}, 404, "model"),
    ("/detokenize", {"tokens": []}, 400, "tokens"),
    ("/detokenize", {"tokens": [1 << 40]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1] * 100}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
]


def test_prompts_have_the_limits_of_generation(serve_http) -> None:
    async def body(front: Front) -> None:
        for path, fields, status, param in BAD:
            answer = await front.post(path, fields)
            error = answer.json()["error"]
            assert answer.status_code == status, (path, fields, error)
            assert error["param"] == (param or "chat_template_kwargs"), (path, fields)
        large = {"prompt": "a" * (5 << 20)}
        assert (await front.post("/tokenize", large)).status_code == 413

    serve_http(body, kind="byte_level", store=True)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/version"])
def test_roles(serve_http, tmp_path: Path, path: str) -> None:
    policy = write_policy(
        tmp_path,
        token_lines("caller", ["caller"]),
        token_lines("operator", ["operator"], ["team-a"]),
    )
    prompts = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}
    statuses = {"": 401, "caller": 200, "operator": 200 if path == "/version" else 403}

    async def body(front: Front) -> None:
        for name, status in statuses.items():
            headers = {"authorization": f"Bearer {token_of(name)}"} if name else {}
            method = "POST" if path in prompts else "GET"
            answer = await front.raw.request(method, path, json=prompts.get(path), headers=headers)
            assert answer.status_code == status, name
            if path == "/version" and status == 200:
                assert answer.json() == {"version": "0"}

    serve_http(body, policy_file=policy)
