"""The page pool: references and prefix keys under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.policy.pages import PagePool, page_key, root_key
from inference_svc.engine.policy.scheduler import extend_page_keys


class PagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, 4)
        self.holders: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if self.pool.can_allocate(count):
            pages = self.pool.allocate(count)
            for page in pages:
                assert not any(page in held for held in self.holders), "handed out twice"
                self.key_of.pop(page, None)
            self.holders.append(pages)

    @rule(data=st.data(), key=st.sampled_from([b"x", b"y", b"z"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = [page for pages in self.holders for page in pages]
        if held:
            page = data.draw(st.sampled_from(held))
            if page not in self.key_of and key not in self.key_of.values():
                self.key_of[page] = key
            self.pool.publish(page, key)

    @rule(keys=st.lists(st.sampled_from([b"x", b"y", b"z"]), max_size=3, unique=True))
    def share(self, keys: list[bytes]) -> None:
        pages = self.pool.match(keys)
        assert [self.key_of[page] for page in pages] == keys[: len(pages)]
        if len(pages) < len(keys):
            assert keys[len(pages)] not in self.key_of.values()
        self.pool.share(pages)
        self.holders.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()
        self.key_of.clear()

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity(self.holders)


PagesMachine.TestCase.settings = settings(max_examples=15, deadline=None)
TestPages = PagesMachine.TestCase


@pytest.mark.long
def test_many_more() -> None:
    run_state_machine_as_test(PagesMachine, settings=settings(max_examples=400, deadline=None))


def keys_of(tokens: list[int], digest: str, activation: int, size: int) -> list[bytes]:
    request = Request("r", tuple(tokens), SamplingParams(), digest, activation=activation)
    sequence = Sequence(request)
    num_pages = len(tokens) // size
    for upto in range(num_pages + 1):
        extend_page_keys(sequence, upto, size)
    return sequence.page_hashes


@given(
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    size=st.integers(1, 5),
    data=st.data(),
)
def test_pages_are_shared_up_to_an_activation_and_not_beyond(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    """With the base model and every other adapter; beyond, with equals alone."""
    places = st.integers(0, len(tokens) - 1)
    users = data.draw(st.lists(st.tuples(st.sampled_from("abc"), places), min_size=2, max_size=4))
    base = keys_of(tokens, "", 0, size)
    keys = {user: keys_of(tokens, *user, size) for user in users}
    for (digest, activation), own in keys.items():
        num_shared = activation // size
        assert own[:num_shared] == base[:num_shared]
        assert not set(own[num_shared:]) & set(base)
        for other, others in keys.items():
            if other != (digest, activation):
                assert not set(own[num_shared:]) & set(others)


def test_unkeyed_pages_are_reused_before_prefix_ends() -> None:
    pool = PagePool(4, 2)
    first, second, third = pool.allocate(3)
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    pool.release([first, second, third])
    order = pool.allocate(4)
    assert order[-2:] == [second, first]


def test_keys_separate_adapters_tenants_and_salts() -> None:
    roots = {root_key("", ""), root_key("sha256:a", ""), root_key("sha256:a", "t\0salt")}
    assert len(roots) == 3
    root = root_key("", "")
    assert page_key(root, [1, 2]) != page_key(root, [2, 1])
    assert page_key(root, [1, 2]) != page_key(page_key(root, [1, 2]), [1, 2])


def test_without_caching_nothing_is_shared() -> None:
    pool = PagePool(4, 2, caching=False)
    (page,) = pool.allocate(1)
    pool.publish(page, b"1")
    assert pool.match([b"1"]) == []
