"""Which pictures a step computes, and whose embeddings stay."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.engine.policy.pictures.memory import BESIDE_SHARE, PictureMemory, TowerCosts
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.pictures.prompt import PictureKey, PictureWork, PromptPicture, Run
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.pictures.units import TowerUnits
from servicekit.shared_memory import SharedBytes
from tests.support.inference.loop import TwoAdapterRows

COSTS = TowerCosts(TowerUnits(TileForm(1, 1), (True,) * 3, 1, 1 << 20), 2.0, 0.0, row_bytes=10)
"""A tile has 4 units, which cost 8 tokens of a prompt, and 5 tokens: 50 bytes."""
TILE = Size(1, 1)

LIMITS = Limits(4, 128, 128)
PIXELS = SharedBytes.of("pixels", b"1")


def sequence(
    *places: int,
    digest: str = "a",
    tenant: str = "",
    seed: str = "",
    length: int = 5,
    adapter: str = "",
    slot: int = -1,
) -> Sequence:
    """A prompt of 100 tokens, with a picture of one tile at each of these places, which runs with
    an adapter at a slot."""
    pictures = tuple(
        PromptPicture(f"{digest}{place}".encode(), PIXELS, TILE, 1, (Run(place, place + length),))
        for place in places
    )
    fields: dict[str, Any] = {"tenant": tenant, "cache_seed": seed or tenant, "key": adapter}
    made = Sequence(Request("r", (7,) * 100, SamplingParams(), pictures=pictures, **fields))
    made.slot = slot
    return made


def memory(capacity: int = 1000, max_tokens: int = 100) -> PictureMemory:
    """Adapters whose keys begin with "tower" change pictures."""
    return PictureMemory(capacity, COSTS, max_tokens, lambda key: str(key).startswith("tower"))


def step(found: PictureMemory, *rows: tuple[Sequence, int]) -> tuple[list[int], PictureWork]:
    """Plans a step in which sequences may have so many tokens; returns how many each gets, and the
    work, which is done then."""
    running = [each for each, _ in rows]
    found.begin(running)
    counts = []
    for each, count in rows:
        counts.append(found.num_computable(each, count))
    for (each, _), count in zip(rows, counts, strict=True):
        each.num_computed += count
    found.check_integrity(running)
    return counts, found.pop_work()


def scheduler(found: PictureMemory, masks: Any = None, limits: Limits = LIMITS) -> Scheduler:
    states = States(Pages(64, 4))
    return Scheduler(limits, states, TwoAdapterRows(), masks=masks, pictures=found)


def units(work: PictureWork) -> list[int]:
    return [each.num_units for each in work.encodes]


def test_a_picture_is_computed_with_the_tokens_that_reach_it() -> None:
    found, own = memory(), sequence(20)
    assert step(found, (own, 20)) == ([20], PictureWork())
    counts, work = step(found, (own, 30))
    assert (counts, units(work)) == ([30], [4])
    assert own.held_pictures.keys() == {0}
    counts, work = step(found, (own, 30))
    assert (counts, units(work), own.held_pictures) == ([30], [], {})
    assert found.num_kept == 1


def test_tokens_wait_at_a_picture_that_is_not_there_in_this_step() -> None:
    """A step of 4 tokens computes 2 units."""
    found, own = memory(max_tokens=4), sequence(20)
    assert step(found, (own, 50))[0] == [20]
    counts, work = step(found, (own, 50))
    assert (counts, units(work)) == ([50], [2])


def test_beside_generated_tokens_of_texts_a_step_computes_one_unit() -> None:
    found, own, other = memory(), sequence(0), sequence()
    other.num_computed = 99
    for _ in range(3):
        counts, work = step(found, (own, 10), (other, 0))
        assert (counts, units(work)) == ([0, 0], [1])
    assert step(found, (own, 10), (other, 0))[0] == [10, 0]


def test_pictures_take_a_share_of_the_time_of_texts() -> None:
    """Seconds are the ones of late: work that costs 2 tokens a unit, at 10 tokens a
    second, beside steps of 8 seconds."""
    found, own, other = memory(), sequence(0), sequence()
    other.num_computed = 99
    counts, work = step(found, (own, 10), (other, 0))
    [row] = (BatchRow(other, 99, 1, samples=True),)
    found.note(Batch((row,), pictures=work), pictures_s=0.2, rows_s=8.0)
    assert found.pace.beside == pytest.approx(8 * BESIDE_SHARE * 10)
    counts, work = step(found, (own, 10), (other, 0))
    assert (counts, units(work)) == ([0, 0], [2])
    found.note(Batch((row,), pictures=work), pictures_s=400.0, rows_s=8.0)
    counts, work = step(found, (own, 10), (other, 0))
    assert (counts, units(work)) == ([10, 0], [1])


def test_requests_with_pictures_wait_for_each_others() -> None:
    """They wait for each other's prompts, too."""
    found, own, other = memory(), sequence(0), sequence(0, digest="other")
    other.num_computed = 99
    assert step(found, (own, 10), (other, 0))[0] == [10, 0]


