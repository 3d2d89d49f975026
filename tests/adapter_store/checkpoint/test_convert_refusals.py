"""What cannot be converted, or does not fit together, is refused by name, and leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.conversion.convert import convert
from servicekit.errors import ServiceError
from tests.adapter_store.checkpoint.initialised import Trained, load_model, save_model, train

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q0}.lora_{side}.weight" for side in "AB")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("pissa")
    return train(folder, save_model(folder / "model"), "pissa")


@pytest.fixture
def folders(made: Trained, tmp_path: Path) -> dict[str, Path]:
    """Copies, to be changed."""
    found = {name: tmp_path / name for name in ("model", "initial", "trained")}
    for name, folder in found.items():
        shutil.copytree(getattr(made, name), folder)
    return found


def refusal(folders: dict[str, Path], *given: str, **options: Any) -> ServiceError:
    """Converts with these folders; returns the error, after which nothing is left."""
    out = folders["trained"].parent / "below" / "out"
    with pytest.raises(ServiceError) as caught:
        convert(folders["trained"], out, **{name: folders[name] for name in given}, **options)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return caught.value


def edit(folder: Path, **fields: Any) -> None:
    """Sets fields of the config."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))


def change(folder: Path, name: str, with_tensor: Callable[[torch.Tensor], Any]) -> None:
    """Replaces a tensor, or leaves it out where there is None in its place."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensor = with_tensor(tensors.pop(name).clone())
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file, {"format": "pt"})


def test_more_must_be_given(folders) -> None:
    message = refusal(folders).message
    assert "init_lora_weights='pissa': give --model DIR, the base model" in message
    assert "or --initial DIR, the adapter as it was saved before training" in message


@pytest.mark.parametrize(
    ("init", "began"),
    [
        ("pissa_niter_16", "a randomised decomposition"),
        ("pissa_something", "facts that are not known here"),
        ("corda", "the effect of its data"),
        ("lora_ga", "gradients of its data"),
        ("loftq", "the errors of quantising the base"),
    ],
)
def test_what_does_not_follow_from_the_base_needs_the_initial_adapter(init, began, folders):
    edit(folders["trained"], init_lora_weights=init)
    message = refusal(folders, "model").message
    assert f"init_lora_weights='{init}' begins with {began}" in message
    assert "give --initial DIR, the adapter as it was saved before training; without it," in message


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_a_plain_lora_is_left_alone(init, folders) -> None:
    edit(folders["trained"], init_lora_weights=init)
    message = refusal(folders, "model").message
    assert f"init_lora_weights={init!r} leaves the base as it is, so this is a plain" in message
    assert ("give --initial" in message) == (init is True)
    if init is not True:
        assert "leaves the base as it is" in refusal(folders, "initial").message


def test_a_config_that_was_set_to_true_before_training_needs_the_initial_adapter(
    folders, tmp_path
) -> None:
    edit(folders["trained"], init_lora_weights=True)
    result = convert(folders["trained"], tmp_path / "out", initial=folders["initial"])
    assert (result.initialisation, result.rank) == ("true", (4, 8))


def test_an_initial_adapter_that_says_pissa_may_have_been_trained(folders) -> None:
    edit(folders["initial"], init_lora_weights="pissa")
    error = refusal(folders, "initial")
    assert error.subject == "init_lora_weights"
    assert f"the initial adapter in {folders['initial']}: {CONFIG}: init_lora" in error.message
    assert "may be a checkpoint that was trained. If this is the adapter as" in error.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3]),
        ("bias", "all"),
        ("lora_bias", True),
        ("use_dora", True),
        ("alora_invocation_tokens", [3, 4]),
        ("ensure_weight_tying", True),
    ],
)
def test_what_there_is_besides_a_and_b(key, value, folders) -> None:
    edit(folders["trained"], **{key: value})
    error = refusal(folders, "model")
    assert error.subject == key
    assert f"{CONFIG}: {key}=" in error.message
    assert "only A and B of modules are converted; merge the adapter into" in error.message


def test_olora_of_transposed_layers(folders) -> None:
    edit(folders["trained"], init_lora_weights="OLoRA", fan_in_fan_out=True)
    assert refusal(folders, "initial").subject == "fan_in_fan_out"


@pytest.mark.parametrize(("alpha", "why"), [(0, "would change nothing"), (-8, "to be positive")])
def test_a_scale_that_pissa_divides_by(alpha, why, folders) -> None:
    edit(folders["trained"], lora_alpha=alpha)
    error = refusal(folders, "model")
    assert error.subject == "lora_alpha"
    assert why in error.message


def test_a_module_that_the_other_adapter_lacks(folders) -> None:
    for name in (A, B):
        change(folders["initial"], name, lambda _: None)
    error = refusal(folders, "initial")
    assert error.subject == Q0
    assert f"{Q0}: the initial adapter has no A and B for it" in error.message
    for name in (A, B):
        change(folders["trained"], name, lambda _: None)
    change(folders["initial"], A.replace("layers.0", "layers.1"), lambda _: None)
    assert "has no A for it" in refusal(folders, "initial").message


def test_a_module_that_the_trained_adapter_lacks(folders) -> None:
    for name in (A, B):
        change(folders["trained"], name, lambda _: None)
    assert "the trained adapter has no A and B for it" in refusal(folders, "initial").message


def test_an_initial_adapter_of_another_shape_or_rank_or_scale(folders) -> None:
    change(folders["initial"], A, lambda a: a[:, :-1].contiguous())
    message = refusal(folders, "initial").message
    assert "A and B are [4, 31] and [32, 4] in the initial adapter, [4, 32] and [32" in message
    edit(folders["initial"], lora_alpha=16)
    change(folders["initial"], A, lambda a: torch.cat([a, a[:, :1]], 1))
    message = refusal(folders, "initial").message
    assert "the scale is 4 by the initial adapter's config, 2 by the trained" in message
    edit(folders["initial"], r=5)
    error = refusal(folders, "initial")
    assert error.reason == "RANK_MISMATCH"
    assert f"the initial adapter in {folders['initial']}: " in error.message


@pytest.mark.parametrize("which", ["initial", "trained"])
def test_values_that_are_not_finite(which, folders) -> None:
    change(folders[which], B, lambda b: b.fill_(torch.nan))
    error = refusal(folders, "initial")
    assert (error.subject, error.reason) == (B, "NOT_FINITE")
    assert ("the initial adapter" in error.message) == (which == "initial")


def test_values_that_overflow_when_converted(folders) -> None:
    change(folders["trained"], B, lambda b: b.fill_(3e38))
    change(folders["trained"], A, lambda a: a.fill_(3e38))
    error = refusal(folders, "initial", force=True)
    assert (error.subject, error.reason) == (Q0, "NOT_FINITE")


def test_a_file_that_is_cut_off(folders) -> None:
    for name in ("initial", "trained"):
        file = folders[name] / WEIGHTS
        file.write_bytes(file.read_bytes()[:-1])
        assert refusal(folders, "initial").reason == "TENSOR_OUT_OF_FILE"


def test_a_base_without_the_weight(folders) -> None:
    change(folders["model"], f"{Q0}.weight", lambda _: None)
    error = refusal(folders, "model")
    assert f"{folders['model']} has no tensor {Q0}.weight: is it the model" in error.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda w: w[:, 1:].contiguous(),
            "is [32, 31], and the adapter's A and B are for [32,",
        ),
        (lambda w: w.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn: pissa begins with weights"),
        (lambda w: w.fill_(torch.inf), "contains NaN or infinite values"),
        (
            lambda _: torch.eye(32),
            "its singular values 4 and 5 are equal, so it does not determine the start of pissa",
        ),
    ],
    ids=["shape", "dtype", "infinite", "ambiguous"],
)
def test_a_base_that_it_was_not_trained_on(changed, message, folders) -> None:
    change(folders["model"], f"{Q0}.weight", changed)
    error = refusal(folders, "model")
    assert f"{Q0}.weight of {folders['model']}" in error.message
    assert message in error.message


def test_a_base_whose_first_columns_depend_on_one_another(folders) -> None:
    edit(folders["trained"], init_lora_weights="olora")
    change(folders["model"], f"{Q0}.weight", lambda w: w.index_fill_(1, torch.tensor([2]), 0))
    assert (
        "its first 4 columns depend on one another" in refusal(folders, "model", force=True).message
    )


def test_another_model_of_the_same_shapes(folders, tmp_path) -> None:
    """With its own weights subtracted the adapter would be larger than before."""
    other = load_model(folders["model"])
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    other.save_pretrained(folders["model"])
    message = refusal(folders, "model").message
    assert "further from the stated start of training than from zero" in message
    convert(folders["trained"], tmp_path / "out", folders["model"], force=True)


def test_an_initial_adapter_that_did_not_change_the_base(folders) -> None:
    edit(folders["trained"], init_lora_weights=True)
    for name in load_file(folders["initial"] / WEIGHTS):
        if "lora_B" in name:
            change(folders["initial"], name, torch.zeros_like)
    assert "with which the base stays as it is" in refusal(folders, "initial").message


def test_the_trained_adapter_as_the_initial_one(folders) -> None:
    edit(folders["initial"], init_lora_weights=True)
    shutil.copy(folders["trained"] / WEIGHTS, folders["initial"] / WEIGHTS)
    assert "the adapter equals the start of training" in refusal(folders, "initial").message


def test_folders_that_are_none_or_of_another_kind(folders, tmp_path) -> None:
    for path, message in (
        (tmp_path / "none", f"{tmp_path}/none is no folder"),
        (Path(__file__).parent / "trainers" / "mlx", "an adapter of MLX-LM is a plain LoRA"),
    ):
        assert message in refusal({**folders, "trained": path}, "model").message
    assert "is no folder" in refusal({**folders, "initial": tmp_path / "none"}, "initial").message
    assert "has no *.safetensors" in refusal({**folders, "model": tmp_path}, "model").message


def test_a_disk_without_room(folders, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    assert f"bytes are needed for {WEIGHTS}, and 1000 are free" in refusal(folders, "model").message


def test_a_head_that_may_be_the_embedding(tmp_path) -> None:
    """PiSSA of a tied head changes the embedding along."""
    targets = {"target_modules": ["lm_head"]}
    for is_tied in (False, True):
        folder = tmp_path / str(is_tied)
        model = save_model(folder / "model", tie_word_embeddings=is_tied)
        made = train(folder, model, "pissa", **targets)
        folders = {"model": model, "trained": made.trained, "initial": made.initial}
        assert "lm_head is adapted: give --model DIR, too" in refusal(folders, "initial").message
        if is_tied:
            message = refusal(folders, "model").message
            assert f"in {model} it is one weight with the embedding" in message
        else:
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
            assert "it is one weight with the embedding" in refusal(folders, "model").message


def test_base_weights_saved_along_are_compared(folders, made) -> None:
    name = "base_model.model.model.embed_tokens.weight"
    tensors = load_file(folders["trained"] / WEIGHTS)
    tensors[name] = load_file(made.model / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors, folders["trained"] / WEIGHTS)
    assert (
        f"{name} was saved with the adapter: give --model DIR, too"
        in refusal(folders, "initial").message
    )
    change(folders["trained"], name, lambda w: w.add_(1))
    message = refusal(folders, "initial", "model").message
    assert "model.embed_tokens.weight differs from the base's in 48 of 48 rows" in message
