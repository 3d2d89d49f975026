"""Tenants share the memory of embeddings: nobody pushes out those of a tenant that has less."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.policy.pictures.memory import PictureMemory, TowerCosts
from inference_svc.pictures.prompt import PictureKey, PromptPicture, Run
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.pictures.units import TowerUnits
from tests.support.examples import examples

COSTS = TowerCosts(TowerUnits(TileForm(1, 1), (True,) * 3, 1, 1 << 20), 1.0, 0.0, row_bytes=1)


class Shares:
    """Embeddings of a byte for each token within `capacity`; what each key takes, and the sequences
    that hold some."""

    def __init__(self, capacity: int) -> None:
        self.memory = PictureMemory(capacity, COSTS, 1000, lambda key: False)
        self.kept: dict[PictureKey, int] = {}
        self.running: list[Sequence] = []

    def size(self, tenant: str) -> int:
        return sum(count for key, count in self.kept.items() if key.cache_seed == tenant)

    def come(self, tenant: str, digest: str, length: int) -> Sequence | None:
        """Plans a step of a sequence that comes to a picture; returns it if it holds that now.
        Asserts that tenants that lose something have as much as this one would have."""
        picture = PromptPicture(digest.encode(), b"", Size(1, 1), 1, (Run(0, length),))
        fields = {"tenant": tenant, "cache_seed": tenant, "pictures": (picture,)}
        own = Sequence(Request("r", (7,) * 100, SamplingParams(), **fields))
        self.memory.begin([])
        count = self.memory.num_computable(own, 1)
        work = self.memory.pop_work()
        for key in work.dropped:
            if key.cache_seed != tenant and self.size(tenant):
                assert self.size(key.cache_seed) >= self.size(tenant) + length
            del self.kept[key]
        self.kept |= {each.key: length for each in work.encodes}
        self.running += [own] * count
        self.memory.check_integrity(self.running)
        assert self.memory.num_bytes == sum(self.kept.values())
        return own if count else None

    def release(self, own: Sequence | None) -> None:
        assert own is not None
        self.running.remove(own)
        self.memory.release(own)
        self.memory.check_integrity(self.running)


def test_of_equal_tenants_the_one_that_needs_room_loses() -> None:
    found = Shares(100)
    for tenant, digest in (("one", "a"), ("two", "a"), ("two", "b")):
        found.release(found.come(tenant, digest, 50))
    assert found.kept == {PictureKey("one", "", b"a"): 50, PictureKey("two", "", b"b"): 50}


def test_a_tenant_waits_for_its_own_requests() -> None:
    """They hold more than another has, which keeps its embeddings."""
    found = Shares(200)
    found.release(found.come("small", "a", 50))
    first, *_ = [found.come("many", digest, 50) for digest in "abc"]
    assert found.come("many", "d", 50) is None
    assert found.size("small") == 50
    found.release(first)
    assert found.come("many", "d", 50) is not None
    assert (found.size("small"), found.size("many")) == (50, 150)


def test_a_single_picture_may_need_all_memory() -> None:
    found = Shares(200)
    for tenant in ("one", "two", "three"):
        found.release(found.come(tenant, "a", 50))
    assert found.come("large", "a", 200) is not None
    assert found.kept == {PictureKey("large", "", b"a"): 200}


arrivals = st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz"), st.integers(1, 12))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.one_of(arrivals, st.integers(0, 3)), max_size=40))
def test_embeddings_are_lost_to_nobody_who_has_more(
    events: list[tuple[str, str, int] | int],
) -> None:
    """Pictures of three tenants come; a number is the place of a sequence that stops to run."""
    found = Shares(20)
    for event in events:
        if not isinstance(event, int):
            tenant, digest, length = event
            found.come(tenant, f"{digest}{length}", length)
        elif event < len(found.running):
            found.release(found.running[event])
    while found.running:
        found.release(found.running[0])
    assert found.come("a", "last", 20) is not None
