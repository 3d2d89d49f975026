"""Files of pictures that callers have uploaded, so that their requests name them by their hashes.

Only the file's bytes are kept: its pixels take many times as much, and requests that use it decode
it. A file belongs to an account and a salt; for others it does not exist.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from servicekit.errors import InvalidArgument, ShareExceeded
from servicekit.shares import RETRY_SECONDS, PlaceUse, limit_of

MAX_FILE_BYTES = 32 << 20
"""The largest file: eight times a request."""
HASH_BYTES = 32
ENTRY_BYTES = 4 << 10
"""The memory that a file counts as in addition to its bytes, so that small files are few."""
IDLE_SECONDS = 3600.0
"""How long a file is kept without use."""
SETTING = "--prompt-image-memory"


def room_for_uploads(num_bytes: int) -> int:
    """Returns the memory for files where embeddings, and pixels, have so many bytes each."""
    return num_bytes // 2


class UploadKey(NamedTuple):
    """Says which file a request may name."""

    account: str
    cache_salt: str
    sha256: bytes


@dataclass(eq=False, slots=True)
class UploadedFile:
    """A file, which `num_holders` requests read now; the last one let go of it at `used_s`."""

    key: UploadKey
    data: memoryview = field(repr=False)
    used_s: float = 0.0
    num_holders: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.data) + ENTRY_BYTES


@dataclass(slots=True)
class _Account:
    """The bytes of an account's files, also while they arrive; and the `idle` files, which no
    request reads, in the order of their last use, and their bytes."""

    num_bytes: int = 0
    num_idle_bytes: int = 0
    idle: OrderedDict[UploadKey, None] = field(default_factory=OrderedDict)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes that arrive, or that requests read."""
        return self.num_bytes - self.num_idle_bytes


