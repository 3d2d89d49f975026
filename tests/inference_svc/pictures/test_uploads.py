"""Uploaded files stay within bytes and shares, and while a request reads them."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.pictures.uploads import (
    ENTRY_BYTES,
    IDLE_SECONDS,
    MAX_FILE_BYTES,
    IncomingFile,
    UploadedFile,
    UploadKey,
    Uploads,
)
from servicekit.errors import InvalidArgument, ShareExceeded
from servicekit.shares import limit_of

ROOM = 4
"""How many files of a KiB there is room for."""
SIZE = 1024
FILE_BYTES = SIZE + ENTRY_BYTES


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def content(name: str, size: int = SIZE) -> bytes:
    return hashlib.shake_256(name.encode()).digest(size)


def upload(
    uploads: Uploads, account: str, name: str, salt: str = "", size: int = SIZE
) -> UploadKey:
    with uploads.begin(account, size) as file:
        file.add(content(name, size)[: size // 2])
        file.add(content(name, size)[size // 2 :])
        sha256 = file.keep(salt)
    assert sha256 == hashlib.sha256(content(name, size)).digest()
    uploads.check_integrity()
    return UploadKey(account, salt, sha256)


def has(uploads: Uploads, key: UploadKey) -> bool:
    found = uploads.hold(key)
    if found is not None:
        uploads.let_go(found)
    return found is not None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(clock: Clock) -> Uploads:
    return Uploads("uploads", ROOM * FILE_BYTES, 0.5, clock)


def test_a_file_is_named_by_its_account_salt_and_hash_alone(uploads: Uploads) -> None:
    key = upload(uploads, "one", "a", salt="s")
    found = uploads.hold(key)
    assert found is not None
    assert bytes(found.data) == content("a")
    assert found.data.readonly
    uploads.let_go(found)
    for other in (
        key._replace(account="two"),
        key._replace(cache_salt=""),
        key._replace(sha256=hashlib.sha256(b"other").digest()),
    ):
        assert uploads.hold(other) is None


def test_equal_files_of_an_account_take_room_once(uploads: Uploads) -> None:
    assert upload(uploads, "one", "a") == upload(uploads, "one", "a")
    assert uploads.use().used == FILE_BYTES
    upload(uploads, "two", "a")
    assert uploads.use().used == 2 * FILE_BYTES


def test_an_account_loses_the_file_that_it_used_longest_ago(uploads: Uploads) -> None:
    first, second = upload(uploads, "one", "a"), upload(uploads, "one", "b")
    assert has(uploads, first)
    third = upload(uploads, "one", "c")  # its share is two
    assert [has(uploads, key) for key in (first, second, third)] == [True, False, True]


def test_the_account_with_most_makes_room_for_others(uploads: Uploads) -> None:
    large = [upload(uploads, "large", name) for name in "ab"]
    small = [upload(uploads, name, name) for name in "xy"]
    last = upload(uploads, "z", "z")
    found = [has(uploads, key) for key in (*large, *small, last)]
    assert found == [False, True, True, True, True]


def test_a_file_that_a_request_reads_stays(uploads: Uploads) -> None:
    held = [uploads.hold(upload(uploads, "one", name)) for name in "ab"]
    with pytest.raises(ShareExceeded, match="read by requests: try again later") as refused:
        uploads.begin("one", SIZE)
    assert refused.value.retry_after_s > 0
    assert uploads.use().num_refused == 1
    for each in held:
        assert each is not None
        uploads.let_go(each)
    upload(uploads, "one", "c")


@pytest.mark.parametrize("arrive", [False, True])
def test_two_accounts_leave_room_for_others(clock: Clock, arrive: bool) -> None:
    """However much of their files arrives, or is read by their requests."""
    uploads = Uploads("uploads", 16 * FILE_BYTES, 0.5, clock)
    keys = {
        name: [] if arrive else [upload(uploads, name, str(index)) for index in range(8)]
        for name in ("one", "two")
    }
    used = {name: _take_all(uploads, name, keys[name]) for name in keys}
    assert used == {"one": 8, "two": 4}
    for index in range(2):
        upload(uploads, "three", str(index))


def _take_all(uploads: Uploads, account: str, keys: list[UploadKey]) -> int:
    """Holds files, then has others arrive, until it is refused; returns how many they were."""
    num_used = 0
    while True:
        try:
            if num_used < len(keys):
                assert uploads.hold(keys[num_used]) is not None
            else:
                uploads.begin(account, SIZE)
        except ShareExceeded as refused:
            if refused.retry_after_s:
                return num_used
            raise
        num_used += 1


def test_a_file_that_is_read_can_be_read_again(uploads: Uploads) -> None:
    first = upload(uploads, "one", "a")
    upload(uploads, "one", "b")
    held = uploads.hold(first)
    with uploads.begin("two", SIZE), uploads.begin("three", 1):
        assert held is not None
        assert uploads.hold(first) is held


def test_an_account_takes_no_files_of_smaller_ones(clock: Clock) -> None:
    """Not even where the largest one's files are all in use."""
    uploads = Uploads("uploads", 10 * FILE_BYTES, 0.8, clock)
    small = [upload(uploads, name, name) for name in ("x", "y", "z")]
    for name in "cde":
        uploads.hold(upload(uploads, "large", name))
    idle = [upload(uploads, "other", name) for name in "ab"]
    with pytest.raises(ShareExceeded, match="no larger tenant can lose any: try again") as refused:
        uploads.begin("large", 3 * FILE_BYTES - ENTRY_BYTES)
    assert refused.value.retry_after_s > 0
    assert all(has(uploads, key) for key in (*small, *idle)), "nothing is deleted"
    # The largest one with files that nobody uses loses one.
    last = upload(uploads, "new", "n", size=3 * FILE_BYTES - ENTRY_BYTES)
    assert [has(uploads, key) for key in (*idle, last)] == [False, True, True]
    assert all(has(uploads, key) for key in small)


