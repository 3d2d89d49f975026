"""Who goes first: equal parts for tenants and adapters, priorities, age; nothing is wasted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.policy.fair_queue import GENERATED_WEIGHT, FairQueue
from inference_svc.engine.policy.prices import Prices
from tests.inference_svc.engine.server import NEVER_S, Server
from tests.support.examples import examples


def cost(request: Request) -> int:
    generated = GENERATED_WEIGHT * request.sampling.max_tokens
    return len(request.prompt_token_ids) + generated


shapes = st.tuples(st.integers(1, 60), st.integers(1, 20))


@pytest.mark.parametrize("ageing_s", [3.0, NEVER_S], ids=["aged", "young"])
@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 6),
    st.lists(st.tuples(shapes, st.integers(1, 4)), min_size=2, max_size=4),
    st.sampled_from(["tenant", "key"]),
)
def test_tokens_are_shared_equally(
    ageing_s: float,
    quantum: int,
    num_places: int,
    kinds: list[tuple[tuple[int, int], int]],
    by: str,
) -> None:
    """However large the requests of each, and however many it sends at once, none that always has
    something waiting gets ahead of another by more than a quantum and the largest request. Of
    adapters with aged requests, each has at least its equal part of that half of the tokens that
    goes by rounds."""
    server = Server(quantum, ageing_s, num_places)
    taken = Counter({f"m{i}": 0 for i in range(len(kinds))})
    waiting: Counter[str] = Counter()
    largest = 0
    for _ in range(60):
        for i, ((num_prompt, max_tokens), at_once) in enumerate(kinds):
            while waiting[f"m{i}"] < num_places + at_once:
                waiting[f"m{i}"] += 1
                server.submit(**{by: f"m{i}"}, num_prompt=num_prompt, max_tokens=max_tokens)
        server.started.clear()
        server.step()
        for request in server.started:
            taken[getattr(request, by)] += cost(request)
            waiting[getattr(request, by)] -= 1
            largest = max(largest, cost(request))
        if by == "key" and ageing_s < NEVER_S:
            part = taken.total() / 2 / len(kinds)
            assert min(taken.values()) >= part - quantum - 2 * largest
        else:
            assert max(taken.values()) - min(taken.values()) <= quantum + largest
        server.now_s += 1.0
    server.scheduler.check_integrity()


def test_unused_charge_is_refunded() -> None:
    """One that asks for much and ends early gets as much as one that asks for little."""
    server = Server(quantum=50, num_places=1)
    served: Counter[str] = Counter()
    for _ in range(300):
        for tenant, max_tokens in (("much", 200), ("little", 4)):
            if server.scheduler.queue.tenant(tenant) is None:
                server.submit(tenant, max_tokens=max_tokens)
        for sequence in list(server.scheduler.running):
            if sequence.num_output >= 4:
                served[sequence.request.tenant] += 4
                server.settler.end(sequence, server.now_s)
        server.step()
        for request in server.started:
            served[request.tenant] += request.tenant == "little" and 4
        server.started.clear()
    assert 0.5 < served["much"] / served["little"] < 2


PRICES = Prices(sort=3.3)


def position(queue: FairQueue) -> int:
    """Returns the tokens that tenant a, which waits, has taken."""
    return queue._round_robin._positions["a"]


def charges(num_sorted: int, num_plain: int, max_tokens: int) -> int:
    """Returns what a tenant is charged in all for a request of four prompt tokens that is ended
    after so many tokens, of which the first ones took sorting."""
    queue = FairQueue(10**6, NEVER_S, PRICES)
    sampling = SamplingParams(max_tokens=max_tokens, top_p=0.999)
    sequence, other = (
        Sequence(Request(name, (1, 2, 3, 4), sampling, tenant="a")) for name in ("first", "second")
    )
    queue.add(sequence)
    queue.add(other)
    before = position(queue)
    queue.start(sequence, 4)
    for number in range(num_sorted + num_plain):
        sequence.token_ids.append(7)
        sequence.is_sorted = number < num_sorted
        if sequence.is_sorted:
            queue.sorted_for(sequence)
    queue.ended(sequence)
    return position(queue) - before


@pytest.mark.parametrize(("num_sorted", "num_plain"), [(1, 0), (0, 1), (10, 0), (7, 5)])
def test_sorting_is_charged_for_the_tokens_that_took_it(num_sorted: int, num_plain: int) -> None:
    """No refund exceeds the charge, whether the last token took sorting or not."""
    count = num_sorted + num_plain
    expected = 4 + GENERATED_WEIGHT * count + int(PRICES.sort * num_sorted)
    assert charges(num_sorted, num_plain, 2000) == expected


def test_settling_charges_for_sorting() -> None:
    server = Server()
    server.scheduler.queue = FairQueue(10**6, NEVER_S, PRICES)
    first, _waits, _too = (server.submit("a", max_tokens=50) for _ in range(3))
    server.step()
    before = position(server.scheduler.queue)
    first.is_sorted = True
    server.step()
    assert position(server.scheduler.queue) - before in (3, 4)


def test_the_next_to_age_is_the_oldest_that_is_not_yet() -> None:
    """Of those that wait for an adapter: others need no memory for one."""
    queue = FairQueue(10, 2.0)
    assert queue.next_ageing_s(5.0) is None
    for arrival_s, digest in [(1.0, "x"), (4.0, "x"), (4.5, "y"), (3.5, "")]:
        request = Request(str(arrival_s), (1,), SamplingParams(), digest, arrival_s=arrival_s)
        queue.add(Sequence(request))
    assert queue.next_ageing_s(2.9) == 3.0
    assert queue.next_ageing_s(3.0) == 6.0
    assert queue.next_ageing_s(7.0) is None


def test_aged_flood_delays_no_other_tenant() -> None:
    server = Server(quantum=20, ageing_s=1.0, num_places=1)
    for number in range(50):
        server.submit("flood", key=f"a{number}")
    server.now_s = 60.0
    server.step()
    server.submit("other", key="b")
    order = [request.tenant for request in server.run()]
    assert order.index("other") <= 4


def test_priority_goes_first_without_aged_requests() -> None:
    server = Server(num_places=1, quantum=20)
    for priority in (0, 2, 1, 2, 0):
        server.submit(priority=priority)
    assert [request.priority for request in server.run()] == [2, 2, 1, 0, 0]


def test_aged_requests_get_half_beside_round_robin() -> None:
    """The aged go on though their adapter has had more than its part; the others' turns do, too."""
    server = Server(num_places=1, quantum=10, ageing_s=5.0)
    for _ in range(20):
        server.submit(key="popular")
    for number in range(10):
        server.submit(key=f"rare-{number % 3}", arrival_s=5.0)
    server.now_s = 6.0
    order = [request.key == "popular" for request in server.run()]
    for n in range(2, 21, 2):
        assert abs(sum(order[:n]) - n // 2) <= 1


def test_aged_backlog_delays_no_other_adapter() -> None:
    server = Server(num_places=1, quantum=20, ageing_s=2.0)
    for _ in range(50):
        server.submit(key="backlog")
    server.now_s = 3.0
    server.submit(key="other")
    assert [request.key for request in server.run()].index("other") <= 4


def test_aged_request_waits_for_earlier_ones_and_as_much_again() -> None:
    """However many of other adapters come meanwhile."""
    server = Server(num_places=1, quantum=20, ageing_s=5.0)
    aged = [server.submit(key="popular").request for _ in range(8)]
    server.now_s = 6.0
    for number in range(40):
        server.submit(key=f"new-{number}")
        server.step()
    while len(server.started) < 40:
        server.step()
    places = [server.started.index(request) for request in aged]
    assert all(place <= 2 * number + 1 for number, place in enumerate(places))


def test_aged_requests_get_half_beside_priority() -> None:
    server = Server(num_places=1, quantum=20, ageing_s=5.0)
    for _ in range(10):
        server.submit(priority=0)
    for _ in range(10):
        server.submit(priority=9, arrival_s=10.0)
    server.now_s = 11.0
    order = [request.priority for request in server.run()]
    for n in range(2, 20, 2):
        assert Counter(order[:n]) == {0: n // 2, 9: n // 2}


def test_short_prompt_overtakes_long_ones() -> None:
    """Two long prompts are being computed; the first of them goes on all the same."""
    server = Server(num_places=8)
    long = [server.submit(num_prompt=500) for _ in range(2)]
    server.step()
    server.step()
    for _ in range(3):
        before = long[0].num_computed
        short = server.submit(num_prompt=12)
        batch = server.step()
        assert batch is not None
        assert sum(row.num_tokens for row in batch.rows) == 64, "nothing is wasted"
        assert short.num_output == 1
        assert long[0].num_computed - before >= 20


def test_lone_prompt_gets_the_whole_budget() -> None:
    server = Server()
    server.submit(num_prompt=200)
    assert [server.step().rows[0].num_tokens for _ in range(4)] == [64, 64, 64, 8]


def num_calls(work: Callable[[], object]) -> int:
    """How many calls of functions `work` makes: what it costs, on whatever machine."""
    count = 0

    def on_event(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("ageing_s", [0.5, NEVER_S], ids=["aged", "young"])
def test_step_cost_does_not_grow_with_the_queue(ageing_s: float) -> None:
    costs = []
    for num_waiting in (100, 10_000):
        server = Server(num_places=8, ageing_s=ageing_s)
        for number in range(num_waiting):
            server.submit(f"t{number % 10}", f"a{number % 30}", priority=number % 3)
        server.now_s = 1.0
        costs.append(sum(num_calls(server.step) for _ in range(12)))
    assert costs[1] < 1.2 * costs[0]
