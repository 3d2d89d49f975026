"""Pictures in prompts: greedy tokens are those of transformers and PEFT in fp32, for the base model
and adapters of its language part, tower and connector, however a prompt is cut, preempted or
cached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference_svc.backends.pictures import PictureRows
from inference_svc.core import FinishReason
from inference_svc.engine.transport.messages import Call, Command
from inference_svc.pictures.prompt import PictureWork, PromptPicture
from servicekit.shared_memory import SharedBytes
from tests.support.pairs import PATHS, long_but
from tests.support.pictures.files import encoded
from tests.support.pictures.models import NAMES
from tests.support.pictures.templates import IMAGE
from tests.support.wait import TIMEOUT_S
from tests.system.engines import Running
from tests.system.picture_readers import (
    CUT,
    NUM_TOKENS,
    PAGE,
    PICTURES,
    PROMPTS,
    SETTINGS,
    WHOLE,
    Reader,
    check_answer,
    check_greedy,
    check_steps,
    submit,
)

ON_TORCH = ("Llava", "SmolVLM", "Qwen3VL", "Gemma4")
"""Towers of all models through torch are compared in tests/inference_svc/model/test_towers.py."""


@pytest.fixture(scope="module", params=NAMES)
def reader(request: pytest.FixtureRequest, readers: Callable[[str], Reader]) -> Reader:
    return readers(request.param)


def test_prompts_are_those_of_transformers(reader: Reader) -> None:
    for name, (messages, pictures) in PROMPTS.items():
        expected = reader.oracle.inputs(messages, pictures)["input_ids"][0].tolist()
        ids, found = reader.prompt(name)
        assert ids == expected
        num_tokens = sum(each.num_tokens for each in found)
        assert num_tokens == ids.count(reader.rule.token_id)
        assert num_tokens == sum(
            each.num_tiles * reader.rule.tiles.tokens(each.tile) for each in found
        )


def test_greedy_tokens_equal_transformers_and_peft(reader: Reader, start: Callable) -> None:
    check_greedy(reader, start(reader.zoo, **SETTINGS))


@pytest.mark.parametrize("reader", long_but(ON_TORCH, NAMES), indirect=True)
def test_greedy_tokens_through_torch(reader: Reader, start: Callable) -> None:
    check_greedy(reader, start(reader.zoo, native_kernels=False, **SETTINGS))


@pytest.fixture(scope="module")
def smolvlm(readers: Callable[[str], Reader]) -> Reader:
    """Its pictures are cut into tiles, with texts between the tokens of these."""
    return readers("SmolVLM")


@pytest.fixture(scope="module")
def gemma3(readers: Callable[[str], Reader]) -> Reader:
    """The tokens of its pictures see each other, in layers of windows, too."""
    return readers("Gemma3")


STEPPED = ("SmolVLM", "Qwen3VL", "Gemma3", "Gemma4", "Gemma4Small", "Mistral3")


@pytest.fixture(scope="module", params=STEPPED)
def stepped(request: pytest.FixtureRequest, readers: Callable[[str], Reader]) -> Reader:
    """Tiles of one size with texts between them; a tile of its own size, whose rows and columns are
    positions, and whose embeddings several layers add; tiles whose tokens see each other, in some
    layers or all; and a model with inputs of each layer."""
    return readers(request.param)


WITH_ODD, WITH_EVEN = STEPPED[::2], STEPPED[1::2]
"""Each model is cut and preempted; the other cases are shared between two halves of the models."""


@pytest.mark.parametrize("case", ["chunks", "preemption"])
def test_answers_do_not_depend_on_steps(stepped: Reader, case: str, start: Callable) -> None:
    check_steps(stepped, case, start)


@pytest.mark.parametrize("case", ["chunks-torch", "scored"])
@pytest.mark.parametrize("stepped", long_but(WITH_ODD, STEPPED), indirect=True)
def test_answers_do_not_depend_on_programs(stepped: Reader, case: str, start: Callable) -> None:
    check_steps(stepped, case, start)


@pytest.mark.parametrize("case", ["no-prefix-cache", "little-memory"])
@pytest.mark.parametrize("stepped", long_but(WITH_EVEN, STEPPED), indirect=True)
def test_answers_do_not_depend_on_memory(stepped: Reader, case: str, start: Callable) -> None:
    check_steps(stepped, case, start)


def test_a_picture_goes_on_behind_cached_pages(gemma3: Reader, start: Callable) -> None:
    """Pages end in the middle of a picture: keys and values there are of all of it."""
    running = start(gemma3.zoo, **SETTINGS)
    prompt, pictures = gemma3.prompt("one")
    first = pictures[0].start
    assert first % PAGE
    end = pictures[0].end - pictures[0].end % PAGE
    assert first < end < pictures[0].end
    for name, ids, num_cached in (
        ("first", prompt, 0),
        ("again", prompt, (len(prompt) - 1) // PAGE * PAGE),
        ("other end", [*prompt[: pictures[0].end], 5, 6, 7], end),
    ):
        running.submit(name, ids, pictures=pictures, max_tokens=NUM_TOKENS)
        tokens, last = running.result(name)
        assert last.usage.cached_prompt_tokens == num_cached, name
        if name != "other end":
            assert tokens == gemma3.expected("", "one", tokens)
    alone = start(gemma3.zoo, **SETTINGS | {"prefix_cache": False})
    alone.submit("other end", ids, pictures=pictures, max_tokens=NUM_TOKENS)
    assert alone.result("other end")[0] == tokens


def black(num_bytes: int) -> SharedBytes:
    return SharedBytes.of("loadout-pixels", bytes(num_bytes))


def test_prefixes_are_shared_by_the_picture(stepped: Reader, start: Callable) -> None:
    """An equal prompt with equal pictures is not computed again, nor its pictures; the same tokens
    with another picture are, from the page on in which it begins."""
    running = start(stepped.zoo, **SETTINGS)
    memory = running.engine.built.engine.scheduler.pictures
    prompt, pictures = stepped.prompt("one")
    other = tuple(
        PromptPicture(b"other" * 6 + b"..", black(p.pixels.num_bytes), p.tile, p.num_tiles, p.runs)
        for p in pictures
    )
    answers = {}
    for name, own in (("first", pictures), ("again", pictures), ("other", other)):
        running.submit(name, prompt, pictures=own, max_tokens=NUM_TOKENS)
        tokens, last = running.result(name)
        answers[name] = tokens
        num_cached = last.usage.cached_prompt_tokens
        expected = {
            "first": 0,
            "again": (len(prompt) - 1) // PAGE * PAGE,
            "other": pictures[0].start // PAGE * PAGE,
        }
        assert num_cached == expected[name], name
    assert memory.num_encoded == 2
    assert answers["first"] == answers["again"] == stepped.expected("", "one", answers["first"])
    assert answers["other"] != answers["first"]
    running.check_idle()


def test_a_prompt_may_end_with_a_picture(tmp_path: Path, start: Callable) -> None:
    """Its last token is then computed alone: after a chunk, and after cached pages."""
    reader = Reader("Llava", tmp_path)
    text = "the quick brown fox" + IMAGE
    num_words = len(reader.tokenizer.encode(text, add_special_tokens=False)) - 1
    text = "." * (PAGE + 1 - num_words % PAGE) + text
    tiles = [reader.decoder.decode(encoded(PICTURES[0]), "image")]
    ids = tuple(reader.tokenizer.encode(text, add_special_tokens=False))
    ids = reader.rule.expanded(ids, tiles, IMAGE, lambda part: [])
    reader.close()
    options = {"add_special_tokens": False, "return_tensors": "pt"}
    inputs = reader.oracle.processor(text=text, images=[PICTURES[0].convert("RGB")], **options)
    assert inputs["input_ids"][0].tolist() == list(ids)
    assert len(ids) % PAGE == 1
    assert ids[-1] == reader.rule.token_id
    given = {name: inputs[name] for name in ("input_ids", "pixel_values")}
    expected = reader.oracle.greedy("", given, NUM_TOKENS)
    running = start(reader.zoo, **SETTINGS | {"max_prefill_chunk": PAGE})
    for name, num_cached in (("first", 0), ("again", len(ids) - 1)):
        pictures = reader.rule.found(ids, tiles)
        running.submit(name, ids, pictures=pictures, max_tokens=NUM_TOKENS)
        tokens, last = running.result(name)
        assert (tokens, last.usage.cached_prompt_tokens) == (expected, num_cached), name
    running.check_idle()


@pytest.mark.parametrize("path", PATHS)
def test_a_sleeping_server_has_no_tower(path: str, smolvlm: Reader, start: Callable) -> None:
    running = start(smolvlm.zoo, native_kernels=PATHS[path], **SETTINGS)
    first = submit(running, smolvlm, "", "three")
    check_answer(running, first, smolvlm, "", "three")
    engine = running.engine.built.engine
    backend, costs = engine.runner.backend, engine.scheduler.pictures.costs
    assert costs.units is backend.pictures.units is backend.pictures.tower.order
    held = backend.pictures.num_bytes + backend.kv_bytes + backend.weights_bytes
    assert backend.pictures.num_bytes > 0
    assert backend.pictures.weights_bytes > 0
    assert running.call(Command.SLEEP, frees_weights=True).result == held
    assert backend.pictures.num_bytes == backend.pictures.weights_bytes == 0
    running.call(Command.WAKE)
    assert costs.units == backend.pictures.tower.order
    again = submit(running, smolvlm, "", "three")
    check_answer(running, again, smolvlm, "", "three")
    running.check_idle()


def test_a_picture_whose_work_fails_is_computed_with_its_row(
    smolvlm: Reader, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = PictureRows.apply

    def fail(rows: PictureRows, work: PictureWork) -> None:
        if work.encodes:
            raise MemoryError
        apply(rows, work)

    monkeypatch.setattr(PictureRows, "apply", fail)
    running = start(smolvlm.zoo, **SETTINGS)
    request_id = submit(running, smolvlm, "", "one")
    tokens, last = running.result(request_id)
    assert last.error is None
    assert tokens == smolvlm.expected("", "one", tokens)
    pace = running.engine.built.engine.scheduler.pictures.pace
    assert not pace.beside, "a failure is no measure of pictures"
    running.check_idle()


def test_the_towers_memory_is_of_the_workspace(smolvlm: Reader, start: Callable) -> None:
    running = start(smolvlm.zoo, **SETTINGS)
    built = running.engine.built.engine
    backend, found = built.runner.backend, built.commands.describe().memory["workspace"]
    assert found == (backend.workspace_bytes, backend.workspace_bytes)
    assert backend.workspace_bytes > backend.pictures.workspace_bytes > 0


def test_generated_tokens_do_not_wait_for_a_whole_picture(
    smolvlm: Reader, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another sequence generates, a step computes a few layers of a picture."""
    counts: list[int] = []
    apply = PictureRows.apply

    def count(rows: PictureRows, work: PictureWork) -> None:
        counts.append(sum(each.num_units for each in work.encodes))
        apply(rows, work)

    monkeypatch.setattr(PictureRows, "apply", count)
    running = start(smolvlm.zoo, **SETTINGS, **CUT)
    text, _ = smolvlm.prompt("text")
    prompt, pictures = smolvlm.prompt("three")  # before, since the text ends while it is decoded
    running.submit("text", text, max_tokens=300)
    running.until(lambda: running.outputs.get("text"))
    running.submit("three", prompt, pictures=pictures, max_tokens=NUM_TOKENS)
    check_answer(running, "three", smolvlm, "", "three")
    memory = running.engine.built.engine.scheduler.pictures
    assert sum(counts) == sum(map(memory.costs.num_units, pictures))
    assert len(counts) > 3
    running.cancel("text")
    running.result("text")
    running.check_idle()


