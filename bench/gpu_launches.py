"""What a step on a GPU launches, without one: on torch's `meta` device, whose tensors have shapes
and nothing in them.

All that a step does between its inputs and its logits can be seen there: operations of torch by a
dispatch mode, Triton's kernels by what stands in their place. What would wait for a device, or read
the host's memory, raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.attention import triton_kernels as attention
from kernels.dispatch import interpreted
from kernels.elementwise import triton_kernels as elementwise
from kernels.experts import triton_kernels as experts
from kernels.lora import triton_kernels as lora
from kernels.replaced import triton_kernels as replaced

META = torch.device("meta")
MODULES: tuple[ModuleType, ...] = (attention, elementwise, experts, lora, replaced)
FREE = {"empty", "detach", "t", "view", "_unsafe_view", "slice", "split", "split_with_sizes"}
FREE |= {"empty_like", "flatten", "unflatten", "reshape", "alias", "select", "transpose", "view_as"}
FREE |= {"as_strided", "chunk", "expand", "squeeze", "unsqueeze", "permute", "unbind", "new_empty"}
"""Operations of torch that launch nothing."""
WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static"}
WAITING |= {"masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operations of torch that wait for the device: the host needs a value, or how many there are."""


class NotCapturable(Exception):
    """Raised where a step does what no recording can hold."""


class Launch(NamedTuple):
    """One kernel. `grid` is None for torch's. `arguments` are Triton's by name, or torch's by
    position and name; `outputs` what torch's operation returns."""

    name: str
    grid: tuple[int, ...] | None
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """What it reads and writes, other than `outputs`."""
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]


Note = Callable[[Launch], None]


@dataclass
class Noted:
    """The launches of a step in order, and the memory that it has allocated."""

    launches: list[Launch] = field(default_factory=list)
    allocated: dict[int, int] = field(default_factory=dict)
    """The how manieth it is, by `storage_id`."""
    _kept: list[Tensor] = field(default_factory=list)
    """As long as they are here no other tensor gets an id of theirs."""

    def add_allocated(self, before: list[Tensor], after: list[Tensor]) -> None:
        """Takes from an operation's arguments and results what is new."""
        known = {storage_id(tensor) for tensor in before}
        for tensor in after:
            if storage_id(tensor) not in known and tensor.device == META:
                self.allocated.setdefault(storage_id(tensor), len(self.allocated))
                self._kept.append(tensor)


def storage_id(tensor: Tensor) -> int:
    """Returns the same for tensors that share memory; on `meta` addresses do not tell."""
    return tensor.untyped_storage()._cdata


class _TorchLaunches(TorchDispatchMode):
    """Notes torch's operations."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        arguments = {str(index): each for index, each in enumerate(args)} | kwargs
        launch = Launch(name, None, arguments)
        devices = {tensor.device for tensor in launch.tensors}
        is_launched = name not in FREE and (META in devices or kwargs.get("device") == META)
        if is_launched:
            _check(launch, func)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._noted.add_allocated(launch.tensors, outputs)
        if is_launched:
            self._noted.launches.append(launch._replace(outputs=tuple(outputs)))
        return result


def _check(launch: Launch, func: Any) -> None:
    """Raises NotCapturable for what waits for the device, or would read memory of the host, which a
    replay finds changed or freed."""
    name, tensors = launch.name, launch.tensors
    indexes = launch.arguments.get("1") if name in ("index", "index_put", "index_put_") else None
    if name in WAITING or any(i is not None and i.dtype == torch.bool for i in indexes or ()):
        raise NotCapturable(f"{func} waits for the device")
    if launch.arguments.get("device", META) != META:
        raise NotCapturable(f"{func} copies to the host and waits for it")
    if any(tensor.device != META for tensor in tensors):
        raise NotCapturable(f"{func} reads or writes the host's memory")


class _NotedKernel:
    """Stands for a kernel: tells of launches, and computes nothing."""

    def __init__(self, name: str, parameters: list[str], note: Note) -> None:
        self._name, self._parameters, self._note = name, parameters, note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
            self._note(Launch(self._name, tuple(grid), arguments))

        return launch


@contextmanager
def noted_kernels(note: Note) -> Iterator[None]:
    """Meanwhile Triton's kernels are launched on every device; `note` is told, and they compute
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
    """Meanwhile all that is launched is noted."""
    noted = Noted()

    def note(launch: Launch) -> None:
        if any(tensor.device != META for tensor in launch.tensors):
            raise NotCapturable(f"{launch.name} reads or writes the host's memory")
        noted.launches.append(launch)

    with noted_kernels(note), _TorchLaunches(noted):
        yield noted
