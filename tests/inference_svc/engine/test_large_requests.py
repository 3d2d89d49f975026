"""A request that takes much more than its tenant's part of the pages comes to its end, whatever
others send."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from inference_svc.core import Sequence, SequenceState
from inference_svc.engine.policy.preemption import Claims
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from tests.inference_svc.engine.server import NEVER_S, AllResident, Server

pytestmark = pytest.mark.matrix

STEP_S = 0.05
NUM_PAGES, PAGE_SIZE, NUM_TENANTS, AT_ONCE = 400, 4, 8, 6
OWN_PART = NUM_PAGES // (NUM_TENANTS + 1) * PAGE_SIZE
"""Tokens in the part of the pages that each tenant has a right to."""


class Busy:
    """Eight tenants that have six requests each at any time, which need more pages than there
    are."""

    def __init__(self, ageing_s: float, num_prompt: int, max_tokens: int) -> None:
        self.server = Server(quantum=1024, num_places=32, gives_up_places=True)
        limits = Limits(32, 64, 64, 1024, ageing_s)
        scheduler = Scheduler(limits, States(Pages(NUM_PAGES, PAGE_SIZE)), AllResident())
        self.server.scheduler = self.server.settler.scheduler = scheduler
        self.server.settler.max_model_len = 2000
        self.num_prompt, self.max_tokens = num_prompt, max_tokens
        self.open: defaultdict[str, list[Sequence]] = defaultdict(list)
        self.num_ended = 0
        for _ in range(40):
            self.step()

    def step(self) -> None:
        for number in range(NUM_TENANTS):
            name = f"tenant {number}"
            before = self.open[name]
            after = [each for each in before if each.state is not SequenceState.FINISHED]
            self.num_ended += len(before) - len(after)
            while len(after) < AT_ONCE:
                made = self.server.submit(
                    name, num_prompt=self.num_prompt, max_tokens=self.max_tokens
                )
                after.append(made)
            self.open[name] = after
        self.server.now_s += STEP_S
        self.server.step()
        self.server.scheduler.check_integrity()

    def steps_until_the_last_token(self, sequence: Sequence) -> int:
        for count in range(1, 1000):
            self.step()
            if sequence.state is SequenceState.FINISHED:
                return count
        raise AssertionError("it never ends")


@pytest.mark.parametrize("ageing_s", [2.0, NEVER_S], ids=["aged", "young"])
@pytest.mark.parametrize("others", [(60, 20), (20, 80)], ids=["prompts", "answers"])
@pytest.mark.parametrize(("num_prompt", "most_steps"), [(300, 300), (500, 400), (1200, 700)])
def test_a_request_beyond_its_tenants_part_ends(
    num_prompt: int, most_steps: int, others: tuple[int, int], ageing_s: float
) -> None:
    """To its last token: of 20 to 80 % of all pages, however many claims others have."""
    busy = Busy(ageing_s, *others)
    large = busy.server.submit("large", num_prompt=num_prompt, max_tokens=20)
    assert large.num_prompt > OWN_PART
    before = busy.num_ended
    assert busy.steps_until_the_last_token(large) <= most_steps
    assert large.num_output == 20
    assert busy.num_ended > before + 20, "the others go on"


def test_what_has_a_claim_starts_before_others_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would take the pages that its victims have given up for it."""
    busy = Busy(2.0, 20, 80)
    places, found = busy.server.scheduler.places, Claims([], 0)
    claims = places.claims

    def noted(*arguments: Any) -> Claims:
        nonlocal found
        found = claims(*arguments)
        return found

    monkeypatch.setattr(places, "claims", noted)
    num_claims = 0
    for _ in range(600):
        found = Claims([], 0)
        busy.step()
        for sequence in found.sequences:
            num_claims += bool(found.victims)
            assert places.last_start_s(sequence.request.tenant) == busy.server.now_s
    assert num_claims > 10
