"""Malformed adapters are refused by name, and nobody beside them notices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadout import errors, types
from tests.support.wait import until
from tests.system.services import Services

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [ord(char) for char in "good requests"]
A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B_NAME = A_NAME.replace("lora_A", "lora_B")

Change = Callable[[Path], None]


def config(**fields: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        values = load_file(path)
        edit(values)
        save_file(values, path)

    return change


def poke(name: str, value: float) -> Change:
    return tensors(lambda values: values[name].view(-1)[3:4].fill_(value))


def raw(edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        path.write_bytes(edit(path.read_bytes()))

    return change


def link_out(folder: Path) -> None:
    """The weights are a link to a file outside the roots."""
    path = folder / "adapter_model.safetensors"
    outside = folder.parent.parent / "outside.safetensors"
    shutil.move(path, outside)
    path.symlink_to(outside)


def only_pickle(folder: Path) -> None:
    torch.save({}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


REFUSED: dict[str, tuple[Change, type[errors.LoadoutError], str]] = {
    "truncated-file": (raw(lambda b: b[:-100]), errors.InvalidArgument, "adapter_model"),
    "header-beyond-the-file": (
        raw(lambda b: (1 << 40).to_bytes(8, "little") + b[8:]),
        errors.InvalidArgument,
        "adapter_model",
    ),
    "header-not-json": (
        raw(lambda b: b[:8] + b"x" + b[9:]),
        errors.InvalidArgument,
        "adapter_model",
    ),
    "empty-file": (raw(lambda b: b""), errors.InvalidArgument, "adapter_model"),
    "missing-b": (tensors(lambda v: v.pop(B_NAME)), errors.InvalidArgument, "q_proj"),
    "unknown-tensor": (
        tensors(lambda v: v.update({"extra.weight": torch.ones(2)})),
        errors.InvalidArgument,
        "extra.weight",
    ),
    "rank-is-not-the-configs": (
        tensors(lambda v: v.update({A_NAME: torch.ones(5, 64)})),
        errors.InvalidArgument,
        "q_proj",
    ),
    "magnitudes-without-numbers": (
        lambda folder: _add_vectors(folder, "lora_magnitude_vector", "use_dora", torch.nan),
        errors.InvalidArgument,
        "lora_magnitude_vector",
    ),
    "biases-without-numbers": (
        lambda folder: _add_vectors(folder, "lora_B.bias", "lora_bias", torch.inf),
        errors.InvalidArgument,
        "lora_B.bias",
    ),
    "nan": (poke(A_NAME, float("nan")), errors.InvalidArgument, "q_proj"),
    "infinity": (poke(B_NAME, float("inf")), errors.InvalidArgument, "q_proj"),
    "integer-weights": (
        tensors(lambda v: v.update({A_NAME: torch.ones(16, 64, dtype=torch.int32)})),
        errors.InvalidArgument,
        "q_proj",
    ),
    "lost-biases": (config(bias="all"), errors.InvalidArgument, "bias"),
    "dora-without-magnitudes": (config(use_dora=True), errors.InvalidArgument, "use_dora"),
    "pissa": (config(init_lora_weights="pissa"), errors.InvalidArgument, "init_lora_weights"),
    "loftq": (config(init_lora_weights="loftq"), errors.InvalidArgument, "init_lora_weights"),
    "lost-parameters": (
        config(target_parameters=["mlp.experts.gate_up_proj"]),
        errors.InvalidArgument,
        "target_parameters",
    ),
    "lost-module": (
        config(modules_to_save=["lm_head"]),
        errors.InvalidArgument,
        "modules_to_save",
    ),
    "not-lora": (config(peft_type="IA3"), errors.InvalidArgument, "peft_type"),
    "unknown-key": (config(use_magic=True), errors.InvalidArgument, "use_magic"),
    "config-not-json": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        errors.InvalidArgument,
        "adapter_config.json",
    ),
    "no-config": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        errors.InvalidArgument,
        "adapter_config.json",
    ),
    "pickle-only": (only_pickle, errors.InvalidArgument, "adapter_model"),
    "link-out-of-the-roots": (link_out, errors.InvalidArgument, "adapter_model.safetensors"),
}

UNSERVABLE: dict[str, tuple[Change, str]] = {
    "target-parameters": (lambda folder: _add_experts(folder), "mlp.experts.w1"),
    # Of content of its own: a digest means the first name that has it.
    "wrong-base": (
        config(base_model_name_or_path="another-model", lora_alpha=3),
        "another-model",
    ),
    "wrong-shape": (
        tensors(lambda v: v.update({A_NAME: torch.ones(16, 60)})),
        "q_proj",
    ),
    "overflow-in-the-cast": (poke(B_NAME, 3e38), "q_proj"),
    "rank-too-high": (
        lambda folder: _raise_rank(folder, 80),
        "--max-rank",
    ),
    "rows-beyond-the-vocabulary": (
        lambda folder: _add_rows(folder, [5, 1 << 30]),
        "a row for token 1073741824, and this server accepts",
    ),
    "tokens-that-its-embedding-lacks": (
        lambda folder: _add_rows(folder, [128], "lm_head", adapts_embedding=True),
        "model.embed_tokens has A and B for 128 tokens: tokens were added",
    ),
    "unknown-target": (
        lambda folder: _rename_module(folder, "model.layers.0.", "model.layers.7."),
        "model.layers.7",
    ),
}


def _add_vectors(folder: Path, name: str, key: str, number: float) -> None:
    """Adds one of this number for each B, and says so in the config."""
    config(**{key: True})(folder)
    path = folder / "adapter_model.safetensors"
    values = load_file(path)
    for b in [each for each in values if ".lora_B." in each]:
        values[b.replace("lora_B.weight", name)] = torch.full((len(values[b]),), number)
    save_file(values, path)


def _add_rows(
    folder: Path, ids: list[int], module: str = "embed_tokens", *, adapts_embedding: bool = False
) -> None:
    """Adds trained rows of these tokens, and LoRA of the embedding."""
    config(trainable_token_indices={module: ids})(folder)
    parent = "base_model.model." if module == "lm_head" else "base_model.model.model."
    added = {
        f"{parent}{module}.token_adapter.trainable_tokens_delta": torch.ones(len(ids), 64),
    }
    if adapts_embedding:
        path = folder / "adapter_config.json"
        targets = json.loads(path.read_text())["target_modules"]
        config(target_modules=[*targets, "embed_tokens"])(folder)
        prefix = "base_model.model.model.embed_tokens.lora_embedding_"
        added |= {f"{prefix}A": torch.ones(16, 128), f"{prefix}B": torch.ones(64, 16)}
    tensors(lambda saved: saved.update(added))(folder)


def _add_experts(folder: Path) -> None:
    """A and B of two experts, as PEFT saves those of a parameter."""
    config(target_parameters=["mlp.experts.w1"])(folder)
    values = {"A": torch.ones(2 * 16, 64), "B": torch.ones(48, 2 * 16)}
    prefix = "base_model.model.model.layers.0.mlp.experts.lora_"
    added = {f"{prefix}{side}.weight": value for side, value in values.items()}
    tensors(lambda saved: saved.update(added))(folder)


def _raise_rank(folder: Path, rank: int) -> None:
    config(r=rank)(folder)
    path = folder / "adapter_model.safetensors"
    values = load_file(path)
    for name, value in values.items():
        shape = (rank, value.shape[1]) if "lora_A" in name else (value.shape[0], rank)
        values[name] = torch.ones(shape) * 0.01
    save_file(values, path)


def _rename_module(folder: Path, old: str, new: str) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({k.replace(old, new): v for k, v in load_file(path).items()}, path)


@pytest.fixture(scope="module")
def good(services: Services) -> dict[str, list[int]]:
    """What good requests answer when nothing bad happens."""
    names = ("", "r16", "r3", "r33")
    for name in names[1:]:
        services.client.register(name, services.source(name))
    return {name: generate(services, name) for name in names}


def generate(services: Services, adapter: str) -> list[int]:
    done = services.client.complete(PROMPT, adapter=adapter, max_tokens=24, **GREEDY)
    return list(done.token_ids)


def malformed(services: Services, case: str, change: Change) -> str:
    folder = services.sources / f"bad-{case}"
    shutil.copytree(services.zoo.adapter_dirs["r16"], folder)
    change(folder)
    return f"file://{folder}"


def check_refused(services: Services, case: str) -> None:
    change, kind, culprit = REFUSED[case]
    with pytest.raises(kind) as caught:
        services.client.register(f"bad-{case}", malformed(services, case, change))
    assert culprit in f"{caught.value.subject} {caught.value.message}"
    with pytest.raises(errors.NotFound):
        services.client.get(f"bad-{case}")


def check_unservable(services: Services, case: str) -> None:
    """Sound in itself, so it may be registered; this model refuses it with the reason."""
    change, culprit = UNSERVABLE[case]
    done = services.client.register(f"bad-{case}", malformed(services, case, change))
    with pytest.raises(errors.FailedPrecondition) as caught:
        services.client.complete(
            PROMPT, adapter=f"bad-{case}", min_revision=done.revision, max_tokens=1
        )
    assert culprit in caught.value.message


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_registration(services: Services, good: dict[str, list[int]], case: str) -> None:
    check_refused(services, case)


@pytest.mark.parametrize("case", UNSERVABLE)
def test_refused_by_this_model(services: Services, good: dict[str, list[int]], case: str) -> None:
    check_unservable(services, case)


def test_incompatibility_is_part_of_get_adapter(
    services: Services, good: dict[str, list[int]]
) -> None:
    change, culprit = UNSERVABLE["wrong-shape"]
    services.client.register("seen", malformed(services, "seen", change))

    def state() -> types.LayoutState:
        (found,) = services.client.get("seen").layout_states
        return found

    until(lambda: state().state is types.ImageState.INCOMPATIBLE)
    assert culprit in state().reason


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc",
        "file://{sources}/../store",
        "s3://not-allowed/adapter",
        "gopher://x/y",
        "hf://org/name",
    ],
)
def test_sources_outside_the_allowed_are_refused(services: Services, uri: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        services.client.register("outside", uri.format(sources=services.sources))
    assert "source" in f"{caught.value.subject} {caught.value.message}"


def test_good_requests_beside_malformed_ones(
    services: Services, good: dict[str, list[int]]
) -> None:
    """64 good requests while every malformed adapter arrives: the same tokens, no error."""
    for folder in services.sources.glob("bad-*"):
        shutil.rmtree(folder)
    names = list(good) * 16
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(generate, services, name) for name in names]
        bad = [pool.submit(check_refused, services, case) for case in REFUSED]
        bad += [pool.submit(check_again, services, case) for case in UNSERVABLE]
        for future in bad:
            future.result()
        for name, future in zip(names, running, strict=True):
            assert future.result() == good[name]


def check_again(services: Services, case: str) -> None:
    with pytest.raises(errors.FailedPrecondition):
        services.client.complete(PROMPT, adapter=f"bad-{case}", max_tokens=1)
