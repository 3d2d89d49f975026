"""A model over several processes answers as one process does, and one that ends, ends all."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.models import NAME, prepare
from inference_svc.adapters.targets import build_layout
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Rank
from inference_svc.model.sharding.description import of_rank
from loadout import errors
from loadout.cli.adapters.verdicts import print_verdicts
from loadout.prometheus import scrape
from tests.support.forks import EXECUTED_RANKS, engine_of
from tests.support.models.zoo import (
    ALL,
    PARAMETERS,
    AdapterSpec,
    Zoo,
    adapted,
    make_model,
    make_zoo,
)
from tests.support.wait import until
from tests.system.expert_forms import FORMS, write_form
from tests.system.kinds import shake
from tests.system.services import Services

PROMPT = list(range(5, 26))
SHARDED = ("--fully-sharded-loras",)
NUM_TOKENS = 32
ADAPTERS = {
    "llama": ("", "r1", "r3", "r8", "r16", "r33", "embed"),
    "qwen3": ("", "r3", "r33", "embed"),
    "qwen3-moe": ("", "r3", "r8", "r16", "embed"),
    "qwen3_5": ("", "r3", "r8", "r33"),
    "qwen3-next": ("", "r3", "r8"),
    "lfm2": ("", "r3", "r8", "r33"),
    "olmo2": ("", "r3", "r33", "embed"),
}


def serve(zoo: Zoo, folder: Path, count: int, *more: str) -> Services:
    flags = ("--base-model", zoo.kind, "--adapter-wait-seconds", "60")
    ranks = ("--tensor-parallel", str(count))
    return Services(zoo, folder, inference_flags=(*flags, *ranks, *more))


def ranks_of(services: Services) -> list[int]:
    """Returns the processes of the other ranks, as the engine has logged them."""
    found = re.findall(r"rank \d+ is process (\d+)", services.inference.log_path.read_text())
    return [int(each) for each in found]


def check_nobody_else_reaches(services: Services, count: int) -> None:
    """All ranks are there, and none listens."""
    ranks, engine = ranks_of(services), engine_of(services.inference.pid)
    assert len(ranks) == count - 1
    connections = [
        each for pid in (engine, *ranks) for each in psutil.Process(pid).net_connections()
    ]
    assert not [each for each in connections if each.status == psutil.CONN_LISTEN]


def check_operators_see_all(services: Services, ranks: list[int], num_stages: int) -> None:
    """Each rank has a status, which its own process has counted, and stacks. Ranks of a stage pull
    as much."""
    indices = range(len(ranks) + 1)
    stages = [index * num_stages // len(indices) for index in indices]

    def is_counted() -> bool:  # other ranks report every second
        found = services.client.server_info().ranks
        pulled = {(each.stage, each.pulled_bytes) for each in found}
        is_done = all(each.num_steps and each.pulled_bytes for each in found)
        return is_done and len(pulled) == num_stages

    until(is_counted)
    found = services.client.server_info().ranks
    assert [each.index for each in found] == [*indices]
    assert [each.stage for each in found] == stages
    assert [each.process_id for each in found[1:]] == ranks
    for each in found:
        resident = psutil.Process(each.process_id).memory_info().rss
        assert abs(each.resident_bytes - resident) < 0.2 * resident
        assert each.answers
        assert each.num_threads == 1
        assert min(each.weights_bytes, each.pulled_bytes) > 0
        assert each.kv_bytes > 0 or num_stages > 1, "a stage of recurrent layers has none"
        assert 0 < each.exchange_seconds < each.step_seconds
    bound = [processor for each in found if not each.stage for processor in each.processors]
    assert len(bound) == len(set(bound)), "no two ranks of a stage share one"
    assert bool(bound) == (len(found) // num_stages <= len(os.sched_getaffinity(0)))
    metrics = scrape(services.inference_metrics)
    seconds = ("step_seconds_total", "exchange_seconds_total")
    for name in ("up", "resident_bytes", "steps_total", "pulled_bytes_total", *seconds):
        samples = metrics.select(f"loadout_inference_rank_{name}")
        assert {each.labels["rank"]: each.value > 0 for each in samples} == {
            str(index): True for index in indices
        }
    of_rank = metrics.select("loadout_inference_rank_up")
    assert [int(each.labels["stage"]) for each in of_rank] == stages
    parts = {each.name: each.content for each in services.client.server_debug_info()}
    stacks = parts["stacks.txt"].decode()
    for index in indices[1:]:
        _, _, of_rank = stacks.partition(f"=== rank {index}\n")
        assert "in recv_bytes" in of_rank.partition("===")[0], "it waits for a step"


@pytest.mark.parametrize(
    ("kind", "count", "expert_parallel", "num_stages"),
    [
        ("llama", 2, 1, 1),
        ("qwen3-moe", 2, 2, 1),
        pytest.param("qwen3-moe", 2, 1, 1, marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, 1, 1, marks=pytest.mark.long),
        ("qwen3_5", 1, 1, 2),
        pytest.param("lfm2", 2, 1, 1, marks=pytest.mark.long),
        pytest.param("olmo2", 2, 1, 1, marks=pytest.mark.long),
        pytest.param("qwen3-next", 2, 1, 1, marks=pytest.mark.long),
        pytest.param("qwen3", 2, 1, 1, marks=pytest.mark.long),
        pytest.param("qwen3-moe", 4, 1, 1, marks=pytest.mark.long),
        pytest.param("qwen3-moe", 4, 2, 1, marks=pytest.mark.long),
        pytest.param("llama", 2, 1, 2, marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, 2, 2, marks=pytest.mark.long),
        pytest.param("lfm2", 1, 1, 2, marks=pytest.mark.long),
    ],
)
def test_ranks_answer_as_peft(
    kind: str,
    count: int,
    expert_parallel: int,
    num_stages: int,
    zoos: Callable[[str], Zoo],
    tmp_path: Path,
    capsys: Any,
) -> None:
    """Mixed adapters in one batch, greedy in fp32."""
    zoo, num_ranks = zoos(kind), count * num_stages
    flags = "--expert-parallel", str(expert_parallel), "--pipeline-parallel", str(num_stages)
    with serve(zoo, tmp_path, count, *flags) as services:
        check_nobody_else_reaches(services, num_ranks)
        names = ADAPTERS[kind]
        check_answers(zoo, services, names)
        check_operators_see_all(services, ranks_of(services), num_stages)
        if num_stages > 1:
            refusal = "does not embed: with --pipeline-parallel another process has its hidden"
            with pytest.raises(errors.LoadoutError, match=refusal):
                services.client.embed(PROMPT)
        layers = {each.layer for each in services.client.inspect(names[1]).targets}
        assert layers == set(range(load_description(zoo.model_dir).num_layers)), "of all stages"
        print_verdicts(services.client.get(names[1]))
        expected = rf"servable by layout \w+, {num_ranks} processes, ranks up to 64"
        assert re.fullmatch(expected, capsys.readouterr().out.strip()), "a line for all ranks"
    assert services.exit_codes == [0, 0]


def check_answers(zoo: Zoo, services: Services, names: Sequence[str]) -> None:
    """All adapters, "" being none, in one batch."""
    for name in filter(None, names):
        services.client.register(name, services.source(name))

    def answer(name: str) -> list[int]:
        found = services.client.generate(
            PROMPT, adapter=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        return [token for chunk in found for token in chunk.token_ids]

    with ThreadPoolExecutor(len(names)) as threads:
        answers = dict(zip(names, threads.map(answer, names), strict=True))
    for name, found in answers.items():
        assert found == zoo.greedy(name, PROMPT, NUM_TOKENS, guess=found), name


@pytest.mark.long
def test_norms_of_all_heads_that_adapters_replace(tmp_path: Path) -> None:
    """Each rank has the part of its heads."""
    spec = AdapterSpec("norms", 4, ["q_proj"], {"modules_to_save": ["norm"]})
    model = make_model("olmo2", tmp_path / "model")
    reference = adapted(model, "olmo2", tmp_path / "adapters", [spec], shake)
    zoo = Zoo("olmo2", tmp_path / "model", reference, {"norms": tmp_path / "adapters" / "norms"})
    with serve(zoo, tmp_path, 2) as services:
        check_answers(zoo, services, ["", "norms"])


@pytest.mark.long
def test_adapters_of_some_experts_alone_are_refused(tmp_path: Path) -> None:
    """Ranks' parts would have other sizes. Adapters of all experts go on being served."""
    kind, folder = "qwen3-moe", tmp_path / "some"
    spec = AdapterSpec("all", 4, [], {"target_parameters": list(PARAMETERS[kind][:2])})
    zoo = make_zoo(kind, tmp_path, [spec])
    write_form(FORMS["one by one"], zoo.adapter_dirs["all"], folder, zoo.model_dir)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: each for name, each in tensors.items() if ".experts.5." not in name}, path)
    with serve(zoo, tmp_path, 2, "--expert-parallel", "2") as services:
        services.client.register("some", str(folder))
        with pytest.raises(errors.LoadoutError, match="with --expert-parallel 2 each process"):
            list(services.client.generate(PROMPT, adapter="some", max_tokens=2))
        check_answers(zoo, services, ["", "all"])


