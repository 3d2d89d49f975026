"""Models that only embed: checkpoints without a head, with adapters trained on them, and the files
of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers

from inference_svc.results.embedding_rule import Pooling
from loadout.errors import InvalidArgument
from tests.support.models.zoo import Zoo, make_model
from tests.support.pairs import PATHS
from tests.system.embedded import embedding, option
from tests.system.services import Services

NAMES = ("base", "wide")
PROMPTS = {"query": "find: ", "document": ""}


class Bare(NamedTuple):
    """A model without a head, and adapters that were trained on it."""

    folder: Path
    reference: Any
    adapter_dirs: dict[str, Path]

    def vector(self, adapter: str, ids: list[int], pooling: Pooling) -> np.ndarray:
        with torch.no_grad():
            if adapter:
                self.reference.set_adapter(adapter)
                found = self.reference(torch.tensor([ids])).last_hidden_state[0].numpy()
            else:
                with self.reference.disable_adapter():
                    found = self.reference(torch.tensor([ids])).last_hidden_state[0].numpy()
        vector = found.mean(0) if pooling is Pooling.MEAN else found[-1]
        return np.asarray(vector / np.linalg.norm(vector))


def make_bare(folder: Path) -> Bare:
    """As sentence-transformers saves a model of Qwen 3, and as PEFT saves its adapters."""
    model_dir = folder / "model"
    make_model("qwen3", model_dir).model.save_pretrained(model_dir)
    model = transformers.AutoModel.from_pretrained(model_dir).eval()
    reference: Any = model
    dirs = {}
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            task_type="FEATURE_EXTRACTION",
            r=8 if name == "base" else 16,
            target_modules=["q_proj", "v_proj", "down_proj"],
            init_lora_weights=False,
        )
        if seed:
            reference.add_adapter(name, config)
        else:
            reference = peft.get_peft_model(model, config, name)
        reference.save_pretrained(folder / "adapters", selected_adapters=[name])
        dirs[name] = folder / "adapters" / name
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("", "Normalize"))
    ]
    (model_dir / "1_Pooling").mkdir()
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
        ("config_sentence_transformers.json", {"prompts": PROMPTS}),
    ):
        (model_dir / name).write_text(json.dumps(content))
    return Bare(model_dir, reference.eval(), dirs)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return make_bare(tmp_path_factory.mktemp("bare"))


def as_zoo(bare: Bare) -> Zoo:
    return Zoo("bare", bare.folder, bare.reference, bare.adapter_dirs)


@pytest.mark.parametrize("path", PATHS)
def test_adapters_of_models_without_a_head(bare: Bare, start: Callable, path: str) -> None:
    """Their names lack the first component, too."""
    running = start(as_zoo(bare), native_kernels=PATHS[path])
    ids = list(range(5, 40))
    for adapter in ("", *NAMES):
        for pooling in (Pooling.LAST, Pooling.MEAN):
            name, each = f"{adapter} {pooling}", option(pooling)
            running.submit(name, ids, adapter, max_tokens=0, embedding=each)
            found = embedding(running, name, each)
            np.testing.assert_allclose(found, bare.vector(adapter, ids, pooling), atol=1e-4)
    running.check_idle()


@pytest.fixture(scope="module")
def services(bare: Bare, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with Services(as_zoo(bare), tmp_path_factory.mktemp("services")) as made:
        made.client.register("wide", str(bare.adapter_dirs["wide"]), base_model="llama")
        yield made
        made.check_exit_codes()


def test_the_folder_says_how_to_embed(bare: Bare, services: Services) -> None:
    """The mean, normalised; and prompts go before texts."""
    client = services.client
    for prompt_name, prompt in (("", ""), ("query", "find: "), ("document", "")):
        ids = list(client.tokenize(f"{prompt}a b c"))
        [found] = client.embed("a b c", adapter="wide", prompt_name=prompt_name)
        vector = bare.vector("wide", ids, Pooling.MEAN)
        np.testing.assert_allclose(np.asarray(found.vector), vector, atol=1e-4)
    for fields in ({"prompt_name": "absent"}, {"prompt_name": "query", "inputs": [5]}):
        with pytest.raises(InvalidArgument) as caught:
            client.embed(**({"inputs": "a"} | fields))
        assert caught.value.subject == "prompt_name"


def test_a_model_without_a_head_does_not_generate(services: Services) -> None:
    with pytest.raises(InvalidArgument, match="has no head, and does not generate: it embeds"):
        services.client.complete("a", max_tokens=1)
