"""Structured answers through real services: random models, whose answers only a mask can make
valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

from loadout import errors, types
from loadout.prometheus import scrape
from tests.support.models.zoo import Zoo
from tests.system.services import Services

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("structured")
    flags = ("--http", "127.0.0.1:0")
    with Services(zoos("llama"), folder, inference_flags=flags) as made:
        yield made
        made.check_exit_codes()


def complete(served: Services, structure: types.Structure, **sampling: Any) -> types.Completion:
    sampling = {"max_tokens": 200, "seed": 7, **sampling}
    return served.client.complete("a person: ", structure=structure, **sampling)


def test_json_schema(served: Services) -> None:
    done = complete(served, {"json_schema": PERSON})
    assert done.finish_reason is types.FinishReason.STOP
    jsonschema.validate(json.loads(done.text), PERSON)
    as_text = complete(served, {"json_schema": json.dumps(PERSON)}, seed=8)
    jsonschema.validate(json.loads(as_text.text), PERSON)


def test_http(served: Services) -> None:
    body = {
        "model": "llama",
        "messages": [{"role": "user", "content": "a person"}],
        "max_tokens": 200,
        "seed": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    }
    url = f"http://{served.http_address}/v1/chat/completions"
    answer = httpx2.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


def test_other_forms(served: Services) -> None:
    for seed in range(5):
        found = complete(served, {"regex": "[a-c]{3}-[0-9]{2}"}, seed=seed).text
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", found)
        assert complete(served, {"choice": ["yes", "no"]}, seed=seed).text in ("yes", "no")
        lark = 'start: "<" WORD ">"\nWORD: /[a-z]{2,4}/'
        assert re.fullmatch("<[a-z]{2,4}>", complete(served, {"grammar": lark}, seed=seed).text)
        ebnf = 'root ::= "(" [ab]+ ")"'
        done = complete(served, {"grammar": ebnf}, seed=seed)
        is_whole = re.fullmatch(r"\([ab]+\)", done.text) is not None
        assert is_whole == (done.finish_reason is types.FinishReason.STOP)
    assert isinstance(json.loads(complete(served, {"json_schema": True}).text), object)


BAD: list[tuple[types.Structure, dict[str, Any], str, str]] = [
    ({"json_schema": {"not": {}}}, {}, "json_schema", "Unimplemented keys"),
    ({"regex": "("}, {}, "regex", "unclosed group"),
    ({"grammar": "start: x"}, {}, "grammar", "unknown name"),
    ({"regex": "a"}, {"ignore_eos": True}, "regex", "not with sampling.ignore_eos"),
    ({"regex": "a"}, {"min_tokens": 3}, "regex", "not with sampling.min_tokens"),
    ({"regex": ""}, {}, "regex", "must not be empty"),
]


def test_refusals_name_the_field(served: Services) -> None:
    for structure, sampling, field, words in BAD:
        with pytest.raises(errors.InvalidArgument, match=words) as caught:
            complete(served, structure, **sampling)
        assert caught.value.subject == f"sampling.structure.{field}"
    for stream in (False, True):
        body = {"model": "llama", "prompt": "a", "guided_json": {"not": {}}, "stream": stream}
        answer = httpx2.post(f"http://{served.http_address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "guided_json"
        assert "this server cannot enforce it: Unimplemented keys" in error["message"]


def test_streams_and_choices(served: Services) -> None:
    chunks = list(
        served.client.generate(
            "a person: ", structure={"json_schema": PERSON}, max_tokens=200, seed=7
        )
    )
    assert "".join(chunk.text for chunk in chunks) == (
        complete(served, {"json_schema": PERSON}).text
    )
    several = served.client.sample(
        "a person: ", 4, structure={"regex": "[a-c]{8}"}, max_tokens=20, seed=1
    )
    texts = [each.text for each in several]
    assert all(re.fullmatch("[a-c]{8}", text) for text in texts)
    assert len(set(texts)) > 1
    stopped = complete(served, {"regex": "[a-c]{20}"}, stop=["b"])
    assert re.fullmatch("[ac]*", stopped.text)
    assert stopped.finish_reason is types.FinishReason.STOP


def test_metrics(served: Services) -> None:
    complete(served, {"choice": ["yes", "no"]})
    metrics = scrape(served.inference_metrics)
    prefix = "loadout_inference_"
    assert metrics.one(f"{prefix}structured_requests_total", result="accepted") >= 1
    assert metrics.one(f"{prefix}grammar_opens_total") >= 1
    assert metrics.one(f"{prefix}grammar_masks_total") >= 2
    assert metrics.one(f"{prefix}grammar_process_restarts_total") == 0
    assert metrics.one(f"{prefix}grammar_slow_rows") == 0
    memory = {each.name: each.used_bytes for each in served.client.server_info().memory}
    assert memory["grammars"] > 20 << 20, "a check, and both lanes"
