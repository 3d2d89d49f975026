"""A server without a tokenizer: token ids in, token ids out, and no text, by name."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import check_files
from loadout import Client
from loadout.errors import InvalidArgument
from tests.support.models.zoo import Zoo
from tests.system.guarded import serve_base

PROMPT = [5, 9, 70, 12]


@pytest.fixture
def folder(zoos: Callable[[str], Zoo], tmp_path: Path) -> Path:
    """A model's folder without the files of a tokenizer."""
    source = zoos("llama").model_dir
    for path in source.iterdir():
        if "token" not in path.name and not path.name.startswith("chat"):
            shutil.copy(path, tmp_path)
    return tmp_path


def post(address: str, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://{address}{route}",
        json.dumps({"model": "llama", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_folder_without_a_tokenizer_is_refused_unless_it_is_wanted(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json: .*--no-tokenizer"):
        check_files(folder)
    check_files(folder, has_tokenizer=False)


def test_token_ids_in_and_out(folder: Path, zoos: Callable[[str], Zoo]) -> None:
    """lablup/mlxcel#1466: stop strings, which no text could match, are refused."""
    expected = zoos("llama").greedy("", PROMPT, 8)
    running = serve_base(folder, tokenizer=False, http="127.0.0.1:0")
    try:
        with Client(inference=running.server.address) as client:
            done = client.complete(PROMPT, max_tokens=8, ignore_eos=True, temperature=0)
            assert (list(done.token_ids), done.text) == (expected, "")
            for prompt, sampling, message in (
                ("text", {}, "prompt: this server has no tokenizer .*: send token ids"),
                (
                    [{"role": "user", "content": "hi"}],
                    {},
                    "chat: this server has no tokenizer .*, and so no chat template",
                ),
                (PROMPT, {"stop": ["x"]}, "sampling.stop: this server has no .*stop_token_ids"),
            ):
                with pytest.raises(InvalidArgument, match=message):
                    client.complete(prompt, max_tokens=2, **sampling)
        address = running.server.http_address
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        for asked, ids in (({}, expected), ({"return_token_ids": False}, None)):
            status, answer = post(address, "/v1/completions", body | asked)
            assert (status, answer["choices"][0].get("token_ids")) == (200, ids)
        for route, wrong, message in (
            ("/v1/completions", {"prompt": "text"}, "no tokenizer"),
            ("/v1/completions", {"prompt": PROMPT, "stop": "x"}, "stop: this server has no"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "no chat"),
        ):
            status, answer = post(address, route, wrong)
            assert (status, message in answer["error"]["message"]) == (400, True), answer
    finally:
        running.stop()
