"""Adapters of vision towers and connectors: whatever they have, whoever runs beside them, and
wherever they lie, greedy tokens are those of transformers and PEFT; embeddings are shared only
where they are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_svc.backends.pictures import PictureRows
from inference_svc.core import Part, Sum, VersionPolicy
from inference_svc.engine.transport.messages import Command, Move
from inference_svc.pictures.prompt import PictureWork
from inference_svc.pictures.sizes import MAX_SLICE
from tests.support.pairs import long_but
from tests.support.pictures.contents import FURTHER
from tests.support.pictures.files import picture
from tests.support.pictures.models import PATCH, PROCESSORS
from tests.support.wait import until
from tests.system.engines import Running
from tests.system.picture_readers import (
    NUM_TOKENS,
    PROMPTS,
    SETTINGS,
    Reader,
    asked,
    check_answer,
    submit,
)

CUT = {"max_batch_tokens": 8, "max_prefill_chunk": 8, "max_sequences": 4}
OWN = ("of-tower", "of-connector", "of-all")
"""Adapters with embeddings of their own."""


@pytest.fixture(scope="module")
def smolvlm(readers: Callable[[str], Reader]) -> Reader:
    return readers("SmolVLM")


CONTENTS = {
    "Llava": ("magnitudes", "base-biases", "norms", "whole-projector"),
    "SmolVLM": ("magnitudes", "base-biases", "norms", "whole-projection"),
    "Gemma3": ("norms-of-gemma", "magnitudes", "base-biases"),
    "Gemma4": ("whole-embedder",),
    "Gemma4Small": ("norms-of-gemma4", "of-gemma4"),
    "Mistral3": ("whole-projector", "magnitudes", "norms-of-mistral"),
    "Qwen2_5_VL": ("base-biases", "magnitudes", "norms-of-qwen2.5", "whole-merger"),
    "Qwen3VL": ("whole-taps", "magnitudes", "base-biases", "norms-of-qwen3"),
}
"""The kinds of contents that each model's tower and connector have a place for."""
QUICK = ("Llava", "SmolVLM")
"""The models of which all kinds are tested always: of the others the first."""


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(
            model, kind, marks=() if model in QUICK or kind == kinds[0] else pytest.mark.long
        )
        for model, kinds in CONTENTS.items()
        for kind in kinds
    ],
)
def test_contents_besides_a_and_b_are_computed_as_peft_does(
    model: str, kind: str, tmp_path: Path, start: Callable
) -> None:
    """Also after sleep, when the tower is read again."""
    cells = [(each.name, name) for each in FURTHER[kind] for name in ("one", "three")]
    with closing(Reader(model, tmp_path / "reader", FURTHER[kind])) as made:
        running = start(made.zoo, **SETTINGS)
        check_answers(running, made, cells)
        assert len({tuple(made.expected(*cell)) for cell in cells}) == len(cells)
        running.call(Command.SLEEP, frees_weights=True)
        running.call(Command.WAKE)
        for adapter in dict(cells):
            running.call(Command.UNLOAD, adapter)
        check_answers(running, made, cells)
    running.check_idle()


def check_answers(running: Running, made: Reader, cells: Sequence[tuple[str, str]]) -> None:
    """Asks for all of these adapters and prompts at once."""
    ids = {cell: submit(running, made, *cell) for cell in cells}
    for (adapter, name), request_id in ids.items():
        tokens, last = running.result(request_id)
        assert last.error is None
        assert tokens == made.expected(adapter, name, tokens), (adapter, name)


