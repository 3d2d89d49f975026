"""The bodies of text-embeddings-inference, and inputs that are cut, over real services."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inference_svc.results.embedding_rule import Pooling
from loadout.cli.__main__ import main
from loadout.errors import InvalidArgument
from loadout.types import EmbeddingInfo
from tests.support.models.encoders import MAX_TOKENS, Encoder, make_encoder, save_modules
from tests.support.models.zoo import Zoo
from tests.system.services import Services

MOST = 40
"""The most tokens of an input, as the model's folder says."""


class Serving(NamedTuple):
    services: Services
    http: httpx2.Client
    made: Encoder

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

    def vector(self, ids: list[int], adapter: str = "") -> np.ndarray:
        return self.made.vector(adapter, ids, Pooling.MEAN)

    def ids(self, text: str) -> list[int]:
        return list(self.services.client.tokenize(text))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tei")
    made = make_encoder("bert", folder)
    save_modules(made.folder, pooling="mean_tokens", normalises=True, query="a b ")
    inputs = {"max_seq_length": MOST, "do_lower_case": True}
    (made.folder / "sentence_bert_config.json").write_text(json.dumps(inputs))
    flags = ("--http", "127.0.0.1:0", "--base-model", "bert", "--max-model-len", str(MAX_TOKENS))
    with ExitStack() as stack:
        services = stack.enter_context(Services(made.zoo, folder, inference_flags=flags))
        services.client.register("every", str(made.adapter_dirs["every"]), base_model="bert")
        url = f"http://{services.http_address}"
        http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
        yield Serving(services, http, made)
        services.check_exit_codes()


def test_embed_answers_with_vectors_alone(serving: Serving) -> None:
    one, two = "a b c", "how nice"
    found = serving.post("/embed", inputs=[one, two])
    for vector, text in zip(found, (one, two), strict=True):
        np.testing.assert_allclose(vector, serving.vector(serving.ids(text)), atol=1e-4)
    assert serving.post("/embed", inputs=one) == [found[0]]
    longer = serving.post("/embed", inputs=one, normalize=False)[0]
    assert not np.isclose(np.linalg.norm(longer), 1.0)
    np.testing.assert_allclose(longer / np.linalg.norm(longer), found[0], atol=1e-5)
    own = serving.post("/embed", inputs=one, model="every")[0]
    np.testing.assert_allclose(own, serving.vector(serving.ids(one), "every"), atol=1e-4)
    query = serving.post("/embed", inputs=one, prompt_name="query")[0]
    np.testing.assert_allclose(query, serving.vector(serving.ids("a b " + one)), atol=1e-4)


def test_a_dense_layer_makes_the_vectors(serving: Serving, tmp_path: Path) -> None:
    """Of 64 numbers it makes 24, over each API; tokens keep theirs."""
    model = tmp_path / "model"
    shutil.copytree(serving.made.folder, model)
    modules = json.loads((model / "modules.json").read_text())
    dense = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (model / "modules.json").write_text(json.dumps([*modules[:2], dense, *modules[2:]]))
    (model / "2_Dense").mkdir()
    config = {"in_features": 64, "out_features": 24, "bias": True}
    (model / "2_Dense" / "config.json").write_text(json.dumps(config))
    layer = torch.nn.Linear(64, 24)
    tensors = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
    save_file(tensors, model / "2_Dense" / "model.safetensors")
    text = "a b c"
    mean = serving.made.hidden("", serving.ids(text)).mean(0)
    with torch.no_grad():
        wanted = torch.tanh(layer(torch.from_numpy(mean))).numpy()
    flags = ("--http", "127.0.0.1:0", "--base-model", "bert", "--max-model-len", str(MAX_TOKENS))
    zoo = Zoo("encoder", model, None, {})
    with Services(zoo, tmp_path, inference_flags=flags) as running:
        [found] = running.client.embed(text, normalize=False)
        np.testing.assert_allclose(found.vector, wanted, atol=1e-4)
        assert np.asarray(running.client.embed(text, pooling="none")[0].vector).shape[1] == 64
        with pytest.raises(InvalidArgument, match="from 1 to 24"):
            running.client.embed(text, dimensions=25)
        answer = httpx2.post(f"http://{running.http_address}/embed", json={"inputs": text})
        unit = wanted / np.linalg.norm(wanted)
        np.testing.assert_allclose(answer.json()[0], unit, atol=1e-4)
        running.check_exit_codes()


