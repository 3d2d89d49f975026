"""Adapters with tokens and chat templates of their own, over both services, as transformers'."""

from __future__ import annotations

import dataclasses
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from loadout.errors import FailedPrecondition, InvalidArgument
from loadout.prometheus import scrape
from loadout.types import ChatMessage, Completion, FinishReason
from tests.support.models import tokenizer_files as files
from tests.support.models.zoo import CHAT_TEMPLATE, Zoo
from tests.system.services import GRACE_S, Services

pytestmark = [pytest.mark.slow, pytest.mark.processes]

KNOWN = 124
"""How many tokens the tokenizer knows, of the model's 128: its vocabulary is padded, as Qwen's."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}>"
NEW = ["<|im_start|>", "<|im_end|>", AddedToken("<tool>", normalized=False)]
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi <tool> the"}]
LENGTH = 16


def backend() -> Tokenizer:
    """One token per character, as the zoo's, of fewer of them."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(i): i for i in range(3, KNOWN)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


class House(Services):
    """Both services, over a model whose tokenizer is smaller than its vocabulary, with HTTP."""

    def folder_of(self, adapter: str) -> Path:
        return Path(self.source(adapter).removeprefix("file://"))

    def register(self, adapter: str, tokens: Any = (), template: str = "", **config: Any) -> Any:
        """Registers the zoo's adapter with files of a tokenizer beside it."""
        folder = self.folder_of(adapter)
        files.save(files.with_tokens(backend(), tokens), folder, template, **config)
        return self.client.register(adapter, f"file://{folder}", base_model="llama")

    def chat(self, adapter: str, **options: Any) -> Completion:
        messages = [ChatMessage(**each) for each in MESSAGES]
        sampling = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0, **options}
        return self.client.complete(messages, adapter=adapter, **sampling)

    def post(self, body: dict[str, Any], route: str = "chat/completions") -> tuple[int, Any]:
        address = json.loads((self.folder / "inference.json").read_text())["http"]
        request = urllib.request.Request(
            f"http://{address}/v1/{route}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def check_chat(self, adapter: str) -> None:
        """The chat is what transformers and PEFT make of the adapter's folder."""
        theirs = AutoTokenizer.from_pretrained(str(self.folder_of(adapter)))
        theirs.chat_template = theirs.chat_template or CHAT_TEMPLATE
        ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
        expected = self.zoo.greedy(adapter, ids, LENGTH)
        text = theirs.decode(expected, skip_special_tokens=True)
        done = self.chat(adapter)
        assert (list(done.token_ids), done.text) == (expected, text)
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(ids)
        status, answer = self.post(
            {
                "model": adapter,
                "messages": MESSAGES,
                "max_completion_tokens": LENGTH,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "logprobs": True,
                "top_logprobs": 5,
            }
        )
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected
        assert choice["message"]["content"] == text
        assert answer["usage"]["prompt_tokens"] == len(ids)
        names = [each["token"] for each in choice["logprobs"]["content"]]
        assert names == [
            theirs.convert_ids_to_tokens(each) if each < len(theirs) else "" for each in expected
        ]


@pytest.fixture(scope="module")
def house(zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    zoo, folder = zoos("llama"), tmp_path_factory.mktemp("texts")
    model_dir = Path(shutil.copytree(zoo.model_dir, folder / "model"))
    (model_dir / "chat_template.jinja").unlink(missing_ok=True)
    files.save(backend(), model_dir, CHAT_TEMPLATE)
    zoo = dataclasses.replace(zoo, model_dir=model_dir)
    flags = ("--adapter-wait-seconds", "30", "--http", "127.0.0.1:0", "--dtype", "float32")
    with House(zoo, folder, inference_flags=flags) as made:
        yield made
        made.check_exit_codes()


def test_tokens_and_templates_of_several_adapters_in_one_server(house: House) -> None:
    house.register("r16", NEW, CHATML)
    house.register("r3", template=PLAIN)
    house.register("r1")  # without a template: kubeai#347
    for adapter in ("r16", "r3", "r1", "r16"):
        house.check_chat(adapter)
    status, answer = house.post(
        {"model": "r16", "prompt": "<tool>the<|im_end|>", "max_tokens": 1}, "completions"
    )
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 5)
    status, answer = house.post(
        {"model": "llama", "prompt": "<tool>the<|im_end|>", "max_tokens": 1}, "completions"
    )
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 19)