class Uploads:
    """Files within `capacity` bytes, of which one account has at most a `share`. What arrives for
    it, or is read by its requests, is at most a `share` of the part that others' such files leave,
    or one file that is read. If there is no room, the account with the most bytes loses its least
    recently used file. A file that a request reads stays. Thread-safe."""

    def __init__(
        self,
        name: str,
        capacity: int,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self._share = share
        self._most = limit_of(capacity, 0, share)
        self._clock = clock
        # A request may be collected, and let go of its files, while this thread has the lock.
        self._lock = threading.RLock()
        self._files: dict[UploadKey, UploadedFile] = {}
        self._accounts: dict[str, _Account] = {}
        self._used = 0
        self._num_refused = 0

    def use(self) -> PlaceUse:
        with self._lock:
            return PlaceUse(self.name, self.capacity, self._used, 0, self._num_refused)

    def begin(self, account: str, size: int) -> IncomingFile:
        """Returns the room for a file, as a context. Raises InvalidArgument for a size that no file
        may have, and ShareExceeded."""
        if not 0 < size <= MAX_FILE_BYTES:
            raise InvalidArgument(
                f"upload.size_bytes must be from 1 to {MAX_FILE_BYTES}, not {size}: send a smaller "
                "image",
                subject="upload.size_bytes",
            )
        with self._lock:
            self.expire()
            num_bytes = size + ENTRY_BYTES
            self._make_room(account, num_bytes)
            incoming = IncomingFile(self, account, size)  # which may find no memory
            self._add(account, num_bytes)
        return incoming

    def hold(self, key: UploadKey) -> UploadedFile | None:
        """Returns a file, which stays until `let_go`; None if nobody has uploaded it. Raises
        ShareExceeded."""
        with self._lock:
            self.expire()
            found = self._files.get(key)
            if found is not None:
                # Its only one takes no room, and is read whatever others do.
                if not found.num_holders and self._accounts[key.account].num_pinned_bytes:
                    self._check_pinned(key.account, found.num_bytes)
                self._take_out(found)
                found.num_holders += 1
            return found

    def let_go(self, file: UploadedFile) -> None:
        """Ends a request's use of a file. Once for each `hold`."""
        with self._lock:
            file.num_holders -= 1
            if not file.num_holders:
                self._put_last(file)

    def expire(self) -> None:
        """Deletes files that no request has used for IDLE_SECONDS."""
        with self._lock:
            end_s = self._clock() - IDLE_SECONDS
            for account in tuple(self._accounts.values()):
                while account.idle:
                    first = self._files[next(iter(account.idle))]
                    if first.used_s > end_s:
                        break
                    self._drop(first)

    def sizes(self) -> dict[str, tuple[int, list[int]]]:
        """Returns each account's bytes that arrive or are read, and those of each of its other
        files, in the order of their last use. For tests."""
        with self._lock:
            return {
                name: (each.num_pinned_bytes, [self._files[key].num_bytes for key in each.idle])
                for name, each in self._accounts.items()
            }

    def check_integrity(self) -> None:
        """Asserts that all sums agree, and that idle files are in the order of their last use."""
        with self._lock:
            assert self._used == sum(each.num_bytes for each in self._accounts.values())
            assert self._used <= self.capacity
            held: dict[str, int] = {}
            for key, file in self._files.items():
                assert file.key == key
                assert hashlib.sha256(file.data).digest() == key.sha256
                assert file.num_holders >= 0
                is_idle = key in self._accounts[key.account].idle
                assert is_idle == (file.num_holders == 0)
                held[key.account] = held.get(key.account, 0) + file.num_bytes
            for name, account in self._accounts.items():
                assert held.get(name, 0) <= account.num_bytes <= self._most
                assert account.num_bytes > 0, "an account without files"
                idle = [self._files[key] for key in account.idle]
                assert account.num_idle_bytes == sum(each.num_bytes for each in idle)
                times = [each.used_s for each in idle]
                assert times == sorted(times)

    # With the lock held.

    def _make_room(self, account: str, num_bytes: int) -> None:
        """Deletes files until there is room for so many more bytes. Raises ShareExceeded, and
        deletes nothing then."""
        if num_bytes > self._most:
            raise self._exceeded(
                f"a file of {num_bytes} bytes is more than the {self._most} that one tenant may "
                f"have ({SETTING}): send a smaller image"
            )
        self._check_pinned(account, num_bytes)
        for file in self._victims(account, num_bytes):
            self._drop(file)

    def _check_pinned(self, account: str, num_bytes: int) -> None:
        """Raises ShareExceeded if so many more bytes cannot arrive, or be read, for an account."""
        pinned = sum(each.num_pinned_bytes for each in self._accounts.values())
        own = self._accounts.get(account, _Account()).num_pinned_bytes
        most = limit_of(self.capacity, pinned - own, self._share)
        if own + num_bytes > most:
            raise self._exceeded(
                f"{own} of the {most} bytes that one tenant may use now ({SETTING}) arrive, or are "
                "being read by requests: try again later",
                RETRY_SECONDS,
            )

    def _victims(self, account: str, num_bytes: int) -> list[UploadedFile]:
        """Returns the files to delete for so many more bytes. Raises ShareExceeded where only
        accounts that are smaller than this one could lose files."""
        own = self._accounts.get(account, _Account())
        own_bytes, own_idle = own.num_bytes, iter(own.idle)
        excess = self._used + num_bytes - self.capacity
        victims: list[UploadedFile] = []
        while own_bytes + num_bytes > self._most:  # idle files suffice: the others are checked
            victims.append(self._files[next(own_idle)])
            own_bytes -= victims[-1].num_bytes
            excess -= victims[-1].num_bytes
        if excess <= 0:
            return victims
        others = [
            (-each.num_bytes, name, iter(each.idle))
            for name, each in self._accounts.items()
            if name != account
        ]
        largest = [*others, (-own_bytes, account, own_idle)]
        heapq.heapify(largest)
        while excess > 0:
            size, name, idle = largest[0]
            if -size < own_bytes:
                raise self._exceeded(
                    f"{own_bytes} of this tenant's bytes ({SETTING}) arrive, or are being read by "
                    "requests, and no larger tenant can lose any: try again later",
                    RETRY_SECONDS,
                )
            key = next(idle, None)
            if key is None:
                heapq.heappop(largest)
                continue
            victims.append(self._files[key])
            excess -= victims[-1].num_bytes
            size += victims[-1].num_bytes
            if name == account:
                own_bytes = -size
            heapq.heapreplace(largest, (size, name, idle))
        return victims

    def _exceeded(self, why: str, retry_after_s: float = 0.0) -> ShareExceeded:
        self._num_refused += 1
        message = f"{self.name}: {why}"
        return ShareExceeded(message, subject=self.name, retry_after_s=retry_after_s)

    def _add(self, account: str, num_bytes: int) -> None:
        found = self._accounts.setdefault(account, _Account())
        found.num_bytes += num_bytes
        self._used += num_bytes
        if not found.num_bytes:
            del self._accounts[account]

    def _drop(self, file: UploadedFile) -> None:
        assert not file.num_holders, "a request reads it"
        self._take_out(file)
        del self._files[file.key]
        self._add(file.key.account, -file.num_bytes)

    def _take_out(self, file: UploadedFile) -> None:
        """Takes a file out of the idle files, if it is there."""
        account = self._accounts[file.key.account]
        if file.key in account.idle:
            del account.idle[file.key]
            account.num_idle_bytes -= file.num_bytes

    def _put_last(self, file: UploadedFile) -> None:
        """Makes a file idle, and the last in the order of use."""
        account = self._accounts[file.key.account]
        file.used_s = self._clock()
        account.idle[file.key] = None
        account.num_idle_bytes += file.num_bytes

    # For files that arrive.

    def _keep(self, key: UploadKey, data: memoryview) -> bool:
        """Keeps a file in the room that it has. Returns False if it is there already."""
        with self._lock:
            found = self._files.get(key)
            if found is None:
                self._files[key] = file = UploadedFile(key, data)
                self._put_last(file)
                return True
            if not found.num_holders:
                self._take_out(found)
                self._put_last(found)
            return False

    def _give_back(self, account: str, size: int) -> None:
        with self._lock:
            self._add(account, -size - ENTRY_BYTES)


class IncomingFile:
    """A file that arrives, in the room that it has. The context gives the room back unless the file
    is kept."""

    def __init__(self, uploads: Uploads, account: str, size: int) -> None:
        self.size = size
        self.num_received = 0
        self._uploads = uploads
        self._account = account
        self._data: bytearray | None = bytearray(size)
        self._hash = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        """Adds the next bytes. Raises InvalidArgument for more than the file has."""
        assert self._data is not None, "it arrives"
        end = self.num_received + len(chunk)
        if end > self.size:
            raise InvalidArgument(
                f"chunk: the file has {self.size} bytes (upload.size_bytes), and more have arrived",
                subject="chunk",
            )
        self._data[self.num_received : end] = chunk
        self._hash.update(chunk)
        self.num_received = end

    def keep(self, cache_salt: str) -> bytes:
        """Keeps the file, and returns its hash. Raises InvalidArgument if it is not all there."""
        if self.num_received < self.size:
            raise InvalidArgument(
                f"chunk: {self.num_received} of {self.size} bytes (upload.size_bytes) have "
                "arrived: upload the image again",
                subject="chunk",
            )
        data, self._data = self._data, None
        assert data is not None, "it is kept once"
        key = UploadKey(self._account, cache_salt, self._hash.digest())
        if not self._uploads._keep(key, memoryview(data).toreadonly()):
            self._uploads._give_back(self._account, self.size)
        return key.sha256

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._data is not None:
            self._data = None
            self._uploads._give_back(self._account, self.size)