TEXT_TOKENS = 96
"""Of a text that is to run until other prompts have been computed."""


class Stop:
    """Makes engines wait in the step in which so many units of pictures have been computed, until
    the test lets them `go`; `num_units` counts all."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch) -> None:
        self.num_units = 0
        self.reached, self.go = threading.Event(), threading.Event()
        apply = PictureRows.apply

        def count_and_stop(rows: PictureRows, work: PictureWork) -> None:
            apply(rows, work)
            self.num_units += sum(each.num_units for each in work.encodes)
            if self.num_units >= count and not self.reached.is_set():
                self.reached.set()
                assert self.go.wait(TIMEOUT_S)

        patch.setattr(PictureRows, "apply", count_and_stop)


def interrupt(running: Running, stop: Stop, reader: Reader) -> list[int]:
    """Begins a text, and pictures beside it, up to the unit where the engine stops; returns the
    text's tokens so far."""
    text, _ = reader.prompt("text")
    prompt, pictures = reader.prompt("three")  # before, since the text ends while it is decoded
    running.submit("text", text, max_tokens=TEXT_TOKENS)
    running.until(lambda: running.outputs.get("text"))
    running.submit("three", prompt, pictures=pictures, max_tokens=NUM_TOKENS)
    assert stop.reached.wait(TIMEOUT_S)
    return [token for each in running.outputs["text"] for token in each.token_ids]