def test_requests_follow_a_template_that_is_registered_again(house: House) -> None:
    first = house.register("r33", NEW, CHATML).adapter
    house.check_chat("r33")
    second = house.register("r33", NEW, PLAIN).adapter
    assert (second.version, second.digest) == (first.version + 1, first.digest)
    assert second.tokenizer_digest == first.tokenizer_digest
    assert house.chat("r33", min_revision=0).adapter is not None
    done = house.chat(f"r33@{second.version}")
    assert done.usage != house.chat(f"r33@{first.version}").usage
    assert house.chat("r33").usage == done.usage
    house.check_chat("r33")


def test_answers_end_at_the_adapters_own_end(house: House) -> None:
    house.register("r16", NEW, CHATML)
    tokens = house.chat("r16").token_ids
    index = next(
        i for i in range(1, LENGTH) if 32 < tokens[i] < KNOWN and tokens[i] not in tokens[:i]
    )
    house.register("r16", NEW, CHATML, eos_token=chr(tokens[index]))
    done = house.chat("r16", ignore_eos=False)
    assert done.token_ids == tokens[: index + 1]
    assert done.finish_reason is FinishReason.STOP
    assert chr(tokens[index]) not in done.text
    assert house.chat("r16").token_ids == tokens


def test_stop_strings_are_found_in_the_adapters_text(house: House) -> None:
    house.register("r16", NEW, CHATML)
    text = house.chat("r16").text
    assert house.chat("r16", stop=[text[3:6]]).text == text[: text.index(text[3:6])]


def test_a_tokenizer_that_changes_the_models_is_refused_by_name(house: House) -> None:
    house.register("r64", NEW, CHATML)
    folder = house.folder_of("r64")
    files.edit(folder, lambda found: found["added_tokens"][-1].update(content="a", id=KNOWN + 2))
    with pytest.raises(InvalidArgument, match="'a'"):
        house.client.register("r64", f"file://{folder}")
    house.register("r64", NEW, CHATML)
    files.edit(folder, lambda found: found["model"]["vocab"].update({"a": 98, "b": 97}))
    house.client.register("r64", f"file://{folder}")
    for prompt in ("the", [5, 6], [ChatMessage(role="user", content="hi")]):
        with pytest.raises(
            FailedPrecondition, match=r"default/r64@\d+: .* the vocabulary"
        ) as found:
            house.client.complete(prompt, adapter="r64", max_tokens=1)
        assert found.value.reason == "TOKENIZER_CHANGED"
    status, answer = house.post({"model": "r64", "messages": MESSAGES})
    assert status == 400
    assert "the vocabulary" in answer["error"]["message"]


def test_hostile_templates_end_and_others_are_served(house: House) -> None:
    house.register(
        "r3", template="{% for i in range(99999) %}{{ i }}{% import 'os' as x %}{% endfor %}"
    )
    with pytest.raises(InvalidArgument, match="chat template"):
        house.chat("r3")
    house.register("r3", template="{{ 'x' | center(9999999999) }}")
    with pytest.raises(InvalidArgument, match="chat template"):
        house.chat("r3")
    house.register("r3", template="{% if %}")
    with pytest.raises(FailedPrecondition, match="chat template cannot be used"):
        house.chat("r3")
    house.register("r16", NEW, CHATML)
    house.check_chat("r16")


def test_a_token_that_has_no_row_is_refused_where_it_is_used(house: House) -> None:
    tokens = [f"<|{number}|>" for number in range(12)]
    house.register("r16", tokens, PLAIN)
    with pytest.raises(InvalidArgument, match=r"token 134 \('<\|10\|>'\); this model knows 128"):
        house.client.complete("the <|10|>", adapter="r16", max_tokens=1)
    house.check_chat("r16")


def test_texts_survive_restarts_of_both(house: House) -> None:
    house.register("r16", NEW, CHATML)
    house.check_chat("r16")
    metrics = scrape(house.inference_metrics)
    assert metrics.one("loadout_inference_text_cache_entries") >= 1
    house.store.stop(GRACE_S)
    house.chat("r16")  # from memory
    house.start_store()
    assert house.inference.stop(GRACE_S) == 0
    house.start_inference()
    house.client.close()
    house.client = type(house.client)(inference=house.inference_address, store=house.store_address)
    house.check_chat("r16")
