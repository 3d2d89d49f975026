"""Cross-encoders score pairs of texts: every family by its own tokenizer's pairs, with adapters and
their own heads, over each API, and cut by the rule of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from loadout import Client
from loadout.cli.__main__ import main
from loadout.errors import InvalidArgument
from tests.support.models.encoders import save_encoder
from tests.support.models.zoo import VOCAB, Zoo, make_model, quiet
from tests.support.pairs import long_but
from tests.support.store.cards import copied_cards
from tests.system.services import Services

MOST = 90
"""The most tokens of a pair here."""
QUERY = "Where is the Eiffel Tower?"
DOCUMENTS = ["It stands in Paris.", "I like tea.", "The tower, " * 4, "a"]
LONG = "It stands in Paris, on the Champ de Mars. " * 3
BERT = processors.TemplateProcessing(
    single="<s> $A </s>",
    pair="<s> $A </s> $B:1 </s>:1",
    special_tokens=[("<s>", 1), ("</s>", 2)],
)
LLAMA = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
)
ROBERTA = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
TYPED = ["input_ids", "token_type_ids", "attention_mask"]
FORMS: dict[str, tuple[Any, list[str]]] = {
    "bert": (BERT, TYPED),
    "roberta": (ROBERTA, TYPED[::2]),
    "xlm-roberta": (ROBERTA, TYPED[::2]),
    "modernbert": (BERT, TYPED[::2]),
    "llama": (LLAMA, TYPED[::2]),
}
"""The pairs of each family's tokenizer, and the inputs that its model reads."""
FAMILIES = [name for name in FORMS if name != "bert"]
"""Families without a test of their own; pairs of two are equal, so `make test` runs one of them."""


class CrossEncoder(NamedTuple):
    """A model with one output, its adapters, and the oracle of all of them."""

    folder: Path
    tokenizer: Any
    references: dict[str, Any]
    adapter_dirs: dict[str, Path]

    def logit(self, adapter: str, query: str, document: str, **cut: Any) -> float:
        """Cuts as transformers does, if at all."""
        encoded = self.tokenizer(query, document, return_tensors="pt", **cut)
        with torch.no_grad():
            return float(self.references[adapter](**encoded).logits[0, 0])

    def scores(self, adapter: str, query: str, documents: list[str], **cut: Any) -> np.ndarray:
        logits = [self.logit(adapter, query, each, **cut) for each in documents]
        return np.asarray(1 / (1 + np.exp(-np.array(logits))))


