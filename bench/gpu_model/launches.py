"""Lists the launches of a step on a GPU without one, on torch's `meta` device, whose tensors have
shapes and no content.

This shows all of a step between its inputs and its logits: a dispatch mode sees torch's operations,
and stand-ins replace Triton's kernels. An operation that would wait for a device, or read the
host's memory, raises.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention import triton_kernels as attention
from kernels.dispatch import interpreted
from kernels.elementwise import triton_kernels as elementwise
from kernels.experts import triton_kernels as experts
from kernels.lora import triton_kernels as lora
from kernels.quantised import triton_kernels as quantised
from kernels.recurrence import triton_kernels as recurrence
from kernels.replaced import triton_kernels as replaced
from kernels.streams import HostStream

META = torch.device("meta")
COMPUTE = "compute"
MODULES: tuple[ModuleType, ...] = (
    attention,
    elementwise,
    experts,
    lora,
    quantised,
    recurrence,
    replaced,
)
FREE = {"empty", "detach", "t", "view", "_unsafe_view", "slice", "split", "split_with_sizes"}
FREE |= {"empty_like", "flatten", "unflatten", "reshape", "alias", "select", "transpose", "view_as"}
FREE |= {"as_strided", "chunk", "expand", "squeeze", "unsqueeze", "permute", "unbind", "new_empty"}
"""Operations of torch that launch nothing."""
WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static"}
WAITING |= {"masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operations of torch that wait for the device, because the host needs a value or a count."""


class NotCapturable(Exception):
    """Raised for an operation that no recorded graph can hold."""


class Launch(NamedTuple):
    """The launch of one kernel. `grid` is None for torch's. `arguments` are Triton's by name, or
    torch's by position and name; `outputs` are the results of torch's operation."""

    name: str
    grid: tuple[int, ...] | None
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...] = ()
    stream: str = COMPUTE
    """The field of `Streams`; `COMPUTE` has the step's critical path."""
    place: int = 0
    """How many launches its stream has before it."""
    after: Mapping[str, int] = MappingProxyType({})
    """By stream, how many launches have ended when it begins."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the launch reads and writes, except `outputs`."""
        return list(tensors_in(self.arguments.values()))

    def may_overlap(self, other: Launch) -> bool:
        """Returns whether nothing orders the two."""
        return not (self._follows(other) or other._follows(self))

    def _follows(self, other: Launch) -> bool:
        return self.after.get(other.stream, 0) > other.place


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among values, also within lists, tuples and dicts. torch's own functions
    for trees would take most of the time of a traced step."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


Note = Callable[[Launch], None]


@dataclass
class Noted:
    """The launches of a step in order, and the memory that the step has allocated."""

    launches: list[Launch] = field(default_factory=list)
    allocated: dict[int, int] = field(default_factory=dict)
    """The number of each allocation, in order, by `storage_id`."""
    _kept: list[Tensor] = field(default_factory=list)
    """Tensors kept so that no other tensor gets their id."""
    _current: str = COMPUTE
    _ended: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For each stream, how many launches of each have ended when its next launch begins."""

    @property
    def critical(self) -> list[Launch]:
        """The launches of the critical path."""
        return [launch for launch in self.launches if launch.stream == COMPUTE]

    def add(self, launch: Launch) -> None:
        """Adds a launch on the current stream."""
        stream = self._current
        ended = self._ended[stream]
        self.launches.append(
            launch._replace(stream=stream, place=ended[stream], after=Counter(ended))
        )
        ended[stream] += 1

    @contextmanager
    def enter(self, stream: HostStream) -> Iterator[None]:
        """Within the context, launches are on `stream`."""
        before, self._current = self._current, stream.name
        try:
            yield
        finally:
            self._current = before

    def wait(self, stream: HostStream, other: HostStream) -> None:
        """Orders later launches of `stream` after all launches of `other` so far."""
        self._ended[stream.name] |= self._ended[other.name]

    def add_allocated(self, before: list[Tensor], after: list[Tensor]) -> None:
        """Adds an operation's results that have new memory."""
        known = {storage_id(tensor) for tensor in before}
        for tensor in after:
            if storage_id(tensor) not in known and tensor.device == META:
                self.allocated.setdefault(storage_id(tensor), len(self.allocated))
                self._kept.append(tensor)


def storage_id(tensor: Tensor) -> int:
    """Returns an id that is equal for tensors that share memory; on `meta`, addresses are not."""
    return tensor.untyped_storage()._cdata


class _TorchLaunches(TorchDispatchMode):
    """Records torch's operations."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self._noted = noted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled: without torch's wrapper a step is traced in four fifths of the
        time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        arguments = {str(index): each for index, each in enumerate(args)} | kwargs
        launch = Launch(name, None, arguments)
        tensors = launch.tensors
        devices = {tensor.device for tensor in tensors}
        is_launched = name not in FREE and (META in devices or kwargs.get("device") == META)
        if is_launched:
            _check(launch, func)
        result = func(*args, **kwargs)
        outputs = list(tensors_in((result,)))
        self._noted.add_allocated(tensors, outputs)
        if is_launched:
            self._noted.add(launch._replace(outputs=tuple(outputs)))
        return result


def _check(launch: Launch, func: Any) -> None:
    """Raises NotCapturable for an operation that waits for the device, or reads memory of the host,
    which has changed or is freed when the step is replayed."""
    name, tensors = launch.name, launch.tensors
    indexes = launch.arguments.get("1") if name in ("index", "index_put", "index_put_") else None
    if name in WAITING or any(i is not None and i.dtype == torch.bool for i in indexes or ()):
        raise NotCapturable(f"{func} waits for the device")
    if launch.arguments.get("device", META) != META:
        raise NotCapturable(f"{func} copies to the host and waits for it")
    if any(tensor.device != META for tensor in tensors):
        raise NotCapturable(f"{func} reads or writes the host's memory")


class _NotedKernel:
    """Replaces a kernel: records launches, and computes nothing."""

    def __init__(self, name: str, parameters: list[str], note: Note) -> None:
        self._name, self._parameters, self._note = name, parameters, note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
            self._note(Launch(self._name, tuple(grid), arguments))

        return launch


@contextmanager
def noted_kernels(note: Note) -> Iterator[None]:
    """Replaces Triton's kernels within the context: launches on any device call `note`, and compute
    nothing."""
    places = [(m, n, k) for m in MODULES for n, k in vars(m).items() if n.endswith("_kernel")]
    for module, name, kernel in places:
        setattr(module, name, _NotedKernel(name, kernel.arg_names, note))
    try:
        with interpreted():
            yield
    finally:
        for module, name, kernel in places:
            setattr(module, name, kernel)


@contextmanager
def launches() -> Iterator[Noted]:
    """Records all launches within the context."""
    noted = Noted()

    def note(launch: Launch) -> None:
        if any(tensor.device != META for tensor in launch.tensors):
            raise NotCapturable(f"{launch.name} reads or writes the host's memory")
        noted.add(launch)

    with noted_kernels(note), _noted_streams(noted), _TorchLaunches(noted):
        yield noted


@contextmanager
def _noted_streams(noted: Noted) -> Iterator[None]:
    """Within the context, streams of the host record their launches and waits."""

    def enter(stream: HostStream) -> AbstractContextManager[None]:
        return noted.enter(stream)

    def wait(stream: HostStream, other: HostStream) -> None:
        noted.wait(stream, other)

    with (
        mock.patch.object(HostStream, "entered", enter),
        mock.patch.object(HostStream, "wait_stream", wait),
    ):
        yield
