"""`loadout check` and `loadout digest`, whole: what is printed, and the exit code. What they say of
each way of making an adapter, test_trained_adapters compares with the services."""

from __future__ import annotations

import json
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.features import Feature
from loadout.cli.__main__ import main
from loadout.cli.adapters.engines import NOTES, Does, Engine
from tests.support.models.trained import CONFIG, PREFIX, WEIGHTS, Trainer, as_mlx
from tests.support.models.whole_models import make_whole
from tests.support.models.zoo import AdapterSpec, make_model, make_zoo
from tests.support.servers.hub_cache import linked

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked_commands")]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    unused = [AdapterSpec("unused", 1, ["q_proj"])]
    return Trainer.load(make_zoo("qwen2", tmp_path_factory.mktemp("zoo"), unused).model_dir)


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(list(map(str, arguments)))
    printed = capfd.readouterr()
    return code, printed.out, printed.err


def test_what_an_adapter_changes_and_who_applies_it(trainer, tmp_path, capfd):
    folder = replace(trainer, folder=tmp_path).lora(use_rslora=True, layers_to_transform=[1])
    code, out, err = run(
        *(capfd, "check", folder, "--model", trainer.model_dir, "--engine", "sglang")
    )
    assert (code, err) == (0, "")
    head, table, verdict, engine = out.split("\n\n")
    assert head.startswith(f"{folder}: saved as PEFT does, for ")
    assert ", rank 4, " in head
    columns, *rows = (line.split("  ") for line in table.splitlines())
    assert [each.strip() for each in columns if each] == ["module", "layers", "has", "rank", "size"]
    assert [row[0] for row in rows] == [
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.v_proj",
    ]
    assert verdict == (
        f"applied by a server of {trainer.model_dir}, ranks up to 64, all of it; image of 3.6 kB"
    )
    assert engine.startswith("rslora: SGLang ")
    assert "sgl-project/sglang#40835" in engine


def test_what_equals_the_bases_is_named(trainer, tmp_path, capfd):
    folder = replace(trainer, folder=tmp_path).lora(target_modules=["q_proj", "embed_tokens"])
    code, out, _ = run(capfd, "check", folder, "--model", trainer.model_dir)
    assert code == 0
    assert "\nleft out, because equal to the base model's: model.embed_tokens\napplied by " in out


def test_what_no_request_passes_through_is_named(tmp_path, capfd):
    """PEFT's "all-linear" of a whole model adapts its vision tower, too."""
    model, folder = make_whole("Gemma3", tmp_path / "model"), tmp_path / "adapter"
    config = peft.LoraConfig(target_modules="all-linear")
    peft.get_peft_model(model, config).save_pretrained(folder)
    code, out, err = run(capfd, "check", folder, "--model", tmp_path / "model")
    assert (code, err) == (0, "")
    unused, verdict = out.splitlines()[-2:]
    said, _, names = unused.partition(": ")
    assert said == "not used, because no request passes through them"
    assert "model.vision_tower.encoder.layers.*.self_attn.q_proj" in names.split(", ")
    assert ", the rest of it; image of " in verdict


def test_what_a_server_does_not_apply_fails(trainer, tmp_path, capfd):
    folder = replace(trainer, folder=tmp_path).lora(use_dora=True)
    code, out, _ = run(capfd, "check", folder)
    assert code == 0
    assert out.endswith("a store would register it; give --model MODEL to check it for a server\n")
    code, out, err = run(capfd, "check", folder, "--model", trainer.model_dir)
    assert (code, err) == (0, "")
    assert "A, B, DoRA magnitude" in out
    code, out, err = run(capfd, "check", folder, "--model", trainer.model_dir, "--max-rank", "2")
    assert code == 1
    assert "rank 4 is above this server's limit 2 (--max-rank) (NOT_APPLIED)\n" in out
    assert err == "loadout: a store would register it, but the server would refuse it\n"
    code, out, _ = run(
        *(capfd, "check", folder, "--model", trainer.model_dir, "--json"),
        *("--max-rank", "2", "--lora-targets", "q_proj", "--engine", "vllm"),
    )
    report = json.loads(out)
    assert code == 1
    assert [each["message"].partition(" ")[0] for each in report["server"]["refusals"]] == [
        *("rank", "target"),
    ]
    assert report["engine"]["notes"][0]["does"] == Does.REFUSES.value
    assert "dora" in report["features"]