def test_embed_all_answers_with_vectors_of_tokens(serving: Serving) -> None:
    [found] = serving.post("/embed_all", inputs="a b c")
    wanted = serving.made.hidden("", serving.ids("a b c"))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_similarities_are_cosines(serving: Serving) -> None:
    source, others = "a b c", ["a b c", "how nice", "c b a"]
    found = serving.post("/similarity", inputs={"source_sentence": source, "sentences": others})
    vectors = [serving.vector(serving.ids(text)) for text in (source, *others)]
    np.testing.assert_allclose(found, [vectors[0] @ each for each in vectors[1:]], atol=1e-4)


def test_bad_sentences_are_refused_by_name(serving: Serving) -> None:
    """The source is an input, too, and no item of the sentences."""
    long = "a b c " * 40

    def refused(source: str, sentences: list[str]) -> tuple[str, str]:
        inputs = {"source_sentence": source, "sentences": sentences}
        return serving.refused("/similarity", inputs=inputs)

    for source, sentences, param in (
        (long, ["a", "b"], "inputs.source_sentence"),
        ("", ["a"], "inputs.source_sentence"),
        ("a", ["a", long], "inputs.sentences[1]"),
        ("a", ["a", ""], "inputs.sentences[1]"),
        ("a", [], "inputs.sentences"),
    ):
        assert refused(source, sentences)[0] == param
    param, message = refused("a", ["a"] * 2048)
    assert param == "inputs.sentences"
    assert "at most 2047 items" in message
    inputs = {"source_sentence": "a", "sentences": ["a"] * 2047}
    assert len(serving.post("/similarity", inputs=inputs)) == 2047


def test_answers_name_the_digest_in_a_header(serving: Serving) -> None:
    """They are lists, with no place for it."""
    client, name = serving.services.client, "x-adapter-digest"
    [embedded] = client.embed("a", adapter="every")
    assert embedded.adapter is not None
    digest = embedded.adapter.digest
    assert digest.startswith("sha256:")
    sentences = {"source_sentence": "a", "sentences": ["b"]}
    own = {"model": "every"}
    for path, fields in (
        ("/embed", {"inputs": "a"}),
        ("/embed_all", {"inputs": "a"}),
        ("/similarity", {"inputs": sentences}),
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
    ):
        answer = serving.http.post(path, json=fields | own)
        assert (answer.status_code, answer.headers[name]) == (200, digest), answer.text
    assert name not in serving.http.post("/embed", json={"inputs": "a"}).headers
    other = client.register("heads", str(serving.made.adapter_dirs["heads"]), base_model="bert")
    parts = [{"ref": "every", "scale": 0.5}, {"ref": "heads"}]
    answer = serving.http.post("/embed", json={"inputs": "a", "adapters": parts})
    assert answer.headers[name] == f"{digest};scale=0.5, {other.adapter.digest};scale=1.0"


def test_info(serving: Serving) -> None:
    found = serving.http.get("/info").json()
    assert (found["model_id"], found["max_input_length"], found["auto_truncate"]) == (
        *("bert", MOST),
        False,
    )
    assert found["model_type"] == {"embedding": {"pooling": "mean"}}


