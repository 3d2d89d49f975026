"""The memory and the operations of attention in a native program, of all layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inference_svc.backends.native.buffers import StepArrays
from inference_svc.model.description import Decoder
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.operations import Attend, Op
from kernels.attention.kv_cache import KVCache
from kernels.attention.native import NativeAttention
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.native.library import NativeOp


class NativeAttentions:
    """Layers of one shape share their workspace; layers of one window, too, their work items."""

    def __init__(self, decoder: Decoder, kv_caches: KVCaches, step: StepArrays) -> None:
        self._kv_caches = kv_caches
        self._scratches: dict[AttentionShape, AttentionScratch] = {}
        self._attention: dict[tuple[AttentionShape, int | None], NativeAttention] = {}
        for layer, attention in decoder.attention_of.items():
            cache, _ = kv_caches.of(layer)
            shape, window = AttentionShape.of(cache, attention.num_heads), attention.window
            if shape not in self._scratches:
                self._scratches[shape] = AttentionScratch(shape)
            if (shape, window) not in self._attention:
                scratch = self._scratches[shape]
                made = NativeAttention(cache, step.rows, scratch, window)
                self._attention[shape, window] = made

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
        shape = AttentionShape.of(cache, attention.num_heads)
        return self._attention[shape, attention.window].attend_op(
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
