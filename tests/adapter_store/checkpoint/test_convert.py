"""Plain LoRA of adapters that were trained on a changed base, against PEFT: what they compute on
the original base, and PEFT's own conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Phi3Config

from adapter_store.__main__ import main
from adapter_store.checkpoint.conversion.convert import convert
from adapter_store.checkpoint.open import open_checkpoint
from tests.adapter_store.checkpoint.initialised import (
    IDS,
    Trained,
    changes,
    load,
    load_model,
    save_model,
    train,
)
from tests.support.servers.hub_cache import linked

pytestmark = pytest.mark.matrix

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMPUTED = ("pissa", "olora")
INITS = (*COMPUTED, "pissa_niter_4", "corda", "lora_ga")
SHAPE = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
PATTERNS = {"rank_pattern": {"k_proj": 12}, "alpha_pattern": {"layers.1.mlp.*": 3, "k_proj": 24}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def ways(made: Trained, init: str) -> dict[str, dict[str, Path]]:
    """The arguments that convert it."""
    found = {"initial": {"initial": made.initial}}
    if init in COMPUTED:
        found["model"] = {"model": made.model}
    return found


def assert_same_logits(made: Trained, converted: Path, atol: float = 5e-5) -> None:
    with torch.no_grad():
        logits = load(made.model, converted)(IDS).logits
    torch.testing.assert_close(logits, made.logits, atol=atol, rtol=1e-5)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a module's change, as a part of it."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


@pytest.mark.parametrize("init", INITS)
def test_a_converted_adapter_computes_on_the_base_what_was_trained(
    init: str, model: Path, tmp_path: Path
) -> None:
    made = train(tmp_path, model, init)
    assert made.converted is not None
    with torch.no_grad():
        unconverted = load_model(model)(IDS).logits
    assert (made.logits - unconverted).abs().max() > 0.05
    for name, given in ways(made, init).items():
        result = convert(made.trained, tmp_path / f"by {name}", **given)
        assert (result.initialisation, result.rank, result.num_modules) == (init, (4, 8), 10)
        assert result.num_bytes[1] == 2 * result.num_bytes[0]
        assert_same_logits(made, tmp_path / f"by {name}")
        found, of_peft = (
            changes(load(model, each)) for each in (tmp_path / f"by {name}", made.converted)
        )
        assert distance(found, of_peft) < 1e-4
        saved, by_peft = (
            load_file(each / WEIGHTS) for each in (tmp_path / f"by {name}", made.converted)
        )
        assert {k: (v.shape, v.dtype) for k, v in saved.items()} == {
            k: (v.shape, v.dtype) for k, v in by_peft.items()
        }
        config, of_peft_config = (
            json.loads((each / CONFIG).read_text())
            for each in (tmp_path / f"by {name}", made.converted)
        )
        for key in ("corda_config", "lora_ga_config"):
            of_peft_config[key] = None
        for each in (config, of_peft_config):  # PEFT writes a set, in the order of its hashes
            each["target_modules"].sort()
        assert config == of_peft_config


@pytest.mark.parametrize("init", COMPUTED)
@pytest.mark.parametrize("use_rslora", [False, True], ids=["", "rslora"])
def test_patterns_keep_their_scales(
    init: str, use_rslora: bool, model: Path, tmp_path: Path
) -> None:
    """k_proj has 16 outputs, fewer than twice its rank of 12."""
    made = train(tmp_path, model, init, use_rslora=use_rslora, **PATTERNS)
    assert (made.converted is None) == use_rslora  # where PEFT has no conversion
    for name, given in ways(made, init).items():
        assert convert(made.trained, tmp_path / f"by {name}", **given).rank == (12, 24)
        assert_same_logits(made, tmp_path / f"by {name}")
        assert load_file(tmp_path / f"by {name}" / WEIGHTS)[
            "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
        ].shape == (16, 24)
        if made.converted is not None:
            found, of_peft = (
                changes(load(model, each)) for each in (tmp_path / f"by {name}", made.converted)
            )
            assert distance(found, of_peft) < 1e-4


def test_a_rank_stabilised_scale_stays(model: Path, tmp_path: Path) -> None:
    made = train(tmp_path, model, "pissa", use_rslora=True)
    convert(made.trained, tmp_path / "out", model)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (8, pytest.approx(8 * 2**0.5))
    assert_same_logits(made, tmp_path / "out")


@pytest.mark.parametrize("alpha", [4, 8], ids=["scale 1", "scale 2"])
def test_loftq_is_exact_but_for_what_quantisation_left(
    alpha: int, model: Path, tmp_path: Path
) -> None:
    """The error is W - Q - B0 A0, the part of quantisation's error that no adapter of this rank
    has. PEFT's formula subtracts s B0 A0 in place of B0 A0: the same at scale 1."""
    made = train(tmp_path, model, "loftq", lora_alpha=alpha)
    assert convert(made.trained, tmp_path / "out", initial=made.initial).initialisation == "loftq"
    found = changes(load(model, tmp_path / "out"))
    base = dict(load_model(model).named_modules())
    initial = load_file(made.initial / WEIGHTS)
    trained = changes(made.adapted)
    for name, module in made.adapted.named_modules():
        if name not in found:
            continue
        a, b = (initial[f"{name}.lora_{side}.weight"].double() for side in "AB")
        weight = base[name.removeprefix("base_model.model.")].weight.detach().double()
        quantised = module.base_layer.weight.detach().double()
        left = weight - quantised - b @ a
        wanted = quantised + trained[name] - weight
        assert float((found[name] - wanted + -left).norm()) < 1e-4 * float(left.norm())
    assert made.converted is not None
    of_peft = changes(load(model, made.converted))
    assert (distance(found, of_peft) < 1e-4) == (alpha == 4)
    # Its config may have been set to true, and has LoftQ's settings still.
    fields = json.loads((made.trained / CONFIG).read_text())
    (made.trained / CONFIG).write_text(json.dumps({**fields, "init_lora_weights": True}))
    convert(made.trained, tmp_path / "again", initial=made.initial)
    assert distance(changes(load(model, tmp_path / "again")), found) == 0


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_bfloat16_base_is_met_better_than_by_its_rounded_start(init: str, tmp_path: Path) -> None:
    """PEFT subtracts A0 and B0 from the base as float32 and saves them as bfloat16, so what it
    converts with is not what it took out."""
    model = save_model(tmp_path / "model", torch.bfloat16)
    made = train(tmp_path, model, init)
    assert made.converted is not None
    convert(made.trained, tmp_path / "out", model)
    base = dict(load_model(model).named_modules())
    trained = changes(made.adapted)
    wanted = {
        name: module.base_layer.weight.detach().double()
        + trained[name]
        - base[name.removeprefix("base_model.model.")].weight.detach().double()
        for name, module in made.adapted.named_modules()
        if name in trained
    }
    ours, of_peft = (
        distance(changes(load(model, each)), wanted) for each in (tmp_path / "out", made.converted)
    )
    assert ours < of_peft