def test_prompts_are_no_measure_of_generated_tokens() -> None:
    found, own = memory(), sequence()
    found.note(Batch((BatchRow(own, 0, 50, samples=False),)), pictures_s=0.0, rows_s=8.0)
    found.pace.note_pictures(1.0, 1.0)
    assert found.pace.beside == 0


def test_a_step_computes_one_unit_at_least() -> None:
    found, own = memory(max_tokens=1), sequence(0)
    assert [units(step(found, (own, 10))[1]) for _ in range(4)] == [[1]] * 4


def test_tenants_take_turns() -> None:
    """The second tenant's picture does not wait for all of the first one's."""
    found = memory(max_tokens=16)
    many = [sequence(0, tenant="one", digest=f"{index} ") for index in range(3)]
    own = sequence(0, tenant="two")
    rows = [(each, 10) for each in (*many, own)]
    served = []
    for _ in range(2):
        _, work = step(found, *rows)
        served.append([(each.key.cache_seed, each.num_units) for each in work.encodes])
    assert served == [[("one", 4), ("two", 4)], [("one", 4), ("one", 4)]]
    assert own.num_computed > 0


def test_a_picture_that_is_begun_is_completed_first() -> None:
    """A step that computes one unit serves tenants one after the other, and each in its turn."""
    found = memory(max_tokens=1)
    names = ("one", "one", "two", "three")
    own = [sequence(0, tenant=name, digest=f"{index} ") for index, name in enumerate(names)]
    served = [step(found, *((each, 10) for each in own))[1].encodes for _ in range(16)]
    assert [len(encodes) for encodes in served] == [1] * 16
    tenants = [encodes[0].key[0] for encodes in served]
    assert tenants == [name for name in ("one", "two", "three", "one") for _ in range(4)]
    assert all(each.num_computed for each in own)


@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_no_tenant_waits_for_ever(room: int) -> None:
    """However few pictures stay: a tenant keeps its turn when its last picture is dropped."""
    found = memory(capacity=50 * room, max_tokens=8)
    served = ""
    waiting = {name: sequence(0, tenant=name, digest="0 ") for name in "abc"}
    for number in range(1, 40):
        _, work = step(found, *((each, 10) for each in waiting.values()))
        served += "".join(each.key.cache_seed for each in work.encodes)
        for name, each in waiting.items():
            if each.num_computed:
                found.release(each)
                waiting[name] = sequence(0, tenant=name, digest=f"{number} ")
    assert {served[index : index + 3].count("c") for index in range(0, 27, 3)} == {1}


def test_the_work_of_pictures_is_charged_once() -> None:
    """However it is cut, it costs a tile's 8 tokens; what is found again costs nothing."""
    price = TowerCosts(TowerUnits(TileForm(1, 1), (True,) * 4, 1, 1 << 20), 1.7, 0.0, row_bytes=10)
    for max_tokens in (2, 4, 100):
        found, costs = PictureMemory(1000, price, max_tokens, lambda key: False), []
        own, again = sequence(0), sequence(0)
        for each in (own, again):
            while each.num_computed < 10:
                step(found, (each, 10))
                costs.append(sum(cost for _, cost in found.pop_costs()))
            found.release(each)
        assert sum(costs) == 8
        assert costs[-1] == 0
        assert len(costs) == {2: 6, 4: 4, 100: 2}[max_tokens]


def test_a_tenant_pays_for_its_pictures() -> None:
    """Its next request waits until others have had as much: without the picture they take turns."""
    for has_pictures, expected in ((False, "abab"), (True, "abba")):
        found = memory(max_tokens=1000)
        own = scheduler(found, limits=Limits(1, 128, 128, fair_quantum=1))
        for index in range(2):
            places = (0,) * has_pictures
            for tenant in ("a", "b"):
                each = sequence(*places * (tenant == "a"), tenant=tenant, digest=f"{index} ")
                own.add(each, float(index))
        order = ""
        while len(order) < 4:
            batch = own.schedule(0.0)
            assert batch is not None
            [row] = batch.rows
            order += row.sequence.request.tenant
            own.remove(row.sequence)
            own.check_integrity()
        assert order == expected


