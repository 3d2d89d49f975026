"""TRL's asynchronous GRPO on Loadout's replicas, without a folder or a proxy that they share.

TRL saves its policy to a folder which one server is to read. Here it is pushed to the adapter store
instead, and rollouts come from every replica in turn. Written for TRL 1.16.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import requests
from safetensors import safe_open
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo import AsyncGRPOTrainer as TrlTrainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.vllm_client import VLLMClient

from loadout.client import Client
from loadout.errors import NotFound, NotLoaded

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
CONTROL_SECONDS = 30.0
RETRY_SECONDS = 1.0
NO_REPLICA = "NO_REPLICA"
"""The reason of a push for which no replica was up."""


class PolicyClient(VLLMClient):
    """What AsyncGRPOTrainer publishes its policies by. A policy is ephemeral: it is gone `ttl_s`
    after its registration, at the latest with the store, and before that when TRL unloads it."""

    def __init__(
        self,
        client: Client,
        urls: Sequence[str],
        *,
        token: str | None = None,
        ttl_s: float | None = None,
        server_timeout: float = 240.0,
    ) -> None:
        super().__init__(urls[0], server_timeout)
        self._client = client
        self._urls = urls
        self._headers = _headers(token)
        self._ttl_s = ttl_s

    def wait_for_server_ready(self, poll_interval_s: float = 2.0) -> None:
        """Returns once every replica serves. Raises TimeoutError."""
        for url in self._urls:
            VLLMClient(url, self.server_timeout).wait_for_server_ready(poll_interval_s)

    def get_server_info(self) -> dict[str, Any]:
        return self._get("/server_info?config_format=json")["vllm_config"]

    def get_dtype(self) -> str:
        return self.get_server_info()["model_config"]["dtype"]

    def get_max_model_len(self) -> int:
        return self.get_server_info()["model_config"]["max_model_len"]

    def load_lora_adapter(self, lora_name: str, lora_path: str, timeout: int = 1800) -> None:
        """Pushes the adapter in this process' folder `lora_path`; returns once every replica can
        sample from it at once. Raises LoadoutError."""
        folder = Path(lora_path)
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        base_model = self.get_server_info()["model_config"]["model"]
        end_s = time.monotonic() + timeout
        while True:
            try:
                self._client.push(
                    lora_name,
                    tensors,
                    config,
                    wait="all",
                    ephemeral=True,
                    ttl=self._ttl_s,
                    base_model=base_model,
                    timeout_s=end_s - time.monotonic(),
                )
                return
            except NotLoaded as error:
                # The same again is the same version: a run outlives replicas that start again.
                if error.reason != NO_REPLICA or time.monotonic() + RETRY_SECONDS >= end_s:
                    raise
            time.sleep(RETRY_SECONDS)

    def unload_lora_adapter(self, lora_name: str, timeout: int = 1800) -> None:
        """Deletes the adapter. Requests that run with it end as they began."""
        try:
            self._client.delete(lora_name, timeout_s=timeout)
        except NotFound:
            return

    def pause(self, timeout: int = 1800) -> None:
        """Does nothing: a request ends with the weights that it began with."""

    def resume(self, timeout: int = 1800) -> None:
        """Does nothing, see `pause`."""

    def _get(self, path: str) -> Any:
        response = requests.get(
            self._urls[0] + path, headers=self._headers, timeout=CONTROL_SECONDS
        )
        response.raise_for_status()
        return response.json()


class RolloutLoop(trl_worker._AsyncRolloutLoop):
    """TRL's loop of rollouts, each request of which goes to the next replica."""

    def __init__(self, *, urls: Sequence[str], token: str | None, **fields: Any) -> None:
        super().__init__(**fields)
        self._next_url: Iterator[str] = itertools.cycle(urls)
        self._headers = _headers(token)

    async def _post(
        self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3
    ) -> dict[str, Any]:
        total = aiohttp.ClientTimeout(total=timeout)
        # The trainer's own are of the distribution that tokens are drawn from, too.
        body = {"logprobs_mode": "processed_logprobs", **payload}

        async def post() -> dict[str, Any]:
            posting = self.session.post(
                next(self._next_url) + path, json=body, timeout=total, headers=self._headers
            )
            async with posting as response:
                response.raise_for_status()
                return await response.json()

        return await self._retry(post, label=f"POST {path}", max_attempts=max_retries)


