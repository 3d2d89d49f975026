"""The memory and the operations of attention in a native program, of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from inference_svc.backends.native.buffers import StepArrays
from inference_svc.model.description import Attention, Decoder
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.operations import Attend, Op
from kernels.attention.kv_cache import KVCache
from kernels.attention.native import NativeAttention
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.native.library import NativeOp


class _Kind(NamedTuple):
    """The layers whose queries see the same positions."""

    shape: AttentionShape
    window: int | None
    only_looks_back: bool

    @classmethod
    def of(cls, attention: Attention, cache: KVCache) -> _Kind:
        shape = AttentionShape.of(cache, attention.num_heads)
        return cls(shape, attention.window, attention.only_looks_back)


class NativeAttentions:
    """Layers of one shape share their workspace; layers of one kind, too, their work items."""

    def __init__(self, decoder: Decoder, kv_caches: KVCaches, step: StepArrays) -> None:
        self._kv_caches = kv_caches
        self._scratches: dict[AttentionShape, AttentionScratch] = {}
        self._attention: dict[_Kind, NativeAttention] = {}
        for layer, attention in decoder.attention_of.items():
            cache, _ = kv_caches.of(layer)
            kind = _Kind.of(attention, cache)
            if kind.shape not in self._scratches:
                self._scratches[kind.shape] = AttentionScratch(kind.shape)
            if kind not in self._attention:
                rows = replace(step.rows, ends=None) if kind.only_looks_back else step.rows
                scratch = self._scratches[kind.shape]
                self._attention[kind] = NativeAttention(cache, rows, scratch, kind.window)

    def items_ops(self) -> Iterator[NativeOp]:
        """Yields the operations that cut a step into work items: before any `attend_op`."""
        return (each.items_op() for each in self._attention.values())

    def cache_of(self, op: Op) -> tuple[KVCache, int]:
        """Returns the cache of an operation's layer, and which of its layers that is."""
        assert op.layer is not None
        return self._kv_caches.of(op.layer)

    def attend_op(self, op: Attend, qkv: Tensor, out: Tensor, sinks: Tensor | None) -> NativeOp:
        """qkv: [T, at least q_size], out: [T, q_size], sinks: fp32 [heads]."""
        (cache, layer), attention = self.cache_of(op), op.attention
        return self._attention[_Kind.of(attention, cache)].attend_op(
            qkv,
            out,
            layer,
            scale=attention.scale,
            softcap=attention.softcap,
            sinks=sinks,
        )

    @property
    def num_bytes(self) -> int:
        scratches = sum(each.num_bytes for each in self._scratches.values())
        return scratches + sum(each.num_bytes for each in self._attention.values())
