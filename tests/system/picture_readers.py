"""Models that read pictures, the oracle, the prompts that a server makes of conversations, and
checks of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from inference_svc.app import picture_rule
from inference_svc.core import EngineConfig
from inference_svc.engine.build import describe
from inference_svc.model.architectures import load_description
from inference_svc.pictures.decoding import PictureDecoder
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.prompt import PromptPicture
from inference_svc.text.tokenizer import Tokenizer
from tests.support.models.zoo import AdapterSpec
from tests.support.pictures.files import encoded, picture
from tests.support.pictures.models import GEMMA4, SPECS, ReaderZoo, make_reader_zoo
from tests.support.pictures.templates import image_name
from tests.system.engines import DEFAULTS, Running

NUM_TOKENS = 24
"""More than a page has."""
NUM_GREEDY = 48
"""So many tell any two adapters apart."""
SETTINGS = {
    "max_prompt_images": 4,
    "prompt_image_bytes": 1 << 20,
    "max_model_len": 512,
    "kv_bytes": 8 << 20,
}
PICTURES = (picture(90, 61), picture(61, 140, seed=1), picture(57, 56, seed=2))
"""Of odd sizes."""


def asked(*parts: str | Image.Image) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Returns the message of a user with texts and pictures."""
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
        for each in parts
    ]
    pictures = [each for each in parts if not isinstance(each, str)]
    return [{"role": "user", "content": content}], pictures


PROMPTS = {
    "one": asked(PICTURES[0], "the quick brown fox"),
    "three": asked("jumps", PICTURES[1], "over", PICTURES[0], PICTURES[2], "the lazy dog"),
    "text": asked("the quick brown fox jumps over the lazy dog"),
}


class Reader:
    """A model that reads pictures, the oracle, and what a server makes of conversations."""

    def __init__(self, name: str, folder: Path, specs: Sequence[AdapterSpec] = SPECS) -> None:
        self.oracle: ReaderZoo = make_reader_zoo(name, folder, specs)
        self.zoo = self.oracle.zoo
        decoder = load_description(self.zoo.model_dir, with_pictures=True)
        rule = picture_rule(decoder, 4)
        assert decoder.pictures is not None
        assert rule is not None
        self.pictures = decoder.pictures
        self.rule: PictureRule = rule
        self.decoder = PictureDecoder(rule.processor)
        self.tokenizer = Tokenizer(self.zoo.model_dir)
        self._answers: dict[tuple[str, str], list[int]] = {}
        """The longest so far, by adapter and prompt."""

    def close(self) -> None:
        self.decoder.close()

    def prompt(self, name: str) -> tuple[list[int], tuple[PromptPicture, ...]]:
        messages, pictures = PROMPTS[name]
        text = self.oracle.processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        text = self.rule.framed(text, self.tokenizer.name_of)
        tiles = [self.decoder.decode(encoded(each), "image") for each in pictures]
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))

        def encode(part: str) -> list[int]:
            return self.tokenizer.encode(part, add_special_tokens=False)

        ids = self.rule.expanded(ids, tiles, image_name(self.oracle.name), encode)
        return list(ids), self.rule.found(ids, tiles)

    def expected(
        self, adapter: str, name: str, guess: Sequence[int] = (), count: int = NUM_TOKENS
    ) -> list[int]:
        """Returns the oracle's answer, which a right guess makes quick."""
        key = adapter, name
        if len(self._answers.get(key, ())) < count:
            inputs = self.oracle.inputs(*PROMPTS[name])
            self._answers[key] = self.oracle.greedy(adapter, inputs, count, guess)
        return self._answers[key][:count]


def submit(running: Running, reader: Reader, adapter: str, name: str, **options: Any) -> str:
    prompt, pictures = reader.prompt(name)
    request_id = f"{adapter} {name} {len(running.outputs)}"
    options = {"max_tokens": NUM_TOKENS} | options
    running.submit(request_id, prompt, adapter, pictures=pictures, **options)
    return request_id


def check_answer(
    running: Running,
    request_id: str,
    reader: Reader,
    adapter: str,
    name: str,
    count: int = NUM_TOKENS,
) -> None:
    """Requires the oracle's tokens, for which a request's are a guess: a right one is quick."""
    tokens, last = running.result(request_id)
    assert last.error is None
    assert tokens == reader.expected(adapter, name, tokens, count), (adapter, name)


