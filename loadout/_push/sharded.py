"""Tensors that are sharded over the ranks of a training run: all take part, the first one sends.

All ranks have to gather a tensor at the same time. The first rank announces the tensor that its
upload needs next, and at the end the outcome of the push; the others follow. So they stay together
even if an upload is retried or ends in the middle, and all raise the same error.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from loadout._push.tensors import Read, Tensor, in_order, is_sharded, read
from loadout.errors import InvalidArgument, LoadoutError

_GATHER, _END = "gather", "end"


class Ranks:
    """The ranks of one push. `group` is a process group of torch.distributed, None for all ranks.
    The methods are collective."""

    def __init__(self, group: Any = None) -> None:
        """Raises InvalidArgument if torch.distributed is not initialised."""
        torch = importlib.import_module("torch")  # whose tensors they are
        self._distributed = torch.distributed
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise InvalidArgument(
                "tensors: a sharded tensor (DTensor) or a group needs torch.distributed, which is "
                "not initialised",
                code="INVALID_ARGUMENT",
                subject="tensors",
            )
        self._group = group
        self._one_at_a_time = threading.Lock()
        self._has_ended = False
        # Threads begin on the first device, where it may be another rank's.
        is_on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.cuda.current_device() if is_on_cuda else None
        self._on_device = lambda: nullcontext() if device is None else torch.cuda.device(device)
        self._first = torch.distributed.get_global_rank(group, 0) if group is not None else 0

    @property
    def is_first(self) -> bool:
        return self._distributed.get_rank() == self._first

    def agree(self, tensors: Sequence[Tensor], error: Exception | None) -> None:
        """Raises, on all ranks, the first error that one has found before anything is sent; also
        that they do not have the same tensors."""
        told = None if error is None else _told(error, self._distributed.get_rank(self._group))
        own = [(each.name, each.dtype, each.shape) for each in in_order(tensors)]
        found: list[Any] = [None] * self._distributed.get_world_size(self._group)
        with self._on_device():
            self._distributed.all_gather_object(found, (told, own), group=self._group)
        for other, _ in found:
            if other is not None:
                raise other
        for rank, (_, theirs) in enumerate(found):
            if theirs != found[0][1]:
                different = set(map(str, theirs)) ^ set(map(str, found[0][1]))
                raise InvalidArgument(
                    f"tensors: rank {rank} and rank 0 have different tensors: {min(different)}",
                    code="INVALID_ARGUMENT",
                    subject="tensors",
                )

    def reader(self, tensors: Sequence[Tensor]) -> Read:
        """Returns a function that reads tensors on the first rank, in any thread. The function
        raises LoadoutError after `end`."""
        places = {id(each.values): place for place, each in enumerate(in_order(tensors))}

        def read_whole(values: Any) -> memoryview:
            if not is_sharded(values):
                return read(values)
            with self._one_at_a_time, self._on_device():
                if self._has_ended:  # gRPC reads on for a moment after a call has failed
                    raise LoadoutError("the push has ended", code="CANCELLED")
                self._say((_GATHER, places[id(values)]))
                return read(_gather(values))

        return read_whole

    def follow(self, tensors: Sequence[Tensor]) -> Any:
        """Gathers with the first rank until the push ends. Returns its result, or raises its
        error."""
        ordered = in_order(tensors)
        with self._on_device():
            while True:
                what, subject = self._say(None)
                if what == _END:
                    return _result_of(subject)
                _gather(ordered[subject].values)

    def end(self, result: Any, error: BaseException | None) -> None:
        """Sends the outcome to the other ranks. The first rank calls it once."""
        told = None if error is None else _told(error, 0)
        with self._one_at_a_time, self._on_device():
            self._has_ended = True
            self._say((_END, (result, told)))

    def _say(self, message: Any) -> Any:
        """Returns the first rank's message on all."""
        box = [message]
        self._distributed.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]


def _told(error: BaseException, rank: int) -> LoadoutError:
    """Returns the error as the other ranks raise it."""
    if isinstance(error, LoadoutError):
        return error
    text = "".join(traceback.format_exception_only(error)).strip()
    return LoadoutError(f"rank {rank} failed: {text}", code="CANCELLED")


def _gather(values: Any) -> Any:
    """Returns the whole tensor, on all ranks."""
    return values.detach().full_tensor()


def _result_of(outcome: tuple[Any, LoadoutError | None]) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result
