"""A peer that embeds texts, in its own environment (see `bench.peers.install`).

    python -m bench.pooled.peer sentence-transformers|vllm

It reads messages from standard input and answers on standard output. Only the standard library and
the peer's packages are here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bench.systems.serve import serve, take_standard_output

MAX_TOKENS = 512
"""The model's positions, of which its files allow half."""

Embed: TypeAlias = Callable[[Sequence[str], str], Any]
"""Returns the vectors of texts with an adapter; "": of the model as it is loaded."""


def sentence_transformers(model_dir: str, adapters: dict[str, str]) -> Embed:
    """Returns sentence-transformers in bf16, with PEFT's adapters."""
    import torch
    from sentence_transformers import SentenceTransformer

    kwargs = {"torch_dtype": torch.bfloat16}
    model = SentenceTransformer(model_dir, device="cpu", model_kwargs=kwargs)
    model.max_seq_length = MAX_TOKENS
    for name, folder in adapters.items():
        model.load_adapter(folder, adapter_name=name)

    def embed(texts: Sequence[str], adapter: str) -> Any:
        if adapter:
            model.set_adapter(adapter)
        return model.encode(
            list(texts), batch_size=len(texts), normalize_embeddings=True, show_progress_bar=False
        )

    return embed


def vllm(model_dir: str, adapters: dict[str, str]) -> Embed:
    """Returns vLLM in bf16. It has no adapters of encoders."""
    from vllm import LLM

    assert not adapters
    model = LLM(model_dir, runner="pooling", dtype="bfloat16", max_model_len=MAX_TOKENS)

    def embed(texts: Sequence[str], adapter: str) -> Any:
        assert not adapter
        made = model.embed(list(texts), use_tqdm=False)
        return [each.outputs.embedding for each in made]

    return embed


PEERS = {"sentence-transformers": sentence_transformers, "vllm": vllm}


class Peer:
    """Answers messages: `load`, and then `run`, with groups of an adapter and its texts."""

    def __init__(self, make: Callable[[str, dict[str, str]], Embed]) -> None:
        self._make = make
        self._embed: Embed | None = None

    def answer(self, message: dict[str, Any]) -> Any:
        if message["action"] == "load":
            self._embed = self._make(message["model_dir"], message["adapters"])
            return None
        assert self._embed is not None, "load comes first"
        began_s = time.perf_counter()
        vectors = [self._embed(texts, adapter) for adapter, texts in message["groups"]]
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "first": [float(each) for each in vectors[0][0]]}


def main() -> None:
    [name] = sys.argv[1:]
    serve(Peer(PEERS[name]).answer, take_standard_output())


if __name__ == "__main__":
    main()
