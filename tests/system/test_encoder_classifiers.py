"""Encoders classify by the model's head, and by adapters' own heads of any number of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers

from inference_svc.core import FinishReason
from inference_svc.model.architectures import load_description
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from tests.support.inference.results import parts_of
from tests.support.models.encoders import FAMILIES, MAX_TOKENS, save_encoder
from tests.support.models.zoo import Zoo, quiet
from tests.support.store.cards import copied_cards
from tests.system.services import Services

LABELS = {0: "sad", 1: "calm", 2: "happy"}
OWN = {"two": 2, "five": 5}
"""Adapters with heads of their own, and their labels."""
TARGETS = ["query", "value", "intermediate.dense"]
MODERN_TARGETS = ["Wqkv", "Wi"]


class Classifier(NamedTuple):
    """A model and its adapters, on disk and as the oracles."""

    folder: Path
    base: Any
    adapted: dict[str, Any]
    adapter_dirs: dict[str, Path]

    def logits(self, adapter: str, ids: list[int]) -> np.ndarray:
        model = self.adapted[adapter] if adapter else self.base
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0].float().numpy()
        return np.asarray(found)

    @property
    def zoo(self) -> Zoo:
        return Zoo("classifier", self.folder, None, self.adapter_dirs)


def make_classifier(
    family: str, folder: Path, *, has_head: bool = True, **changes: Any
) -> Classifier:
    """A model with a head, or without; "plain" has no head of its own, if the model has one."""
    model_dir, adapter_dir = folder / "model", folder / "adapters"
    end = "ForSequenceClassification"
    base = save_encoder(family, model_dir, end, id2label=LABELS, num_labels=3, **changes)
    targets = MODERN_TARGETS if family.startswith("modernbert") else TARGETS
    if not has_head:
        base.base_model.save_pretrained(model_dir)
    adapted, dirs = {}, {}
    names = OWN | ({"plain": 3} if has_head else {})
    load = getattr(transformers, f"{FAMILIES[family][0]}{end}").from_pretrained
    for seed, (name, count) in enumerate(names.items()):
        torch.manual_seed(10 + seed)
        model = load(model_dir, num_labels=count, ignore_mismatched_sizes=True)
        task = {} if name == "plain" else {"task_type": "SEQ_CLS"}
        lora = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False, **task)
        with quiet(), copied_cards():
            adapted[name] = peft.get_peft_model(model, lora, name).eval()
            for key, parameter in adapted[name].named_parameters():
                if f"modules_to_save.{name}" in key:
                    parameter.data.normal_(std=0.5)
            adapted[name].save_pretrained(adapter_dir, save_embedding_layers=False)
        dirs[name] = adapter_dir / name
    return Classifier(model_dir, base, adapted, dirs)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Classifier]:
    made: dict[str, Classifier] = {}

    def classifier(family: str) -> Classifier:
        if family not in made:
            made[family] = make_classifier(family, tmp_path_factory.mktemp(family))
        return made[family]

    return classifier


def check_all(made: Classifier, running: Any, adapters: tuple[str, ...]) -> None:
    """Compares all adapters, mixed in steps."""
    rng = np.random.default_rng(5)
    lengths = (1, 2, 17, 17, 64, MAX_TOKENS, 9, 30)
    inputs = [rng.integers(5, 120, length).tolist() for length in lengths]
    asked = {f"{i} {name}": (ids, name) for i, ids in enumerate(inputs) for name in adapters}
    head = load_description(made.folder).encoder.head
    option = ClassLogitsOption(head.pooling)
    for name, (ids, adapter) in asked.items():
        running.submit(name, ids, adapter, max_tokens=0, options=(option,))
    for name, (ids, adapter) in asked.items():
        tokens, last = running.result(name)
        assert last.error is None, last.error
        assert (tokens, last.finish_reason) == ([], FinishReason.STOP)
        [found] = parts_of(running.outputs[name], ClassLogits)
        assert found.is_own == (adapter in OWN)
        np.testing.assert_allclose(found.logits, made.logits(adapter, ids), atol=1e-4)
    running.check_idle()


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_any_mix_equals_transformers(
    classifiers: Callable[[str], Classifier], start: Callable[..., Any], family: str
) -> None:
    made = classifiers(family)
    running = start(made.zoo, max_model_len=MAX_TOKENS)
    check_all(made, running, ("", *made.adapter_dirs))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("modernbert", {"classifier_pooling": "mean", "classifier_bias": True}),
        ("modernbert-plain", {"classifier_activation": "silu"}),
    ],
)
def test_modernbert_norms_what_it_classifies(
    start: Callable[..., Any], family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The mean of all tokens or the first one, with a bias and without."""
    made = make_classifier(family, tmp_path, **changes)
    running = start(made.zoo, max_model_len=MAX_TOKENS)
    check_all(made, running, ("", *made.adapter_dirs))


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_adapters_bring_heads_to_a_model_without_one(
    start: Callable[..., Any], family: str, tmp_path: Path
) -> None:
    made = make_classifier(family, tmp_path, has_head=False)
    running = start(made.zoo, max_model_len=MAX_TOKENS, classifiers=True)
    check_all(made, running, tuple(made.adapter_dirs))


@pytest.fixture(scope="module")
def services(
    classifiers: Callable[[str], Classifier], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    made, folder = classifiers("bert"), tmp_path_factory.mktemp("services")
    flags = ("--base-model", "bert", "--max-model-len", str(MAX_TOKENS))
    with Services(made.zoo, folder, inference_flags=flags) as running:
        for name, path in made.adapter_dirs.items():
            running.client.register(name, str(path))
        yield running
        running.check_exit_codes()


def test_over_the_wire(classifiers: Callable[[str], Classifier], services: Services) -> None:
    made, ids = classifiers("bert"), [5, 9, 33, 70]
    for adapter in ("", *made.adapter_dirs):
        [found] = services.client.classify([ids], adapter=adapter)
        expected = torch.tensor(made.logits(adapter, ids)).softmax(0).numpy()
        np.testing.assert_allclose(np.asarray(found.probabilities), expected, atol=1e-4)
        best = int(expected.argmax())
        assert found.label == (f"LABEL_{best}" if adapter in OWN else LABELS[best])
