"""Base models in few bits through both real services: the tokens of transformers and PEFT with the
weights that the bits mean, for the base model and three adapters in one batch. One of these says
that it was trained on NF4, and the store notes where that is not served."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from loadout.prometheus import scrape
from loadout.types import Completion, WeightFormat
from tests.support.models.parity import prompts
from tests.support.models.quantised import zoo_in_few_bits
from tests.support.models.zoo import Zoo
from tests.support.native import native_library
from tests.support.pairs import in_turns
from tests.support.wait import until
from tests.system.services import Services

NUM_TOKENS = 24
NF4_NAME = "unsloth/llama-bnb-4bit"
"""The base model that the config of the adapter "scaled" names."""
FORMS = {
    "gguf": "gguf q4_k",
    "nf4": "nf4",
    "int8": "int8",
    "mxfp4": "mxfp4",
    **dict.fromkeys(("fp8", "fp8 tensor"), "fp8"),
    **dict.fromkeys(("int4", "int4 zeros", "gptq", "act-order", "awq"), "int4"),
}
"""The form that servers of each checkpoint announce."""
QUICK = ("gguf", "int4", "nf4", "fp8")
HELD_PLAIN = {"act-order": "held in float32"}
"""The report on weights that are dequantised while they are read."""


def name_base(adapter: Path, name: str) -> None:
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": name}
    path.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def zoo_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Zoo]:
    """Models by format, each made once."""
    made: dict[str, Zoo] = {}

    def zoo(form: str) -> Zoo:
        if form not in made:
            made[form] = zoo_in_few_bits(form, tmp_path_factory.mktemp(form))
            for name, adapter in made[form].adapter_dirs.items():
                name_base(adapter, NF4_NAME if name == "scaled" else "llama")
        return made[form]

    return zoo


CASES = [*((each, "float32") for each in QUICK), ("gguf", "bfloat16")]
REST = [
    pytest.param(form, "float32", path, marks=pytest.mark.long)
    for form in FORMS
    if form not in QUICK
    for path in ("native", "torch")
]


@pytest.mark.parametrize(("form", "dtype", "path"), [*in_turns(CASES, ["native", "torch"]), *REST])
def test_a_mixed_batch(
    form: str,
    dtype: str,
    path: str,
    zoo_of: Callable[[str], Zoo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if path == "native":
        native_library()
    monkeypatch.setenv("LOADOUT_INFERENCE_NATIVE_KERNELS", str(path == "native").lower())
    zoo = zoo_of(form)
    names = ("", *zoo.adapter_dirs)
    asked = dict(zip(names, prompts(len(names), seed=5), strict=True))
    with Services(zoo, tmp_path, inference_flags=("--no-tokenizer", "--dtype", dtype)) as services:
        info = services.client.server_info()
        assert info.kernels.startswith(path)
        kernels = "native" if path == "native" else "dequantised"
        check_reported(services, info.weight_formats, HELD_PLAIN.get(form, kernels))
        answers = answers_of(services, asked)
        check_notes(services, FORMS[form])
        services.check_exit_codes()
    check = check_tokens if dtype == "float32" else check_log_probabilities
    for name, answer in answers.items():
        check(zoo, name, asked[name], answer)


def check_reported(services: Services, formats: tuple[WeightFormat, ...], kernels: str) -> None:
    """The metric has the same formats, each with the code that multiplies by it."""
    assert {each.kernels for each in formats} == {kernels}
    samples = scrape(services.inference_metrics).select("loadout_inference_weight_format_info")
    found = [(each.labels["format"], each.labels["kernels"]) for each in samples]
    assert sorted(found) == sorted((each.format, each.kernels) for each in formats)


def answers_of(services: Services, asked: dict[str, list[int]]) -> dict[str, Completion]:
    """Has all prompts answered in one batch: they wait in a server that pauses."""
    client = services.client
    for name in services.zoo.adapter_dirs:
        client.register(name, services.source(name))
        client.load(name)
    client.pause()

    def ask(name: str) -> Completion:
        return client.complete(
            asked[name],
            adapter=name,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            logprobs=1,
        )

    with ThreadPoolExecutor(len(asked)) as pool:
        futures = {name: pool.submit(ask, name) for name in asked}
        until(lambda: client.pause() == len(asked))
        client.resume()
        return {name: future.result() for name, future in futures.items()}


def check_notes(services: Services, form: str) -> None:
    assert services.client.server_info().weight_form == form
    for name in services.zoo.adapter_dirs:
        (state,) = services.client.get(name).layout_states
        (server,) = state.servers
        is_noted = name == "scaled" and form != "nf4"
        assert server.servable
        assert server.note.startswith(
            f"trained on the nf4 form of the base model, served on {form}: " if is_noted else ""
        )
        assert bool(server.note) == is_noted


def check_tokens(zoo: Zoo, name: str, prompt: list[int], answer: Completion) -> None:
    tokens = list(answer.token_ids)
    assert tokens == zoo.greedy(name, prompt, NUM_TOKENS, guess=tokens), name or "base"


def check_log_probabilities(zoo: Zoo, name: str, prompt: list[int], answer: Completion) -> None:
    """They are as near to those in fp32 as the oracle's are in bf16."""
    tokens = torch.tensor(answer.token_ids)
    given = [*prompt, *answer.token_ids[:-1]]
    exact, rounded = (
        zoo.logits(name, given, dtype)[len(prompt) - 1 :].log_softmax(dim=-1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = torch.tensor([each.chosen.logprob for each in answer.logprobs])
    expected, theirs = (each.gather(1, tokens[:, None])[:, 0] for each in (exact, rounded))
    assert (ours - expected).abs().mean() <= 1.5 * (theirs - expected).abs().mean() + 1e-3
    assert (ours - expected).abs().mean() < 0.1