def test_what_is_served_in_bfloat16_is_the_change_and_not_its_rounding(
    model: Path, tmp_path: Path
) -> None:
    """A difference of two nearly equal products, as PEFT saves it, loses what was trained."""
    made = train(tmp_path, model, "pissa", step=0.02)
    assert made.converted is not None
    convert(made.trained, tmp_path / "out", model)
    exact = changes(load(model, tmp_path / "out"))

    def rounded(folder: Path) -> dict[str, torch.Tensor]:
        adapted = load(model, folder)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.bfloat16().float()
        return changes(adapted)

    ours, of_peft = (distance(rounded(each), exact) for each in (tmp_path / "out", made.converted))
    assert ours < 0.005
    assert of_peft > 10 * ours


def test_a_base_in_shards(model: Path, tmp_path: Path) -> None:
    sharded = save_model(tmp_path / "model", max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    made = train(tmp_path, sharded, "pissa")
    convert(made.trained, tmp_path / "out", sharded)
    assert_same_logits(made, tmp_path / "out")


def test_an_adapter_in_bfloat16_stays_in_it(model: Path, tmp_path: Path) -> None:
    made = train(tmp_path, model, "olora")
    weights = {k: v.bfloat16() for k, v in load_file(made.trained / WEIGHTS).items()}
    save_file(weights, made.trained / WEIGHTS)
    expected = changes(load(model, made.trained, torch.float32))
    convert(made.trained, tmp_path / "out", model)
    assert {v.dtype for v in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.bfloat16}
    start = changes(load(model, made.initial))
    wanted = {name: expected[name] - start[name] for name in expected}
    assert distance(changes(load(model, tmp_path / "out")), wanted) < 0.005


def test_embeddings_and_heads(model: Path, tmp_path: Path) -> None:
    """Of an embedding PEFT takes nothing out: it stays at its rank. Beside it PEFT saves the base's
    embedding and the changed head, which the original base has no use for."""
    targets = ["q_proj", "embed_tokens", "lm_head"]
    made = train(tmp_path, model, "pissa", target_modules=targets, rank_pattern={"q_proj": 6})
    for name, given in {"computed": {}, "initial": {"initial": made.initial}}.items():
        result = convert(made.trained, tmp_path / f"by {name}", model, **given)
        assert result.kept == ("model.embed_tokens",)
        assert result.left_out == ("lm_head", "model.embed_tokens")
        assert_same_logits(made, tmp_path / f"by {name}")
        found = open_checkpoint(tmp_path / f"by {name}")
        ranks = {target.name: target.rank for target in found.targets.values()}
        assert ranks["model.embed_tokens"] == 4
        assert ranks["lm_head"] == 8
        assert ranks["model.layers.0.self_attn.q_proj"] == 12


def test_links_of_a_hubs_cache(model: Path, tmp_path: Path) -> None:
    made = train(tmp_path, model, "pissa", target_modules=["q_proj", "lm_head"])
    template, out = "chat_template.jinja", tmp_path / "out"
    (made.trained / template).write_text("{{ messages }}")
    trained, initial = (
        linked(folder, tmp_path / "cache" / folder.name) for folder in (made.trained, made.initial)
    )
    links = tmp_path / "links"  # a base model's may lead anywhere
    links.mkdir()
    for file in model.iterdir():
        (links / file.name).symlink_to(file)
    convert(trained, out, links, initial)
    assert_same_logits(made, out)
    assert (out / template).read_text() == "{{ messages }}"
    assert {file.name for file in out.iterdir()} == {CONFIG, WEIGHTS, template}


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (Phi3Config(**SHAPE, intermediate_size=48, pad_token_id=0), ["qkv_proj", "gate_up_proj"]),
        (GPT2Config(vocab_size=48, n_embd=32, n_layer=1, n_head=4), ["c_attn", "c_proj"]),
    ],
    ids=["fused", "transposed"],
)
def test_other_shapes_of_weights(config: Any, targets: list[str], tmp_path: Path) -> None:
    """Fused projections are one weight, and GPT-2's are [in, out]."""
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    made = train(tmp_path, tmp_path / "model", "pissa", target_modules=targets)
    convert(made.trained, tmp_path / "out", tmp_path / "model")
    assert_same_logits(made, tmp_path / "out")


def test_the_command_reports(model: Path, tmp_path: Path, capsys) -> None:
    made = train(tmp_path, model, "pissa")
    arguments = ["convert", str(made.trained), str(tmp_path / "out"), "--model", str(model)]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["initialisation"], report["rank"]) == ("pissa", [4, 8])
    assert 0.02 < report["change"] < 0.2
    assert main(arguments) == 1
    assert "out exists: nothing is overwritten" in capsys.readouterr().err
