"""Pictures over gRPC and OpenAI's API: answers are transformers' and PEFT's, and bad input is
refused by name."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from loadout import AsyncClient, Client, errors
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from loadout.prometheus import scrape
from loadout.retry import RetryPolicy
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.forks import ForkedProcess
from tests.support.pictures.files import encoded, picture
from tests.support.pictures.models import ReaderZoo, make_reader_zoo
from tests.support.pictures.templates import IMAGE
from tests.support.servers.image_host import ImageHost, chunked
from tests.support.servers.image_host import answer as whole
from tests.support.wait import until
from tests.system.services import Services

pytestmark = pytest.mark.processes

FLAGS = (
    *("--http", "127.0.0.1:0", "--dtype", "float32", "--prompt-image-memory", "40MiB"),
    *("--max-prompt-images", "3", "--aliases", "SmolVLM"),
)
NUM_TOKENS = 24
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
ONE, OTHER = picture(90, 61), picture(61, 140, seed=1)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> ReaderZoo:
    return make_reader_zoo("SmolVLM", tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageHost]:
    """A host from which the server may fetch images."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with ImageHost(authority) as made:
        made.files = {"/one": whole(encoded(ONE)), "/other": chunked(encoded(OTHER, "JPEG"))}
        made.files |= {"/text": whole(b"secret"), "/busy": whole(b"", status="503 Busy")}
        yield made


@pytest.fixture(scope="module")
def services(
    oracle: ReaderZoo, host: ImageHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    hosts = ("--image-hosts", host.address, "--image-tls-ca-file", str(host.ca_file))
    with Services(oracle.zoo, tmp_path_factory.mktemp("services"), (), FLAGS + hosts) as made:
        revision = made.client.register("of-text", made.source("of-text")).revision
        made.client.complete("the", adapter="of-text", min_revision=revision, max_tokens=1)
        yield made
        made.check_exit_codes()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(found: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(encoded(found))} | fields}


def block(found: Any, **fields: Any) -> dict[str, Any]:
    """Returns an image as Anthropic's API has it."""
    data = base64.b64encode(encoded(found)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data} | fields
    return {"type": "image", "source": source}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def expected(oracle: ReaderZoo, adapter: str, parts: list[dict[str, Any]], *found: Any) -> str:
    """Returns the text of the oracle's answer."""
    content = [each if each["type"] == "text" else {"type": "image"} for each in parts]
    inputs = oracle.inputs([{"role": "user", "content": content}], found)
    tokens = oracle.greedy(adapter, inputs, NUM_TOKENS)
    ends = oracle.processor.tokenizer.eos_token_id
    tokens = tokens[: tokens.index(ends)] if ends in tokens else tokens
    return str(oracle.processor.tokenizer.decode(tokens, skip_special_tokens=True))


TWO = [text("jumps"), part(ONE, detail="low"), text(" over "), part(OTHER), text("the dog")]