SIDE = 40 * PATCH
LARGE: dict[str, dict[str, int]] = {
    "Qwen2_5_VL": {"shortest_edge": PATCH * PATCH, "longest_edge": SIDE * SIDE},
    "Qwen3VL": {"shortest_edge": PATCH * PATCH, "longest_edge": SIDE * SIDE},
    "Mistral3": {"longest_edge": SIDE},
}
"""Sizes of processors that leave large pictures as they are."""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole"),
        pytest.param(CUT | {"native_kernels": False}, id="cut", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("model", LARGE)
def test_adapters_change_pictures_of_several_parts(
    model: str,
    settings: dict[str, Any],
    tmp_path: Path,
    start: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of windows, of taps and of blended positions, too; each unit of work is a part's."""
    monkeypatch.setitem(PROCESSORS, model, PROCESSORS[model] | {"size": LARGE[model]})
    large = asked("jumps over", picture(SIDE, SIDE - 4 * PATCH), "the lazy dog")
    monkeypatch.setitem(PROMPTS, "large", large)
    with closing(Reader(model, tmp_path / "reader")) as made:
        [own] = made.prompt("large")[1]
        assert made.pictures.tiles.inner_tokens(own.tile) > MAX_SLICE
        running = start(made.zoo, **SETTINGS | {"prompt_image_bytes": 8 << 20} | settings)
        cells = [(each, "large") for each in ("", "of-tower")]
        check_answers(running, made, cells)
        assert len({tuple(made.expected(*cell)) for cell in cells}) == len(cells)
    running.check_idle()


def test_embeddings_are_shared_by_adapters_that_leave_them_alone(
    smolvlm: Reader, start: Callable
) -> None:
    running = start(smolvlm.zoo, **SETTINGS)
    memory = running.engine.built.engine.scheduler.pictures
    counts = {}
    for adapter in ("", "of-text", *OWN, *OWN):
        for seed in ("", "other tenant"):
            before = memory.num_encoded
            request_id = submit(running, smolvlm, adapter, "three", cache_seed=seed)
            check_answer(running, request_id, smolvlm, adapter, "three")
            counts.setdefault((adapter, seed), []).append(memory.num_encoded - before)
    expected: dict[tuple[str, str], list[int]] = {
        (adapter, seed): [3, 0] for adapter in OWN for seed in ("", "other tenant")
    }
    expected |= {("", seed): [3] for seed in ("", "other tenant")}
    expected |= {("of-text", seed): [0] for seed in ("", "other tenant")}
    assert counts == expected
    running.check_idle()


PRESSURE: dict[str, dict[str, Any]] = {
    "preemption": {"kv_bytes": 22 * 16 * 3 * 2 * 16 * 4, "max_model_len": 320},
    "two-slots": {"max_loras": 2, **CUT},
    "torch": {"max_loras": 2, "native_kernels": False, **CUT},
    "little-memory": {"prompt_image_bytes": 40 * 48 * 4, **CUT},
}


@pytest.mark.parametrize("case", long_but(("preemption", "two-slots", "little-memory"), PRESSURE))
def test_adapters_come_and_go_while_pictures_are_computed(
    smolvlm: Reader, case: str, start: Callable
) -> None:
    """Preempted, evicted and loaded again, at another slot, between the layers of a picture."""
    running = start(smolvlm.zoo, **SETTINGS | PRESSURE[case])
    cells = [(a, n) for n in ("three", "one") for a in (*OWN, "", "of-text")] * 2
    options = {"max_tokens": NUM_TOKENS}
    with running.together():
        for index, (adapter, name) in enumerate(cells):
            prompt, pictures = smolvlm.prompt(name)
            seed = f"{index // len(OWN)}"
            more = {"pictures": pictures, "cache_seed": seed, **options}
            running.submit(f"{index}", prompt, adapter, **more)
    ids = [f"{index}" for index in range(len(cells))]
    for (adapter, name), request_id in zip(cells, ids, strict=True):
        tokens, last = running.result(request_id)
        assert last.error is None
        assert tokens == smolvlm.expected(adapter, name, tokens), (adapter, name)
    built = running.engine.built
    if case == "preemption":
        assert built.engine.scheduler.num_preemptions > 0
    if "max_loras" in PRESSURE[case]:
        assert built.residency.device.num_evictions > 0
    running.check_idle()


def test_a_request_that_moves_has_the_pictures_of_its_new_version(
    smolvlm: Reader, start: Callable
) -> None:
    running = start(smolvlm.zoo, **SETTINGS, **CUT)
    running.call(Command.LOAD, "of-all")
    prompt, pictures = smolvlm.prompt("three")
    options = {"pictures": pictures, "max_tokens": NUM_TOKENS}
    policy = VersionPolicy.FOLLOW_RECOMPUTE
    running.submit("moves", prompt, "of-tower", version_policy=policy, **options)
    memory = running.engine.built.engine.scheduler.pictures
    until(lambda: memory.num_encoded > 0)
    running.engine.send(Move("moves", running.digests["of-all"], "acme/new@2"))
    tokens, last = running.result("moves")
    assert last.error is None
    assert tokens == smolvlm.expected("of-all", "three", tokens)
    again = submit(running, smolvlm, "of-tower", "three")
    check_answer(running, again, smolvlm, "of-tower", "three")
    running.check_idle()


def test_a_picture_whose_work_fails_is_computed_with_its_adapter(
    smolvlm: Reader, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = PictureRows.apply

    def fail(rows: PictureRows, work: PictureWork) -> None:
        if work.encodes:
            raise MemoryError
        apply(rows, work)

    monkeypatch.setattr(PictureRows, "apply", fail)
    running = start(smolvlm.zoo, **SETTINGS)
    ids = {name: submit(running, smolvlm, name, "one") for name in (*OWN, "", "of-text")}
    for name, request_id in ids.items():
        check_answer(running, request_id, smolvlm, name, "one")
    running.check_idle()


def test_sums_change_pictures_by_all_their_parts(smolvlm: Reader, start: Callable) -> None:
    running = start(smolvlm.zoo, **SETTINGS)
    names = ("of-tower", "of-text", "of-connector")
    prompt, pictures = smolvlm.prompt("one")
    parts = tuple(Part(running.digests[name]) for name in names)
    running.submit("sum", prompt, Sum(parts), pictures=pictures, max_tokens=NUM_TOKENS)
    tokens, last = running.result("sum")
    assert last.error is None
    model = smolvlm.oracle.zoo.reference
    model.base_model.set_adapter(list(names))
    inputs = smolvlm.oracle.inputs(*PROMPTS["one"])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        answer = model.generate(**inputs, **options)
    assert tokens == answer[0, inputs["input_ids"].shape[1] :].tolist()
    running.check_idle()


def test_servers_of_some_targets_refuse_other_modules_of_towers(
    smolvlm: Reader, start: Callable
) -> None:
    running = start(smolvlm.zoo, **SETTINGS, lora_targets=("q_proj", "v_proj", "proj"))
    _, last = running.result(submit(running, smolvlm, "of-tower", "one"))
    assert "fc1" in str(last.error)
    accepted = submit(running, smolvlm, "of-connector", "one")
    check_answer(running, accepted, smolvlm, "of-connector", "one")