class RolloutWorker(trl_worker.AsyncRolloutWorker):
    """TRL's process of rollouts, with a RolloutLoop."""

    _loop_cls = RolloutLoop

    def __init__(self, **fields: Any) -> None:
        # TRL asks whether vLLM is installed, of which the worker uses nothing.
        asked, trl_worker.is_vllm_available = trl_worker.is_vllm_available, lambda: True
        try:
            super().__init__(**fields)
        finally:
            trl_worker.is_vllm_available = asked

    def configure(self, **fields: Any) -> None:
        """Sets what the loop is made with, before `start`."""
        self._loop_kwargs |= fields


class AsyncGRPOTrainer(TrlTrainer):
    """TRL's AsyncGRPOTrainer, whose policies the replicas at `urls` sample from.

    `client` knows the store and the same replicas, by their gRPC addresses. `policy` is what the
    policies' names begin with: two runs on one store need two. `args.vllm_server_base_url` and what
    else of `args` is about a server's URL counts for nothing. Every rank calls this.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        *,
        client: Client,
        urls: Sequence[str],
        policy: str = "trl-policy",
        token: str | None = None,
        ttl_s: float | None = None,
        **fields: Any,
    ) -> None:
        if fields.get("peft_config") is None:
            raise ValueError("peft_config: is needed, as LoRA adapters are what can be pushed")
        if not urls:
            raise ValueError("urls: at least one replica's, as http://host:port")
        args = args or AsyncGRPOConfig(f"{model.split('/')[-1]}-AsyncGRPO")
        urls = [url.rstrip("/") for url in urls]
        self._policies = PolicyClient(
            client, urls, token=token, ttl_s=ttl_s, server_timeout=args.vllm_server_timeout
        )
        worker = RolloutWorker(queue_maxsize=args.queue_maxsize)
        super().__init__(model, reward_funcs, args, rollout_worker=worker, **fields)
        self._lora_name = policy
        if self.vllm_client is not None:
            worker.configure(urls=urls, token=token, **self._loop_fields(reward_funcs, fields))

    def _init_lora_sync(self, model: Any) -> bool:
        """Called by TRL before it chooses how policies are published."""
        self.vllm_client = self._policies
        if not super()._init_lora_sync(model):
            raise ValueError(
                "peft_config: TRL publishes no such adapter, its warning says why; the servers "
                "need a store (--store)"
            )
        return True

    def _loop_fields(self, reward_funcs: Any, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns what TRL makes its own loop with."""
        args = self.args
        is_list = isinstance(reward_funcs, list)
        return {
            "model_name": self._lora_name,
            "lora_name": self._lora_name,
            "dataset": self.train_dataset,
            "reward_funcs": reward_funcs if is_list else [reward_funcs] if reward_funcs else [],
            "processing_class": self.processing_class,
            "eos_token_ids": self.eos_token_ids,
            "tools": fields.get("tools"),
            "environment_factory": fields.get("environment_factory"),
            "max_tokens": args.max_completion_length,
            **{name: getattr(args, name) for name in _SAME_FIELDS},
        }


_SAME_FIELDS = (
    *("num_generations", "max_inflight_tasks", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "request_timeout", "chat_template_kwargs"),
    *("max_tool_calling_iterations", "log_completions", "num_completions_to_print"),
    "fork_threshold_tokens",
)
"""Fields of AsyncGRPOConfig that TRL's loop has by the same names, and their values are."""


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}
