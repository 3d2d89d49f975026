"""Settings of the inference service alone; see tests/servicekit/test_settings.py for the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from contract.images.segment_kinds import FURTHER_KINDS, SegmentKind
from inference_svc.auto_settings import (
    Machine,
    ModelFacts,
    Sizes,
    resolve,
    resolve_images,
    to_engine_config,
)
from inference_svc.config import InferenceSettings
from inference_svc.core import padding_pages
from inference_svc.server import announcement_of
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings

MIB = 1 << 20
TARGETS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head")
MODEL = ModelFacts(
    "bfloat16",
    max_position_embeddings=4096,
    kv_elements_per_token=1024,
    kv_vectors_per_token=16,
    lora_targets=TARGETS,
    fused_targets={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
)
HYBRID = dataclasses.replace(MODEL, state_bytes=16 * MIB)
"""A model with recurrent layers."""
ENCODER = dataclasses.replace(
    MODEL, kv_elements_per_token=0, kv_vectors_per_token=0, is_encoder=True, hidden_size=2048
)
CPU, GPU = Machine(has_cuda=False), Machine(True, 1000 * MIB, 1200 * MIB)


def fit(settings: InferenceSettings, machine: Machine) -> Sizes:
    """Takes everything that is free for keys and values."""
    kv_memory = settings.kv_memory or machine.free_bytes
    return Sizes(3 * MIB, 5 * MIB, kv_memory, settings.max_sequences or 7, 9)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LOADOUT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def parse(model: Path, *args: str) -> InferenceSettings:
    return load_settings(InferenceSettings, ["--model", str(model), *args])


def test_names_of_the_base_model(model: Path) -> None:
    assert parse(model, "--aliases", "a, b").base_model_names == ("my-model", "a", "b")
    assert parse(model, "--base-model", "m", "--aliases", "n,m").base_model_names == ("m", "n")


def test_store_addresses(model: Path) -> None:
    assert parse(model).store_addresses == ()
    assert parse(model, "--store", "a:1, [::1]:2,a:1").store_addresses == ("a:1", "[::1]:2")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--http", "7080"], "--http: '7080' is not HOST:PORT"),
        (["--store", "h:1,7080"], "--store: '7080' is not HOST:PORT"),
        (["--dtype", "int8"], "--dtype: must be 'auto'"),
        (
            ["--model", "/nowhere"],
            "--model: /nowhere is neither a folder nor a model's name on the hub",
        ),
        (["--model", "/"], "--model: / has no config.json"),
        (
            ["--max-sequences", "64", "--max-batch-tokens", "63"],
            "--max-sequences 64 exceeds --max-batch-tokens 63",
        ),
        (
            ["--state-interval-tokens", "100"],
            "--state-interval-tokens 100 is not a multiple of --page-size 16: states are stored at "
            "the ends of pages; use 112",
        ),
        (["--state-interval-tokens", "-16"], "--state-interval-tokens: must be"),
        (["--stored-states", "-1"], "--stored-states: must be"),
        (
            ["--tensor-parallel", "6", "--expert-parallel", "4"],
            "--expert-parallel 4 does not divide --tensor-parallel 6; numbers that do: 1, 2, 3, 6",
        ),
        (["--expert-parallel", "2"], "--expert-parallel 2 does not divide --tensor-parallel 1"),
    ],
)
def test_wrong_values(model: Path, args: list[str], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse(model, *args)
    assert str(caught.value).startswith(message)


def test_auto_follows_the_model_and_the_machine(model: Path) -> None:
    config = resolve(parse(model), CPU, MODEL)
    assert (config.device, config.dtype, config.max_model_len) == ("cpu", "bfloat16", 4096)
    assert (config.kv_memory, config.host_memory) == (512 * MIB, 0)
    assert resolve(parse(model, "--host-memory", "7MiB"), CPU, MODEL).host_memory == 7 * MIB
    assert (config.adapter_memory, config.max_sequences) == (256 * MIB, 64)
    assert config.max_batch_tokens == 512
    assert resolve(parse(model, "--max-sequences", "600"), CPU, MODEL).max_batch_tokens == 600
    assert resolve(parse(model, "--max-batch-tokens", "63"), CPU, MODEL).max_sequences == 63
    assert resolve(parse(model, "--device", "cpu"), GPU, MODEL).device == "cpu"
    # Resolving is idempotent: nothing is left to decide.
    assert resolve(config, CPU, MODEL) == config


def test_sizes_on_a_device_are_chosen_by_what_knows_it(model: Path) -> None:
    config = resolve(parse(model, "--dtype", "float32"), GPU, MODEL, fit)
    assert (config.device, config.dtype) == ("cuda", "float32")
    assert (config.kv_memory, config.adapter_memory) == (1000 * MIB, 3 * MIB)
    assert (config.host_memory, config.max_sequences, config.max_batch_tokens) == (5 * MIB, 7, 9)
    assert resolve(config, GPU, MODEL, fit) == config


@pytest.mark.parametrize(
    ("args", "number"),
    [
        ([], 8),
        (["--device", "cpu", "--tensor-parallel", "2"], 8),
        (["--max-prompt-images", "3"], 3),
        (["--max-prompt-images", "0"], 0),
    ],
)
def test_a_model_with_a_processor_reads_images(args: list[str], number: int, model: Path) -> None:
    """Without one it reads text, and starts."""
    assert resolve_images(parse(model)).max_prompt_images == 0
    (model / "preprocessor_config.json").write_text("{}")
    config = resolve_images(parse(model, *args))
    assert config.max_prompt_images == number
    assert resolve_images(config) == config


def test_the_largest_image_has_room(model: Path) -> None:
    """By default, whatever the model; and not more than the longest prompt needs."""
    large = dataclasses.replace(MODEL, picture_tokens=16384, picture_elements=4 * 40960)
    assert resolve(parse(model), CPU, MODEL).prompt_image_memory == 512 * MIB
    assert resolve(parse(model), CPU, large).prompt_image_memory == 2 * 4096 * 4 * 40960 * 2
    own = ("--prompt-image-memory", "3MiB")
    assert resolve(parse(model, *own), CPU, large).prompt_image_memory == 3 * MIB


def test_context_is_as_long_as_the_pages_allow(model: Path) -> None:
    config = resolve(parse(model, "--kv-memory", "1MiB"), CPU, MODEL)
    assert config.max_model_len == MIB // (1024 * 2)
    fp8 = resolve(parse(model, "--kv-memory", "1MiB", "--kv-dtype", "fp8"), CPU, MODEL)
    assert fp8.max_model_len == MIB // (16 * (1024 + 4 * 16)) * 16
    assert resolve(parse(model, "--max-model-len", "100"), CPU, MODEL).max_model_len == 100


def test_on_a_device_one_page_is_of_no_sequence(model: Path) -> None:
    """What is resolved is what the engine can hold beside padding's page."""
    config = resolve(parse(model, "--kv-memory", "1MiB"), GPU, MODEL, fit)
    assert config.max_model_len == 512 - config.page_size * padding_pages("cuda")
    assert padding_pages("cuda") > padding_pages("cpu") == 0
    assert resolve(config, GPU, MODEL, fit) == config


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ()),
        (["--lora-targets", "all"], ()),
        (["--lora-targets", "v_proj,q_proj, q_proj"], ("q_proj", "v_proj")),
        (["--lora-targets", "v_proj", "--lora-targets", "lm_head"], ("lm_head", "v_proj")),
        (["--lora-targets", ",".join(TARGETS)], ()),
        (["--lora-targets", "qkv_proj"], ("k_proj", "q_proj", "v_proj")),
        (["--lora-targets", "qkv_proj,k_proj,lm_head"], ("k_proj", "lm_head", "q_proj", "v_proj")),
        (["--lora-targets", "embed_tokens,qkv_proj,lm_head"], ()),
    ],
)
def test_targets_that_adapters_may_change(
    model: Path, args: list[str], expected: tuple[str, ...]
) -> None:
    config = resolve(parse(model, *args), CPU, MODEL)
    assert config.lora_targets == expected == to_engine_config(config).lora_targets
    assert resolve(config, CPU, MODEL) == config


