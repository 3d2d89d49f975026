"""Classifiers: the model's head, and adapters' own heads of any number of labels, as transformers
and PEFT compute them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inference_svc.core import FinishReason, Part, Sum
from inference_svc.errors import AdapterUnusable, NotFinite
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from loadout import Client
from loadout.cli.__main__ import main
from loadout.errors import FailedPrecondition, InvalidArgument
from loadout.prometheus import scrape
from loadout.types import ClassifierInfo
from tests.support.inference.results import parts_of
from tests.support.models.parity import prompts
from tests.support.models.trained import WEIGHTS
from tests.support.models.zoo import Zoo, copied_cards, make_model, save_tokenizer
from tests.support.pairs import PATHS
from tests.system.engines import Running
from tests.system.services import Services

LABELS = {0: "sad", 1: "calm", 2: "happy"}
OWN = {"two": 2, "five": 5}
"""Adapters with heads of their own, and their labels."""


class Classifier(NamedTuple):
    """A model and its adapters, on disk and as the oracles: PEFT makes one for each number of
    labels."""

    folder: Path
    base: Any
    adapted: dict[str, Any]
    adapter_dirs: dict[str, Path]

    def logits(self, adapter: str, ids: list[int]) -> np.ndarray:
        model = self.adapted[adapter] if adapter else self.base
        with torch.no_grad():
            found: np.ndarray = model(torch.tensor([ids])).logits[0].float().numpy()
        return found

    @property
    def zoo(self) -> Zoo:
        return Zoo("classifier", self.folder, None, self.adapter_dirs)


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options
    )


def make_classifier(folder: Path, *, has_head: bool) -> Classifier:
    """A model with a head, or a language model; adapters of both have heads of their own, and
    "plain" has none."""
    model_dir, adapter_dir = folder / "model", folder / "adapters"
    make_model("llama", model_dir)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    base, adapted, dirs = None, {}, {}
    if has_head:
        torch.manual_seed(1)
        base = load(model_dir, id2label=LABELS, num_labels=3).eval()
        base.score.weight.data.normal_()
        base.save_pretrained(model_dir)
        save_tokenizer(model_dir)
    for seed, (name, count) in enumerate(OWN.items()):
        torch.manual_seed(10 + seed)
        model = load(model_dir, num_labels=count, ignore_mismatched_sizes=True)
        adapted[name] = peft.get_peft_model(model, lora(task_type="SEQ_CLS"), name).eval()
        adapted[name].base_model.model.score.modules_to_save[name].weight.data.normal_()
        with copied_cards():
            adapted[name].save_pretrained(adapter_dir)
        dirs[name] = adapter_dir / name
    torch.manual_seed(20)
    model = load(model_dir) if has_head else load(model_dir, num_labels=3)
    adapted["plain"] = peft.get_peft_model(model, lora(), "plain").eval()
    with copied_cards():
        adapted["plain"].save_pretrained(adapter_dir)
    dirs["plain"] = adapter_dir / "plain"
    return Classifier(model_dir, base, adapted, dirs)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    return make_classifier(tmp_path_factory.mktemp("classifier"), has_head=True)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    return make_classifier(tmp_path_factory.mktemp("language_model"), has_head=False)


def outputs(running: Running, name: str) -> ClassLogits:
    tokens, last = running.result(name)
    assert last.error is None, last.error
    assert (tokens, last.finish_reason) == ([], FinishReason.STOP)
    [found] = parts_of(running.outputs[name], ClassLogits)
    return found


def classify(running: Running, name: str, ids: list[int], adapter: Any) -> None:
    running.submit(name, ids, adapter, max_tokens=0, options=(ClassLogitsOption(),))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_prefill_chunk": 7}, {"tensor_parallel": 2}, {"max_loras": 2}],
    ids=["plain", "chunks-of-7", "two-ranks", "two-slots"],
)
@pytest.mark.parametrize("path", PATHS)
def test_any_mix_equals_transformers(
    classifier: Classifier, start: Callable, path: str, settings: dict[str, Any]
) -> None:
    """Of the model's head, of adapters that leave it as it is, and of heads of their own."""
    running = start(classifier.zoo, max_model_len=320, native_kernels=PATHS[path], **settings)
    asked = prompts(16, seed=5)
    adapters = ("", *classifier.adapter_dirs)
    for index, ids in enumerate(asked):
        classify(running, str(index), ids, adapters[index % len(adapters)])
    for index, ids in enumerate(asked):
        adapter = adapters[index % len(adapters)]
        found = outputs(running, str(index))
        assert found.is_own == (adapter in OWN)
        np.testing.assert_allclose(found.logits, classifier.logits(adapter, ids), atol=1e-4)
    running.check_idle()


