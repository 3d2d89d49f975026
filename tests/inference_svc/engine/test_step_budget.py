"""How a step is shared: generated tokens, prompts of tenants, prices of scoring and choosing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import AdapterVersion, Request, Sequence
from inference_svc.engine.policy.prices import FREE, Prices
from inference_svc.engine.policy.step_budget import (
    ANEW_BESIDE_SHARE,
    ANEW_SHARE,
    CHOICES_SHARE,
    Turns,
    share_step,
)
from tests.support.examples import examples
from tests.support.inference.results import asking

PRICES = Prices(logits=0.5, logprobs=1.5, sort=10.0, listed=0.1)


def prompt(tenant: str, num_tokens: int, **sampling: Any) -> Sequence:
    return Sequence(Request("", (1,) * num_tokens, tenant=tenant, **asking(sampling)))


def generating(tenant: str, last_s: float = 0.0, **sampling: Any) -> Sequence:
    made = prompt(tenant, 5, **sampling)
    made.num_computed, made.last_token_s = 4, last_s
    return made


def anew(tenant: str, num_tokens: int) -> Sequence:
    made = prompt(tenant, num_tokens)
    made.token_ids.append(1)
    made.version = AdapterVersion("a@2", "sha256:2")
    return made


def granted(running: list[Sequence], budget: int, prices: Prices = FREE, waiting: int = 0) -> Any:
    grants = share_step(running, budget, 1 << 20, waiting, prices)
    return [grants.of(sequence) for sequence in running], grants.left


def test_tokens_that_are_computed_at_once_take_turns_with_others() -> None:
    """Beside generated tokens there is room for one picture: another tenant's prompt has every
    second step, and a picture of another tenant comes first."""

    def picture(tenant: str) -> Sequence:
        made = prompt(tenant, 300)
        made.num_at_once = 256
        return made

    pictures, text = [picture("a") for _ in range(4)], prompt("b", 1000)
    running = [*pictures, text, *(generating("c") for _ in range(31))]
    turns = Turns()

    def tenants(sequences: list[Sequence]) -> str:
        grants = share_step(sequences, 288, 1 << 20, 0, FREE, turns)
        return "".join(e.request.tenant for e in sequences if grants.of(e) > 200)

    assert [tenants(running) for _ in range(4)] == ["a", "b", "a", "b"]
    running[4:4] = [picture("d"), picture("e")]
    assert [tenants(running) for _ in range(6)] == ["d", "b", "e", "b", "a", "b"]
    running.remove(text)
    assert [tenants(running) for _ in range(3)] == ["d", "e", "a"]


def test_generated_tokens_come_first() -> None:
    running = [prompt("a", 100), *(generating("b") for _ in range(10))]
    assert granted(running, 40) == ([30, *[1] * 10], 0)


def test_tenants_have_equal_parts_of_what_prompts_get() -> None:
    """What one does not need goes to the others, however many prompts each has."""
    running = [*(prompt("many", 50) for _ in range(10)), prompt("one", 1000), prompt("few", 20)]
    tokens, left = granted(running, 320)
    assert (sum(tokens[:10]), tokens[10], tokens[11], left) == (150, 150, 20, 0)


def test_within_a_tenant_the_first_gets_half_and_the_shortest_go_first() -> None:
    running = [prompt("a", 500), prompt("a", 80), prompt("a", 30)]
    assert granted(running, 100) == ([50, 20, 30], 0)


def test_a_quarter_stays_for_those_that_wait() -> None:
    running = [prompt("a", 500)]
    assert granted(running, 100, waiting=1000) == ([75], 25)
    assert granted(running, 100, waiting=10) == ([90], 10)


def test_what_is_computed_anew_comes_after_other_prompts() -> None:
    """It has a little in any case, and what they leave."""
    running = [anew("follows", 400), prompt("other", 400)]
    assert granted(running, 80) == ([80 * ANEW_SHARE, 80 - 80 * ANEW_SHARE], 0)
    running = [anew("follows", 400), prompt("other", 30)]
    assert granted(running, 80) == ([50, 30], 0)
    running = [anew("follows", 400), prompt("follows", 30)]
    assert granted(running, 80) == ([50, 30], 0)


def test_what_is_computed_anew_lengthens_others_steps_little() -> None:
    """Their next tokens wait for it; those of its own tenant were asked for by the same one."""
    most = int(640 * ANEW_BESIDE_SHARE)
    followers = [anew("follows", 400) for _ in range(4)]
    tokens, left = granted([*followers, generating("other")], 640)
    assert (sum(tokens[:4]), tokens[4], left) == (most, 1, 639 - most)
    assert granted([anew("follows", 400), generating("follows")], 64) == ([63, 1], 0)
    tokens, _ = granted([anew("follows", 400), generating("other"), prompt("other", 400)], 640)
    assert tokens == [most, 1, 400]


def test_what_starts_to_be_computed_anew_does_so_too() -> None:
    grants = share_step([generating("other")], 640, 1 << 20, 0, FREE)
    most = int(640 * ANEW_BESIDE_SHARE)
    assert [grants.start(anew("follows", 400)) for _ in range(2)] == [most, 1]
    assert grants.start(prompt("follows", 400)) == 400
    assert grants.left == 639 - most - 1 - 400


def test_scored_tokens_cost_what_they_take() -> None:
    """10 alternatives: 1 + 0.5 + 1.5 + 10 * 0.1 = 4."""
    scored = prompt("a", 500, prompt_logprobs=10)
    assert granted([scored], 100, PRICES) == ([25], 0)
    assert granted([scored, prompt("b", 500)], 100, PRICES)[0] == [12, 52]
    scored.num_scored = scored.num_prompt
    assert granted([scored], 100, PRICES)[0] == [100], "scored before: only computed again"


def test_a_token_that_costs_more_than_a_step_has_it_alone() -> None:
    scored = prompt("a", 500, prompt_logprobs=1000)
    tokens, left = granted([scored], 50, PRICES)
    assert tokens == [1]
    assert left < 0


def test_choices_with_a_price_take_turns() -> None:
    """2 each: 20 in half of 80. Those that have waited longest go first, tenants in turns; others
    have a token in every step."""
    plain = generating("b")
    dear = [generating("a", float(-number), logprobs=5) for number in range(30)]
    other = generating("c", 0.0, logprobs=5)
    tokens, _ = granted([plain, *dear, other], 80, PRICES)
    assert tokens[0] == tokens[-1] == 1
    assert sum(tokens[1:-1]) == CHOICES_SHARE * 80 / 2 - 1
    assert tokens[1:-1] == sorted(tokens[1:-1]), "the last served are left out"


def test_one_choice_is_granted_whatever_it_costs() -> None:
    dear = [generating("a", float(number), logprobs=1000) for number in range(3)]
    assert granted(dear, 20, PRICES)[0] == [1, 0, 0]


@pytest.mark.parametrize("num_plain", [0, 10, 18])
def test_a_dear_choice_starves_no_prompt(num_plain: int) -> None:
    """It costs many steps; a prompt has a token beside it, and else what waits may start."""
    dear = generating("a", logprobs=1000)
    plain = [generating("b") for _ in range(num_plain)]
    tokens, _ = granted([dear, *plain, prompt("c", 50)], 20, PRICES)
    assert tokens[:-1] == [1] * (num_plain + 1)
    assert tokens[-1] >= 1
    assert granted([dear, *plain], 20, PRICES)[1] >= 1


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 90),
            st.sampled_from([None, 0, 5, 1024]),
            st.sampled_from(["prompt", "generating", "anew"]),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(20, 200),
    st.integers(1, 64),
    st.sampled_from([FREE, PRICES]),
)
def test_a_step_stays_within_its_budget(
    rows: list[tuple[str, int, int | None, str]], budget: int, chunk: int, prices: Prices
) -> None:
    """But for one token that costs more than all; and something is granted."""
    kinds = {
        "prompt": lambda tenant, count, top: prompt(tenant, count + 1, prompt_logprobs=top),
        "generating": lambda tenant, count, top: generating(tenant, float(count), logprobs=top),
        "anew": lambda tenant, count, top: anew(tenant, count),
    }
    running = [kinds[kind](tenant, count, top) for tenant, count, top, kind in rows]
    grants = share_step(running, budget, chunk, 0, prices)
    tokens = [grants.of(each) for each in running]
    assert sum(tokens) > 0
    assert sum(tokens) <= budget
    for sequence, count in zip(running, tokens, strict=True):
        assert count <= max(1, min(sequence.num_uncomputed, chunk))
    dearest = max(max(prices.of_prompt(each), 1 + prices.of_choice(each)) for each in running)
    assert grants.left >= -max(dearest, 1.0) * 2


@pytest.mark.parametrize("num_steps", [200])
def test_every_prompt_progresses(num_steps: int) -> None:
    """A long one beside others' short ones that never cease."""
    long = prompt("long", 30_000)
    follower = anew("follows", 30_000)
    for _ in range(num_steps):
        short = [prompt("short", 30) for _ in range(50)]
        grants = share_step([*short, long, follower], 64, 64, 0, FREE)
        long.num_computed += grants.of(long)
        follower.num_computed += grants.of(follower)
    assert long.num_computed > num_steps * 64 / 4
    assert follower.num_computed > num_steps * 64 * ANEW_SHARE / 2