def let_go(running: Running, stop: Stop, call: Call) -> None:
    """Has the engine answer a call before its next step."""
    running.engine.send(call)
    stop.go.set()
    running.until(lambda: call.call_id in running.replies)
    assert running.replies[call.call_id].error is None


def check_rest(running: Running, reader: Reader, *names: str) -> None:
    """Asserts that the text, these requests and another one with the same pictures are answered as
    if nothing had happened."""
    again = submit(running, reader, "of-text", "three")
    check_answer(running, "text", reader, "", "text", TEXT_TOKENS)
    for name in names:
        check_answer(running, name, reader, "", "three")
    check_answer(running, again, reader, "of-text", "three")
    running.check_idle()


FIRST_UNITS = 3
"""Fewer than a picture has, so that its tower stops in the middle."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("next_name", ["three", "one"])
def test_a_picture_of_a_cancelled_request_is_completed_or_dropped(
    next_name: str, path: str, smolvlm: Reader, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the next request asks for the same picture first, or another one."""
    stop = Stop(FIRST_UNITS, monkeypatch)
    running = start(smolvlm.zoo, native_kernels=PATHS[path], **SETTINGS, **CUT)
    assert len(interrupt(running, stop, smolvlm)) < NUM_TOKENS
    num_begun = stop.num_units
    running.cancel("three")
    after = submit(running, smolvlm, "", next_name)
    stop.go.set()
    assert running.result("three")[1].finish_reason is FinishReason.ABORTED
    check_answer(running, after, smolvlm, "", next_name)
    check_rest(running, smolvlm)
    pictures = smolvlm.prompt("three")[1]
    needed = sum(map(running.engine.built.engine.scheduler.pictures.costs.num_units, pictures))
    assert stop.num_units - needed == (0 if next_name == "three" else num_begun)


