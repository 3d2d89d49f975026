"""llama.cpp in this process, in its own environment (see `bench.peers.install`).

It computes all requests in one batch, a prompt's tokens or one token of each per step, as its
server does, through the functions of its C library. An adapter applies to a whole batch, so
requests of different adapters are computed one adapter after the other, as its server does.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np

from bench.systems.protocol import CLOCKS, Ask, Done, Job, Spec

BATCH_TOKENS = 512
"""llama.cpp's own default of tokens in one step."""
WARM_UP_STEPS = 8


class Entry(NamedTuple):
    """A token to compute, and whether the next one is wanted."""

    token: int
    position: int
    sequence: int
    is_wanted: bool


@dataclass(slots=True)
class Track:
    """A request in one sequence of the context."""

    ask: Ask
    number: int
    position: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.ask.max_tokens

    def next_tokens(self, room: int) -> list[int]:
        """Returns the tokens to compute next, at most `room`."""
        if self.position < len(self.ask.prompt):
            return self.ask.prompt[self.position : self.position + room]
        return self.tokens[-1:][:room]


class LlamaCppSystem:
    """llama.cpp with a GGUF file: the option `gguf`, or the file that the model's folder was made
    of. The option `loras` has files of adapters by name.

    One context computes everything, and adapters are changed between its batches. With the option
    `has_contexts` each adapter of a job has a context of its own, whose plans of memory stay.
    """

    def load(self, spec: Spec) -> dict[str, str]:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        path = spec.options.get("gguf") or next(
            Path(spec.model_dir).with_name("gguf").glob("*.gguf")
        )
        self._spec = spec
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._contexts = {"": self._make_context(spec.max_sequences)}
        self._has_contexts = bool(spec.options.get("has_contexts"))
        self._clock = CLOCKS[spec.options.get("clock", "wall")]
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._adapters = {
            name: self._load_adapter(file) for name, file in spec.options.get("loras", {}).items()
        }
        self._tracks: list[Track] = []
        info = llama_cpp.llama_print_system_info().decode()
        return {"llama_cpp_python": llama_cpp.__version__, "kernels": info}

    def _make_context(self, num_sequences: int) -> llama_cpp.llama_context_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._spec.max_len * num_sequences
        params.n_seq_max = num_sequences
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._spec.num_threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp makes no context")
        return context

    def _load_adapter(self, file: str) -> llama_cpp.llama_adapter_lora_p:
        adapter = llama_cpp.llama_adapter_lora_init(self._model, file.encode())
        if not adapter:
            raise RuntimeError(f"llama.cpp cannot load the adapter {file}")
        return adapter

    def register(self, name: str, folder: str) -> None:
        raise NotImplementedError("this comparison is of the base model")

    def set_resident(self, names: list[str]) -> None:
        assert not names, "this comparison is of the base model"

    def run(self, job: Job) -> Done:
        self._begin(job)
        began_s = time.perf_counter()
        while waiting := [track for track in self._tracks if not track.is_done]:
            self._step(waiting)
        seconds = time.perf_counter() - began_s
        return Done(seconds, sum(len(track.tokens) for track in self._tracks))

    def start(self, job: Job) -> None:
        self._begin(job)
        while not all(track.tokens for track in self._tracks):
            self._step(self._tracks)
        self.step(WARM_UP_STEPS)

    def step(self, count: int) -> list[float]:
        moments = [self._clock()]
        for _ in range(count):
            self._step(self._tracks)
            moments.append(self._clock())
        return [after - before for before, after in pairwise(moments)]

    def outputs(self) -> list[list[int]]:
        return [track.tokens for track in self._tracks]

    def choices(self, job: Job, outputs: list[list[int]]) -> list[list[int]]:
        """Returns the token that follows in each place of each output, by the highest logit, after
        the prompt and the tokens of the output before it."""
        self._begin(job)
        found = []
        for track, output in zip(self._tracks, outputs, strict=True):
            ask = track.ask
            known = [*ask.prompt, *output[:-1]]
            first = len(ask.prompt) - 1
            entries = [
                Entry(t, place, track.number, place >= first) for place, t in enumerate(known)
            ]
            found.append(self._decode(entries, ask.adapter))
        return found

    def _begin(self, job: Job) -> None:
        self._tracks = [Track(ask, number) for number, ask in enumerate(job.asks)]
        for name in [name for name in self._contexts if name]:
            llama_cpp.llama_free(self._contexts.pop(name))
        if self._has_contexts:
            counts = Counter(ask.adapter for ask in job.asks if ask.adapter)
            for name, count in counts.items():
                self._contexts[name] = self._make_context(count)
            numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
            for track in self._tracks:
                track.number = next(numbers[track.ask.adapter])
        memory = llama_cpp.llama_get_memory(self._contexts[""])
        llama_cpp.llama_memory_clear(memory, True)

    def _step(self, tracks: list[Track]) -> None:
        """Computes a batch for each adapter in use."""
        for adapter in dict.fromkeys(track.ask.adapter for track in tracks):
            self._compute([track for track in tracks if track.ask.adapter == adapter], adapter)

    def _context_with(self, name: str) -> llama_cpp.llama_context_p:
        """Returns the context of an adapter, or the common one, with only this adapter applied; ""
        is none. Nothing happens if it is applied already."""
        context = self._contexts[name if self._has_contexts else ""]
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)()
        if name:
            adapters[0] = self._adapters[name]
        scales = (ctypes.c_float * 1)(1.0)
        if llama_cpp.llama_set_adapters_lora(context, adapters, 1 if name else 0, scales):
            raise RuntimeError(f"llama.cpp does not apply the adapter {name}")
        return context

    def _compute(self, tracks: list[Track], adapter: str) -> None:
        """Computes one batch: first a token of each sequence that generates, then prompts."""
        entries: list[Entry] = []
        sampled: list[Track] = []
        for track in sorted(tracks, key=lambda track: not track.tokens):
            for token in track.next_tokens(BATCH_TOKENS - len(entries)):
                is_last = track.position + 1 == len(track.ask.prompt) + len(track.tokens)
                entries.append(Entry(token, track.position, track.number, is_last))
                track.position += 1
                if is_last:
                    sampled.append(track)
        for track, token in zip(sampled, self._decode(entries, adapter), strict=True):
            track.tokens.append(token)

    def _decode(self, entries: list[Entry], adapter: str) -> list[int]:
        """Returns the tokens with the highest logits after the entries that want them."""
        batch, context = self._batch, self._context_with(adapter)
        for index, entry in enumerate(entries):
            batch.token[index] = entry.token
            batch.pos[index] = entry.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = entry.sequence
            batch.logits[index] = entry.is_wanted
        batch.n_tokens = len(entries)
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        wanted = [index for index, entry in enumerate(entries) if entry.is_wanted]
        return [self._best(context, index) for index in wanted]

    def _best(self, context: llama_cpp.llama_context_p, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        for context in self._contexts.values():
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)


def make_system() -> LlamaCppSystem:
    return LlamaCppSystem()