@pytest.mark.parametrize("adapter", ["", "of-text"])
def test_openais_client_sends_pictures(services: Services, oracle: ReaderZoo, adapter: str) -> None:
    client = OpenAI(base_url=f"http://{services.http_address}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": TWO}]
    made = client.chat.completions.create(model=adapter or "llama", messages=messages, **GREEDY)
    assert made.choices[0].message.content == expected(oracle, adapter, TWO, ONE, OTHER)
    assert made.usage is not None
    content = [each if each["type"] == "text" else {"type": "image"} for each in TWO]
    inputs = oracle.inputs([{"role": "user", "content": content}], (ONE, OTHER))
    assert made.usage.prompt_tokens == inputs["input_ids"].shape[1]
    streamed = client.chat.completions.create(
        model=adapter or "llama", messages=messages, stream=True, **GREEDY
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert "".join(pieces) == made.choices[0].message.content


@pytest.mark.long
@pytest.mark.parametrize("shape", ["--tensor-parallel", "--pipeline-parallel"])
def test_several_processes_read_pictures(shape: str, oracle: ReaderZoo, tmp_path: Path) -> None:
    """By default, as one does. The first one has the tower, in memory too, and each process of its
    stage pulls the part of an adapter that changes it."""
    flags = (*FLAGS[:6], "--aliases", "SmolVLM", shape, "2")
    with Services(oracle.zoo, tmp_path, (), flags) as made:
        client = OpenAI(base_url=f"http://{made.http_address}/v1", api_key="none")
        for adapter in ("", "of-all", "of-tower"):
            if adapter:
                made.client.register(adapter, made.source(adapter))
            found = client.chat.completions.create(
                model=adapter or "llama",
                messages=[{"role": "user", "content": TWO}],  # type: ignore[misc]
                **GREEDY,  # type: ignore[arg-type]
            )
            answer = found.choices[0].message.content
            assert answer == expected(oracle, adapter, TWO, ONE, OTHER), adapter
        if shape == "--tensor-parallel":

            def pulled() -> list[int]:
                return [each.pulled_bytes for each in made.client.server_info().ranks]

            until(lambda: 0 < pulled()[0] == pulled()[1])  # others report every second
            first, second = made.client.server_info().ranks
            assert first.weights_bytes > second.weights_bytes
    assert made.exit_codes == [0, 0]


def test_responses_have_pictures(services: Services, oracle: ReaderZoo) -> None:
    client = OpenAI(base_url=f"http://{services.http_address}/v1", api_key="none")
    given = [{"type": "input_image", "image_url": url(encoded(each))} for each in (ONE, OTHER)]
    words = [{"type": "input_text", "text": each} for each in ("jumps", " over ", "the dog")]
    content = [words[0], given[0] | {"detail": "auto"}, words[1], given[1], words[2]]
    asked: Any = [{"role": "user", "content": content}]
    options = {"temperature": 0.0, "max_output_tokens": NUM_TOKENS}
    made = client.responses.create(model="llama", input=asked, **options)
    assert made.output_text == expected(oracle, "", TWO, ONE, OTHER)
    assert made.usage is not None
    assert made.usage.input_tokens > 100


def test_messages_have_pictures(services: Services, oracle: ReaderZoo) -> None:
    """Texts are joined with an empty line where no image is between them."""
    blocks = [text("jumps"), block(ONE), text("over"), text("the"), block(OTHER), text("dog")]
    asked = {"model": "of-text", "messages": [{"role": "user", "content": blocks}]}
    path = f"http://{services.http_address}/v1/messages"
    made = httpx.post(path, json=asked | GREEDY).json()
    parts = [text("jumps"), part(ONE), text("over\n\nthe"), part(OTHER), text("dog")]
    answer = expected(oracle, "of-text", parts, ONE, OTHER)
    assert made["content"] == [{"type": "text", "text": answer}]
    counted = httpx.post(f"{path}/count_tokens", json=asked).json()["input_tokens"]
    usage = made["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > 100


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_pictures_of_urls_are_fetched_from_allowed_hosts(
    services: Services, oracle: ReaderZoo, host: ImageHost, route: str
) -> None:
    one, other = host.url("/one"), host.url("/other")
    content: list[dict[str, Any]]
    if route == "chat/completions":
        content = [{"type": "image_url", "image_url": {"url": each}} for each in (one, other)]
    elif route == "responses":
        content = [{"type": "input_image", "image_url": each} for each in (one, other)]
    else:
        sources = [{"type": "url", "url": each} for each in (one, other)]
        content = [{"type": "image", "source": each} for each in sources]
    kind = "input_text" if route == "responses" else "text"
    message = {"role": "user", "content": [*content, {"type": kind, "text": "the dog"}]}
    name = {"responses": "max_output_tokens"}.get(route, "max_tokens")
    body = {"model": "llama", "temperature": 0.0, name: NUM_TOKENS}
    body |= {"input" if route == "responses" else "messages": [message]}
    found = httpx.post(f"http://{services.http_address}/v1/{route}", json=body).json()
    if route == "chat/completions":
        text_of_answer = found["choices"][0]["message"]["content"]
    elif route == "responses":
        text_of_answer = found["output"][-1]["content"][0]["text"]
    else:
        text_of_answer = found["content"][0]["text"]
    jpeg = Image.open(BytesIO(encoded(OTHER, "JPEG")))
    parts = [part(ONE), part(OTHER), text("the dog")]
    assert text_of_answer == expected(oracle, "", parts, ONE, jpeg)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/text", 400, "is no picture"),
        ("/none", 400, "it answers 404"),
        ("/busy", 424, "it answers 503; try again, or send the image itself"),
    ],
)
def test_a_fetch_that_fails_names_the_field(
    services: Services, host: ImageHost, path: str, status: int, words: str
) -> None:
    outcome = "done" if path == "/text" else "status"
    before = num_fetches(services, outcome)
    parts = [{"type": "image_url", "image_url": {"url": host.url(f"{path}?secret")}}]
    body = {"model": "llama", "messages": [{"role": "user", "content": parts}], **GREEDY}
    answer = httpx.post(f"http://{services.http_address}/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert "secret" not in error["message"]
    assert error["param"] == FIELD
    source = {"type": "url", "url": host.url(path)}
    body["messages"] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer = httpx.post(f"http://{services.http_address}/v1/messages", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]
    assert num_fetches(services, outcome) == before + 2


def num_fetches(services: Services, outcome: str) -> float:
    name = "loadout_inference_prompt_image_fetches_total"
    return scrape(services.inference_metrics).one(name, outcome=outcome)


@pytest.mark.parametrize("adapter", ["", "of-text"])
def test_the_clients_chat_has_pictures(services: Services, oracle: ReaderZoo, adapter: str) -> None:
    words = "jumps over the dog"
    images = [
        {"data": encoded(ONE), "position": len("jumps")},
        {"data": encoded(OTHER, "JPEG", quality=95), "position": len("jumps over ")},
    ]
    message: Any = {"role": "user", "content": words, "images": images}
    done = services.client.complete([message], adapter=adapter, **GREEDY)
    parts = [text("jumps"), part(ONE), text(" over "), part(OTHER), text("the dog")]
    jpeg = Image.open(BytesIO(images[1]["data"]))
    assert done.text == expected(oracle, adapter, parts, ONE, jpeg)


def test_conversations_without_pictures_are_in_parts_for_such_templates(
    services: Services, oracle: ReaderZoo
) -> None:
    message: Any = {"role": "user", "content": "the quick brown fox"}
    done = services.client.complete([message], **GREEDY)
    assert done.text == expected(oracle, "", [text("the quick brown fox")])


FIELD = "messages[0].content[0].image_url"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "http": (
        [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
        FIELD,
        "the server fetches nothing",
    ),
    "file": ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], FIELD, "data:"),
    "base64": (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}}],
        FIELD,
        "no base64",
    ),
    "no picture": (
        [{"type": "image_url", "image_url": {"url": url(b"hello")}}],
        FIELD,
        "is no picture",
    ),
    "truncated": (
        [{"type": "image_url", "image_url": {"url": url(encoded(ONE)[:2000])}}],
        FIELD,
        "cannot be decoded",
    ),
    "too many": ([part(ONE)] * 4, "messages[0].content[3].image_url", "at most 3 images"),
    "a string": ([{"type": "image_url", "image_url": "data:"}], "messages[0].content", "url"),
    "audio": ([{"type": "input_audio", "input_audio": {}}], "messages[0].content", "input_audio"),
    "video": ([{"type": "video_url", "video_url": {}}], "messages[0].content", "video_url"),
    "detail": ([part(ONE, detail="huge")], "messages[0].content", "detail"),
    "the placeholder": ([part(ONE), text(f"a {IMAGE} b")], "messages[0].content", IMAGE),
    "a placeholder alone": (f"a {IMAGE} b", "messages[0].content", IMAGE),
    "too long": ([part(ONE)] * 3 + [text("a " * 100)], "messages", "tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_pictures_are_refused_by_name(services: Services, name: str) -> None:
    content, field, words = REFUSED[name]
    body = {"model": "llama", "messages": [{"role": "user", "content": content}], **GREEDY}
    answer = httpx.post(f"http://{services.http_address}/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == field


INPUT, SOURCE = "input[0].content[0].image_url", "messages[0].content[0].source"
ITEM, BLOCK = "input[0].message.content", "messages[0].content[0].image.source"
REFUSED_ELSEWHERE: dict[str, tuple[str, Any, str, str]] = {
    "response http": ("responses", {"image_url": "https://a/b.png"}, INPUT, "fetches nothing"),
    "response base64": ("responses", {"image_url": "data:image/png;base64,@"}, INPUT, "no base64"),
    "response none": ("responses", {"image_url": url(b"hello")}, INPUT, "is no picture"),
    "response file": ("responses", {"file_id": "file-1"}, ITEM, "takes no files"),
    "response detail": (
        "responses",
        {"image_url": url(encoded(ONE)), "detail": "huge"},
        ITEM,
        "detail",
    ),
    "message url": (
        "messages",
        {"type": "url", "url": "https://a"},
        f"{SOURCE}.url",
        "fetches nothing",
    ),
    "message file": ("messages", {"type": "file", "file_id": "f"}, BLOCK, "over HTTP"),
    "message base64": (
        "messages",
        {"type": "base64", "media_type": "image/png", "data": "@"},
        f"{SOURCE}.data",
        "no base64",
    ),
    "message none": (
        "messages",
        {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="},
        f"{SOURCE}.data",
        "is no picture",
    ),
}


@pytest.mark.parametrize("name", REFUSED_ELSEWHERE)
def test_bad_pictures_of_other_apis_are_refused_by_name(services: Services, name: str) -> None:
    route, fields, field, words = REFUSED_ELSEWHERE[name]
    if route == "responses":
        content: Any = {"type": "input_image"} | fields
        body = {"input": [{"role": "user", "content": [content]}], "max_output_tokens": 2}
    else:
        content = {"type": "image", "source": fields}
        body = {"messages": [{"role": "user", "content": [content]}], "max_tokens": 2}
    answer = httpx.post(
        f"http://{services.http_address}/v1/{route}", json=body | {"model": "llama"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert field in (error.get("param"), error["message"].partition(": ")[0]), answer.text


@pytest.mark.parametrize("route", ["responses", "messages"])
def test_only_users_of_other_apis_send_pictures(services: Services, route: str) -> None:
    if route == "responses":
        content: Any = {"type": "input_image", "image_url": url(encoded(ONE))}
        body = {"input": [{"role": "system", "content": [content]}]}
    else:
        body = {"messages": [{"role": "assistant", "content": [block(ONE)]}], "max_tokens": 2}
    answer = httpx.post(
        f"http://{services.http_address}/v1/{route}", json=body | {"model": "llama"}
    )
    assert answer.status_code == 400, answer.text
    assert "user" in answer.json()["error"]["message"]


def test_only_users_send_pictures(services: Services) -> None:
    messages = [{"role": "assistant", "content": [part(ONE)]}, {"role": "user", "content": "a"}]
    body = {"model": "llama", "messages": messages}
    answer = httpx.post(f"http://{services.http_address}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == FIELD


def test_placeholders_in_other_prompts_are_refused(services: Services, oracle: ReaderZoo) -> None:
    """They are never computed as words."""
    token_id = oracle.processor.tokenizer.convert_tokens_to_ids(IMAGE)
    for prompt in (f"a {IMAGE} b", [5, token_id, 6]):
        with pytest.raises(errors.InvalidArgument, match=f"token {token_id}.*stands for an image"):
            services.client.complete(prompt, max_tokens=1)
    images = [{"data": encoded(ONE), "position": 2}, {"data": encoded(ONE), "position": 1}]
    message: Any = {"role": "user", "content": "abc", "images": images}
    with pytest.raises(errors.InvalidArgument, match=r"chat.messages\[0\].images\[1\].position"):
        services.client.complete([message], max_tokens=1)


def test_tokenize_counts_the_tokens_of_pictures(services: Services, oracle: ReaderZoo) -> None:
    message: Any = {"role": "user", "content": "abc", "images": [{"data": encoded(ONE)}]}
    content = [{"type": "image"}, text("abc")]
    expected_ids = oracle.inputs([{"role": "user", "content": content}], [ONE])["input_ids"][0]
    assert list(services.client.tokenize([message])) == expected_ids.tolist()


def test_pixels_of_open_requests_are_bounded(services: Services) -> None:
    """After all of these the memory is free again."""
    for _ in range(6):
        message: Any = {
            "role": "user",
            "content": "a",
            "images": [{"data": encoded(OTHER)}, {"data": encoded(ONE)}],
        }
        assert services.client.complete([message], **GREEDY).text
    later: Any = {"role": "user", "content": "b", "images": [{"data": encoded(ONE), "position": 1}]}
    assert services.client.complete([later], **GREEDY).text  # an image of another prefix
    metrics = scrape(services.inference_metrics)
    for place, capacity in (
        ("prompt_image_bytes", 20 << 20),
        ("prompt_images", 2),
        ("prompt_image_uploads", 10 << 20),
    ):
        assert metrics.one("loadout_inference_place_capacity", place=place) == capacity
    assert metrics.one("loadout_inference_prompt_image_encodes_total") >= 2
    assert metrics.one("loadout_inference_prompt_image_hits_total") >= 1
    embeddings = "loadout_inference_prompt_image_embedding"
    assert metrics.one(f"{embeddings}_used_bytes") == 0
    room = metrics.one(f"{embeddings}_capacity_bytes")
    assert 0 < metrics.one(f"{embeddings}_stored_bytes") <= room == 20 << 20
    assert metrics.one("loadout_inference_place_used", place="prompt_image_fetches") == 0
    assert metrics.one("loadout_inference_place_used", place="request_bytes") == 0


# --- uploads ------------------------------------------------------------------------------------


def used_uploads(services: Services) -> float:
    return scrape(services.inference_metrics).one(
        "loadout_inference_place_used", place="prompt_image_uploads"
    )


def asks(**image: Any) -> Any:
    """Returns a chat with the image, and a text after it."""
    return [{"role": "user", "content": "the dog", "images": [image]}]


def noise() -> Image.Image:
    """An image whose file is larger than a request may be."""
    values = np.random.default_rng(3).integers(0, 256, (1200, 1300, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("adapter", ["", "of-text"])
def test_an_uploaded_image_is_as_one_that_is_sent(
    services: Services, oracle: ReaderZoo, adapter: str
) -> None:
    large = noise()
    data = encoded(large)
    assert len(data) > 4 << 20
    with pytest.raises(errors.ResourceExhausted):
        services.client.complete(asks(data=data), adapter=adapter, **GREEDY)
    sha256 = services.client.upload_image(data, adapter=adapter)
    assert sha256 == hashlib.sha256(data).digest()
    used = used_uploads(services)
    assert services.client.upload_image(data, adapter=adapter) == sha256
    assert used_uploads(services) == used >= len(data)
    parts = [part(ONE), text("the dog")]
    answer = expected(oracle, adapter, parts, large)
    for _ in range(2):  # the second time its embeddings are found
        made = services.client.complete(asks(sha256=sha256), adapter=adapter, **GREEDY)
        assert made.text == answer
    content = [{"type": "image"}, text("the dog")]
    tokens = oracle.inputs([{"role": "user", "content": content}], [large])["input_ids"][0]
    assert list(services.client.tokenize(asks(sha256=sha256))) == tokens.tolist()


def test_an_unknown_hash_is_refused_by_name(services: Services) -> None:
    sha256 = services.client.upload_image(encoded(ONE), cache_salt="mine")
    options: dict[str, Any] = {"max_tokens": 1}
    services.client.complete(asks(sha256=sha256), cache_salt="mine", **options)
    services.client.tokenize(asks(sha256=sha256), cache_salt="mine")
    for unknown, salt in ((sha256, ""), (sha256, "other"), (b"x" * 32, "mine")):
        with pytest.raises(errors.NotFound, match="upload it again") as refused:
            services.client.complete(asks(sha256=unknown), cache_salt=salt, **options)
        assert refused.value.reason == "IMAGE_NOT_FOUND"
        assert refused.value.subject == "chat.messages[0].images[0].sha256"
    with pytest.raises(errors.NotFound):
        services.client.tokenize(asks(sha256=sha256))
    with pytest.raises(errors.InvalidArgument, match="a hash of 32 bytes"):
        services.client.complete(asks(sha256=b"x" * 31), **options)
    with pytest.raises(errors.InvalidArgument, match="one of data, sha256 is missing"):
        services.client.complete(asks(position=1), **options)


def test_the_client_uploads_an_image_that_the_server_lacks(services: Services) -> None:
    data = encoded(picture(33, 44, seed=7))
    both = {"data": data, "sha256": hashlib.sha256(data).digest()}
    sent = services.client.complete(asks(data=data), **GREEDY).text
    used = used_uploads(services)
    assert services.client.complete(asks(**both), **GREEDY).text == sent
    assert used_uploads(services) > used
    assert services.client.complete(asks(sha256=both["sha256"]), **GREEDY).text == sent
    salted = {"cache_salt": "another"}
    assert services.client.tokenize(asks(**both), **salted) == services.client.tokenize(
        asks(data=data)
    )

    async def main() -> list[str]:
        async with AsyncClient(inference=services.inference_address) as client:
            chunks = client.generate(asks(**both), cache_salt="third", **GREEDY)
            found = "".join([chunk.text async for chunk in chunks])
            sha256 = await client.upload_image(data)
            return [found, (await client.complete(asks(sha256=sha256), **GREEDY)).text]

    assert asyncio.run(main()) == [sent, sent]
    wrong = {"data": data, "sha256": b"x" * 32}  # nobody believes it
    with pytest.raises(errors.NotFound, match="upload it again"):
        services.client.complete(asks(**wrong), **GREEDY)


def test_content_is_checked_when_it_is_used(services: Services) -> None:
    sha256 = services.client.upload_image(b"hello")
    with pytest.raises(errors.InvalidArgument, match="is no picture") as refused:
        services.client.complete(asks(sha256=sha256), max_tokens=1)
    assert refused.value.subject == "chat.messages[0].images[0].sha256"


def describes(size: int, salt: str = "") -> pb.UploadImageRequest:
    return pb.UploadImageRequest(upload=pb.ImageUpload(size_bytes=size, cache_salt=salt))


def has(chunk: bytes) -> pb.UploadImageRequest:
    return pb.UploadImageRequest(chunk=chunk)


HOSTILE: dict[str, tuple[list[pb.UploadImageRequest], str, str]] = {
    "nothing": ([], "INVALID_ARGUMENT", "begins with `upload`"),
    "no description": ([has(b"a")], "INVALID_ARGUMENT", "begins with `upload`"),
    "no part": ([pb.UploadImageRequest()], "INVALID_ARGUMENT", "begins with `upload`"),
    "no bytes": ([describes(0)], "INVALID_ARGUMENT", "size_bytes"),
    "too large": ([describes(1 << 63)], "INVALID_ARGUMENT", "size_bytes"),
    "more than there is": ([describes(20 << 20)], "RESOURCE_EXHAUSTED", "send a smaller image"),
    "fewer": ([describes(2), has(b"a")], "INVALID_ARGUMENT", "1 of 2 bytes"),
    "more": ([describes(2), has(b"abc")], "INVALID_ARGUMENT", "more have arrived"),
    "an empty piece": ([describes(2), has(b"")], "INVALID_ARGUMENT", "chunk"),
    "a large piece": ([describes(8 << 20), has(bytes(2 << 20))], "RESOURCE_EXHAUSTED", "are read"),
    "twice": ([describes(2), describes(2)], "INVALID_ARGUMENT", "only chunks"),
    "a long salt": ([describes(2, "s" * 257), has(b"ab")], "INVALID_ARGUMENT", "cache_salt"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_uploads_are_refused_and_hold_nothing(services: Services, name: str) -> None:
    messages, code, words = HOSTILE[name]
    used = used_uploads(services)
    with grpc.insecure_channel(services.inference_address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.UploadImage(iter(messages), timeout=60)
    assert (refused.value.code().name, words in str(refused.value.details())) == (code, True)
    assert used_uploads(services) <= used  # less, if others made room for it


def test_tenants_name_their_own_uploads_alone(oracle: ReaderZoo, tmp_path: Path) -> None:
    """A hash of another tenant is answered as one that nobody has uploaded."""
    tenants = ("red", "blue")
    lines = (token_lines(each, ["caller"], [each]) for each in tenants)
    ready = tmp_path / "ready.json"
    command = [
        *(sys.executable, "-m", "inference_svc", "--model", str(oracle.zoo.model_dir)),
        *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--kv-memory", "8MiB"),
        *("--num-threads", "1", "--max-model-len", "256", "--ready-file", str(ready)),
        *("--policy-file", str(write_policy(tmp_path, *lines)), "--dtype", "float32"),
        *("--adapter-memory", "8MiB", "--prompt-image-memory", "4MiB"),
    ]
    process = ForkedProcess("inference", command, tmp_path, ready)
    address = process.wait_ready(120.0)["grpc"]
    retry = RetryPolicy(max_attempts=1)
    red, blue = (Client(inference=address, token=token_of(name), retry=retry) for name in tenants)
    try:
        sha256 = red.upload_image(encoded(ONE))
        assert red.complete(asks(sha256=sha256), max_tokens=1).token_ids
        words = []
        for unknown in (sha256, b"x" * 32):
            with pytest.raises(errors.NotFound) as refused:
                blue.complete(asks(sha256=unknown), max_tokens=1)
            words.append((refused.value.message, refused.value.reason, refused.value.subject))
        assert words[0] == words[1]
        with pytest.raises(errors.ResourceExhausted, match="one tenant may have"):
            blue.upload_image(bytes(600 << 10))  # its share is half of a MiB
        both = {"data": encoded(ONE), "sha256": sha256}
        assert blue.complete(asks(**both), max_tokens=1).token_ids
    finally:
        for each in (red, blue):
            each.close()
        process.stop(40.0)