def test_server_info_and_its_command(
    serving: Serving, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = serving.services.client.server_info()
    assert (found.generates, found.classifier) == (False, None)
    assert found.embedding == EmbeddingInfo("mean", True, 64, (), ("query",), "", MOST)
    monkeypatch.setenv("LOADOUT_INFERENCE", serving.services.inference_address)
    monkeypatch.setenv("LOADOUT_STORE", serving.services.store_address)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info"]) == 0
    out = capfd.readouterr().out
    assert f"64 numbers, mean of up to {MOST} tokens, of length 1; prompts query" in out


def test_the_command_embed(
    serving: Serving, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADOUT_INFERENCE", serving.services.inference_address)
    options = ["--adapter", "every", "--dimensions", "16", "--pooling", "first"]
    assert main(["embed", "a b c", "how nice", *options]) == 0
    vectors = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    wanted = serving.services.client.embed(
        ["a b c", "how nice"], adapter="every", dimensions=16, pooling="first"
    )
    np.testing.assert_allclose(vectors, [each.vector.tolist() for each in wanted])
    long = "a b c " * 40
    assert main(["embed", long]) != 0
    assert "max_seq_length" in capfd.readouterr().err
    assert main(["embed", long, "--truncate", "end", "--pooling", "none"]) == 0
    assert len(json.loads(capfd.readouterr().out)) == MOST
    assert main(["embed", "a", "--truncate", "middle"]) == 2
    assert "one of end, start" in capfd.readouterr().err


def test_what_is_not_served_is_refused_by_name(serving: Serving) -> None:
    answer = serving.http.post("/embed_sparse", json={"inputs": "a"})
    assert answer.status_code == 501
    assert "no sparse vectors" in answer.json()["error"]["message"]
    assert serving.refused("/predict", inputs="a")[0] == "model"
    assert serving.refused("/predict", inputs=[["a", "b"]])[0] == "model"
    assert serving.refused("/embed", inputs=["a", ""])[0] == "inputs[1]"
    assert serving.refused("/embed", inputs="a", truncation_direction="up") is not None
    assert serving.refused("/rerank", query="q", texts=["a"])[0] == "model"
    assert serving.refused("/rerank", query="q")[0] == "documents"


def test_inputs_longer_than_the_models_folder_says_are_refused(serving: Serving) -> None:
    """Not at the context, which is longer."""
    ids = list(range(5, 5 + MOST + 1))
    assert len(ids) < MAX_TOKENS
    param, message = serving.refused("/v1/embeddings", input=[[5], ids])
    assert param == "input[1]"
    assert f"at most {MOST} are embedded by this model (max_seq_length" in message
    with pytest.raises(InvalidArgument, match="max_seq_length"):
        serving.services.client.embed([ids])
    with pytest.raises(InvalidArgument, match=f"max_tokens: at most {MOST}"):
        serving.services.client.embed([ids], max_tokens=MOST + 1)
    assert serving.services.client.embed([ids[:MOST]])


def test_inputs_are_cut_at_either_end(serving: Serving) -> None:
    """Ids as they are; of texts the tokenizer's own tokens stay."""
    client, ids = serving.services.client, list(range(5, 5 + MOST + 9))
    [end] = client.embed([ids], truncation="end")
    np.testing.assert_allclose(end.vector, serving.vector(ids[:MOST]), atol=1e-4)
    assert end.usage is not None
    assert end.usage.prompt_tokens == MOST
    [start] = client.embed([ids], truncation="start", max_tokens=7)
    np.testing.assert_allclose(start.vector, serving.vector(ids[-7:]), atol=1e-4)
    body = {"input": [ids], "truncate_prompt_tokens": 7}
    for side, wanted in (("right", ids[:7]), ("left", ids[-7:])):
        [found] = serving.post("/v1/embeddings", **body, truncation_side=side)["data"]
        np.testing.assert_allclose(found["embedding"], serving.vector(wanted), atol=1e-4)
    whole = {"input": [ids], "truncate_prompt_tokens": -1}
    [found] = serving.post("/v1/embeddings", **whole)["data"]
    np.testing.assert_allclose(found["embedding"], end.vector, atol=1e-5)
    for side in ("left", "right"):  # alone it has no effect, as with vLLM
        [found] = serving.post("/v1/embeddings", input=[ids[:7]], truncation_side=side)["data"]
        np.testing.assert_allclose(found["embedding"], serving.vector(ids[:7]), atol=1e-4)
        assert serving.refused("/v1/embeddings", input=[ids], truncation_side=side)[0] == "input[0]"
    text = "a b c " * 200
    [found] = serving.post("/embed", inputs=text, truncate=True)
    np.testing.assert_allclose(found, serving.vector(serving.ids(text[:60])[:MOST]), atol=1e-4)


def test_texts_are_in_lower_case(serving: Serving) -> None:
    [upper] = serving.post("/embed", inputs="A B c")
    np.testing.assert_allclose(upper, serving.vector(serving.ids("a b c")), atol=1e-4)