def test_equal_pictures_are_computed_once_for_each_cache() -> None:
    found = memory()
    one, same = sequence(0, seed="x"), sequence(0, seed="x")
    assert step(found, (one, 10), (same, 10))[0] == [10, 10]
    assert (found.num_encoded, found.num_found) == (1, 1)
    other = sequence(0, seed="y")
    assert step(found, (one, 10), (same, 10), (other, 10))[0] == [10, 10, 10]
    assert (found.num_encoded, found.num_kept) == (2, 2)


def test_adapters_share_the_embeddings_that_none_of_them_changes() -> None:
    """Others have their own, also of equal pictures of other tenants."""
    found = memory()
    texts = [sequence(0, adapter=each, slot=i) for i, each in enumerate(("", "text-1", "text-2"))]
    towers = [
        sequence(0, adapter=each, slot=i + 5) for i, each in enumerate(("tower-1", "tower-2"))
    ]
    again, other = (
        sequence(0, adapter="tower-1", slot=5),
        sequence(0, adapter="tower-1", tenant="x"),
    )
    rows = [*texts, *towers, again, other]
    other.slot = 5
    found.max_tokens = 1000
    counts, work = step(found, *((each, 10) for each in rows))
    assert counts == [10] * len(rows)
    assert {(each.key.cache_seed, each.key.adapter, each.slot) for each in work.encodes} == {
        ("", "", -1),
        ("", "tower-1", 5),
        ("", "tower-2", 6),
        ("x", "tower-1", 5),
    }
    assert (found.num_encoded, found.num_found) == (4, 3)


def test_a_preempted_sequence_leaves_no_work_at_its_slot() -> None:
    """There may be another adapter before the step runs; the work goes on at the next slot."""
    found = memory(max_tokens=4)
    own = sequence(0, adapter="tower", slot=3)
    assert units(step(found, (own, 10))[1]) == [2]
    own.num_computed = 0
    found.begin([own])
    found.num_computable(own, 10)
    found.release(own)
    assert found.pop_work().encodes == ()
    found.check_integrity([])
    own.slot = 1
    counts, work = step(found, (own, 10))
    assert (counts, [(each.num_units, each.slot) for each in work.encodes]) == ([10], [(2, 1)])


def test_a_picture_whose_last_units_are_not_computed_leaves_no_memory() -> None:
    """The step has begun another one, and a tower has the memory of one that is begun."""
    found = memory(max_tokens=6)
    one, other = sequence(0, digest="a"), sequence(0, digest="b")
    assert units(step(found, (one, 10))[1]) == [3]
    one.num_computed = 0
    found.begin([one, other])
    assert [found.num_computable(each, 10) for each in (one, other)] == [10, 0]
    found.release(one)
    work = found.pop_work()
    assert work.dropped == (PictureKey("", "", b"a0"),)
    assert [(each.picture.digest, each.num_units) for each in work.encodes] == [(b"b0", 2)]
    assert (found.num_kept, found.num_bytes) == (1, 50)
    found.check_integrity([other])
    for each in (other, sequence(0, digest="a")):
        while not each.num_computed:
            step(found, (each, 10))
        found.release(each)


def test_work_that_another_sequence_waits_for_stays() -> None:
    found = memory()
    one, other = (sequence(0, adapter="tower", slot=3) for _ in range(2))
    found.begin([one, other])
    assert [found.num_computable(each, 10) for each in (one, other)] == [10, 10]
    found.release(one)
    assert units(found.pop_work()) == [4]
    found.check_integrity([other])


def test_a_sequence_that_moves_lets_go_of_its_old_adapters_embeddings() -> None:
    found, own = memory(), sequence(0, adapter="tower-1", slot=3)
    step(found, (own, 10))
    own.request, own.slot = replace(own.request, key="tower-2"), 4
    step(found, (own, 10))
    assert own.held_pictures == {}
    assert found.num_kept == 1
    found.check_integrity([])


def test_the_largest_tenant_loses_what_it_used_longest_ago() -> None:
    found = memory(capacity=200)
    for tenant, digest in (("one", "a"), ("two", "a"), ("two", "b"), ("two", "c")):
        own = sequence(0, tenant=tenant, digest=digest)
        step(found, (own, 10))
        found.release(own)
    own = sequence(0, tenant="two", digest="a")  # used again
    step(found, (own, 10))
    found.release(own)
    _, work = step(found, (sequence(0, tenant="one", digest="z"), 10))
    assert work.dropped == (PictureKey("two", "", b"b0"),)
    assert (found.num_dropped, found.num_held_bytes, found.num_bytes) == (1, 50, 200)