def test_dtype_that_is_not_computed(model: Path) -> None:
    message = "model's float64 is not supported; choose one of float32, bfloat16, float16$"
    with pytest.raises(InvalidSetting, match=message):
        resolve(parse(model), CPU, dataclasses.replace(MODEL, dtype="float64"))


@pytest.mark.parametrize(
    ("args", "free_bytes", "sequences", "stored"),
    [
        ((), 4 << 30, 8, 16),
        ((), 16 << 30, 32, 64),
        (("--tensor-parallel", "4"), 16 << 30, 8, 16),  # each rank has states of so many bytes
        ((), 1 << 40, 64, 64 + 512),  # as prefixes in 512 MiB of pages can have, at most
        ((), 1 << 20, 1, 0),
        ((), None, 16, 32),
        (("--memory-limit", "8GiB"), 1 << 40, 16, 32),
        (("--max-sequences", "40"), 4 << 30, 40, 16),
        (("--stored-states", "7"), 4 << 30, 8, 7),
        (("--stored-states", "0"), 4 << 30, 8, 0),
        (("--no-prefix-cache", "--stored-states", "7"), 4 << 30, 8, 0),
        (("--kv-memory", "16MiB", "--state-interval-tokens", "1024"), 1 << 40, 64, 64 + 8),
    ],
)
def test_recurrent_states_have_a_share_of_a_cpus_memory(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    free_bytes: int | None,
    sequences: int,
    stored: int,
) -> None:
    if "--memory-limit" in args:  # no flag
        monkeypatch.setenv("LOADOUT_INFERENCE_MEMORY_LIMIT", args[1])
        args = ()
    machine = Machine(has_cuda=False, host_free_bytes=free_bytes)
    config = resolve(parse(model, *args), machine, HYBRID)
    assert (config.max_sequences, config.stored_states) == (sequences, stored)
    assert to_engine_config(config).num_stored_states == stored
    assert resolve(config, machine, HYBRID) == config


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        ((), 512),
        (("--page-size", "48"), 528),
        (("--page-size", "1024"), 1024),
        (("--state-interval-tokens", "64"), 64),
        (("--page-size", "7", "--state-interval-tokens", "21"), 21),
    ],
)
def test_states_are_stored_at_the_ends_of_pages(
    model: Path, args: tuple[str, ...], tokens: int
) -> None:
    config = resolve(parse(model, *args), CPU, HYBRID)
    assert config.state_interval_tokens == tokens
    assert to_engine_config(config).state_pages * config.page_size == tokens


