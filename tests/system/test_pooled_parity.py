"""Models that embed, score and classify against transformers and PEFT: base and adapters, in fp32
and bf16, one of each shape that is published."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers

from inference_svc.model.checkpoint.sentence_transformers import read_embedding_rule
from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import HiddenSum, PoolingOption, pooled
from tests.support.inference.results import parts_of
from tests.support.models.encoders import MAX_TOKENS, save_encoder, save_modules
from tests.support.models.zoo import Zoo, make_model, quiet, save_tokenizer
from tests.support.store.cards import copied_cards
from tests.system.minilm import download_minilm

pytestmark = pytest.mark.long

NUM_LABELS = 16
"""As many outputs show a direction, too."""
ANSWERS = (4, 3)
TARGETS = ("q_proj", "v_proj", "down_proj", "query", "value", "output.dense", "Wqkv", "Wi")
LENGTHS = (1, 17, 64, 100, 33)


class Shape(NamedTuple):
    """A model of `kind`, its class in transformers, and the pooling or the kind of its results."""

    kind: str
    load: str
    pooling: Pooling | None = None
    per_token: bool = False


SHAPES = {
    "qwen3-embedding": Shape("qwen3", "AutoModel", Pooling.LAST),
    "qwen3-reranker": Shape("qwen3", "AutoModelForCausalLM"),
    "llama-classifier": Shape("llama", "AutoModelForSequenceClassification"),
    "gemma2-classifier": Shape("gemma2", "AutoModelForSequenceClassification"),
    "mistral-classifier": Shape("mistral", "AutoModelForSequenceClassification"),
    "bert": Shape("bert", "AutoModel", Pooling.MEAN),
    "roberta": Shape("roberta", "AutoModel", Pooling.MEAN),
    "xlm-roberta-classifier": Shape("xlm-roberta", "AutoModelForSequenceClassification"),
    "modernbert": Shape("modernbert", "AutoModel", Pooling.MEAN),
    "bert-tokens": Shape("bert", "AutoModelForTokenClassification", per_token=True),
    "minilm": Shape("minilm", "AutoModel", Pooling.MEAN),
}
ENDS = {
    "AutoModel": "Model",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
}


class Made(NamedTuple):
    """A model on disk, and the oracle of it, "", and of its adapter."""

    shape: Shape
    folder: Path
    references: dict[str, Any]
    adapter_dirs: dict[str, Path]

    def result(
        self, adapter: str, ids: list[int], dtype: torch.dtype = torch.float32
    ) -> np.ndarray:
        """Returns a vector, the logits of answers, or those of labels, perhaps of each token."""
        model = self.references[adapter]
        if dtype is not torch.float32:
            model = copy.deepcopy(model).to(dtype)
        with torch.no_grad():
            found = model(torch.tensor([ids]))
        if self.shape.pooling is not None:
            states = found.last_hidden_state[0].float().numpy()
            first, end = self.shape.pooling.positions(len(ids))
            vector = states[first:end].mean(0)
            return np.asarray(vector / np.linalg.norm(vector))
        logits = found.logits[0].float().numpy()
        return np.asarray(logits[-1, list(ANSWERS)] if logits.shape[-1] > NUM_LABELS else logits)


def make(shape: Shape, folder: Path) -> Made:
    model_dir = folder / "model"
    load = getattr(transformers, shape.load).from_pretrained
    labels = {} if shape.pooling or "Causal" in shape.load else {"num_labels": NUM_LABELS}
    if shape.kind == "minilm":
        model_dir = download_minilm(folder)
    elif shape.kind in ("bert", "roberta", "xlm-roberta", "modernbert"):
        save_encoder(shape.kind, model_dir, ENDS[shape.load], **labels)
    else:
        make_model(shape.kind, model_dir)
        if "Causal" not in shape.load:
            torch.manual_seed(3)
            model = load(model_dir, **labels)
            if labels:
                model.score.weight.data.normal_()
            model.save_pretrained(model_dir)
            save_tokenizer(model_dir)
    if shape.pooling is Pooling.LAST:
        save_modules(model_dir, pooling="lasttoken", normalises=True, query="find: ")
        rule = read_embedding_rule(model_dir, 64)
        assert (rule.pooling, rule.is_normalised) == (Pooling.LAST, True)
        assert rule.prompts == {"query": "find: "}
    torch.manual_seed(5)
    model = load(model_dir, dtype=torch.float32)
    names = [name for name, _ in model.named_modules() if not name.endswith("pooler.dense")]
    targets = [each for each in TARGETS if any(name.endswith(f".{each}") for name in names)]
    lora = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    with quiet(), copied_cards():
        adapted = peft.get_peft_model(model, lora, "own").eval()
        adapted.save_pretrained(folder / "adapters", save_embedding_layers=False)
    base = load(model_dir, dtype=torch.float32).eval()
    dirs = {"own": folder / "adapters" / "own"}
    return Made(shape, model_dir, {"": base, "own": adapted}, dirs)


def option_of(shape: Shape, size: int) -> Any:
    if shape.pooling is not None:
        return PoolingOption(shape.pooling, True, size, size)
    if "Causal" in shape.load:
        return ChosenLogitsOption(("no", "yes"), ANSWERS)
    is_encoder = "bert" in shape.kind
    pooling = Pooling.FIRST if is_encoder else Pooling.LAST
    return ClassLogitsOption(pooling, per_token=shape.per_token)


def found_of(running: Any, name: str, option: Any) -> np.ndarray:
    _, last = running.result(name)
    assert last.error is None, last.error
    parts = running.outputs[name]
    if isinstance(option, PoolingOption):
        return pooled(parts_of(parts, HiddenSum), option)
    if isinstance(option, ChosenLogitsOption):
        [chosen] = parts_of(parts, ChosenLogits)
        return np.frombuffer(chosen.values, np.float32)
    rows = np.concatenate([each.rows for each in parts_of(parts, ClassLogits)])
    return rows if option.per_token else rows[0]


@pytest.fixture(scope="module")
def made_shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            made[name] = make(SHAPES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_results_equal_transformers(
    made_shapes: Callable[[str], Made], start: Callable[..., Any], name: str, dtype: str
) -> None:
    """1e-4 in fp32. In bf16 vectors have a cosine of 0.9999, and outputs of heads, which may be
    near zero, are no farther from fp32 than those of transformers in bf16, give or take."""
    made = made_shapes(name)
    zoo = Zoo(name, made.folder, None, made.adapter_dirs)
    sizes = {"max_batch_tokens": 512, "kv_bytes": 8 << 20, "arena_bytes": 16 << 20}
    running = start(zoo, max_model_len=MAX_TOKENS, dtype=dtype, **sizes)
    option = option_of(made.shape, made.references[""].config.hidden_size)
    rng = np.random.default_rng(3)
    asked = {
        f"{adapter} {length}": (adapter, rng.integers(5, 120, length).tolist())
        for length in LENGTHS
        for adapter in made.references
    }
    for key, (adapter, ids) in asked.items():
        running.submit(key, ids, adapter, max_tokens=0, options=(option,))
    errors = np.zeros(2)
    for key, (adapter, ids) in asked.items():
        found, wanted = found_of(running, key, option), made.result(adapter, ids)
        if dtype == "float32":
            np.testing.assert_allclose(found, wanted, atol=1e-4)
        elif made.shape.pooling is not None:
            assert found @ wanted >= 0.9999, key
        else:
            rounded = made.result(adapter, ids, torch.bfloat16)
            errors += [((each - wanted) ** 2).sum() for each in (found, rounded)]
    assert errors[0] <= 1.2**2 * errors[1], np.sqrt(errors)
    running.check_idle()
