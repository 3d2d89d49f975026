import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers as hf
from transformers import AutoTokenizer

from inference_svc.errors import UnsupportedModel
from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.cut import Kept
from inference_svc.text.no_tokenizer import NoTokenizer
from inference_svc.text.tokenizer import Tokenizer, tokenizer_bytes
from servicekit.errors import InvalidArgument
from tests.support.models.tokenizers import CHAT_TEMPLATE, byte_level, save_tokenizer


def test_encode_equals_hugging_face(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        for text in ("the lazy dog", "", "日本 <s> in the text", "a😀"):
            assert tokenizer.encode(text) == tokenizer.hf(text)["input_ids"]


def test_chat_goes_through_the_template(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode_chat(Chat((ChatMessage("user", "hi"),)), 1000, 1.0)
    assert token_ids == tokenizer.hf("<s>user: hi</s><s>assistant:")["input_ids"]


def test_chat_without_template_names_chat(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        tokenizers["unigram"].encode_chat(Chat((ChatMessage("user", "hi"),)), 1000, 1.0)
    assert caught.value.subject == "chat"


def test_conversation_that_the_template_refuses_is_invalid(
    tokenizers: dict[str, Tokenizer],
) -> None:
    chat = Chat((ChatMessage("bard", "hi"),))
    with pytest.raises(InvalidArgument, match="does not know the role 'bard'") as caught:
        tokenizers["chars"].encode_chat(chat, 1000, 1.0)
    assert caught.value.subject == "chat.messages[0].role"


def test_special_tokens_are_the_callers_choice(tmp_path: Path) -> None:
    """thinking-machines-lab/tinker-feedback#125: a rendered chat as a text has one BOS more, unless
    the caller adds none."""
    backend = byte_level()
    backend.post_processor = hf.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    assert backend.token_to_id("<s>") == 0
    tokenizer = Tokenizer(save_tokenizer(backend, tmp_path, CHAT_TEMPLATE))
    rendered = "<s>user: hi</s><s>assistant:"
    chat = Chat((ChatMessage("user", "hi"),))
    ids = tokenizer.encode_chat(chat, 1000, 1.0)
    assert tokenizer.encode(rendered, add_special_tokens=False) == ids
    assert tokenizer.encode(rendered) == [0, *ids]
    twice = replace(chat, add_special_tokens=True)
    assert tokenizer.encode_chat(twice, 1000, 1.0) == [0, *ids]


def test_vocabulary_facts(tokenizers: dict[str, Tokenizer]) -> None:
    unigram = tokenizers["unigram"]
    assert len(unigram.byte_ids) == 256
    assert tokenizers["byte_level"].byte_ids == frozenset()
    for tokenizer in tokenizers.values():
        hidden = set(range(tokenizer.vocab_size)) - tokenizer.visible_ids
        assert {"<s>", "</s>"} <= set(tokenizer.hf.convert_ids_to_tokens(sorted(hidden)))
        assert tokenizer.decode([*hidden, tokenizer.vocab_size]) == ""


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot load the tokenizer in"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Nowhere", None]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "nowhere", None])
def test_class_is_what_hugging_face_chooses(
    tmp_path: Path, named: str | None, model_type: str | None
) -> None:
    """Without the class of the model's configuration, whose import takes seconds."""
    save_tokenizer(byte_level(), tmp_path, CHAT_TEMPLATE)
    for name, field, value in (
        ("tokenizer_config.json", "tokenizer_class", named),
        ("config.json", "model_type", model_type),
    ):
        path = tmp_path / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(fields | {field: value} if value else {}))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    ours = Tokenizer(tmp_path).hf
    assert type(ours) is type(theirs)
    text = "the lazy dog 日本 <s>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template


def test_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    backend = byte_level()
    plain = backend.encode("the lazy dog").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=6)
    tokenizer = Tokenizer(save_tokenizer(backend, tmp_path, CHAT_TEMPLATE))
    assert tokenizer.encode("the lazy dog") == plain
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode_chat(Chat((ChatMessage("user", "the lazy dog"),)), 1000, 1.0)) > 6


@pytest.mark.slow
def test_encoding_lets_other_threads_run(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """A prompt of megabytes takes a second, in which the event loop and the engine must run."""
    text = "the quick brown fox " * 50_000
    tokenizing = threading.Thread(target=tokenizers["byte_level"].encode, args=(text,))
    num_turns = 0
    tokenizing.start()
    while tokenizing.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10


MEASURE = """
import sys
from pathlib import Path
import inference_svc.app
from inference_svc.host.memory import resident_bytes
from inference_svc.text.tokenizer import Tokenizer
before = resident_bytes()
tokenizer = Tokenizer(Path(sys.argv[1]))
assert "transformers.activations" not in sys.modules, "what its models compute with"
print(resident_bytes() - before)
"""


@pytest.mark.processes
@pytest.mark.parametrize("num_pairs", [100, pytest.param(200, marks=pytest.mark.long)])
def test_memory_is_estimated_before_loading(tmp_path: Path, num_pairs: int) -> None:
    """A vocabulary of 900 pairs of letters, and of every two of the first `num_pairs` of them."""
    letters = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    short = list(itertools.product(letters[:30], letters[:30]))
    long = itertools.product(["".join(pair) for pair in short[:num_pairs]], repeat=2)
    merges = [*short, *long]
    words = [*letters, *("".join(pair) for pair in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=merges))
    save_tokenizer(backend, tmp_path, CHAT_TEMPLATE)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    estimated_bytes = tokenizer_bytes(tmp_path)
    assert 0.5 * estimated_bytes < int(done.stdout) < 1.2 * estimated_bytes


def test_memory_of_other_tokenizers(tmp_path: Path) -> None:
    bare_bytes = tokenizer_bytes(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(bytes(1000))
    assert tokenizer_bytes(tmp_path) == bare_bytes + 100_000


def test_a_server_without_a_tokenizer_says_what_to_do() -> None:
    server = NoTokenizer()
    for call in (
        lambda: server.encode("a"),
        lambda: server.encode_pair("a", "b"),
        lambda: server.shortened("a b", 1, Kept.FIRST),
        lambda: server.decode_all([1]),
    ):
        with pytest.raises(InvalidArgument, match=r"--no-tokenizer\): (send|use a server with)"):
            call()
