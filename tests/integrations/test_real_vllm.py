"""vLLM itself over a real store: PEFT's tokens, or a refusal by name, and the current version."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import loadout
from bench.peers.install import python_of
from tests.support.models import tokenizer_files as tokenizers
from tests.support.store.catalogs import make_data_folder
from tests.support.store.served import Served, serving

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPT = [5 + 7 * index % 480 for index in range(300)]
"""Longer than a block of vLLM's prefix cache."""
NUM_TOKENS = 16
READY_S = 600.0
NUM_TIMES = 5
LINEAR = ["q_proj", "v_proj", "down_proj"]
APPLIED: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"v_proj": 3, "layers.1.self_attn.q_proj": 9},
        "alpha_pattern": {"down_proj": 3},
    },
    "layers": {"layers_to_transform": [1, 3], "layers_pattern": "layers"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "bias": ({"lora_bias": True}, "lora_bias"),
    "norms": ({"modules_to_save": ["norm"]}, "norms of the base"),
    "rows": ({"trainable_token_indices": [3, 7]}, "trainable_token_indices"),
    "alora": ({"alora_invocation_tokens": [3, 4]}, "aLoRA"),
    "high": ({"r": 32}, "--max-lora-rank"),
}


def make_model(**sizes: int) -> Any:
    """A model in fp32 whose answers do not repeat themselves."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=False)).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    return model


def tokens_of(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        found = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return found[0, len(PROMPT) :].tolist()


def train(
    folder: Path, seed: int = 1, sizes: Mapping[str, int] | None = None, **options: Any
) -> list[int]:
    """Saves a random adapter, of a model with other sizes if there are some; returns the tokens
    that PEFT computes with it."""
    fields = {"r": 8, "lora_alpha": 16, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.get_peft_model(
            make_model(**sizes or {}), peft.LoraConfig(**{**fields, **options})
        )
        torch.manual_seed(seed)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.08)
        adapted.eval().save_pretrained(str(folder))
    return tokens_of(adapted)


@dataclass
class Vllm:
    """A running server of vLLM, and the store under it."""

    url: str
    client: loadout.Client
    model: Path
    """The folder of its base model."""

    def post(self, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + route, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def load(self, **adapter: str) -> None:
        """Loads a folder, as vLLM does without the plugin: it answers with a sentence."""
        data = json.dumps(adapter).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/load_lora_adapter", data, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            assert response.status == 200

    def complete(self, model: str, num_tokens: int = NUM_TOKENS) -> tuple[int, dict[str, Any]]:
        return self.post(
            "/v1/completions",
            model=model,
            prompt=PROMPT,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            return_token_ids=True,
        )

    def tokens(self, model: str, num_tokens: int = NUM_TOKENS) -> tuple[str, list[int]]:
        """Returns the answering adapter's name, and the tokens."""
        status, answer = self.complete(model, num_tokens)
        assert status == 200, answer
        return answer["model"], answer["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    folder = tmp_path_factory.mktemp("vllm")
    model = tokenizers.save(tokenizers.byte_level(), folder / "model", "")
    make_model().save_pretrained(model)
    make_data_folder(folder / "data")
    with serving(folder) as start:
        store: Served = start()
        settings = {
            "VLLM_PLUGINS": "loadout",
            "LOADOUT_STORE": store.running.grpc_address,
            "LOADOUT_CACHE": str(folder / "cache"),
            "LOADOUT_BASE_MODEL": "org/base",
        }
        with (
            vllm_server(model, folder / "vllm.log", settings) as url,
            loadout.Client(store=store.running.grpc_address) as client,
        ):
            yield Vllm(url, client, model)


@contextmanager
def vllm_server(model: Path, log_file: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Runs vLLM with a model; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # More may wait actively for each other on a busy machine.
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "base", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "4", "--enable-lora"]
    command += ["--max-loras", "2", "--max-lora-rank", "16"]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=log_file.parent,
            env={**environment, **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process, log_file)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-6000:])


def until(seconds: float, is_so: Callable[[], bool]) -> float:
    """Returns after how many seconds it is so."""
    start_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - start_s < seconds
        time.sleep(0.02)
    return time.monotonic() - start_s


def refuses(vllm: Vllm, name: str, reason: str) -> None:
    status, answer = vllm.complete(name)
    assert (status, reason in answer["error"]["message"]) == (400, True), (name, answer)


