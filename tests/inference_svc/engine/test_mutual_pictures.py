"""Where the tokens of a picture see each other, one step computes all of them, and soon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import Batch, Request, SamplingParams, Sequence
from inference_svc.engine.policy.pictures.memory import PictureMemory, TowerCosts
from inference_svc.engine.policy.scheduler import Hold, Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.pictures.prompt import PromptPicture, Run
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.pictures.units import TowerUnits
from tests.support.examples import examples
from tests.support.inference.loop import TwoAdapterRows

LENGTH, MAX_TOKENS, MAX_SEQUENCES, PAGE = 20, 24, 4, 4
COSTS = TowerCosts(TowerUnits(TileForm(1, 1), (True,) * 1, 1, 1 << 20), 4.0, 0.0, row_bytes=1)


def sequence(
    *places: int, name: str = "r", num_tokens: int = 100, arrival_s: float = 0.0, tenant: str = ""
) -> Sequence:
    """A prompt with a picture of LENGTH tokens at each of these places."""
    pictures = tuple(
        PromptPicture(f"{place}".encode(), b"", Size(1, 1), 1, (Run(place, place + LENGTH),))
        for place in places
    )
    prompt = (7,) * num_tokens
    request = Request(
        name, prompt, SamplingParams(), pictures=pictures, arrival_s=arrival_s, tenant=tenant
    )
    return Sequence(request)


def make_scheduler(
    num_pages: int = 1000, capacity: int = 1000, *, are_mutual: bool = True
) -> Scheduler:
    memory = PictureMemory(capacity, COSTS, MAX_TOKENS, lambda key: False, are_mutual=are_mutual)
    states = States(Pages(num_pages, PAGE))
    return Scheduler(
        Limits(MAX_SEQUENCES, MAX_TOKENS, MAX_TOKENS), states, TwoAdapterRows(), pictures=memory
    )


def compute(own: Scheduler, batch: Batch) -> None:
    """Does a step: each row that samples gets a token."""
    for row in batch.rows:
        each = row.sequence
        each.num_computed += row.num_tokens
        own.states.settle(each, row.start)
        if row.samples:
            each.has_sampled = True
            each.token_ids.append(9)


def step(own: Scheduler) -> dict[str, tuple[int, int]]:
    """Computes a step; returns each row's tokens, [start, end)."""
    batch = own.schedule(0.0)
    assert batch is not None
    found = {
        row.sequence.request.request_id: (row.start, row.start + row.num_tokens)
        for row in batch.rows
    }
    assert sum(end - start for start, end in found.values()) <= MAX_TOKENS
    for row in batch.rows:
        end = row.start + row.num_tokens
        for picture in row.sequence.request.pictures:
            is_cut = picture.start < end < picture.end
            assert not (own.pictures.are_mutual and is_cut), "a picture is cut"
    compute(own, batch)
    own.check_integrity()
    return found


def test_a_chunk_ends_before_a_picture_that_has_no_room() -> None:
    own = make_scheduler()
    own.add(sequence(10), 0.0)
    assert [step(own)["r"] for _ in range(4)] == [(0, 10), (10, 34), (34, 58), (58, 82)]


def test_two_pictures_are_computed_one_after_the_other() -> None:
    own = make_scheduler()
    own.add(sequence(2, 22), 0.0)
    assert [step(own)["r"] for _ in range(3)] == [(0, 22), (22, 46), (46, 70)]


def test_the_rest_of_a_picture_follows_cached_pages() -> None:
    """A page may end in the middle of a picture: its keys and values are of the whole picture."""
    own = make_scheduler()
    own.add(sequence(10, num_tokens=30), 0.0)
    assert [step(own)["r"] for _ in range(2)] == [(0, 10), (10, 30)]
    own.add(sequence(10, name="again", num_tokens=30), 0.0)
    assert step(own) == {"r": (30, 31), "again": (28, 30)}


