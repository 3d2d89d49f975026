"""Keys of prefixes: equal where state is equal, and only there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.policy.states.prefix import extend_page_keys, page_key, root_key


def keys_of(tokens: list[int], digest: str, activation: int, size: int) -> list[bytes]:
    request = Request("r", tuple(tokens), SamplingParams(), digest, activation=activation)
    sequence = Sequence(request)
    num_pages = len(tokens) // size
    for upto in range(num_pages + 1):
        extend_page_keys(sequence, upto, size)
    return sequence.prefix_keys


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


def test_keys_separate_adapters_tenants_and_salts() -> None:
    roots = {root_key("", ""), root_key("sha256:a", ""), root_key("sha256:a", "t\0salt")}
    assert len(roots) == 3
    root = root_key("", "")
    assert page_key(root, [1, 2]) != page_key(root, [2, 1])
    assert page_key(root, [1, 2]) != page_key(page_key(root, [1, 2]), [1, 2])