def test_held_embeddings_stay_and_others_wait() -> None:
    found = memory(capacity=50)
    one, other = sequence(0, digest="a"), sequence(3, digest="b")
    assert step(found, (one, 2), (other, 10))[0] == [2, 3]
    assert step(found, (one, 2), (other, 10))[0] == [2, 0]
    assert step(found, (one, 2), (other, 10))[0] == [2, 0]
    counts, work = step(found, (one, 2), (other, 10))
    assert counts == [2, 10]
    assert work.dropped == (PictureKey("", "", b"a0"),)


def test_a_picture_behind_is_let_go_of_without_a_token() -> None:
    """A step has none for its sequence, as others come before it, and wait for its room."""
    found = memory(capacity=50, max_tokens=1)
    own = Scheduler(Limits(4, 4, 4), States(Pages(256, 4)), TwoAdapterRows(), pictures=found)
    sequences = [sequence(0, 5, digest=f"{index}") for index in range(4)]
    for each in sequences:
        own.add(each, 0.0)
    for _ in range(200):
        batch = own.schedule(0.0)
        assert batch is not None
        for row in batch.rows:
            row.sequence.num_computed += row.num_tokens
            if not row.sequence.num_uncomputed:
                own.remove(row.sequence)
        own.check_integrity()
        own.running.sort(key=lambda each: each.num_computed)  # the last ones come first
        if min(each.num_computed for each in sequences) >= 10:
            return
    raise AssertionError("a sequence does not pass its pictures")


def test_one_picture_is_begun_at_a_time() -> None:
    """One that is begun takes much memory until it is done, or nobody waits for it."""
    found = memory(max_tokens=6)
    one, other = sequence(0, digest="a"), sequence(0, digest="b")
    assert units(step(found, (one, 10))[1]) == [3]
    counts, work = step(found, (other, 10), (one, 10))
    assert (counts, [each.picture.digest for each in work.encodes]) == ([0, 10], [b"a0", b"b0"])
    assert units(work) == [1, 2]
    found.release(one)
    found.release(other)
    counts, work = step(found, (sequence(0, digest="c"), 10))
    assert (work.dropped, units(work)) == ((PictureKey("", "", b"b0"),), [3])


def test_pictures_are_computed_in_strips_whose_cost_counts_pairs() -> None:
    """Of patches that see all others, or the ones of their window. A strip has whole windows."""
    form = TileForm(0, 2, merge=2, window=4)
    units = TowerUnits(form, (False, True, False), 1, 1 << 20)
    costs, picture = TowerCosts(units, 1.0, 0.5, row_bytes=10), large_picture()
    assert costs.num_units(picture) == 25 * 4
    found = [costs.of_first(picture, 25 * count) for count in range(5)]
    of_layers = [after - before for before, after in pairwise(found)]
    assert of_layers == [25 * 64 * (1 + 0.5 * num_seen) for num_seen in (0, 64, 40 * 40, 64)]


def large_picture(num_tiles: int = 1) -> PromptPicture:
    """Of tiles of 1,600 patches and 25 strips, in windows of 64."""
    return PromptPicture(b"", PIXELS, Size(4 * 20, 4 * 20), num_tiles, (Run(0, 400 * num_tiles),))


@pytest.mark.parametrize("most_pairs", [64 * 1600 * 3, 64 * 1600, 1000])
def test_units_of_a_large_tile_cost_as_much_as_undivided(most_pairs: int) -> None:
    """Its attention is divided by heads, or by heads and queries, in the layers that see all."""
    form = TileForm(0, 2, merge=2, window=4)
    whole = TowerUnits(form, (False, True, False), 3, 1 << 40)
    costs = [
        TowerCosts(units, 1.0, 0.5, row_bytes=10)
        for units in (whole, whole._replace(most_pairs=most_pairs))
    ]
    picture = large_picture(num_tiles=2)
    undivided, divided = (each.num_units(picture) for each in costs)
    num_own = {64 * 1600 * 3: 1, 64 * 1600: 3 + 1, 1000: 3 * 4 + 1}
    assert (undivided, divided) == (2 * 25 * 4, 2 * 25 * (3 + num_own[most_pairs]))
    cost = costs[0].of_first(picture, undivided)
    assert costs[1].of_first(picture, divided) == pytest.approx(cost)


def test_products_behind_shares_have_a_price_of_their_own() -> None:
    """Of a tile with one layer, in which each share has one of three heads."""
    units = TowerUnits(TileForm(0, 2, merge=2, window=4), (True,), 3, 64 * 1600)
    costs, picture = TowerCosts(units, 1.0, 0.5, row_bytes=10), large_picture()
    found = [costs.of_first(picture, 25 + count) for count in range(9)]
    share = 64 * 1600 * 0.5 / 3
    wanted = 2 * [share, share, share, 64]
    assert [after - before for before, after in pairwise(found)] == pytest.approx(wanted)
    assert costs.num_within(picture, 26, 1.5 * share) == 1
    assert costs.num_within(picture, 27, 1.0 * share) == 1
    assert costs.num_within(picture, 28, 1.5 * share) == 2