def save_pairs(family: str, folder: Path) -> Any:
    """Saves a tokenizer of characters with the pairs of this family."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(i): i for i in range(3, VOCAB)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor, inputs = FORMS[family]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", model_input_names=inputs
    )
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def make_cross_encoder(family: str, folder: Path) -> CrossEncoder:
    """Adapters have heads of one and of two outputs; "plain" has none of its own."""
    model_dir, adapter_dir = folder / "model", folder / "adapters"
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    if family == "llama":
        make_model("llama", model_dir)
        torch.manual_seed(1)
        made = load(model_dir, num_labels=1).eval()
        made.score.weight.data.normal_()
        made.save_pretrained(model_dir)
    else:
        changes = {"pad_token_id": 0, "num_labels": 1}
        save_encoder(family, model_dir, "ForSequenceClassification", **changes)
    tokenizer, references, dirs = save_pairs(family, model_dir), {"": load(model_dir).eval()}, {}
    for seed, (name, count) in enumerate({"plain": 1, "own": 1, "two": 2}.items()):
        torch.manual_seed(10 + seed)
        model = load(model_dir, num_labels=count, ignore_mismatched_sizes=True)
        task = {} if name == "plain" else {"task_type": "SEQ_CLS"}
        targets = [end for end in ("query", "q_proj", "Wqkv") if end in str(model)]
        lora = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False, **task)
        with quiet(), copied_cards():
            adapted = peft.get_peft_model(model, lora, name).eval()
            for key, parameter in adapted.named_parameters():
                if f"modules_to_save.{name}" in key:
                    parameter.data.normal_(std=0.5)
            adapted.save_pretrained(adapter_dir, save_embedding_layers=False)
        references[name], dirs[name] = adapted, adapter_dir / name
    return CrossEncoder(model_dir, tokenizer, references, dirs)


def flags(*more: str) -> tuple[str, ...]:
    return ("--http", "127.0.0.1:0", "--base-model", "cross", "--max-model-len", str(MOST), *more)


@pytest.mark.parametrize("family", long_but(("roberta", "modernbert", "llama"), FAMILIES))
def test_scores_equal_transformers(family: str, tmp_path: Path) -> None:
    made = make_cross_encoder(family, tmp_path)
    zoo = Zoo(family, made.folder, None, made.adapter_dirs)
    with Services(zoo, tmp_path, inference_flags=flags()) as running:
        for name, path in made.adapter_dirs.items():
            running.client.register(name, str(path), base_model="cross")
        check_scores(made, running.client)
        running.check_exit_codes()


def check_scores(made: CrossEncoder, client: Client) -> None:
    """Compares scores and outputs, whole and cut at either end."""
    for adapter in ("", "plain", "own"):
        found = client.score(QUERY, DOCUMENTS, adapter=adapter)
        wanted = made.scores(adapter, QUERY, DOCUMENTS)
        np.testing.assert_allclose([each.score for each in found], wanted, atol=1e-4)
        for each, document in zip(found, DOCUMENTS, strict=True):
            assert each.usage is not None
            assert each.usage.prompt_tokens == len(made.tokenizer(QUERY, document).input_ids)
        for end, side in (("end", "right"), ("start", "left")):
            made.tokenizer.truncation_side = side
            for most in (MOST, 20):
                cut = {"truncation": "longest_first", "max_length": most}
                [raw] = client.score(
                    QUERY,
                    [LONG],
                    adapter=adapter,
                    raw=True,
                    truncation=end,
                    max_tokens=most % MOST,
                )
                assert raw.score == pytest.approx(made.logit(adapter, QUERY, LONG, **cut), abs=1e-4)
                assert raw.usage is not None
                assert raw.usage.prompt_tokens == most
    with pytest.raises(InvalidArgument, match="two@1 does not score: its head has 2 labels"):
        client.score(QUERY, DOCUMENTS, adapter="two")


class Serving(NamedTuple):
    services: Services
    http: httpx2.Client
    made: CrossEncoder

    def post(self, path: str, **fields: Any) -> Any:
        answer = self.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **fields: Any) -> tuple[str, str]:
        """Returns the field and the message of the error."""
        answer = self.http.post(path, json=fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return error["param"], error["message"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("cross")
    made = make_cross_encoder("bert", folder)
    with ExitStack() as stack:
        zoo = Zoo("bert", made.folder, None, made.adapter_dirs)
        services = stack.enter_context(Services(zoo, folder, inference_flags=flags()))
        for name, path in made.adapter_dirs.items():
            services.client.register(name, str(path), base_model="cross")
        http = httpx2.Client(base_url=f"http://{services.http_address}", timeout=60)
        yield Serving(services, stack.enter_context(http), made)
        services.check_exit_codes()


def test_scores_of_bert_equal_transformers(serving: Serving) -> None:
    check_scores(serving.made, serving.services.client)


def test_over_vllms_routes(serving: Serving) -> None:
    made = serving.made
    wanted = made.scores("own", QUERY, DOCUMENTS)
    for path in ("/v1/score", "/score"):
        found = serving.post(path, model="own", text_1=QUERY, text_2=DOCUMENTS)
        np.testing.assert_allclose([each["score"] for each in found["data"]], wanted, atol=1e-4)
    best_first = np.argsort(-wanted).tolist()
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        found = serving.post(path, model="own", query=QUERY, documents=DOCUMENTS, top_n=2)
        assert [each["index"] for each in found["results"]] == best_first[:2]
    raw = serving.post("/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False)
    logit = made.logit("", QUERY, DOCUMENTS[0])
    assert raw["data"][0]["score"] == pytest.approx(logit, abs=1e-4)
    made.tokenizer.truncation_side = "left"
    cut = {"truncate_prompt_tokens": 30, "truncation_side": "left", "use_activation": False}
    found = serving.post("/rerank", query=QUERY, documents=[LONG], **cut)
    logit = made.logit("", QUERY, LONG, truncation="longest_first", max_length=30)
    assert found["results"][0]["relevance_score"] == pytest.approx(logit, abs=1e-4)


def test_over_routes_of_text_embeddings_inference(serving: Serving) -> None:
    made = serving.made
    wanted = made.scores("", QUERY, DOCUMENTS)
    ranks = serving.post("/rerank", query=QUERY, texts=DOCUMENTS)
    assert [each["index"] for each in ranks] == np.argsort(-wanted).tolist()
    np.testing.assert_allclose([each["score"] for each in ranks], sorted(wanted)[::-1], atol=1e-4)
    [raw] = serving.post("/rerank", query=QUERY, texts=["a"], raw_scores=True)
    assert raw["score"] == pytest.approx(made.logit("", QUERY, "a"), abs=1e-4)
    made.tokenizer.truncation_side = "right"
    for truncate in (True, False):
        body = {"query": QUERY, "texts": [LONG], "truncate": truncate, "raw_scores": True}
        if not truncate:
            assert serving.refused("/rerank", **body)[0] == "texts[0]"
            continue
        [raw] = serving.post("/rerank", **body)
        logit = made.logit("", QUERY, LONG, truncation="longest_first", max_length=MOST)
        assert raw["score"] == pytest.approx(logit, abs=1e-4)
    pair, single = serving.post("/predict", inputs=[[QUERY, "a"], ["a"]], raw_scores=True)
    assert pair[0]["score"] == pytest.approx(made.logit("", QUERY, "a"), abs=1e-4)
    assert single[0]["score"] != pytest.approx(pair[0]["score"], abs=1e-3)
    [alone] = serving.post("/predict", inputs=[QUERY, "a"], raw_scores=True)
    assert alone["score"] == pytest.approx(pair[0]["score"], abs=1e-5)
    info = serving.http.get("/info").json()["model_type"]
    assert info == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def test_pairs_are_classified_over_grpc(serving: Serving) -> None:
    made, client = serving.made, serving.services.client
    pairs = [(QUERY, each) for each in DOCUMENTS]
    for adapter in ("", "two"):
        found = client.classify([*pairs, QUERY], adapter=adapter, raw=True)
        logits = [made.logit(adapter, *each) for each in pairs]
        np.testing.assert_allclose([e.probabilities[0] for e in found[:-1]], logits, atol=1e-4)
        assert found[-1].usage.prompt_tokens < found[0].usage.prompt_tokens
    [cut] = client.classify([(QUERY, LONG)], truncation="end", raw=True)
    made.tokenizer.truncation_side = "right"
    logit = made.logit("", QUERY, LONG, truncation="longest_first", max_length=MOST)
    assert cut.probabilities[0] == pytest.approx(logit, abs=1e-4)
    for pair in (("a", ""), ("", "a"), (QUERY, LONG)):
        with pytest.raises(InvalidArgument) as caught:
            client.classify(["a", pair])
        assert caught.value.subject == "inputs[1]"


def test_info_lists_the_calls(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    services = serving.services
    places = ("--inference", services.inference_address, "--store", services.store_address)
    assert main(["info", *places]) == 0
    assert "embed, classify, score" in capsys.readouterr().out


def test_bad_pairs_are_refused_by_name(serving: Serving) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/score", {"text_1": "a", "text_2": ["a", LONG]}, "text_2[1]"),
        ("/score", {"text_1": "a", "text_2": "a", "instruction": "judge"}, "instruction"),
        ("/score", {"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 0}, "truncate_prompt"),
        ("/score", {"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 2}, "text_2[0]"),
        ("/score", {"text_1": "a", "text_2": ["x" * 10**6]}, "text_2[0]"),
        ("/rerank", {"query": "a", "texts": ["a"], "truncate_prompt_tokens": 9}, "truncate_prompt"),
        ("/rerank", {"query": "a", "documents": ["a"], "raw_scores": True}, "raw_scores"),
        ("/rerank", {"query": "a", "documents": ["a"], "truncate": True}, "truncate"),
        ("/rerank", {"query": "a", "documents": ["a"], "model": "two"}, "model"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs"),
        ("/predict", {"inputs": [["a", ""]]}, "inputs[0]"),
    ]
    for path, fields, param in refused:
        found, message = serving.refused(path, **fields)
        assert found.startswith(param), (fields, message)
    with pytest.raises(InvalidArgument) as caught:
        serving.services.client.score(QUERY, ["a", LONG])
    assert caught.value.subject == "documents[1]"


def check_unknown(running: Services, logit: float) -> None:
    """Checks a server whose config names an activation that it does not know."""
    words = r"activation_fn = .*GELU.*: supported are.* send raw: true"
    with pytest.raises(InvalidArgument, match=words) as caught:
        running.client.score(QUERY, ["a"])
    assert caught.value.subject == "raw"
    classifier = running.client.server_info().classifier
    assert classifier is not None
    assert classifier.scores_pairs
    [raw] = running.client.score(QUERY, ["a"], raw=True)
    assert raw.score == pytest.approx(logit, abs=1e-4)
    with httpx2.Client(base_url=f"http://{running.http_address}", timeout=60) as http:
        pair = {"text_1": QUERY, "text_2": "a"}
        refused = http.post("/score", json=pair).json()["error"]
        assert refused["param"] == "use_activation"
        assert refused["message"].endswith("send use_activation: false")
        found = http.post("/score", json={**pair, "use_activation": False}).json()
        assert found["data"][0]["score"] == pytest.approx(logit, abs=1e-4)
        [found] = http.post("/rerank", json={"query": QUERY, "texts": ["a"]}).json()
        assert found["score"] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)
        assert "reranker" in http.get("/info").json()["model_type"]


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"problem_type": "regression"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GELU"}}, "GELU"),
    ],
    ids=["newer", "older", "by-default", "unknown"],
)
def test_the_config_names_the_activation(
    serving: Serving,
    changes: dict[str, Any],
    activation: str,
    tmp_path: Path,
) -> None:
    """As sentence-transformers reads it. One that is not known is refused by name where a call
    uses it, and the output can be had as it is."""
    model = tmp_path / "model"
    shutil.copytree(serving.made.folder, model)
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    zoo = Zoo("bert", model, None, {})
    with Services(zoo, tmp_path, inference_flags=flags()) as running:
        if activation == "GELU":
            check_unknown(running, serving.made.logit("", QUERY, "a"))
            return
        [found] = running.client.score(QUERY, ["a"])
        logit = serving.made.logit("", QUERY, "a")
        wanted = logit if activation == "none" else 1 / (1 + np.exp(-logit))
        assert found.score == pytest.approx(wanted, abs=1e-4)