def test_nothing_is_deleted_for_a_file_without_room(uploads: Uploads) -> None:
    kept = upload(uploads, "one", "a")
    with uploads.begin("two", SIZE), uploads.begin("two", 1), uploads.begin("three", SIZE):
        with pytest.raises(ShareExceeded):
            uploads.begin("four", 2 * FILE_BYTES - ENTRY_BYTES)
        assert has(uploads, kept)


def test_idle_files_are_deleted(uploads: Uploads, clock: Clock) -> None:
    first, second = upload(uploads, "one", "a"), upload(uploads, "one", "b")
    clock.now_s = IDLE_SECONDS / 2
    held = uploads.hold(first)
    clock.now_s = IDLE_SECONDS
    uploads.expire()
    assert uploads.use().used == FILE_BYTES
    assert not has(uploads, second)
    assert held is not None
    clock.now_s = 5 * IDLE_SECONDS
    uploads.let_go(held)
    assert has(uploads, first)
    clock.now_s += IDLE_SECONDS
    uploads.expire()
    assert uploads.use().used == 0


def test_sizes_are_checked_before_bytes_arrive(uploads: Uploads) -> None:
    for size in (0, MAX_FILE_BYTES + 1):
        with pytest.raises(InvalidArgument, match=f"from 1 to {MAX_FILE_BYTES}") as wrong:
            uploads.begin("one", size)
        assert wrong.value.subject == "upload.size_bytes"
    with pytest.raises(ShareExceeded, match="send a smaller image") as refused:
        uploads.begin("one", 2 * FILE_BYTES)
    assert not refused.value.retry_after_s


def test_a_file_has_the_size_that_was_announced(uploads: Uploads) -> None:
    with uploads.begin("one", 3) as file:
        file.add(b"abc")
        with pytest.raises(InvalidArgument, match="more have arrived"):
            file.add(b"d")
    with uploads.begin("one", 3) as file:
        file.add(b"ab")
        with pytest.raises(InvalidArgument, match="2 of 3 bytes"):
            file.keep("")
    assert uploads.use().used == 0


