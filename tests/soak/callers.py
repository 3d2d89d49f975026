"""Callers: each owns some names, changes them one call at a time, and holds the store to it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from tests.soak.calls import Calls, Lost, Refused
from tests.soak.expected_images import Content
from tests.soak.model import NameHistory
from tests.soak.replicas import BURIAL_S, Life, Roster

NAMES_EACH = 5
WRONG_DIGEST = "sha256:" + "0" * 64


class Caller:
    """A thread's work. Contents are shared with other callers, names are not."""

    def __init__(self, index: int, seed: int, roster: Roster, contents: Sequence[Content]) -> None:
        self.histories = [NameHistory(f"team-{index}/name-{n}") for n in range(NAMES_EACH)]
        self.num_calls = 0
        self.num_lost = 0
        self.num_pulls = 0
        self.error: BaseException | None = None
        self._random = random.Random(f"{seed}/{index}")
        self._roster = roster
        self._contents = contents
        self._by_digest = {content.digest: content for content in contents}
        self._acts: tuple[tuple[int, Callable[[Calls, NameHistory], None]], ...] = (
            (10, self._register),
            (8, self._upload),
            (2, self._break_off),
            (2, self._expect_other),
            (3, self._race_lost),
            (3, self._delete),
            (2, self._delete_version),
            (4, self._roll_back),
            (8, self._pull),
        )
        self.thread = threading.Thread(target=self._run, name=f"caller-{index}", daemon=True)

    def _run(self) -> None:
        try:
            while (life := self._roster.pick(self._random)) is not None:
                self._speak_to(life)
        except BaseException as error:
            self.error = error

    def _speak_to(self, life: Life) -> None:
        """Calls one process of the store until it is gone, or nobody is to call any more."""
        calls = Calls(life.address)
        try:
            self.settle(calls)
            layout_id = calls.register_layout()
            while not self._roster.is_closed:
                self._layout_id = layout_id
                self._act(calls)
        except Lost:
            self.num_lost += 1
            assert life.buried.wait(BURIAL_S), "a store that runs cannot be reached"
        finally:
            calls.close()

    def settle(self, calls: Calls) -> None:
        """Compares everything promised with what is there."""
        for history in self.histories:
            found = calls.name_state(history.name, history.state.last)
            history.settle(found)

    def _act(self, calls: Calls) -> None:
        weights = [weight for weight, _ in self._acts]
        _, act = self._random.choices(self._acts, weights)[0]
        act(calls, self._random.choice(self.histories))
        self.num_calls += 1

    def _register(self, calls: Calls, history: NameHistory) -> None:
        self._change_content(calls.register, history)

    def _upload(self, calls: Calls, history: NameHistory) -> None:
        self._change_content(calls.upload, history)

    def _change_content(self, send: Callable[..., object], history: NameHistory) -> None:
        content = self._random.choice(self._contents)
        labels = self._labels()
        after = history.state.registered(content.digest, labels)
        fields = {}
        if self._random.random() < 0.3:
            fields["expected_digest"] = content.digest
        if history.state.current and self._random.random() < 0.3:
            fields["if_current_digest"] = history.state.digest
        history.begin(after)
        answer = send(history.name, content, labels, **fields)
        found = answer.adapter
        assert (found.version, found.digest) == (after.current, after.digest), found
        assert tuple(sorted(found.labels.items())) == after.live[after.current].labels, found
        history.kept(answer.revision)

    def _break_off(self, calls: Calls, history: NameHistory) -> None:
        content = self._random.choice(self._contents)
        self._refused("CANCELLED", history, calls.upload, content, break_off=True)

    def _expect_other(self, calls: Calls, history: NameHistory) -> None:
        content = self._random.choice(self._contents)
        send = self._random.choice([calls.register, calls.upload])
        fields = {"expected_digest": WRONG_DIGEST}
        self._refused("FAILED_PRECONDITION", history, send, content, **fields)

    def _race_lost(self, calls: Calls, history: NameHistory) -> None:
        """What another trainer has replaced meanwhile is no longer current."""
        content = self._random.choice(self._contents)
        send = self._random.choice([calls.register, calls.upload])
        fields = {"if_current_digest": WRONG_DIGEST}
        self._refused("ABORTED", history, send, content, **fields)

    def _refused(
        self,
        code: str,
        history: NameHistory,
        send: Callable[..., object],
        content: Content,
        **fields: object,
    ) -> None:
        history.begin(history.state)
        try:
            send(history.name, content, self._labels(), **fields)
        except Refused as refused:
            if refused.code != code:
                raise
            history.refused()
        else:
            raise AssertionError(f"{history.name}: not refused: {fields}")

    def _delete(self, calls: Calls, history: NameHistory) -> None:
        self._remove(calls, history, 0)

    def _delete_version(self, calls: Calls, history: NameHistory) -> None:
        if history.state.live:
            self._remove(calls, history, self._random.choice(list(history.state.live)))

    def _remove(self, calls: Calls, history: NameHistory, version: int) -> None:
        if not history.state.live:
            self._not_there(history, lambda: calls.delete(history.name, version))
            return
        history.begin(history.state.removed(version))
        history.kept(calls.delete(history.name, version))

    def _roll_back(self, calls: Calls, history: NameHistory) -> None:
        if not history.state.last:
            return
        number = self._random.randint(1, history.state.last)
        if number not in history.state.live:  # deleted, and its grace is over
            self._not_there(history, lambda: calls.rollback(history.name, number))
            return
        history.begin(history.state.rolled_back(number))
        answer = calls.rollback(history.name, number)
        assert answer.adapter.version == number, answer
        history.kept(answer.revision)

    def _not_there(self, history: NameHistory, call: Callable[[], object]) -> None:
        history.begin(history.state)
        try:
            call()
        except Refused as refused:
            if refused.code != "NOT_FOUND":
                raise
            history.refused()
        else:
            raise AssertionError(f"{history.name}: changed, and was not there")

    def _pull(self, calls: Calls, history: NameHistory) -> None:
        """What a name points to can be pulled, whatever else goes on, and is right."""
        if not history.state.current:
            return
        header, data = calls.pull(history.state.digest, self._layout_id)
        content = self._by_digest[history.state.digest]
        assert data == content.image(header), f"{history.name}: wrong bytes"
        self.num_pulls += 1

    def _labels(self) -> tuple[tuple[str, str], ...]:
        if self._random.random() < 0.3:
            return ()
        return (("call", str(self.num_calls)), ("host", "trainer"))