@pytest.mark.parametrize("name", ["SmolVLM", "Gemma3"])
def test_a_paused_server_computes_neither_pictures_nor_texts(
    name: str, start: Callable, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In the middle of a tower; and behind a picture whose tokens a step has computed at once."""
    reader: Reader = request.getfixturevalue(name.lower())
    settings, count = SETTINGS | CUT, FIRST_UNITS
    if name in WHOLE:
        settings |= {"max_batch_tokens": WHOLE[name], "max_prefill_chunk": WHOLE[name]}
    running = start(reader.zoo, **settings)
    scheduler = running.engine.built.engine.scheduler
    if name in WHOLE:
        count = scheduler.pictures.costs.num_units(reader.prompt("three")[1][0])
    stop = Stop(count, monkeypatch)
    interrupt(running, stop, reader)
    num_units = stop.num_units
    let_go(running, stop, Call(99, Command.PAUSE))
    num_computed = [each.num_computed for each in scheduler.running]
    later = submit(running, reader, "", "three", cache_seed="later")
    for _ in range(5):
        assert running.call(Command.DESCRIBE).result.num_running == 2
    assert [each.num_computed for each in scheduler.running] == num_computed
    assert stop.num_units == num_units
    assert later not in running.outputs
    running.call(Command.RESUME)
    check_rest(running, reader, "three", later)


@pytest.mark.parametrize("path", PATHS)
def test_a_picture_that_is_begun_does_not_outlast_sleep(
    path: str, smolvlm: Reader, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop(FIRST_UNITS, monkeypatch)
    running = start(smolvlm.zoo, native_kernels=PATHS[path], **SETTINGS, **CUT)
    interrupt(running, stop, smolvlm)
    let_go(running, stop, Call(99, Command.SLEEP, frees_weights=True))
    engine = running.engine.built.engine
    assert engine.scheduler.pictures.num_kept == engine.runner.backend.pictures.num_bytes == 0
    running.call(Command.WAKE)
    check_rest(running, smolvlm, "three")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_image_bytes": 100}, "--prompt-image-memory must be at least"),
    ],
)
def test_settings_without_pictures_are_named(
    smolvlm: Reader, changes: dict[str, Any], words: str, start: Callable
) -> None:
    with pytest.raises(ValueError, match=words):
        start(smolvlm.zoo, **SETTINGS | changes)


def test_a_step_without_room_for_a_picture_is_refused(gemma3: Reader, start: Callable) -> None:
    small = {"max_batch_tokens": 19, "max_prefill_chunk": 19, "max_sequences": 4}
    with pytest.raises(ValueError, match=r"--max-batch-tokens must be at least 20: .* 16 tokens"):
        start(gemma3.zoo, **SETTINGS | small)
    running = start(gemma3.zoo, **SETTINGS | small | {"max_prompt_images": 0})
    request_id = submit(running, gemma3, "of-text", "text")
    check_answer(running, request_id, gemma3, "of-text", "text")


@pytest.mark.parametrize(
    ("adapter", "shape"),
    [
        ("of-tower", {}),
        ("of-connector", {}),
        ("of-all", {}),
        ("of-all", {"tensor_parallel": 2}),
        ("of-all", {"pipeline_parallel": 2}),
    ],
)
def test_a_server_of_text_alone_needs_no_tower_for_its_adapters(
    smolvlm: Reader, adapter: str, shape: dict[str, int], start: Callable
) -> None:
    """No request passes through the parts that they change, on any rank."""
    alone = start(smolvlm.zoo, **SETTINGS | {"max_prompt_images": 0} | shape)
    tokens, last = alone.result(submit(alone, smolvlm, adapter, "text"))
    assert last.error is None
    assert tokens == smolvlm.expected(adapter, "text", tokens)


def test_text_alone_has_no_tower(smolvlm: Reader, start: Callable) -> None:
    running = start(smolvlm.zoo, **SETTINGS | {"max_prompt_images": 0})
    assert running.engine.built.engine.runner.backend.pictures is None
    request_id = submit(running, smolvlm, "of-text", "text")
    check_answer(running, request_id, smolvlm, "of-text", "text")