def test_other_models_ignore_the_settings_of_states(model: Path) -> None:
    args = ("--stored-states", "7", "--state-interval-tokens", "64")
    config = resolve(parse(model, *args), Machine(False, host_free_bytes=1 << 20), MODEL)
    assert (config.stored_states, config.max_sequences) == (0, 64)


@pytest.mark.parametrize(
    ("args", "machine", "message"),
    [
        (
            ["--lora-targets", "v_proj,self_attn.q_prj"],
            CPU,
            "--lora-targets: the model has no target self_attn.q_prj, but embed_tokens, q_proj, "
            "k_proj, v_proj, lm_head, qkv_proj; did you mean q_proj?",
        ),
        (
            ["--lora-targets", "qkvproj"],
            CPU,
            "no target qkvproj, but .*; did you mean qkv_proj?",
        ),
        (
            ["--lora-targets", "all,q_proj"],
            CPU,
            "--lora-targets: the model has no target all, but .*, qkv_proj$",
        ),
        (["--device", "cuda"], CPU, "--device cuda: there is no CUDA device"),
        (["--max-model-len", "4097"], CPU, "exceeds the model's 4096"),
        (["--max-model-len", "4096", "--kv-memory", "1MiB"], CPU, "holds 512 tokens"),
        (["--kv-memory", "1KiB"], CPU, "holds 0 tokens"),
        (["--max-model-len", "512", "--kv-memory", "1MiB"], GPU, "holds 496 tokens"),
        (["--kv-memory", "1KiB"], GPU, "holds 0 tokens"),
        (["--fully-sharded-loras"], CPU, "--fully-sharded-loras needs --tensor-parallel 2 or more"),
        (
            ["--tensor-parallel", "2", "--fully-sharded-loras", "--adapter-dtype", "fp8"],
            CPU,
            "part of A would have a scale of its own; leave --adapter-dtype auto",
        ),
        (
            ["--tensor-parallel", "4", "--expert-parallel", "2", "--fully-sharded-loras"],
            CPU,
            "--expert-parallel 2 has some processes share experts that others lack; set it to 1",
        ),
        (["--tensor-parallel", "2", "--engine", "thread"], CPU, "needs --engine process"),
        (["--tensor-parallel", "2", "--host-memory", "1MiB"], CPU, "set --host-memory 0"),
        (
            ["--tensor-parallel", "2"],
            GPU,
            "2: each of 2 processes of a machine needs a CUDA device of its own, and 1 are",
        ),
        (["--tensor-parallel", "16", "--pipeline-parallel", "8"], CPU, "are 128 processes, and"),
        (
            ["--tensor-parallel", "2", "--pipeline-parallel", "2"],
            dataclasses.replace(GPU, num_devices=2),
            "--pipeline-parallel 2, 2: each of 4 processes of a machine needs a CUDA device",
        ),
        (["--pipeline-parallel", "2", "--fully-sharded-loras"], CPU, "needs --tensor-parallel 2"),
    ],
)
def test_impossible_settings(model: Path, args: list[str], machine: Machine, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        resolve(parse(model, *args), machine, MODEL, fit)


@pytest.mark.parametrize(
    ("args", "subject", "message"),
    [
        (["--image-tls-ca-file", "ca.pem"], "image_tls_ca_file", "without --image-hosts"),
        (["--image-hosts", "a.example"], "image_hosts", "without --http: only"),
    ],
)
def test_settings_of_fetched_images_have_an_effect(
    model: Path, args: list[str], subject: str, message: str
) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{args[0]} has no effect {message}") as refused:
        resolve_images(parse(model, *args))
    assert refused.value.subject == subject
    resolve_images(parse(model, *args, "--image-hosts", "a.example", "--http", "127.0.0.1:0"))


def test_a_limit_of_the_hosts_memory_is_for_a_gpu(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOADOUT_INFERENCE_HOST_MEMORY_LIMIT", "1GiB")
    with pytest.raises(InvalidSetting, match=r"^host-memory-limit: on a CPU"):
        resolve(parse(model), CPU, MODEL, fit)


def test_adapters_of_experts_have_space_for_one_of_all_experts(model: Path, monkeypatch) -> None:
    """Up to a quarter of what the machine has left, or may use."""
    facts = dataclasses.replace(MODEL, expert_elements_per_rank=MIB)
    largest = 8 * MIB * 2  # of rank 8, in bf16

    for machine, limit, expected in (
        (CPU, "", largest),
        (Machine(False, host_free_bytes=32 * MIB), "", 8 * MIB),
        (CPU, "40MiB", 10 * MIB),
    ):
        if limit:
            monkeypatch.setenv("LOADOUT_INFERENCE_MEMORY_LIMIT", limit)
        settings = parse(model, "--device", "cpu", "--max-rank", "8")
        found = resolve(settings, machine, facts).adapter_memory
        assert found == 256 * MIB + expected
    given = parse(model, "--device", "cpu", "--adapter-memory", "1MiB")
    assert resolve(given, CPU, facts).adapter_memory == MIB


def test_magnitudes_are_announced_unless_adapters_are_fully_sharded(model: Path) -> None:
    """The store refuses such adapters, and the rest is announced all the same."""
    ranks = ("--tensor-parallel", "2")
    kinds = announcement_of(parse(model, *ranks), "").segment_kinds
    assert set(kinds) == set(FURTHER_KINDS)
    fully_sharded = announcement_of(parse(model, *ranks, "--fully-sharded-loras"), "").segment_kinds
    assert set(kinds) - set(fully_sharded) == {SegmentKind.MAGNITUDE}


def test_encoders_have_no_keys_and_values(model: Path) -> None:
    """A step has room for the longest prompt, which is computed at once."""
    found = resolve(parse(model, "--kv-memory", "1GiB"), CPU, ENCODER)
    assert (found.kv_memory, found.max_model_len, found.max_batch_tokens) == (0, 4096, 4096)
    found = resolve(parse(model, "--max-model-len", "512"), CPU, ENCODER)
    assert (found.max_model_len, found.max_batch_tokens) == (512, 512)


@pytest.mark.parametrize(
    ("hidden_size", "num_tokens"), [(32, 24576), (384, 2048), (1024, 768), (4096, 512)]
)
def test_steps_of_small_encoders_have_more_tokens(
    model: Path, hidden_size: int, num_tokens: int
) -> None:
    facts = dataclasses.replace(ENCODER, hidden_size=hidden_size)
    settings = parse(model, "--max-model-len", "512")
    assert resolve(settings, CPU, facts).max_batch_tokens == num_tokens
    settings = parse(model, "--max-model-len", "512", "--max-batch-tokens", "600")
    assert resolve(settings, CPU, facts).max_batch_tokens == 600


@pytest.mark.parametrize(
    ("args", "machine", "message"),
    [
        (["--max-batch-tokens", "300"], CPU, "--max-batch-tokens 300: .* at least --max-model-len"),
        (["--max-model-len", "5000"], CPU, "--max-model-len 5000 exceeds the model's 4096"),
        ([], GPU, "--device auto: encoders are for CPUs: set --device cpu"),
        (["--device", "cuda"], GPU, "--device cuda: encoders are for CPUs"),
    ],
)
def test_refused_settings_of_encoders(
    model: Path, args: list[str], machine: Machine, message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        resolve(parse(model, *args), machine, ENCODER, fit)