class Machine(RuleBasedStateMachine):
    """Compares the files with a list of them in the order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.uploads = Uploads("uploads", 10 * FILE_BYTES, 0.5, self.clock)
        self.incoming: list[IncomingFile] = []
        self.held: list[UploadedFile] = []

    accounts = st.sampled_from(["one", "two", "three"])
    sizes = st.integers(1, 4 * FILE_BYTES)

    def is_within(self, account: str, more: int = 0) -> bool:
        """Whether the account may have so many more bytes that arrive or are read."""
        pinned = {name: num_bytes for name, (num_bytes, _) in self.uploads.sizes().items()}
        own = pinned.pop(account, 0)
        return own + more <= limit_of(self.uploads.capacity, sum(pinned.values()), 0.5)

    def has_room(self, account: str, more: int) -> bool:
        """Whether idle files of the account, and of larger ones, leave room for so many bytes."""
        sizes, used = self.uploads.sizes(), self.uploads.use().used
        own = sizes.get(account, (0, []))[0]
        for name, (pinned, idle) in sizes.items():
            num_bytes = pinned + sum(idle)
            for each in idle:
                if name == account or num_bytes >= own:
                    used -= each
                    num_bytes -= each
        return used + more <= self.uploads.capacity

    @rule(account=accounts, size=sizes)
    def begin(self, account: str, size: int) -> None:
        more = size + ENTRY_BYTES
        before = self.uploads.sizes()
        fits = self.is_within(account, more) and self.has_room(account, more)
        try:
            self.incoming.append(self.uploads.begin(account, size))
        except ShareExceeded:
            assert self.uploads.sizes() == before, "nothing is deleted"
            assert not fits
            return
        assert fits
        after = self.uploads.sizes()
        own = after[account][0] + sum(after[account][1]) - more
        for name, (pinned, idle) in before.items():
            if name != account and len(after.get(name, (0, []))[1]) < len(idle):
                assert pinned + sum(idle) >= own, "a smaller account has lost files"

    @precondition(lambda self: self.incoming)
    @rule(data=st.data(), name=st.sampled_from("abcd"), salt=st.sampled_from(["", "s"]))
    def end(self, data: st.DataObject, name: str, salt: str) -> None:
        index = data.draw(st.integers(0, len(self.incoming) - 1))
        with self.incoming.pop(index) as file:
            file.add(content(name, file.size))
            file.keep(salt)

    @precondition(lambda self: self.incoming)
    @rule()
    def give_up(self) -> None:
        with self.incoming.pop(0):
            pass

    @rule(account=accounts, size=sizes, name=st.sampled_from("abcd"))
    def upload_and_hold(self, account: str, size: int, name: str) -> None:
        with suppress(ShareExceeded):
            found = self.uploads.hold(upload(self.uploads, account, name, size=size))
            assert found is not None, "it was uploaded a moment ago"
            self.held.append(found)
            own = self.uploads.sizes()[account][0]
            assert found.num_holders > 1 or own == found.num_bytes or self.is_within(account)

    @precondition(lambda self: self.held)
    @rule(again=st.booleans())
    def let_go(self, again: bool) -> None:
        file = self.held.pop(0)
        if again:
            found = self.uploads.hold(file.key)
            assert found is file, "a request reads it"
            self.held.append(file)
        self.uploads.let_go(file)

    @rule(seconds=st.integers(0, int(IDLE_SECONDS)))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds
        self.uploads.expire()

    @invariant()
    def holds(self) -> None:
        self.uploads.check_integrity()
        for file in self.held:
            assert file.num_holders == self.held.count(file)

    def teardown(self) -> None:
        for incoming in self.incoming:
            with incoming:
                pass
        for file in self.held:
            self.uploads.let_go(file)
        self.clock.now_s += IDLE_SECONDS
        self.uploads.expire()
        assert self.uploads.use().used == 0


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
test_any_sequence_of_uploads_and_uses = Machine.TestCase
