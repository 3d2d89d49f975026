"""`loadout verify`: passes for the adapter that was trained, and finds planted faults."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadout.cli.__main__ import main
from tests.support.models.zoo import Zoo, make_model
from tests.support.pairs import in_turns
from tests.system.services import Services

ADAPTER = "r16"


DTYPES = ["float32", "bfloat16"]
ONE_DTYPE = pytest.mark.parametrize(
    "served", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)], indirect=True
)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    zoos: Callable[[str], Zoo],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Services]:
    flags = ("--dtype", request.param)
    folder = tmp_path_factory.mktemp(request.param)
    with Services(zoos("llama"), folder, inference_flags=flags) as made:
        yield made
        made.check_exit_codes()


@pytest.fixture
def verify(served: Services) -> Callable[..., int]:
    """The command, for an adapter that is registered under this name."""
    zoo = served.zoo

    def run(name: str, *more: str, model: Path = zoo.model_dir) -> int:
        reference = str(zoo.adapter_dirs[ADAPTER])
        flags = ["--inference", served.inference_address, "--reference", reference]
        return main(["verify", name, *flags, "--model", str(model), *more])

    return run


def changed(
    zoo: Zoo, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> Path:
    """A copy of the adapter, after `change` of its config and tensors."""
    shutil.copytree(zoo.adapter_dirs[ADAPTER], folder)
    config_file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config, tensors = json.loads(config_file.read_text()), load_file(weights)
    change(config, tensors)
    config_file.write_text(json.dumps(config))
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def scale_wrongly(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """As servers did that knew no rsLoRA: by sqrt(r)."""
    config["lora_alpha"] /= math.sqrt(config["r"])


def leave_out_a_layer(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def change_one_tensor(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    tensors[name] = -tensors[name]


@ONE_DTYPE
def test_the_trained_adapter_is_verified(
    verify: Callable[..., int], served: Services, capsys: Any
) -> None:
    served.client.register("good", served.source(ADAPTER))
    assert verify("good") == 0
    assert "verified: good is the adapter in" in capsys.readouterr().out
    assert verify("good", "--json", "--max-tokens", "4") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fault"] == ""
    assert len(report["prompts"]) == 8
    assert report["adapter"]["effect"] > 10 * report["adapter"]["error"] > 0


@pytest.mark.parametrize(
    ("fault", "served"),
    in_turns([(scale_wrongly,), (change_one_tensor,), (leave_out_a_layer,)], DTYPES),
    indirect=["served"],
)
def test_a_changed_adapter_is_found(
    fault: Callable[..., None],
    verify: Callable[..., int],
    served: Services,
    tmp_path: Path,
    capsys: Any,
) -> None:
    folder = changed(served.zoo, tmp_path / "adapter", fault)
    served.client.register(fault.__name__, folder, base_model="llama")
    assert verify(fault.__name__) == 1
    assert "the service applies another adapter" in capsys.readouterr().err


@ONE_DTYPE
def test_another_base_model_is_found(
    verify: Callable[..., int], served: Services, tmp_path: Path, capsys: Any
) -> None:
    served.client.register("other-base", served.source(ADAPTER))
    model = tmp_path / "model"
    shutil.copytree(served.zoo.model_dir, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert verify("other-base", model=model) == 1
    assert "the service runs another base model" in capsys.readouterr().err


@ONE_DTYPE
def test_an_adapter_that_does_nothing_proves_nothing(
    served: Services, tmp_path: Path, capsys: Any
) -> None:
    def silence(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "lora_B" in name]:
            tensors[name] = torch.zeros_like(tensors[name])

    folder = changed(served.zoo, tmp_path / "adapter", silence)
    served.client.register("silent", folder, base_model="llama")
    flags = ["--inference", served.inference_address, "--reference", str(folder)]
    assert main(["verify", "silent", *flags, "--model", str(served.zoo.model_dir)]) == 1
    assert "nothing is proven" in capsys.readouterr().err


@ONE_DTYPE
def test_refusals_name_the_cause(
    verify: Callable[..., int], served: Services, tmp_path: Path, capsys: Any
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n")
    served.client.register("refused", served.source(ADAPTER))
    assert verify("refused", "--prompts", str(prompts)) == 1
    assert f"{prompts} has 0 prompts, expected 1 to 256" in capsys.readouterr().err
    prompts.write_bytes(b"\xff\n")
    assert verify("refused", "--prompts", str(prompts)) == 1
    assert f"{prompts} is not UTF-8 text" in capsys.readouterr().err
    assert verify("nobody") == 1
    assert "nobody" in capsys.readouterr().err
    assert verify("refused", model=tmp_path) == 1
    assert f"on the base model {tmp_path} cannot be computed" in capsys.readouterr().err
    address = ["--inference", served.inference_address]
    assert main(["verify", "refused", *address, "--reference", str(tmp_path)]) == 1
    assert "adapter_config.json cannot be read" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{}")
    flags = ["--reference", str(tmp_path), "--model", str(served.zoo.model_dir)]
    assert main(["verify", "refused", *address, *flags]) == 1
    assert "has neither adapter_model.safetensors nor" in capsys.readouterr().err


@ONE_DTYPE
def test_a_base_model_of_another_size_is_named(
    verify: Callable[..., int], served: Services, tmp_path: Path, capsys: Any
) -> None:
    served.client.register("small-base", served.source(ADAPTER))
    make_model("llama", tmp_path / "small", hidden_size=32, head_dim=8)
    assert verify("small-base", model=tmp_path / "small") == 1
    assert f"on the base model {tmp_path / 'small'} cannot be computed" in capsys.readouterr().err