def test_a_sum_has_the_head_of_its_part(classifier: Classifier, start: Callable) -> None:
    running, ids = start(classifier.zoo), list(range(5, 25))
    digests = running.digests
    key = Sum((Part(digests["plain"], 0.0), Part(digests["five"], 1.0)))
    classify(running, "sum", ids, key)
    found = outputs(running, "sum")
    assert found.is_own
    np.testing.assert_allclose(found.logits, classifier.logits("five", ids), atol=1e-4)
    classify(running, "after", ids, "")
    assert not outputs(running, "after").is_own
    running.check_idle()


@pytest.mark.parametrize("path", PATHS)
def test_heads_on_a_model_without_one(
    language_model: Classifier, start: Callable, path: str
) -> None:
    """Such a model generates, too, with an adapter for classifying as with any."""
    running = start(language_model.zoo, classifiers=True, native_kernels=PATHS[path])
    ids = list(range(5, 40))
    for name in OWN:
        classify(running, name, ids, name)
        found = outputs(running, name)
        assert found.is_own
        np.testing.assert_allclose(found.logits, language_model.logits(name, ids), atol=1e-4)
    for name in ("", "plain"):
        classify(running, f"none {name}", ids, name)
        assert not outputs(running, f"none {name}").values
    running.submit("tokens", ids, "two", max_tokens=4)
    assert len(running.result("tokens")[0]) == 4
    running.check_idle()


@pytest.mark.parametrize("count", [1024, 1025])
def test_heads_of_too_many_labels_are_refused(
    language_model: Classifier, start: Callable, tmp_path: Path, count: int
) -> None:
    shutil.copytree(language_model.adapter_dirs["two"], tmp_path / "many")
    tensors = load_file(tmp_path / "many" / WEIGHTS)
    [name] = [each for each in tensors if "score" in each]
    tensors[name] = tensors[name][:1].repeat(count, 1)
    save_file(tensors, tmp_path / "many" / WEIGHTS)
    zoo = Zoo("classifier", language_model.folder, None, {"many": tmp_path / "many"})
    running = start(zoo, classifiers=True)
    classify(running, "many", [5, 6], "many")
    if count == 1024:
        assert len(outputs(running, "many").logits) == count
    else:
        error = running.result("many")[1].error
        assert isinstance(error, AdapterUnusable)
        assert "has 1025 labels, and this server accepts at most 1024" in str(error)
    running.check_idle()


def test_outputs_that_overflow_end_their_own_request(
    classifier: Classifier, start: Callable, tmp_path: Path
) -> None:
    shutil.copytree(classifier.adapter_dirs["two"], tmp_path / "huge")
    tensors = load_file(tmp_path / "huge" / WEIGHTS)
    [name] = [each for each in tensors if "score" in each]
    tensors[name] = tensors[name].sign() * 3e38
    save_file(tensors, tmp_path / "huge" / WEIGHTS)
    dirs = {**classifier.adapter_dirs, "huge": tmp_path / "huge"}
    running, ids = start(Zoo("classifier", classifier.folder, None, dirs)), list(range(5, 25))
    for adapter in ("huge", "two"):
        classify(running, adapter, ids, adapter)
    assert isinstance(running.result("huge")[1].error, NotFinite)
    found = outputs(running, "two").logits
    np.testing.assert_allclose(found, classifier.logits("two", ids), atol=1e-4)
    running.check_idle()


class Serving(NamedTuple):
    services: Services
    http: httpx2.Client
    digests: dict[str, str]

    @property
    def client(self) -> Client:
        return self.services.client


