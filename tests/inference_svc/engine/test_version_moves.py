"""Requests that follow a name whose versions come fast progress, and disturb no other tenant."""

from __future__ import annotations

import pytest

from inference_svc.core import Sequence, VersionPolicy
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.engine.policy.version_moves import ANEW_PER_NEW, NEW_TOKENS, Moves
from inference_svc.engine.transport.messages import Move
from tests.inference_svc.engine.server import AllResident, Server

STEP_S = 0.05
PROMPT, ANSWER = 300, 200


class Trainer:
    """Pushes a version every so many steps; each of its requests follows."""

    def __init__(self, num_followers: int, policy: VersionPolicy, steps_per_push: int) -> None:
        self.server = Server(quantum=1024, gives_up_places=True)
        limits = Limits(32, 128, 128, 1024, 2.0)
        scheduler = Scheduler(limits, States(Pages(700, 16)), AllResident())
        self.server.scheduler = self.server.settler.scheduler = scheduler
        self.moves, self.policy = Moves(scheduler), policy
        self.steps_per_push, self.num_steps, self.version = steps_per_push, 0, 1
        self.followers = [self._follow() for _ in range(num_followers)]
        self.num_done = 0

    def _follow(self) -> Sequence:
        return self.server.submit(
            "trainer", "digest:1", num_prompt=PROMPT, max_tokens=ANSWER, version_policy=self.policy
        )

    def step(self) -> None:
        server = self.server
        server.now_s += STEP_S
        self.num_steps += 1
        if self.num_steps % self.steps_per_push == 0:
            self.version += 1
            digest = f"digest:{self.version}"
            for each in self.followers:
                name = each.request.request_id
                self.moves.add(each, Move(name, digest, f"a@{self.version}"), server.now_s)
        self.moves.apply(server.now_s)
        server.step()
        server.scheduler.check_integrity()
        for index, each in enumerate(self.followers):
            if each.num_output == ANSWER:
                self.moves.discard(each)
                self.num_done += 1
                self.followers[index] = self._follow()
        self.moves.check_integrity()


@pytest.mark.parametrize("steps_per_push", [1, 5, 40])
@pytest.mark.parametrize("policy", [VersionPolicy.FOLLOW_RECOMPUTE, VersionPolicy.FOLLOW_KEEP])
def test_followers_disturb_no_other_tenant(policy: VersionPolicy, steps_per_push: int) -> None:
    """Nor themselves: at any rate of pushes they come to their ends."""
    trainer = Trainer(16, policy, steps_per_push)
    for _ in range(100):
        trainer.step()
    waits = []
    for _ in range(20):
        short = trainer.server.submit("other", max_tokens=8)
        began = trainer.num_steps
        while short.num_output < 8 and trainer.num_steps - began < 100:
            trainer.step()
        waits.append(trainer.num_steps - began)
    assert max(waits) <= 8 + 10, "prompts of four tokens, eight more, and little waiting"
    for _ in range(1000):
        if trainer.num_done > 10:
            return
        trainer.step()
    pytest.fail("followers do not end")


def test_a_version_that_is_passed_over_is_not_waited_for() -> None:
    """Until enough is generated for the last one, versions come and go; then it is the newest."""
    trainer = Trainer(1, VersionPolicy.FOLLOW_RECOMPUTE, 10**6)
    [follower] = trainer.followers

    def push(version: int) -> None:
        move = Move(follower.request.request_id, f"digest:{version}", f"a@{version}")
        trainer.moves.add(follower, move, trainer.server.now_s)

    while follower.num_output < 3:
        trainer.step()
    push(2)
    trainer.step()
    assert follower.request.key == "digest:2", "the first one at once"
    moved_at = follower.num_output
    for version in range(3, 7):
        push(version)
        trainer.step()
        assert follower.request.key == "digest:2"
    while follower.request.key == "digest:2":
        trainer.step()
    assert follower.request.key == "digest:6"
    length = PROMPT + moved_at
    assert follower.num_output >= moved_at + length // ANEW_PER_NEW > moved_at + NEW_TOKENS
    assert trainer.server.scheduler.num_moves == 2


def test_a_prompt_is_computed_anew_once() -> None:
    """Before its first token, too: else a long one would never be done."""
    trainer = Trainer(1, VersionPolicy.FOLLOW_KEEP, 1)
    [follower] = trainer.followers
    for _ in range(30):
        trainer.step()
        if follower.num_output:
            return
    raise AssertionError("its prompt is computed again and again")