@pytest.mark.parametrize("budget", [60, 2_100, 30_000, 600_000])
def test_a_budget_buys_the_units_that_it_pays_for(budget: int) -> None:
    """Wherever in the picture it begins, and across tiles; and no unit more."""
    units = TowerUnits(TileForm(0, 2, merge=2, window=4), (False, True, False), 3, 64 * 1600)
    costs, picture = TowerCosts(units, 1.0, 0.5, row_bytes=10), large_picture(num_tiles=2)
    num_units = costs.num_units(picture)
    for first in range(num_units + 1):
        count = costs.num_within(picture, first, budget)
        paid = costs.of_first(picture, first)
        assert costs.of_first(picture, first + count) - paid <= budget + 0.1
        if first + count < num_units:
            assert costs.of_first(picture, first + count + 1) - paid > budget - 0.1


def test_a_sequence_that_stops_lets_go() -> None:
    found = memory(capacity=50)
    one, other = sequence(0, digest="a"), sequence(0, digest="b")
    step(found, (one, 2))
    found.release(one)
    assert step(found, (other, 10))[0] == [10]


def test_work_of_dropped_pictures_is_not_done() -> None:
    """One was planned for a sequence that was preempted in the same step."""
    found = memory(capacity=50)
    one, other = sequence(0, digest="a"), sequence(0, digest="b")
    found.begin([one])
    assert found.num_computable(one, 10) == 10
    found.release(one)
    assert found.num_computable(other, 10) == 10
    work = found.pop_work()
    assert [each.key for each in work.encodes] == [PictureKey("", "", b"b0")]


def test_several_pictures_of_a_prompt_are_held_one_after_the_other() -> None:
    found = memory(capacity=100)
    own = sequence(0, 10, 20)
    assert step(found, (own, 50))[0] == [20]
    assert own.held_pictures.keys() == {0, 1}
    assert step(found, (own, 50))[0] == [50]


def test_everything_may_be_forgotten() -> None:
    found, own = memory(), sequence(0)
    step(found, (own, 10))
    found.release(own)
    found.forget()
    assert (found.num_kept, found.num_bytes) == (0, 0)


def test_drops_reach_the_backend_without_a_row() -> None:
    """There is not enough room all the same, so that no row can be computed."""
    found = memory(capacity=100)
    idle, held = sequence(0, digest="idle"), sequence(0, digest="held")
    step(found, (idle, 10), (held, 2))
    found.release(idle)
    own = scheduler(found)
    own.add(sequence(0, digest="large", length=10), 0.0)
    batch = own.schedule(0.0)
    assert batch is not None
    assert (batch.rows, batch.pictures) == (
        (),
        PictureWork(dropped=(PictureKey("", "", b"idle0"),)),
    )
    assert own.schedule(0.0) is None


class LateMasks:
    """The last token's mask is never there."""

    def num_computable(self, row: Any, num_tokens: int, num_left: int) -> int:
        return num_tokens - (num_tokens == num_left)

    def close_row(self, row: Any) -> None:
        pass


def test_a_sequence_without_its_mask_lets_go() -> None:
    found, waits = memory(), sequence(0)
    own = scheduler(found, LateMasks())
    waits.masked = object()
    own.add(waits, 0.0)
    batch = own.schedule(0.0)
    assert batch is not None
    assert [row.num_tokens for row in batch.rows] == [99]
    assert waits.held_pictures.keys() == {0}
    waits.num_computed = 99
    assert own.schedule(0.0) is None
    assert waits.held_pictures == {}
    own.check_integrity()


def test_room_for_a_picture_costs_no_more_than_its_drops() -> None:
    """It would take many seconds to look at all entries for each of them."""
    count = 10_000
    found = memory(capacity=count * 10, max_tokens=count * 100)
    for index in range(count):
        small = sequence(0, digest=f"{index} ", tenant=f"{index % 100}", length=1)
        found.begin([])
        assert found.num_computable(small, 1) == 1
        found.pop_work()
        found.release(small)
    found.begin([])
    begun_s = time.process_time()
    large = sequence(0, length=count)
    assert found.num_computable(large, 1) == 1
    assert time.process_time() - begun_s < 2.0
    assert len(found.pop_work().dropped) == count
    found.check_integrity([large])