@contextmanager
def served(made: Classifier, folder: Path, *flags: str) -> Iterator[Serving]:
    flags += ("--http", "127.0.0.1:0")
    with ExitStack() as stack:
        services = stack.enter_context(Services(made.zoo, folder, inference_flags=flags))
        digests = {
            name: services.client.register(name, str(path), base_model="llama").adapter.digest
            for name, path in made.adapter_dirs.items()
        }
        url = f"http://{services.http_address}"
        http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
        yield Serving(services, http, digests)
        services.check_exit_codes()


@pytest.fixture(scope="module")
def serving(classifier: Classifier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(classifier, tmp_path_factory.mktemp("serving")) as running:
        yield running


@pytest.fixture(scope="module")
def headless(
    language_model: Classifier, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A server of a language model, whose adapters may have heads."""
    folder = tmp_path_factory.mktemp("headless")
    with served(language_model, folder, "--classifiers") as running:
        yield running


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return np.asarray(shares / shares.sum())


@pytest.mark.parametrize("adapter", ["", "plain", "two", "five"])
def test_over_grpc_and_http(serving: Serving, classifier: Classifier, adapter: str) -> None:
    texts = ["a", "a b c", "how nice"]
    ids = [list(serving.client.tokenize(text)) for text in texts]
    wanted = [classifier.logits(adapter, each) for each in ids]
    found = serving.client.classify(texts, adapter=adapter)
    raw = serving.client.classify(ids, adapter=adapter, raw=True)
    body = {"model": adapter or "llama", "input": texts}
    answer = serving.http.post("/classify", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["system_fingerprint"] == serving.digests.get(adapter)
    for index, logits in enumerate(wanted):
        best = int(logits.argmax())
        label = f"LABEL_{best}" if adapter in OWN else LABELS[best]
        each, data = found[index], answer.json()["data"][index]
        np.testing.assert_allclose(np.asarray(each.probabilities), softmax(logits), atol=1e-4)
        np.testing.assert_allclose(np.asarray(raw[index].probabilities), logits, atol=1e-4)
        assert (each.label, each.label_index) == (label, best)
        assert (each.adapter.digest if each.adapter else None) == serving.digests.get(adapter)
        np.testing.assert_allclose(data["probs"], softmax(logits), atol=1e-4)
        assert (data["index"], data["label"], data["num_classes"]) == (index, label, len(logits))


@pytest.mark.parametrize("adapter", ["", "five"])
def test_over_the_bodies_of_vllm_and_tei(
    serving: Serving, classifier: Classifier, adapter: str
) -> None:
    texts, model = ["a", "how nice"], adapter or "llama"
    wanted = [classifier.logits(adapter, list(serving.client.tokenize(text))) for text in texts]
    names = [f"LABEL_{i}" for i in range(5)] if adapter else list(LABELS.values())

    def post(path: str, **fields: Any) -> Any:
        answer = serving.http.post(path, json={"model": model, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    pooled = post("/pooling", input=texts)["data"]
    rewards = post("/pooling", input=texts, task="reward")["data"]
    predicted = post("/predict", inputs=[[text] for text in texts])
    raw = post("/predict", inputs=texts[0], raw_scores=True)
    for index, logits in enumerate(wanted):
        np.testing.assert_allclose(pooled[index]["data"], softmax(logits), atol=1e-4)
        np.testing.assert_allclose(rewards[index]["data"], logits, atol=1e-4)
        order = np.argsort(-logits)
        assert [each["label"] for each in predicted[index]] == [names[i] for i in order]
        scores = [each["score"] for each in predicted[index]]
        np.testing.assert_allclose(scores, softmax(logits)[order], atol=1e-4)
    np.testing.assert_allclose([e["score"] for e in raw], np.sort(wanted[0])[::-1], atol=1e-4)
    [kept] = serving.client.classify(
        [list(range(5, 30))], adapter=adapter, max_tokens=9, truncation="start"
    )
    short = classifier.logits(adapter, list(range(21, 30)))
    np.testing.assert_allclose(kept.probabilities, softmax(short), atol=1e-4)


def test_server_info_and_the_command_classify(
    serving: Serving, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = serving.client.server_info()
    assert found.classifier == ClassifierInfo(tuple(LABELS.values()), False)
    assert (found.generates, found.embedding is None) == (False, False)
    monkeypatch.setenv("LOADOUT_INFERENCE", serving.services.inference_address)
    [wanted] = serving.client.classify("how nice", adapter="five")
    assert main(["classify", "how nice", "--adapter", "five"]) == 0
    row = capfd.readouterr().out.splitlines()[-1].split()
    assert row[-2:] == [wanted.label, f"{wanted.probabilities[wanted.label_index]:.4f}"]
    assert main(["classify", "how nice", "--adapter", "five", "--json"]) == 0
    [each] = json.loads(capfd.readouterr().out)
    assert (each["label"], each["label_index"]) == (wanted.label, wanted.label_index)
    np.testing.assert_allclose(each["probabilities"], wanted.probabilities.tolist())


def test_a_classifier_does_not_generate(serving: Serving) -> None:
    with pytest.raises(InvalidArgument, match="does not generate"):
        serving.client.complete("a", max_tokens=1)


def test_bad_input_is_refused_by_name(serving: Serving) -> None:
    refused: list[tuple[Any, str]] = [([], "inputs"), (["a", ""], "inputs[1]"), ("a" * 300, "")]
    for inputs, subject in refused:
        with pytest.raises(InvalidArgument) as caught:
            serving.client.classify(inputs)
        assert caught.value.subject == (subject or "inputs[0]")
    answer = serving.http.post("/classify", json={"model": "two", "input": ["a", ""]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1]"


@pytest.mark.parametrize("adapter", ["", "plain"])
def test_without_a_head_nothing_is_computed(headless: Serving, adapter: str) -> None:
    def computed() -> float:
        metrics = scrape(headless.services.inference_metrics)
        return metrics.one("loadout_inference_prompt_tokens_total")

    before, name = computed(), "default/plain@1" if adapter else "llama"
    wanted = re.escape(
        f'{name} has no classification head: save one with modules_to_save=["score"]'
    )
    with pytest.raises(InvalidArgument, match=wanted) as caught:
        headless.client.classify(["a", "b"], adapter=adapter)
    assert caught.value.subject == ("adapter" if adapter else "model")
    answer = headless.http.post("/classify", json={"model": adapter or "llama", "input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert computed() == before
    headless.client.classify("a", adapter="two")
    assert computed() > before


def test_an_adapters_own_labels_have_the_names_of_its_config(
    headless: Serving, language_model: Classifier, tmp_path: Path
) -> None:
    """As `model.config.save_pretrained` saves them next to the adapter."""
    folder = tmp_path / "named"
    shutil.copytree(language_model.adapter_dirs["two"], folder)
    config = transformers.LlamaConfig(num_labels=2, id2label={0: "cold", 1: "warm"})
    config.save_pretrained(folder)
    made = headless.client.register("named", str(folder), base_model="llama").adapter
    assert made.class_labels == ("cold", "warm")
    assert made.digest == headless.digests["two"]
    for text in ("a", "a b c", "how nice"):
        [numbered] = headless.client.classify(text, adapter="two")
        [named] = headless.client.classify(text, adapter="named")
        assert named.label == made.class_labels[numbered.label_index]
        answer = headless.http.post("/classify", json={"model": "named", "input": text})
        assert answer.json()["data"][0]["label"] == named.label
        parts = [("plain", 0.0), ("named", 1.0)]
        [summed] = headless.client.classify(text, adapters=parts)
        assert summed.label == named.label


def test_servers_without_classifiers_refuse_heads(services: Services, serving: Serving) -> None:
    """The store's verdict names the module; a request to classify is refused by name."""
    with pytest.raises(InvalidArgument, match="started without --classifiers"):
        services.client.classify("a")
    path = serving.services.zoo.adapter_dirs["two"]
    services.client.register("with-a-head", str(path), base_model="llama")
    with pytest.raises(FailedPrecondition, match="score"):
        services.client.complete("a", adapter="with-a-head", max_tokens=1)