@pytest.mark.parametrize("is_staged", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_ends_the_engine(
    zoos: Callable[[str], Zoo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_staged: bool
) -> None:
    """The rank is a process as elsewhere, and no fork."""
    monkeypatch.setenv(EXECUTED_RANKS, "1")
    zoo, flags = zoos("llama"), ("--pipeline-parallel", "2") if is_staged else ()
    with serve(zoo, tmp_path, 1 if is_staged else 2, *flags) as services:
        chunks = iter(services.client.generate(PROMPT, max_tokens=220, ignore_eos=True))
        next(chunks)
        [rank] = ranks_of(services)
        os.kill(rank, signal.SIGSTOP)
        parts = {each.name: each.content.decode() for each in services.client.server_debug_info()}
        assert "=== rank 1\n\nno answer within 2 s" in parts["stacks.txt"]
        assert "=== process" in parts["stacks.txt"], "of the others"
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(errors.Unavailable, match="rank 1 was ended by SIGKILL"):
            list(chunks)
        until(lambda: not services.inference.is_alive, 30)
        assert "rank 1 was ended by SIGKILL" in services.inference.log_path.read_text()


@pytest.mark.parametrize("is_fully_sharded", [False, True])
@pytest.mark.parametrize(
    ("count", "num_stages"),
    [
        (2, 1),
        pytest.param(4, 1, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_ranks_pull_one_image_and_the_parts_that_each_has_whole(
    tmp_path: Path, count: int, num_stages: int, *, is_fully_sharded: bool
) -> None:
    """By the store's own counter. A third of an image is A of targets whose outputs are cut, or B
    of targets whose inputs are, which each rank of a stage has; none if adapters are fully sharded.
    Stages have other parts."""
    base = make_model("llama", tmp_path / "model", num_key_value_heads=4)
    spec = AdapterSpec("r16", 16, ALL)
    reference = adapted(base, "llama", tmp_path / "adapters", [spec])
    zoo = Zoo("llama", tmp_path / "model", reference, {"r16": tmp_path / "adapters" / "r16"})
    flags = ["--pipeline-parallel", str(num_stages)]
    flags += ["--fully-sharded-loras"] if is_fully_sharded else []
    with serve(zoo, tmp_path / "services", count, *flags) as services:
        check_pulled_bytes(services, count, torch.float32, is_fully_sharded=is_fully_sharded)
        found = services.client.complete(
            PROMPT, adapter="r16", max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        expected = zoo.greedy("r16", PROMPT, NUM_TOKENS, guess=found.token_ids)
        assert list(found.token_ids) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "num_stages", "more"),
    [(2, 1, ()), (2, 1, SHARDED), (4, 1, ()), (4, 1, SHARDED), (1, 2, ()), (2, 2, ())],
)
def test_bytes_of_an_adapter_of_200_million_weights(
    tmp_path: Path, count: int, num_stages: int, more: tuple[str, ...]
) -> None:
    """As above, in bf16, of the benchmarks' model."""
    prepared = prepare(NAME, 1, tmp_path)
    zoo = Zoo(NAME, prepared.model_dir, None, {"r16": prepared.adapters["0"]})
    flags = ("--pipeline-parallel", str(num_stages), "--adapter-memory", "32MiB")
    flags += ("--dtype", "bfloat16", *more)
    with serve(zoo, tmp_path / "services", count, *flags) as services:
        check_pulled_bytes(services, count, torch.bfloat16, is_fully_sharded=bool(more))
        services.client.complete(PROMPT, adapter="r16", max_tokens=4, ignore_eos=True)


@pytest.mark.long
@pytest.mark.parametrize(("count", "num_stages"), [(2, 1), (1, 2)])
def test_pushes_of_a_trainer(
    zoos: Callable[[str], Zoo], tmp_path: Path, count: int, num_stages: int
) -> None:
    """All ranks have a new version when a push returns; an answer that runs keeps its own."""
    zoo = zoos("llama")
    with serve(zoo, tmp_path, count, "--pipeline-parallel", str(num_stages)) as services:
        running, expected = [], dict[str, list[int]]()
        for number, variant in enumerate(("r1", "r16", "r33", "r3"), 1):
            folder = zoo.adapter_dirs[variant]
            tensors = load_file(folder / "adapter_model.safetensors")
            config = (folder / "adapter_config.json").read_text()
            pushed = services.client.push(
                "live", tensors, config, wait="all", keep=2, base_model="llama"
            )
            assert (pushed.version, len(pushed.replicas)) == (number, 1)
            chunks = services.client.generate(
                PROMPT, adapter="live", max_tokens=200, temperature=0.0, ignore_eos=True
            )
            running.append((variant, pushed.digest, [next(chunks)], chunks))
        for variant, digest, found, chunks in running:
            found += chunks
            assert {each.adapter.digest for each in found if each.adapter} == {digest}
            tokens = [token for chunk in found for token in chunk.token_ids]
            expected[variant] = zoo.greedy(variant, PROMPT, 200, guess=tokens)
            assert tokens == expected[variant], variant
        assert len({*map(tuple, expected.values())}) == 4, "versions differ"


def check_pulled_bytes(
    services: Services, count: int, dtype: torch.dtype, *, is_fully_sharded: bool
) -> None:
    """Has all ranks load an adapter of rank 16 on all linear layers: together they pull one image,
    and from then on the parts that each rank of a stage has whole."""
    decoder = load_description(services.zoo.model_dir)
    rank = of_rank(decoder, Rank(0, count))
    part = build_layout(rank, "base", dtype, is_fully_sharded=is_fully_sharded)
    per_rank, image_bytes, whole_bytes = 16 * dtype.itemsize, 0, 0
    for target in part.targets:
        if target.module in ALL:
            image_bytes += per_rank * (target.in_features + target.out_features)
            whole_bytes += 0 if target.in_slice else per_rank * target.in_features
            whole_bytes += 0 if target.out_slice else per_rank * target.out_features
    services.client.register("r16", services.source("r16"))
    services.client.load("r16")
    pulled = scrape(services.store_metrics).one("loadout_store_pulled_bytes_total")
    if is_fully_sharded:
        assert whole_bytes == 0
    elif count > 1:
        assert image_bytes / 4 < whole_bytes < image_bytes / 2
    needed_bytes = image_bytes + (count - 1) * whole_bytes
    assert needed_bytes <= pulled <= needed_bytes + 0.02 * image_bytes
    print(f"{pulled / image_bytes:.4f} images of {image_bytes} bytes")