def check_greedy(reader: Reader, running: Running) -> None:
    """One and three pictures, and text alone, of the base model and four adapters in one batch; and
    pictures matter, as do adapters wherever they change something."""
    cells = [(a, n) for a in ("", *reader.zoo.adapter_dirs) for n in PROMPTS]
    ids = {cell: submit(running, reader, *cell, max_tokens=NUM_GREEDY) for cell in cells}
    for (adapter, name), request_id in ids.items():
        check_answer(running, request_id, reader, adapter, name, NUM_GREEDY)
    answers = {tuple(reader.expected(*cell, count=NUM_GREEDY)) for cell in cells}
    alone = {"of-tower", "of-connector"} & set(reader.zoo.adapter_dirs)
    assert len(answers) == len(cells) - len(alone)  # texts pass neither tower nor connector
    running.check_idle()


PAGE = 16
CUT = {"max_batch_tokens": 7, "max_prefill_chunk": 7, "max_sequences": 4}
WHOLE = {"Gemma3": 20, "Gemma4": 74}
"""Beside four generated tokens there is room for the 16 or 70 tokens of a picture."""
NUM_PAGES = {"SmolVLM": 22, "Qwen3VL": 18, "Gemma3": 22, "Mistral3": 22}
NUM_PAGES |= {"Gemma4": 50, "Gemma4Small": 50}
"""Of all sequences, fewer than they need."""
CASES: dict[str, dict[str, Any]] = {
    "chunks": CUT,
    "chunks-torch": CUT | {"native_kernels": False},
    "preemption": {"max_model_len": 256},
    "no-prefix-cache": {"prefix_cache": False},
    "little-memory": CUT,
    "scored": {},
}


def check_steps(
    stepped: Reader, case: str, start: Callable, adapter: str = "of-text", **shape: int
) -> None:
    """Pictures across the borders of chunks, preempted prompts, embeddings that do not stay, and
    prompts whose log probabilities are returned, for which another program is run. `shape`: the
    settings of several processes."""
    settings = SETTINGS | CASES[case] | shape
    if "max_batch_tokens" in CASES[case] and stepped.oracle.name in WHOLE:
        most = WHOLE[stepped.oracle.name]
        settings |= {"max_batch_tokens": most, "max_prefill_chunk": most}
    if case == "preemption":
        if stepped.oracle.name in GEMMA4:  # its pictures have more tokens
            settings["max_model_len"] = 320
        config = EngineConfig(stepped.zoo.model_dir, "model", **DEFAULTS | settings)
        per_token = max(each.kv_elements_per_token for each in describe(config, 0).every_stage)
        settings["kv_bytes"] = NUM_PAGES[stepped.oracle.name] * PAGE * 4 * per_token
    if case == "little-memory":
        pictures = stepped.pictures
        settings["prompt_image_bytes"] = pictures.max_tokens * pictures.row_size * 4
    running = start(stepped.zoo, **settings)
    cells = [(a, n) for a in ("", adapter) for n in PROMPTS] * 2
    more = {"prompt_logprobs": 0} if case == "scored" else {}
    with running.together():
        ids = [
            (each, submit_as(running, stepped, i, *each, **more)) for i, each in enumerate(cells)
        ]
    for (adapter, name), request_id in ids:
        check_answer(running, request_id, stepped, adapter, name)
    scheduler = running.engine.built.engine.scheduler
    if case == "preemption":
        assert scheduler.num_preemptions > 0
    if case == "little-memory":
        assert scheduler.pictures.num_encoded > 3
    running.check_idle()


def submit_as(
    running: Running, reader: Reader, index: int, adapter: str, name: str, **options: Any
) -> str:
    """Submits a request whose cache others of another number do not share."""
    prompt, pictures = reader.prompt(name)
    request_id = f"{index} {adapter} {name}"
    options = {"max_tokens": NUM_TOKENS, "cache_seed": f"{index % 2}"} | options
    running.submit(request_id, prompt, adapter, pictures=pictures, **options)
    return request_id