def test_what_several_processes_do_not_apply_fails(tmp_path, capfd):
    """A bias of sums over processes, and experts that one process has more of."""
    model = tmp_path / "model"
    make_model("qwen3-moe", model, attention_bias=True)
    folder = replace(Trainer.load(model), folder=tmp_path / "biased").lora(
        target_modules=["o_proj"], bias="lora_only"
    )
    weights = {key: value + 1 for key, value in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS)
    flags = ("--model", model, "--tensor-parallel", "2")
    code, out, err = run(capfd, "check", folder, *flags)
    assert (code, err) == (0, "")
    assert out.endswith(" for each of 2 processes\n")
    code, out, _ = run(capfd, "check", folder, *flags, "--fully-sharded-loras")
    assert code == 1
    assert "does not apply with --fully-sharded-loras: o_proj.bias; serve it without" in out
    down = f"{PREFIX}model.layers.0.mlp.experts.0.down_proj.lora_"
    weights |= {f"{down}A.weight": torch.ones(4, 24), f"{down}B.weight": torch.ones(64, 4)}
    save_file(weights, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text()) | {"target_modules": "all-linear"}
    (folder / CONFIG).write_text(json.dumps(config))
    assert run(capfd, "check", folder, *flags)[0] == 0
    code, out, _ = run(capfd, "check", folder, *flags, "--expert-parallel", "2")
    assert code == 1
    assert "its experts have A and B of different sizes, or some have none: down_proj; " in out


def test_what_equals_the_base_is_dropped(trainer, tmp_path, capfd):
    targets = ["q_proj", "embed_tokens", "lm_head"]
    folder = replace(trainer, folder=tmp_path).lora(target_modules=targets)
    code, out, err = run(capfd, "check", folder, "--model", trainer.model_dir)
    assert (code, err) == (0, "")
    assert "all of it; image of " in out


def test_what_no_store_registers_fails_by_name(trainer, tmp_path, capfd):
    folder = replace(trainer, folder=tmp_path).lora()
    mlx = as_mlx(folder, tmp_path / "mlx")
    config = json.loads((mlx / "adapter_config.json").read_text()) | {"fine_tune_type": "dora"}
    (mlx / "adapter_config.json").write_text(json.dumps(config))
    code, out, err = run(capfd, "check", mlx, "--engine", "vllm")
    assert (code, out) == (1, "")
    assert "fine_tune_type='dora'" in err
    assert err.endswith("(CONFIG_UNSUPPORTED)\n")


def test_an_unknown_key_passes_where_a_store_lets_it(trainer, tmp_path, capfd):
    folder = replace(trainer, folder=tmp_path).lora()
    config = json.loads((folder / "adapter_config.json").read_text()) | {"note": "v3"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert run(capfd, "check", folder)[0] == 1
    code, out, _ = run(capfd, "check", tmp_path / "nowhere", "--json")
    assert (code, json.loads(out)["digest"]) == (1, "")
    assert "is not a directory" in json.loads(out)["refusal"]["message"]
    code, out, _ = run(capfd, "check", folder, "--allow-config-keys", "note,other")
    assert code == 0
    assert "unknown config keys, allowed: note\n" in out


def test_links_of_a_hubs_cache_are_followed(trainer, tmp_path, capfd):
    whole = replace(trainer, folder=tmp_path / "whole").lora()
    digest = run(capfd, "digest", whole)
    links = linked(whole, tmp_path / "cache")
    (links / "optimizer.pt").symlink_to(tmp_path / "gone")  # which nobody reads
    code, out, _ = run(capfd, "check", links)
    assert code == 0
    assert digest[1].strip() in out
    assert run(capfd, "digest", links) == digest
    (links / "adapter_model.safetensors").unlink()
    (links / "adapter_model.safetensors").symlink_to(tmp_path / "gone")
    code, out, err = run(capfd, "digest", links)
    assert (code, out) == (1, "")
    assert "adapter_model.safetensors" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("FOLDER", "--max-rank", "4"), "--max-rank: needs --model"),
        (("nowhere",), "nowhere is not a directory"),
        (("FOLDER", "--model", "nowhere"), "--model"),
        (("FOLDER", "--model", "MODEL", "--lora-targets", "q_prj"), "did you mean q_proj?"),
    ],
)
def test_wrong_arguments_are_named(trainer, tmp_path, capfd, arguments, message):
    folder = replace(trainer, folder=tmp_path).lora()
    paths = {"FOLDER": folder, "MODEL": trainer.model_dir}
    code, out, err = run(capfd, "check", *(paths.get(each, each) for each in arguments))
    assert code in (1, 2)
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_notes_on_other_engines_are_about_our_features():
    assert {note.feature for note in NOTES} <= {feature.value for feature in Feature}
    assert all(note.source and note.what for note in NOTES)
    found = [(note.engine, note.feature) for note in NOTES]
    assert len(set(found)) == len(found)
    assert {note.engine for note in NOTES} == set(Engine)