def test_every_kind_is_applied_with_pefts_tokens_or_refused_by_name(
    vllm: Vllm, tmp_path: Path
) -> None:
    base = tokens_of(make_model())
    assert vllm.tokens("base")[1] == base
    for name, options in APPLIED.items():
        expected = train(tmp_path / name, **options)
        assert expected != base
        vllm.client.register(name, tmp_path / name, base_model="org/base")
        assert vllm.tokens(name) == (f"default/{name}@1", expected), name
    for name, (options, reason) in REFUSED.items():
        train(tmp_path / name, **options)
        vllm.client.register(name, tmp_path / name, base_model="org/base")
        refuses(vllm, name, reason)
    train(tmp_path / "deep", sizes={"num_hidden_layers": 6})
    vllm.client.register("deep", tmp_path / "deep", base_model="org/base")
    refuses(vllm, "deep", "changes layer 5")
    train(tmp_path / "wide", sizes={"hidden_size": 128})
    vllm.client.register("wide", tmp_path / "wide", base_model="org/base")
    refuses(vllm, "wide", "this server's model has 512 and 256")
    assert vllm.complete("nothing")[0] == 404


def test_a_new_version_is_served_without_a_restart_and_never_a_stale_prefix(
    vllm: Vllm, tmp_path: Path
) -> None:
    answers = [train(tmp_path / f"v{seed}", seed) for seed in (1, 2, 3)]
    vllm.client.register("french", tmp_path / "v1", base_model="org/base")
    assert vllm.tokens("french") == ("default/french@1", answers[0])
    for version in (2, 3):
        assert vllm.tokens("french")[1] == answers[version - 2]  # its prefix is cached
        vllm.client.register("french", tmp_path / f"v{version}", base_model="org/base")
        seen: list[tuple[str, list[int]]] = []

        def is_current(version: int = version, seen: list[Any] = seen) -> bool:
            seen.append(vllm.tokens("french"))
            return seen[-1][0].endswith(f"@{version}")

        until(30.0, is_current)
        for name, tokens in seen:  # each answer is of the version that it names
            assert tokens == answers[int(name.partition("@")[2]) - 1], name
    vllm.client.rollback("french", 1)
    until(30.0, lambda: vllm.tokens("french") == ("default/french@1", answers[0]))
    assert vllm.tokens("french@2") == ("default/french@2", answers[1])
    vllm.client.delete("french")
    until(30.0, lambda: vllm.complete("french")[0] == 404)


def test_how_long_an_adapter_takes_to_its_first_token(
    vllm: Vllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints it beside vLLM's own loading of the same folders, by a server without the store. That
    one reads a folder that a trainer wrote, unchecked."""
    folders = [tmp_path / f"v{seed}" for seed in range(NUM_TIMES)]
    firsts = [train(folder, seed)[:1] for seed, folder in enumerate(folders)]
    seconds: dict[str, list[float]] = defaultdict(list)

    def measure(name: str, act: Callable[[], object]) -> None:
        start_s = time.monotonic()
        act()
        seconds[name].append(time.monotonic() - start_s)

    def answer(server: Vllm, model: str, name: str, first: list[int]) -> None:
        assert server.tokens(model, 1) == (name, first)

    def switch(version: int, first: list[int]) -> None:
        until(30.0, lambda: vllm.tokens("moving", 1) == (f"default/moving@{version}", first))

    for index, (folder, first) in enumerate(zip(folders, firsts, strict=True)):
        name = f"timed{index}"
        register = partial(vllm.client.register, source=folder, base_model="org/base")
        measure("registration", partial(register, name))
        for which in ("first token", "first token again"):
            measure(which, partial(answer, vllm, name, f"default/{name}@1", first))
        register("moving")
        if index == 0:
            assert vllm.tokens("moving", 1) == ("default/moving@1", first)
        else:
            measure("update", partial(switch, index + 1, first))
    with vllm_server(vllm.model, tmp_path / "own.log", {}) as url:
        own = Vllm(url, vllm.client, vllm.model)
        assert own.complete("base")[0] == 200
        for index, (folder, first) in enumerate(zip(folders, firsts, strict=True)):
            load = {"lora_name": f"timed{index}", "lora_path": str(folder)}
            measure("vLLM's loading", partial(own.load, **load))
            for which in ("vLLM's first token", "vLLM's first token again"):
                measure(which, partial(answer, own, f"timed{index}", f"timed{index}", first))
    with capsys.disabled():
        for what, times in seconds.items():
            print(f"{what}: {statistics.median(times):.3f} s", [round(each, 3) for each in times])


def test_no_caller_loads_adapters_past_the_store(vllm: Vllm, tmp_path: Path) -> None:
    train(tmp_path / "own")
    status, _ = vllm.post("/v1/load_lora_adapter", lora_name="own", lora_path=str(tmp_path / "own"))
    assert status == 403
    assert vllm.complete("own")[0] == 404
