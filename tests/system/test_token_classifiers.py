"""Classifiers of tokens: decoders and encoders with the model's head, and adapters' own heads, as
transformers and PEFT compute them; and vectors of tokens over the wire."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import peft
import pytest
import torch
import transformers

from inference_svc.api.pooling.call import MAX_TOKEN_BYTES
from inference_svc.core import FinishReason
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.classifier_rule import MAX_LABELS
from loadout.errors import InvalidArgument
from loadout.prometheus import scrape
from tests.support.inference.results import parts_of
from tests.support.models.encoders import MAX_TOKENS, save_encoder
from tests.support.models.parity import prompts
from tests.support.models.zoo import Zoo, copied_cards, make_model, quiet, save_tokenizer
from tests.system.services import Services

LABELS = {0: "O", 1: "PERSON", 2: "PLACE"}
END = "ForTokenClassification"
OWN = {"two": 2, "five": 5}
"""Adapters with heads of their own, and their labels."""
BERT_TARGETS = ["query", "value", "intermediate.dense"]
ENCODERS = {"bert": BERT_TARGETS, "roberta": BERT_TARGETS, "modernbert": ["Wqkv", "Wi"]}
"""The modules that adapters of each family change."""


class Tagger(NamedTuple):
    """A model and its adapters, on disk and as the oracles: PEFT makes one for each number of
    labels."""

    folder: Path
    base: Any
    adapted: dict[str, Any]
    adapter_dirs: dict[str, Path]

    def logits(self, adapter: str, ids: list[int]) -> np.ndarray:
        """[tokens, labels]"""
        model = self.adapted[adapter] if adapter else self.base
        with torch.no_grad():
            found: np.ndarray = model(torch.tensor([ids])).logits[0].float().numpy()
        return found

    @property
    def zoo(self) -> Zoo:
        return Zoo("tagger", self.folder, None, self.adapter_dirs)


def make_tagger(family: str, folder: Path) -> Tagger:
    """A model of this family with a head; "plain" has no head of its own."""
    model_dir, adapter_dir = folder / "model", folder / "adapters"
    load = transformers.AutoModelForTokenClassification.from_pretrained
    if family in ENCODERS:
        base = save_encoder(family, model_dir, END, id2label=LABELS, num_labels=3)
        targets = ENCODERS[family]
    else:
        make_model(family, model_dir)
        torch.manual_seed(1)
        with quiet():
            base = load(model_dir, id2label=LABELS, num_labels=3).eval()
        for each in base.score.parameters():
            each.data.normal_()
        base.save_pretrained(model_dir)
        save_tokenizer(model_dir)
        targets = ["q_proj", "v_proj"]
    adapted, dirs = {}, {}
    for seed, (name, count) in enumerate((OWN | {"plain": 3}).items()):
        torch.manual_seed(10 + seed)
        task = {} if name == "plain" else {"task_type": "TOKEN_CLS"}
        config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False, **task)
        with quiet(), copied_cards():
            model = load(model_dir, num_labels=count, ignore_mismatched_sizes=True)
            adapted[name] = peft.get_peft_model(model, config, name).eval()
            for key, parameter in adapted[name].named_parameters():
                if f"modules_to_save.{name}" in key:
                    parameter.data.normal_(std=0.5)
            adapted[name].save_pretrained(adapter_dir, save_embedding_layers=False)
        dirs[name] = adapter_dir / name
    return Tagger(model_dir, base, adapted, dirs)


@pytest.fixture(scope="module")
def taggers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tagger]:
    made: dict[str, Tagger] = {}

    def tagger(family: str) -> Tagger:
        if family not in made:
            made[family] = make_tagger(family, tmp_path_factory.mktemp(family))
        return made[family]

    return tagger


@pytest.mark.parametrize("family", ["llama", "qwen3", *ENCODERS])
def test_any_mix_equals_transformers(
    taggers: Callable[[str], Tagger], start: Callable, family: str
) -> None:
    """Of the model's head, of adapters that leave it as it is, and of heads of their own; prompts
    of decoders come in chunks."""
    made = taggers(family)
    is_decoder = family not in ENCODERS
    chunks = {"max_prefill_chunk": 7, "max_sequences": 4} if is_decoder else {}
    running = start(made.zoo, max_model_len=MAX_TOKENS, **chunks)
    adapters = ("", *made.adapter_dirs)
    asked = [ids[:MAX_TOKENS] for ids in prompts(12, seed=5)]
    for index, ids in enumerate(asked):
        option = ClassLogitsOption(per_token=True)
        adapter = adapters[index % len(adapters)]
        running.submit(str(index), ids, adapter, max_tokens=0, options=(option,))
    for index, ids in enumerate(asked):
        adapter = adapters[index % len(adapters)]
        tokens, last = running.result(str(index))
        assert last.error is None, last.error
        assert (tokens, last.finish_reason) == ([], FinishReason.STOP)
        parts = parts_of(running.outputs[str(index)], ClassLogits)
        assert {part.is_own for part in parts} == {adapter in OWN}
        found = np.concatenate([part.rows for part in parts])
        np.testing.assert_allclose(found, made.logits(adapter, ids), atol=2e-4)
    running.check_idle()


class Serving(NamedTuple):
    services: Services
    http: httpx2.Client

    def pool(self, **fields: Any) -> Any:
        answer = self.http.post("/pooling", json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def serving(
    taggers: Callable[[str], Tagger], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    made = taggers("bert")
    flags = ("--http", "127.0.0.1:0", "--base-model", "bert", "--max-model-len", str(MAX_TOKENS))
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("serving")
        services = stack.enter_context(Services(made.zoo, folder, inference_flags=flags))
        for name, path in made.adapter_dirs.items():
            services.client.register(name, str(path), base_model="bert")
        url = f"http://{services.http_address}"
        http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
        yield Serving(services, http)
        services.check_exit_codes()


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("adapter", ["", "plain", "five"])
def test_labels_of_tokens_over_grpc_and_http(
    serving: Serving, taggers: Callable[[str], Tagger], adapter: str
) -> None:
    made, client = taggers("bert"), serving.services.client
    ids = [[5, 9, 33, 70], [7], list(range(5, 45))]
    wanted = [made.logits(adapter, each) for each in ids]
    found = client.classify_tokens(ids, adapter=adapter)
    raw = client.classify_tokens(ids, adapter=adapter, raw=True)
    model = adapter or "bert"
    answer = serving.pool(model=model, input=ids)
    named = serving.pool(model=model, input=ids, task="token_classify", use_activation=False)
    labels = tuple(f"LABEL_{i}" for i in range(5)) if adapter == "five" else tuple(LABELS.values())
    for index, logits in enumerate(wanted):
        each = found[index]
        assert (each.labels, each.usage and each.usage.prompt_tokens) == (labels, len(ids[index]))
        np.testing.assert_allclose(np.asarray(each.probabilities), softmax(logits), atol=1e-4)
        np.testing.assert_allclose(np.asarray(raw[index].probabilities), logits, atol=2e-4)
        data = answer["data"][index]
        assert (data["index"], data["object"]) == (index, "pooling")
        np.testing.assert_allclose(data["data"], softmax(logits), atol=1e-4)
        np.testing.assert_allclose(named["data"][index]["data"], logits, atol=2e-4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_vectors_of_tokens_over_grpc_and_http(
    serving: Serving, taggers: Callable[[str], Tagger], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, ids = serving.services.client, [list(range(5, 45)), [7, 8]]
    made = taggers("bert")
    vectors = client.embed(ids, pooling="none", normalize=False)
    for each, found in zip(ids, vectors, strict=True):
        with torch.no_grad():
            wanted = made.base.base_model(torch.tensor([each])).last_hidden_state[0].numpy()
        values = np.asarray(found.vector)
        assert values.shape == (len(each), 64)
        np.testing.assert_allclose(values, wanted, atol=2e-4)
    body = {"model": "bert", "input": ids, "task": "token_embed", "dimensions": 16}
    answer = serving.pool(**body)
    packed = serving.pool(**body, encoding_format="base64")
    plain = serving.pool(**body, use_activation=False)
    for index, found in enumerate(vectors):
        cut = np.asarray(found.vector)[:, :16]
        unit = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        np.testing.assert_allclose(answer["data"][index]["data"], unit, atol=1e-5)
        np.testing.assert_allclose(plain["data"][index]["data"], cut, atol=1e-5)
        flat = np.frombuffer(base64.b64decode(packed["data"][index]["data"]), "<f4")
        np.testing.assert_allclose(flat.reshape(-1, 16), unit, atol=1e-5)


def test_results_of_tokens_are_bounded_before_they_are_computed(serving: Serving) -> None:
    """A head of an adapter's own counts as 1,024 labels."""

    def computed() -> float:
        metrics = scrape(serving.services.inference_metrics)
        return metrics.one("loadout_inference_prompt_tokens_total")

    most = MAX_TOKEN_BYTES // (4 * MAX_LABELS)
    ids = [[5] * MAX_TOKENS] * (most // MAX_TOKENS + 1)
    before = computed()
    with pytest.raises(InvalidArgument, match=f"more than {most} tokens in all"):
        serving.services.client.classify_tokens(ids, adapter="five")
    body = {"model": "five", "input": ids, "task": "token_classify"}
    answer = serving.http.post("/pooling", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert computed() == before


def test_bad_input_is_refused_by_name(serving: Serving) -> None:
    client = serving.services.client
    with pytest.raises(InvalidArgument, match="has labels of each token") as caught:
        client.classify("a")
    assert caught.value.subject == "per_token"
    refused: dict[str, dict[str, Any]] = {
        "task": {"task": "plugin"},
        "dimensions": {"task": "token_classify", "dimensions": 8},
        "encoding_format": {"encoding_format": "bytes"},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 0},
        "truncation_side": {"truncation_side": "middle"},
        "input[1]": {"input": ["a", ""]},
    }
    for param, fields in refused.items():
        answer = serving.http.post("/pooling", json={"model": "bert", "input": "a"} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