def test_a_picture_is_not_overtaken_for_ever() -> None:
    """Prompts of other tenants take equal parts of a step, which are too small for a picture."""
    own = make_scheduler()
    for index in range(MAX_SEQUENCES - 1):
        own.add(sequence(name=f"text {index}", tenant=f"{index}"), 0.0)
    step(own)
    picture = sequence(0, name="picture", arrival_s=1.0, tenant="one")
    own.add(picture, 0.0)
    for _ in range(4):
        step(own)
    assert len(own.running) == MAX_SEQUENCES
    assert picture.num_computed >= LENGTH
    assert not any(each.has_sampled for each in own.running)


def test_generated_tokens_leave_room_for_a_picture() -> None:
    own = make_scheduler()
    others = [sequence(name=f"text {index}", num_tokens=2) for index in range(MAX_SEQUENCES - 1)]
    for each in others:
        own.add(each, 0.0)
    step(own)
    own.add(sequence(0, name="picture", arrival_s=1.0), 0.0)
    found = [step(own) for _ in range(6)]
    assert all(f"text {index}" in rows for rows in found for index in range(MAX_SEQUENCES - 1))
    assert any(rows.get("picture") == (0, MAX_TOKENS - MAX_SEQUENCES + 1) for rows in found)


def test_a_preempted_picture_waits_for_nothing() -> None:
    own = make_scheduler()
    first = sequence(0, name="picture", num_tokens=LENGTH + 1, tenant="one")
    own.add(first, 0.0)
    own.add(sequence(name="text", arrival_s=-1.0, tenant="two"), 0.0)
    while not first.num_at_once:
        step(own)
    own.preempt(first, 0.0)
    assert first.num_at_once == 0
    own.check_integrity()
    while first.num_computed < LENGTH:
        step(own)


def test_nothing_is_computed_while_everything_is_held() -> None:
    """Also where the last step left tokens of a picture to be computed at once."""
    own = make_scheduler()
    own.add(sequence(0, 20, 40, 60), 0.0)
    assert step(own) == {"r": (0, LENGTH)}
    assert own.running[0].num_at_once
    own.hold = Hold.EVERYTHING
    own.add(sequence(name="later", num_tokens=3, tenant="other"), 0.0)
    assert [own.schedule(0.0) for _ in range(3)] == [None] * 3
    assert [each.request.request_id for each in own.running] == ["r"]
    own.check_integrity()
    own.hold = Hold.NOTHING
    assert step(own)["r"] == (LENGTH, 2 * LENGTH)


prompts = st.lists(
    st.tuples(
        st.sets(st.integers(0, 3), max_size=3),
        st.integers(0, 25),
        st.sampled_from(["one", "two", "three"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(60), deadline=None)
@given(prompts, st.sampled_from([20, 40, 1000]), st.sampled_from([70, 1000]), st.booleans())
def test_every_prompt_is_computed(
    described: list[tuple[set[int], int, str, int]],
    capacity: int,
    num_pages: int,
    are_mutual: bool,
) -> None:
    """No picture is cut, and nobody waits for ever, also where the embeddings of one picture have
    room."""
    own = make_scheduler(num_pages, capacity, are_mutual=are_mutual)
    made = []
    for index, (pictures, before, tenant, arrival) in enumerate(described):
        places = [before + LENGTH * place for place in pictures]
        length = before + LENGTH * 4 + 1
        options = {"name": f"{index}", "tenant": tenant, "arrival_s": float(arrival)}
        made.append(sequence(*sorted(places), num_tokens=length, **options))
        own.add(made[-1], 0.0)
    for _ in range(300):
        if not own.num_open:
            break
        step(own)
        for each in list(own.running):
            if each.num_output >= 3:
                own.remove(each)
    assert not own.num_open


@pytest.mark.parametrize("are_mutual", [False, True])
def test_other_models_cut_pictures(are_mutual: bool) -> None:
    memory = PictureMemory(1000, COSTS, MAX_TOKENS, lambda key: False, are_mutual=are_mutual)
    own = sequence(10)
    memory.begin([own])
    assert memory.num_computable(own, 24) == (10 if are_mutual else 24)
