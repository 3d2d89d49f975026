"""Float8 adapters: every kind against transformers + peft, whose A and B are rounded to values that
float8 has; and both services as real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inference_svc.adapters.targets import build_layout
from inference_svc.model.architectures import load_description
from loadout.cli.__main__ import main
from tests.support.models.parity import prompts
from tests.support.models.zoo import AdapterSpec, Zoo, adapted, make_model
from tests.support.pairs import PATHS
from tests.system.kinds import Kinds, begin, check, make_kinds, shake_to_float8, to_float8
from tests.system.services import Services

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds("qwen3", tmp_path_factory.mktemp("float8"), shake_to_float8)


@pytest.mark.parametrize("path", PATHS)
def test_all_kinds_together_have_the_oracles_logits(zoo: Kinds, path: str, start: Callable) -> None:
    running, recorder = begin(zoo, start, native_kernels=PATHS[path], adapter_dtype="fp8")
    names = [*zoo.names, ""]
    asked = [zoo.prompt_of(*each) for each in zip(names, prompts(len(names)), strict=True)]
    for index, (name, prompt) in enumerate(zip(names, asked, strict=True)):
        zoo.submit(running, str(index), prompt, name, max_tokens=NUM_TOKENS)
    results = [running.result(str(index)) for index in range(len(names))]
    for index, (name, prompt) in enumerate(zip(names, asked, strict=True)):
        check(zoo, name, prompt, *results[index], recorder.logits[str(index)])
    running.check_idle()


@pytest.mark.parametrize("path", PATHS)
def test_experts_have_the_oracles_tokens(tmp_path: Path, path: str, start: Callable) -> None:
    options = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    spec = AdapterSpec("experts", 4, ["q_proj"], options)
    model = make_model("mixtral", tmp_path / "model")
    reference = adapted(model, "mixtral", tmp_path / "adapters", [spec], to_float8)
    dirs = {spec.name: tmp_path / "adapters" / spec.name}
    zoo = Zoo("mixtral", tmp_path / "model", reference, dirs)
    running = start(zoo, native_kernels=PATHS[path], adapter_dtype="fp8")
    names = [spec.name, "", spec.name]
    first = prompts(1)[0]
    answers = [zoo.greedy(name, first, NUM_TOKENS) for name in ("", spec.name)]
    assert answers[0] != answers[1], "the adapter changes what is compared"
    for index, (name, prompt) in enumerate(zip(names, prompts(len(names)), strict=True)):
        running.submit(str(index), prompt, name, max_tokens=NUM_TOKENS)
    for index, (name, prompt) in enumerate(zip(names, prompts(len(names)), strict=True)):
        tokens, last = running.result(str(index))
        assert last.error is None, last.error
        assert tokens == zoo.greedy(name, prompt, NUM_TOKENS), name or "base"
    running.check_idle()


@pytest.fixture(scope="module")
def services(zoo: Kinds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    flags = ("--dtype", "float32", "--adapter-dtype", "fp8")
    with Services(zoo, tmp_path_factory.mktemp("services"), inference_flags=flags) as made:
        yield made
        made.check_exit_codes()


def test_services_serve_what_the_oracle_answers(zoo: Kinds, services: Services) -> None:
    """Of images that were compiled, and, after the store's restart, read from its disk."""
    client, names = services.client, ("plain", "dora", "lookup")
    for name in names:
        client.register(name, services.source(name), base_model="llama")
    [prompt] = prompts(1)
    for _ in range(2):
        for name in names:
            answer = client.complete(
                prompt, adapter=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
            assert list(answer.token_ids) == zoo.of(name).greedy(name, prompt, NUM_TOKENS), name
            client.unload(name)
        services.kill_store()
        services.start_store()


def test_the_server_reports_the_type(
    zoo: Kinds, services: Services, capsys: pytest.CaptureFixture[str]
) -> None:
    assert services.client.server_info().adapter_dtype == "float8_e4m3fn"
    addresses = ("--inference", services.inference_address, "--store", services.store_address)
    assert main(["info", *addresses]) == 0
    assert "or less, A and B in float8_e4m3fn" in capsys.readouterr().out.replace("\n", "")


def test_images_have_a_quarter_of_the_bytes_of_float32(zoo: Kinds, services: Services) -> None:
    client = services.client
    client.register("small", services.source("small"), base_model="llama")
    resident = client.load("small")
    decoder = load_description(zoo.model_dir)
    shapes = {each.name: each for each in build_layout(decoder, "", torch.float32).targets}
    targets = client.inspect("small").targets
    for target in targets:
        shape = shapes[target.name]
        sizes = [target.rank * each for each in (shape.in_features, shape.out_features)]
        assert [segment.num_bytes for segment in target.segments] == sizes
    assert resident.num_bytes == sum(
        -(-segment.num_bytes // 256) * 256 for target in targets for segment in target.segments
    )
