"""Scores of documents: the oracle's probability of "yes" against "no", over gRPC and HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loadout import Client
from loadout.errors import InvalidArgument
from loadout.prometheus import scrape
from tests.support.models.zoo import VOCAB, Zoo
from tests.system.services import Services

ADAPTER = "r16"
LONG = 100_000
"""Characters that no context of the model can hold."""
MOST = 512
"""The tokens of the model's context."""
QUERY = "Where is it?"
DOCUMENTS = ["It stands in Paris.", "No.", "yes", "a b c " * 10, "In Rome, I think."]
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)


def save_judging_tokenizer(folder: Path) -> Any:
    """Saves a token for each character, and for "yes" and "no"."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "yes": 3, "no": 4}
    vocab |= {chr(i): i for i in range(5, VOCAB)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken("yes"), AddedToken("no")])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return made


class Judge(NamedTuple):
    services: Services
    http: httpx2.Client
    tokenizer: Any
    digest: str

    @property
    def client(self) -> Client:
        return self.services.client

    def ids(self, query: str, document: str, instruction: str = "") -> list[int]:
        """Returns the tokens of the question about a document."""
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = self.tokenizer.apply_chat_template(
            [{"role": "system", "content": TASK}, {"role": "user", "content": text}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=False,
        )
        return list(ids)

    def score(self, adapter: str, query: str, document: str, instruction: str = "") -> float:
        """Returns the oracle's score."""
        ids = self.ids(query, document, instruction)
        logits = self.services.zoo.logits(adapter, ids, torch.float32)[-1]
        return float(logits[[4, 3]].softmax(-1)[1])

    def post(self, path: str, status: int = 200, **fields: Any) -> Any:
        answer = self.http.post(path, json={"model": ADAPTER, **fields})
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def judge(zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    zoo, folder = zoos("llama"), tmp_path_factory.mktemp("judge")
    model_dir = folder / "llama"
    shutil.copytree(zoo.model_dir, model_dir)
    tokenizer = save_judging_tokenizer(model_dir)
    judging = Zoo(zoo.kind, model_dir, zoo.reference, zoo.adapter_dirs)
    flags = ("--http", "127.0.0.1:0", "--max-model-len", str(MOST), "--max-batch-tokens", "60")
    with ExitStack() as stack:
        services = stack.enter_context(Services(judging, folder / "run", inference_flags=flags))
        made = services.client.register(ADAPTER, str(zoo.adapter_dirs[ADAPTER]))
        url = f"http://{services.http_address}"
        http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
        yield Judge(services, http, tokenizer, made.adapter.digest)
        services.check_exit_codes()


@pytest.mark.parametrize("adapter", ["", ADAPTER])
def test_over_grpc(judge: Judge, adapter: str) -> None:
    """Documents share the pages of all before them; each score names its version."""
    found = judge.client.score(QUERY, DOCUMENTS, adapter=adapter)
    assert [each.index for each in found] == list(range(len(DOCUMENTS)))
    for each, document in zip(found, DOCUMENTS, strict=True):
        assert abs(each.score - judge.score(adapter, QUERY, document)) < 1e-4
        assert (each.adapter.digest if each.adapter else "") == (judge.digest if adapter else "")
    again = judge.client.score(QUERY, DOCUMENTS, adapter=adapter)
    assert [each.score for each in again] == pytest.approx([each.score for each in found])
    assert all(each.usage and each.usage.cached_prompt_tokens > 200 for each in again)


def test_an_instruction_of_your_own(judge: Judge) -> None:
    [found] = judge.client.score(QUERY, ["yes"], adapter=ADAPTER, instruction="Be kind.")
    assert abs(found.score - judge.score(ADAPTER, QUERY, "yes", "Be kind.")) < 1e-4


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_over_http(judge: Judge, path: str) -> None:
    answer = judge.post(path, text_1=QUERY, text_2=DOCUMENTS)
    assert (answer["object"], answer["model"]) == ("list", f"{ADAPTER}@1")
    assert answer["system_fingerprint"] == judge.digest
    for index, (each, document) in enumerate(zip(answer["data"], DOCUMENTS, strict=True)):
        assert (each["index"], each["object"]) == (index, "score")
        assert abs(each["score"] - judge.score(ADAPTER, QUERY, document)) < 1e-4
    pairs = judge.post(path, text_1=["one?", "two?"], text_2=["1", "2"])
    wanted = [judge.score(ADAPTER, *pair) for pair in (("one?", "1"), ("two?", "2"))]
    assert [each["score"] for each in pairs["data"]] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_over_http(judge: Judge, path: str) -> None:
    wanted = {text: judge.score(ADAPTER, QUERY, text) for text in DOCUMENTS}
    best = sorted(wanted, key=lambda text: -wanted[text])
    answer = judge.post(path, query=QUERY, documents=DOCUMENTS)
    assert [each["document"]["text"] for each in answer["results"]] == best
    for each in answer["results"]:
        text = DOCUMENTS[each["index"]]
        assert text == each["document"]["text"]
        assert abs(each["relevance_score"] - wanted[text]) < 1e-4
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    short = judge.post(path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [DOCUMENTS[each["index"]] for each in short["results"]] == best[:2]
    assert all("document" not in each for each in short["results"])


def test_texts_are_ranked_as_by_text_embeddings_inference(judge: Judge) -> None:
    """A list alone, with the scores of documents; the base model needs no name."""
    texts = ["a b c", "c", "how nice a"]
    body = {"query": "a c", "texts": texts, "return_text": True}
    answer = judge.http.post("/rerank", json=body)
    assert answer.status_code == 200, answer.text
    wanted = [each.score for each in judge.client.score("a c", texts)]
    order = sorted(range(3), key=lambda index: -wanted[index])
    assert [(each["index"], each["text"]) for each in answer.json()] == [
        (index, texts[index]) for index in order
    ]
    scores = [each["score"] for each in answer.json()]
    assert scores == pytest.approx([wanted[index] for index in order], abs=1e-5)
    own = judge.http.post("/rerank", json=body | {"model": ADAPTER})
    assert own.headers["x-adapter-digest"] == judge.digest
    plain = judge.http.post("/rerank", json=body | {"return_text": False}).json()
    assert {frozenset(each) for each in plain} == {frozenset(("index", "score"))}


@pytest.mark.parametrize("end", ["end", "start"])
@pytest.mark.parametrize("most", [0, 450])
def test_documents_alone_are_cut(judge: Judge, end: Any, most: int) -> None:
    """Each token is a character here."""
    document = "It stands in Paris, I think. " * 30
    room = (most or MOST) - len(judge.ids(QUERY, ""))
    cut = document[:room] if end == "end" else document[-room:]
    found = judge.client.score(
        QUERY, ["a", document], adapter=ADAPTER, truncation=end, max_tokens=most
    )
    for each, text in zip(found, ("a", cut), strict=True):
        assert abs(each.score - judge.score(ADAPTER, QUERY, text)) < 1e-4
        assert each.usage is not None
        assert each.usage.prompt_tokens == len(judge.ids(QUERY, text))
    assert found[1].usage is not None
    assert found[1].usage.prompt_tokens == (most or MOST)
    fields = {"truncate_prompt_tokens": most or -1}
    fields |= {"truncation_side": "left"} if end == "start" else {}
    answer = judge.post("/v1/score", text_1=QUERY, text_2=document, **fields)
    assert answer["data"][0]["score"] == pytest.approx(found[1].score, abs=1e-5)
    if not most:
        cutting = {"truncate": True, "truncation_direction": "Left" if end == "start" else "Right"}
        [rank] = judge.post("/rerank", query=QUERY, texts=[document], **cutting)
        assert rank["score"] == pytest.approx(found[1].score, abs=1e-5)


def test_a_question_that_is_too_long_without_its_document_is_refused(judge: Judge) -> None:
    with pytest.raises(InvalidArgument, match="shorten the query or the instruction") as caught:
        judge.client.score("q" * 300, ["a"], truncation="end")
    assert caught.value.subject == "documents[0]"
    with pytest.raises(InvalidArgument, match="no longer text is cut than of") as caught:
        judge.client.score(QUERY, ["b" * LONG], truncation="end")
    assert caught.value.subject == "documents[0]"


def test_bad_input_is_refused_by_name(judge: Judge) -> None:
    refused: list[tuple[str, Any, dict[str, Any], str]] = [
        ("", ["a"], {}, "query"),
        ("a", [], {}, "documents"),
        ("a", ["a", ""], {}, "documents[1]"),
        ("a", ["a", "b" * 600], {}, "documents[1]"),
        ("a", ["a"] * 2049, {}, "documents"),
        ("q" * LONG, ["a", "b"], {}, "query"),
        ("a", ["a", "b" * LONG], {}, "documents[1]"),
        ("a", "abc", {}, "documents"),
        ("a", ["a"], {"instruction": "i" * 4097}, "instruction"),
        ("a", ["a"], {"raw": True}, "raw"),
        ("a", ["a"], {"max_tokens": MOST - 300}, "documents[0]"),
    ]
    for query, documents, fields, subject in refused:
        with pytest.raises(InvalidArgument) as caught:
            judge.client.score(query, documents, **fields)
        assert caught.value.subject == subject, caught.value
    for path, fields, param in (
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 600]}, "documents[0]"),
        ("/v1/rerank", {"query": "q" * LONG, "documents": ["a", "b"]}, "query"),
        ("/v1/score", {"text_1": "q" * LONG, "text_2": ["a", "b"]}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/rerank", {"query": "a", "texts": ["a"], "top_n": 1}, "top_n"),
        ("/rerank", {"query": "a", "texts": ["a"], "return_documents": False}, "return_documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "return_text": True}, "return_text"),
        ("/rerank", {"query": "a", "texts": ["a"], "raw_scores": True}, "raw_scores"),
        ("/rerank", {"query": "a", "documents": ["a"], "use_activation": False}, "use_activation"),
    ):
        assert judge.post(path, 400, **fields)["error"]["param"] == param


def test_scores_are_counted_by_kind(judge: Judge) -> None:
    name, labels = "loadout_inference_pooled_requests_total", {"kind": "score"}
    before = scrape(judge.services.inference_metrics).one(name, finish_reason="stop", **labels)
    judge.client.score(QUERY, DOCUMENTS)
    after = scrape(judge.services.inference_metrics).one(name, finish_reason="stop", **labels)
    assert after == before + len(DOCUMENTS)


def test_a_tokenizer_without_single_tokens_cannot_judge(services: Services) -> None:
    with pytest.raises(InvalidArgument, match="no single token for 'no'"):
        services.client.score("a", ["b"])
