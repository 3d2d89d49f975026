"""OpenAI's own client against both services: the same tokens and the same rights as over gRPC."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2
import openai
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb
from tests.support.access.policies import audit_lines, token_lines, token_of
from tests.support.models.zoo import Zoo
from tests.support.store.adapters import tiny_layout
from tests.support.store.served import serving
from tests.support.wait import until
from tests.system.guarded import OTHER, OWN, House

TOKENS = [
    token_lines("caller", ["caller"]),
    token_lines("operator", ["operator"]),
    token_lines("trainer", ["publisher", "operator"]),
    token_lines("publisher", ["publisher"]),
    token_lines("neighbour", ["caller", "operator", "publisher"], [OTHER]),
]
PROMPT = "the quick brown fox"
ADAPTERS = ["r3", "r16", "embed"]
SAMPLING: dict[str, Any] = {
    "seed": 7,
    "temperature": 0.7,
    "top_p": 0.9,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.1,
    "max_tokens": 24,
}
OURS = {"ignore_eos": True, "repetition_penalty": 1.1, "return_token_ids": True}


class OpenHouse(House):
    """With the zoo's adapters, of team-a; and OpenAI's clients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.digests = {}
        for name in ADAPTERS:
            folder = self.folder / f"zoo-{name}"
            shutil.copytree(self.zoo.adapter_dirs[name], folder)
            self.digests[name] = self.register(f"{OWN}/{name}", folder)
        self.register(f"{OTHER}/secret", self.make())
        self.url = f"http://{self.inference.server.http_address}"
        self.stub = self.connect(token_of("caller"))
        self._clients: list[openai.OpenAI] = []

    def openai(self, name: str) -> openai.OpenAI:
        """A client with the token of this name."""
        self._clients.append(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=token_of(name), max_retries=0)
        )
        return self._clients[-1]

    def post(self, path: str, token: str, **body: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {token_of(token)}"}
        return httpx2.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def over_grpc(self, adapter: str, **prompt: Any) -> list[Any]:
        ours = {name: value for name, value in OURS.items() if name != "return_token_ids"}
        request = pb.GenerateRequest(
            adapter=adapter, sampling=pb.SamplingParams(**SAMPLING, **ours, logprobs=2), **prompt
        )
        return list(self.stub.Generate(request, timeout=60))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        super().close()


@pytest.fixture(scope="module")
def house(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenHouse]:
    folder = tmp_path_factory.mktemp("house")
    with serving(folder) as start:
        house = OpenHouse(start, folder, zoos("llama"), *TOKENS)
        yield house
        house.close()


@pytest.fixture(scope="module")
def client(house: OpenHouse) -> openai.OpenAI:
    return house.openai("caller")


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["", *ADAPTERS])
def test_same_seed_gives_the_tokens_of_grpc(
    house: OpenHouse, client: openai.OpenAI, adapter: str
) -> None:
    """Full and streamed, of a text and of a conversation, with logprobs."""
    model = adapter or "llama"
    parts = house.over_grpc(adapter, text=PROMPT)
    token_ids = [token for part in parts for token in part.token_ids]
    text = "".join(part.text for part in parts)
    assert len(token_ids) == 24

    whole = client.completions.create(
        model=model, prompt=PROMPT, logprobs=2, extra_body=OURS, **SAMPLING
    )
    assert whole.choices[0].token_ids == token_ids
    assert whole.choices[0].text == text
    found = [entry.chosen.logprob for part in parts for entry in part.logprobs]
    assert whole.choices[0].logprobs.token_logprobs == pytest.approx(found, abs=1e-5)

    with client.completions.create(
        model=model, prompt=PROMPT, stream=True, extra_body=OURS, **SAMPLING
    ) as stream:
        assert [token for chunk in stream for token in chunk.choices[0].token_ids] == token_ids

    message = {"role": "user", "content": PROMPT}
    chat = pb.ChatMessages(messages=[pb.ChatMessage(**message)])
    parts = house.over_grpc(adapter, chat=chat)
    told: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(
        model=model, messages=[message], extra_body=OURS, **told, **SAMPLING
    )
    assert answer.choices[0].token_ids == [token for part in parts for token in part.token_ids]
    assert answer.choices[0].message.content == "".join(part.text for part in parts)
    entries = [entry for part in parts for entry in part.logprobs]
    check_logprobs(answer.choices[0].logprobs.content, entries)
    with client.chat.completions.create(
        model=model, messages=[message], stream=True, extra_body=OURS, **told, **SAMPLING
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    texts = [choice.delta.content or "" for choice in choices]
    assert "".join(texts) == answer.choices[0].message.content
    streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == answer.choices[0].logprobs.content


def check_logprobs(told: list[Any], expected: list[Any]) -> None:
    """Compares a chat's logprobs with those over gRPC."""
    assert [entry.logprob for entry in told] == pytest.approx(
        [entry.chosen.logprob for entry in expected], abs=1e-5
    )
    for entry, other in zip(told, expected, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [top.logprob for top in other.top], abs=1e-5
        )
        pairs = zip(other.top, entry.top_logprobs, strict=True)
        texts = {top.token_id: each.token for top, each in pairs}
        assert texts.get(other.chosen.token_id, entry.token) == entry.token
        assert bytes(entry.bytes).decode() == entry.token


def test_greedy_matches_the_oracle(house: OpenHouse, client: openai.OpenAI) -> None:
    ids = [ord(char) for char in PROMPT]
    ours = {"ignore_eos": True, "return_token_ids": True}
    for adapter in ("", *ADAPTERS):
        answer = client.completions.create(
            model=adapter or "llama", prompt=ids, max_tokens=16, temperature=0, extra_body=ours
        )
        tokens = answer.choices[0].token_ids
        assert tokens == house.zoo.greedy(adapter, ids, 16, guess=tokens)


def test_each_choice_equals_a_request_with_its_seed(
    house: OpenHouse, client: openai.OpenAI
) -> None:
    fields: dict[str, Any] = {"model": "r16", "prompt": PROMPT, "extra_body": OURS}
    together = client.completions.create(n=3, **fields, **SAMPLING)
    for index, choice in enumerate(together.choices):
        alone = client.completions.create(**fields, **{**SAMPLING, "seed": 7 + index})
        assert alone.choices[0].token_ids == choice.token_ids
    texts = {choice.text for choice in together.choices}
    assert len(texts) == 3, "different seeds, different texts"
    assert together.usage.completion_tokens == 3 * 24
    assert together.usage.prompt_tokens == len(PROMPT)


def test_stop_and_usage_of_a_stream(house: OpenHouse, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "r3", "prompt": PROMPT, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(max_tokens=40, temperature=0, **fields).choices[0].text
    stop = whole[17:20]
    with client.completions.create(
        max_tokens=40,
        temperature=0,
        stop=stop,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    ) as stream:
        *chunks, last = stream
    assert "".join(c.choices[0].text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens == len(PROMPT)
    assert last.usage.prompt_tokens_details.cached_tokens == 16, "a page of the whole one"


def test_closed_stream_frees_its_sequence(house: OpenHouse, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "r16", "prompt": PROMPT, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, n=4, max_tokens=200, **fields)
    next(iter(stream))
    stream.close()
    idle = ("vllm:num_requests_running 0.0", "vllm:num_requests_waiting 0.0")
    until(lambda: all(line in _metrics(house) for line in idle), what="the requests still run")
    text = _metrics(house)
    assert "vllm:kv_cache_usage_perc 0.0" in text
    assert 'finish_reason="length"} 4' not in text


def _metrics(house: OpenHouse) -> str:
    headers = {"authorization": f"Bearer {token_of('root')}"}
    request = urllib.request.Request(f"{house.url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


# --- models -------------------------------------------------------------------------------------


def test_models_are_the_base_and_the_callers_adapters(
    house: OpenHouse, client: openai.OpenAI
) -> None:
    base, *adapters = client.models.list().data
    assert (base.id, base.root, base.parent) == ("llama", "llama", None)
    by_name = {card.id: card for card in adapters}
    assert by_name.keys() >= set(ADAPTERS)
    assert not any("secret" in name for name in by_name)
    for name in ADAPTERS:
        card = by_name[name]
        assert (card.object, card.parent, card.root) == ("model", "llama", house.digests[name])
        assert abs(card.created - time.time()) < 3600
        assert client.models.retrieve(name) == card
        # The root is a model as well.
        assert client.completions.create(model=card.root, prompt="a", max_tokens=1).choices
    assert client.models.retrieve("llama") == base
    all_of_them = {card.id for card in house.openai("root").models.list().data}
    assert all_of_them >= {f"{OWN}/r16", f"{OTHER}/secret"}
    assert {card.id for card in house.openai("neighbour").models.list().data} == {"llama", "secret"}


def test_models_are_paged(house: OpenHouse, client: openai.OpenAI) -> None:
    expected = [card.id for card in client.models.list().data]
    found: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    for _ in range(20):
        page = client.models.list(extra_query=query)
        assert len(page.data) <= 3, "the base model, and as many adapters as asked for"
        found += [card.id for card in page.data]
        if not page.has_more:
            break
        query["page_token"] = page.next_page_token
    assert found == expected
    for bad, param in (({"limit": 0}, "limit"), ({"page_token": "x"}, "page_token")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.models.list(extra_query=bad)
        assert caught.value.param == param


def test_other_tenants_adapters_are_not_found(house: OpenHouse, client: openai.OpenAI) -> None:
    answers = set()
    for name in (f"{OTHER}/secret", f"{OTHER}/nothing"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        answers.add(caught.value.body["message"].replace(name, "X"))
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "a"}])
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert len(answers) == 1


def test_sum_of_adapters(house: OpenHouse, client: openai.OpenAI) -> None:
    """The tokens of the same request over gRPC; another tenant's adapter is not found, as alone."""
    (base, *_) = client.models.list(extra_query={"limit": 1}).data
    first, second = ADAPTERS[:2]
    parts = [{"ref": first, "scale": 0.5}, {"ref": second}]
    fields = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    response = house.post(
        "/v1/completions", "caller", model=base.id, adapters=parts, ignore_eos=True, **fields
    ).json()
    request = pb.GenerateRequest(
        adapters=[pb.AdapterPart(ref=first, scale=0.5), pb.AdapterPart(ref=second)],
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    )
    answers = list(house.stub.Generate(request, timeout=60))
    tokens = [token for answer in answers for token in answer.token_ids]
    assert response["choices"][0]["token_ids"] == tokens
    assert response["model"] == base.id
    assert response["system_fingerprint"] is None
    assert [(each["digest"], each["scale"]) for each in response["adapters"]] == [
        (house.digests[first], 0.5),
        (house.digests[second], 1.0),
    ]
    for name in ("secret", "nothing"):
        gone = [{"ref": first}, {"ref": f"{OTHER}/{name}"}]
        refused = house.post("/v1/completions", "caller", model=base.id, adapters=gone, **fields)
        assert refused.status_code == 404, refused.text
    for wrong in (
        {"model": first, "adapters": parts},
        {"model": base.id, "adapters": [*parts, {"ref": "x", "scale": "much"}]},
        {"model": base.id, "adapters": parts * 5},
    ):
        refused = house.post("/v1/completions", "caller", **wrong, **fields)
        assert refused.status_code == 400, refused.text


# --- adapters -----------------------------------------------------------------------------------


def test_load_registers_on_behalf_of_the_caller(house: OpenHouse, client: openai.OpenAI) -> None:
    folder = house.make()
    name = house.fresh()
    loaded = house.post("/v1/load_lora_adapter", "trainer", lora_name=name, lora_path=str(folder))
    assert loaded.status_code == 200, loaded.text
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == f"{name}@1"
    record = house.root.get(f"{OWN}/{name}")
    assert (record.created_by, record.base_model) == ("trainer", "llama")
    assert record.source_uri == f"file://{folder}"
    # The same content may be loaded again, and other content in its place if that is said.
    same = house.post("/v1/load_lora_adapter", "trainer", lora_name=name, lora_path=str(folder))
    assert same.status_code == 200, same.text
    other = {"lora_name": name, "lora_path": f"file://{house.make()}"}
    refused = house.post("/v1/load_lora_adapter", "trainer", **other)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "lora_name")
    assert "load_inplace" in error["message"]
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == f"{name}@1"
    again = house.post("/v1/load_lora_adapter", "trainer", load_inplace=True, **other)
    assert again.status_code == 200
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == f"{name}@2"
    assert house.post("/v1/unload_lora_adapter", "trainer", lora_name=name).status_code == 200
    line = audit_lines(house.audit)[-1]
    assert (line["who"], line["what"], line["result"]) == ("trainer", "UnloadAdapter", "ok")
    # It stays registered, and comes back when it is asked for.
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == f"{name}@2"


def test_load_of_an_adapter_that_names_no_base_is_for_the_server_that_is_asked(
    house: OpenHouse, client: openai.OpenAI
) -> None:
    folder = house.make()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/mnt/runs/7/base"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = house.fresh()
    layout_id = house.root.announce(tiny_layout(base_model="org/second")).layout_id
    with pytest.raises(grpc.RpcError, match="'llama', 'org/second'"):
        house.root.register(f"{OWN}/{name}", folder)
    loaded = house.post("/v1/load_lora_adapter", "trainer", lora_name=name, lora_path=str(folder))
    assert loaded.text.endswith(
        "Its base model is llama: the base model of the server that was asked to load it; the "
        "adapter's config names '/mnt/runs/7/base': make sure that it is the same model."
    )
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == f"{name}@1"
    house.root.stub.ForgetLayout(store_pb.ForgetLayoutRequest(layout_id=layout_id))


@pytest.mark.parametrize(
    ("token", "name", "path", "status", "param"),
    [
        ("unknown", "new", "/nowhere", 401, None),
        ("caller", "new", "/nowhere", 403, None),
        ("publisher", "new", "/nowhere", 403, None),
        ("operator", "new", None, 403, None),
        ("trainer", f"{OTHER}/new", None, 403, None),
        ("trainer", "new", "/nowhere", 400, "lora_path"),
        ("trainer", "new", "s3://nowhere/x", 400, "lora_path"),
        ("trainer", "Team/new", None, 400, "lora_name"),
    ],
)
def test_load_without_the_right_to_register_is_refused(
    house: OpenHouse, token: str, name: str, path: str | None, status: int, param: str | None
) -> None:
    """A path of None stands for one that the store may read."""
    answer = house.post(
        "/v1/load_lora_adapter", token, lora_name=name, lora_path=path or str(house.make())
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    listed = house.root.stub.ListAdapters(store_pb.ListAdaptersRequest(page_size=1000))
    assert not [adapter for adapter in listed.adapters if adapter.name.endswith("/new")]
    if status != 401:
        line = audit_lines(house.audit)[-1]
        assert (line["who"], line["result"]) == (token, "refused")


def test_refused_caller_does_not_eject_the_store(house: OpenHouse, client: openai.OpenAI) -> None:
    for _ in range(3):
        answer = house.post(
            "/v1/load_lora_adapter", "operator", lora_name="x", lora_path=str(house.folder)
        )
        assert answer.status_code == 403
    assert client.models.retrieve("r16").id == "r16"
    assert json.loads(house.post("/v1/completions", "caller", model="r16", prompt="a").content)
