"""Callers: each owns some names, changes them one call at a time, and holds the store to it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from tests.soak.calls import Calls, Lost, Refused
from tests.soak.expected_images import Content
from tests.soak.model import Promises
from tests.soak.replicas import BURIAL_S, Life, Roster

NAMES_EACH = 5
WRONG_DIGEST = "sha256:" + "0" * 64


class Caller:
    """A thread's work. Contents are shared with other callers, names are not."""

    def __init__(self, index: int, seed: int, roster: Roster, contents: Sequence[Content]) -> None:
        self.promises = [Promises(f"team-{index}/name-{n}") for n in range(NAMES_EACH)]
        self.num_calls = 0
        self.num_lost = 0
        self.num_pulls = 0
        self.error: BaseException | None = None
        self._random = random.Random(f"{seed}/{index}")
        self._roster = roster
        self._contents = contents
        self._by_digest = {content.digest: content for content in contents}
        self._acts: tuple[tuple[int, Callable[[Calls, Promises], None]], ...] = (
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
        for promises in self.promises:
            found = calls.name_state(promises.name, promises.state.last)
            promises.settle(found)

    def _act(self, calls: Calls) -> None:
        weights = [weight for weight, _ in self._acts]
        _, act = self._random.choices(self._acts, weights)[0]
        act(calls, self._random.choice(self.promises))
        self.num_calls += 1

    def _register(self, calls: Calls, promises: Promises) -> None:
        self._change_content(calls.register, promises)

    def _upload(self, calls: Calls, promises: Promises) -> None:
        self._change_content(calls.upload, promises)

    def _change_content(self, send: Callable[..., object], promises: Promises) -> None:
        content = self._random.choice(self._contents)
        labels = self._labels()
        after = promises.state.registered(content.digest, labels)
        fields = {}
        if self._random.random() < 0.3:
            fields["expected_digest"] = content.digest
        if promises.state.current and self._random.random() < 0.3:
            fields["if_current_digest"] = promises.state.digest
        promises.begin(after)
        answer = send(promises.name, content, labels, **fields)
        found = answer.adapter
        assert (found.version, found.digest) == (after.current, after.digest), found
        assert tuple(sorted(found.labels.items())) == after.live[after.current].labels, found
        promises.kept(answer.revision)

    def _break_off(self, calls: Calls, promises: Promises) -> None:
        content = self._random.choice(self._contents)
        self._refused("CANCELLED", promises, calls.upload, content, break_off=True)

    def _expect_other(self, calls: Calls, promises: Promises) -> None:
        content = self._random.choice(self._contents)
        send = self._random.choice([calls.register, calls.upload])
        fields = {"expected_digest": WRONG_DIGEST}
        self._refused("FAILED_PRECONDITION", promises, send, content, **fields)

    def _race_lost(self, calls: Calls, promises: Promises) -> None:
        """What another trainer has replaced meanwhile is no longer current."""
        content = self._random.choice(self._contents)
        send = self._random.choice([calls.register, calls.upload])
        fields = {"if_current_digest": WRONG_DIGEST}
        self._refused("ABORTED", promises, send, content, **fields)

    def _refused(
        self,
        code: str,
        promises: Promises,
        send: Callable[..., object],
        content: Content,
        **fields: object,
    ) -> None:
        promises.begin(promises.state)
        try:
            send(promises.name, content, self._labels(), **fields)
        except Refused as refused:
            if refused.code != code:
                raise
            promises.refused()
        else:
            raise AssertionError(f"{promises.name}: not refused: {fields}")

    def _delete(self, calls: Calls, promises: Promises) -> None:
        self._remove(calls, promises, 0)

    def _delete_version(self, calls: Calls, promises: Promises) -> None:
        if promises.state.live:
            self._remove(calls, promises, self._random.choice(list(promises.state.live)))

    def _remove(self, calls: Calls, promises: Promises, version: int) -> None:
        if not promises.state.live:
            self._not_there(promises, lambda: calls.delete(promises.name, version))
            return
        promises.begin(promises.state.removed(version))
        promises.kept(calls.delete(promises.name, version))

    def _roll_back(self, calls: Calls, promises: Promises) -> None:
        if not promises.state.last:
            return
        number = self._random.randint(1, promises.state.last)
        if number not in promises.state.live:  # deleted, and its grace is over
            self._not_there(promises, lambda: calls.rollback(promises.name, number))
            return
        promises.begin(promises.state.rolled_back(number))
        answer = calls.rollback(promises.name, number)
        assert answer.adapter.version == number, answer
        promises.kept(answer.revision)

    def _not_there(self, promises: Promises, call: Callable[[], object]) -> None:
        promises.begin(promises.state)
        try:
            call()
        except Refused as refused:
            if refused.code != "NOT_FOUND":
                raise
            promises.refused()
        else:
            raise AssertionError(f"{promises.name}: changed, and was not there")

    def _pull(self, calls: Calls, promises: Promises) -> None:
        """What a name points to can be pulled, whatever else goes on, and is right."""
        if not promises.state.current:
            return
        header, data = calls.pull(promises.state.digest, self._layout_id)
        content = self._by_digest[promises.state.digest]
        assert data == content.image(header), f"{promises.name}: wrong bytes"
        self.num_pulls += 1

    def _labels(self) -> tuple[tuple[str, str], ...]:
        if self._random.random() < 0.3:
            return ()
        return (("call", str(self.num_calls)), ("host", "trainer"))
