"""vLLM's CPU build in this process, in its own environment (see `bench.peers.install`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from bench.systems.protocol import Done, Job, Spec


class VllmSystem:
    """vLLM, with the options `enforce_eager` and `enable_lora`."""

    def load(self, spec: Spec) -> dict[str, str]:
        options: dict[str, Any] = {"enforce_eager": spec.options["enforce_eager"]}
        self._has_lora = bool(spec.options["enable_lora"] and spec.max_resident)
        if self._has_lora:
            options |= {
                "enable_lora": True,
                "max_loras": spec.max_resident,
                "max_lora_rank": spec.max_rank,
            }
        self._llm = LLM(
            spec.model_dir,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=spec.max_sequences,
            max_model_len=spec.max_len,
            enable_prefix_caching=False,
            **options,
        )
        self._requests: dict[str, LoRARequest] = {}
        for name, folder in spec.adapters.items():
            self.register(name, folder)
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def register(self, name: str, folder: str) -> None:
        assert Path(folder).is_dir()
        self._requests[name] = LoRARequest(name, len(self._requests) + 1, folder)

    def set_resident(self, names: list[str]) -> None:
        if not self._has_lora:
            assert not names
            return
        engine = self._llm.llm_engine
        wanted = {self._requests[name].lora_int_id for name in names}
        for number in set(engine.list_loras()) - wanted:
            engine.remove_lora(number)
        for name in names:
            engine.add_lora(self._requests[name])

    def run(self, job: Job) -> Done:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in job.asks]
        params = [
            SamplingParams(
                max_tokens=ask.max_tokens,
                min_tokens=ask.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
            )
            for ask in job.asks
        ]
        adapters = [self._requests[ask.adapter] if ask.adapter else None for ask in job.asks]
        began_s = time.perf_counter()
        outputs = self._llm.generate(
            prompts, params, lora_request=adapters if any(adapters) else None, use_tqdm=False
        )
        seconds = time.perf_counter() - began_s
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_tokens == sum(ask.max_tokens for ask in job.asks)
        return Done(seconds, num_tokens)

    def close(self) -> None:
        """Does nothing, because the process ends."""


def make_system() -> VllmSystem:
    return VllmSystem()
