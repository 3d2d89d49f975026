"""A call to generate, checked, whatever it came by; and what the engine is asked with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from inference_svc.core import Request, SamplingParams
from inference_svc.store.directory import Binding
from inference_svc.text.prompt import Prompt

MAX_ID_CHARS = 256
MAX_DEADLINE_SECONDS = 1e6
"""Callers without a deadline may send centuries, which no clock of ours can wait for."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Its prompt is not tokenised and its adapter not resolved yet; `adapter` "" is the base."""

    request_id: str
    adapter: str
    min_revision: int
    prompt: Prompt
    sampling: SamplingParams
    priority: int
    cache_salt: str

    def to_request(
        self,
        prompt_token_ids: tuple[int, ...],
        binding: Binding | None,
        home_tenant: str,
        max_model_len: int,
        remaining_s: float | None,
    ) -> Request:
        """For the engine. `home_tenant` is the caller's; `remaining_s` what its deadline leaves."""
        now_s = time.monotonic()
        if remaining_s is not None and remaining_s > MAX_DEADLINE_SECONDS:
            remaining_s = None
        max_tokens = min(self.sampling.max_tokens, max_model_len - len(prompt_token_ids))
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        tenant = "" if binding is None else binding.tenant
        return Request(
            request_id=self.request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=replace(self.sampling, max_tokens=max_tokens, min_tokens=min_tokens),
            digest="" if binding is None else binding.digest,
            # Neither tenants that share an adapter nor the adapters of one caller share prefixes.
            # Tenants have no "/", so that no two triples give one seed.
            cache_seed=f"{home_tenant}/{tenant}/{self.cache_salt}",
            tenant=home_tenant,
            priority=self.priority,
            arrival_s=now_s,
            deadline_s=None if remaining_s is None else now_s + remaining_s,
        )
