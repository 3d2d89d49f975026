"""Runs TRL's asynchronous GRPO on Loadout's replicas, without a shared folder or proxy.

TRL saves its policy to a folder for one server to read. This module pushes the policy to the
adapter store instead, and rollouts come from every replica in turn. Written for TRL 1.16.
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

from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from loadout.client import Client
from loadout.errors import NotFound, NotLoaded

CONTROL_SECONDS = 30.0
RETRY_SECONDS = 1.0
NO_REPLICA = "NO_REPLICA"
"""Reason of a push that found no replica up."""


class PolicyClient(VLLMClient):
    """Publishes the policies of AsyncGRPOTrainer. A policy is ephemeral: it is deleted when TRL
    unloads it, after `ttl_s`, or when the store ends.

    Args:
        client: Client of the store and of all replicas.
        urls: HTTP URLs of the replicas, "http://host:port".
        token: Bearer token for the replicas' HTTP API. None: none.
        ttl_s: Seconds after which the store deletes a policy. None: never.
        server_timeout: Seconds to wait for the replicas to be ready.
    """

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
        """Returns when every replica serves.

        Args:
            poll_interval_s: Seconds between two checks.

        Raises:
            TimeoutError: A replica is not ready within `server_timeout` seconds.
        """
        for url in self._urls:
            VLLMClient(url, self.server_timeout).wait_for_server_ready(poll_interval_s)

    def get_server_info(self) -> dict[str, Any]:
        """Returns the first replica's configuration in vLLM's form."""
        return self._get("/server_info?config_format=json")["vllm_config"]

    def get_dtype(self) -> str:
        """Returns the dtype of the first replica's model."""
        return self.get_server_info()["model_config"]["dtype"]

    def get_max_model_len(self) -> int:
        """Returns the first replica's longest prompt plus output, in tokens."""
        return self.get_server_info()["model_config"]["max_model_len"]

    def load_lora_adapter(self, lora_name: str, lora_path: str, timeout: int = 1800) -> None:
        """Pushes an adapter. Returns when every replica can sample from it.

        Args:
            lora_name: Name of the adapter.
            lora_path: Folder of this process that has the adapter.
            timeout: Deadline in seconds.

        Raises:
            LoadoutError: The push failed.
        """
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
                # Pushing the same content gives the same version, so a run survives restarts.
                if error.reason != NO_REPLICA or time.monotonic() + RETRY_SECONDS >= end_s:
                    raise
            time.sleep(RETRY_SECONDS)

    def unload_lora_adapter(self, lora_name: str, timeout: int = 1800) -> None:
        """Deletes an adapter. Running requests finish with it.

        Args:
            lora_name: Name of the adapter.
            timeout: Deadline in seconds.

        Raises:
            LoadoutError: The deletion failed.
        """
        try:
            self._client.delete(lora_name, timeout_s=timeout)
        except NotFound:
            return

    def pause(self, timeout: int = 1800) -> None:
        """Does nothing, because a request ends with the weights that it began with."""

    def resume(self, timeout: int = 1800) -> None:
        """Does nothing, see `pause`."""

    def _get(self, path: str) -> Any:
        response = requests.get(
            self._urls[0] + path, headers=self._headers, timeout=CONTROL_SECONDS
        )
        response.raise_for_status()
        return response.json()


class RolloutLoop(trl_worker._AsyncRolloutLoop):
    """TRL's loop of rollouts; each request goes to the next replica."""

    def __init__(self, *, urls: Sequence[str], token: str | None, **fields: Any) -> None:
        super().__init__(**fields)
        self._next_url: Iterator[str] = itertools.cycle(urls)
        self._headers = _headers(token)

    async def _post(
        self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3
    ) -> dict[str, Any]:
        total = aiohttp.ClientTimeout(total=timeout)
        # The trainer's log probabilities are of the distribution that tokens are drawn from.
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
        # TRL checks that vLLM is installed, although the worker does not use it.
        asked, trl_worker.is_vllm_available = trl_worker.is_vllm_available, lambda: True
        try:
            super().__init__(**fields)
        finally:
            trl_worker.is_vllm_available = asked

    def configure(self, **fields: Any) -> None:
        """Sets arguments of the loop; call it before `start`.

        Args:
            **fields: Arguments of RolloutLoop.
        """
        self._loop_kwargs |= fields


class AsyncGRPOTrainer(TrlTrainer):
    """TRL's AsyncGRPOTrainer with Loadout's replicas as its servers. Every rank creates it.

    Args:
        model: Model to train, as in TRL.
        reward_funcs: Reward functions, as in TRL.
        args: TRL's configuration. Its settings about a server's URL have no effect.
        client: Client of the store and of the same replicas, by their gRPC addresses.
        urls: HTTP URLs of the replicas, "http://host:port".
        policy: Start of the policies' names. Two runs on one store need different ones.
        token: Bearer token for the replicas' HTTP API. None: none.
        ttl_s: Seconds after which the store deletes a policy. None: never.
        **fields: Further arguments of TRL's trainer; `peft_config` is required.

    Raises:
        ValueError: `peft_config` or `urls` is missing, or TRL cannot publish such an adapter.
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
            raise ValueError("peft_config: is required, because only LoRA adapters can be pushed")
        if not urls:
            raise ValueError("urls: give at least one replica, as http://host:port")
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
        """TRL calls this before it chooses how to publish policies."""
        self.vllm_client = self._policies
        if not super()._init_lora_sync(model):
            raise ValueError(
                "peft_config: TRL does not publish such an adapter; its warning says why. The "
                "servers need a store (--store)"
            )
        return True

    def _loop_fields(self, reward_funcs: Any, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of TRL's own loop."""
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
"""Fields of AsyncGRPOConfig that TRL's loop takes under the same names."""


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}
