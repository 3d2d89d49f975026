"""llama.cpp in this process, in its own environment (see `bench.peers.install`).

It computes all requests in one batch, a prompt's tokens or one token of each per step, as its
server does, through the functions of its C library.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np

from bench.systems.protocol import Ask, Done, Job, Spec

BATCH_TOKENS = 512
"""llama.cpp's own default of tokens in one step."""


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
    """llama.cpp with the GGUF file that the model's folder was made of."""

    def load(self, spec: Spec) -> dict[str, str]:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        path = next(Path(spec.model_dir).with_name("gguf").glob("*.gguf"))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = spec.max_len * spec.max_sequences
        params.n_seq_max = spec.max_sequences
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = spec.num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        info = llama_cpp.llama_print_system_info().decode()
        return {"llama_cpp_python": llama_cpp.__version__, "kernels": info}

    def register(self, name: str, folder: str) -> None:
        raise NotImplementedError("this comparison is of the base model")

    def set_resident(self, names: list[str]) -> None:
        assert not names, "this comparison is of the base model"

    def run(self, job: Job) -> Done:
        assert not any(ask.adapter for ask in job.asks)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        tracks = [Track(ask, number) for number, ask in enumerate(job.asks)]
        began_s = time.perf_counter()
        while waiting := [track for track in tracks if not track.is_done]:
            self._step(waiting)
        seconds = time.perf_counter() - began_s
        return Done(seconds, sum(len(track.tokens) for track in tracks))

    def _step(self, tracks: list[Track]) -> None:
        """Computes one batch: first a token of each sequence that generates, then prompts."""
        batch, count = self._batch, 0
        sampled: list[tuple[int, Track]] = []
        for track in sorted(tracks, key=lambda track: not track.tokens):
            tokens = track.next_tokens(BATCH_TOKENS - count)
            for token in tokens:
                batch.token[count] = token
                batch.pos[count] = track.position
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = track.number
                track.position += 1
                is_last = track.position == len(track.ask.prompt) + len(track.tokens)
                batch.logits[count] = is_last
                if is_last:
                    sampled.append((count, track))
                count += 1
        batch.n_tokens = count
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        for index, track in sampled:
            logits = llama_cpp.llama_get_logits_ith(self._context, index)
            row = np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)
            )
            track.tokens.append(int(row.argmax()))

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def make_system() -> LlamaCppSystem:
    return LlamaCppSystem()
