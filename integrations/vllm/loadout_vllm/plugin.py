"""vLLM's entry points: the resolver, and the endpoint plugin that starts the rest.

vLLM loads `register` in each of its processes; only the API server asks the resolver. It loads the
endpoint plugin only if VLLM_PLUGINS names it, and only there: it is what has the server's loaded
adapters. Without it a name that has moved would be served in its old version for ever, so the
resolver refuses to resolve.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from loadout.errors import FailedPrecondition, LoadoutError
from loadout.integrations.adapter_folders import AdapterFolders
from loadout.integrations.engine_settings import read_settings
from loadout.integrations.following import follow
from loadout_vllm.model_shapes import ModelShapes, read_shapes
from loadout_vllm.resolver import Resolver

NAME = "loadout"
"""The name of both entry points, for VLLM_PLUGINS."""


class LoadoutResolver(LoRAResolver):
    """Asks the store for adapters that vLLM does not know."""

    def __init__(self) -> None:
        self.resolver: Resolver | None = None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if self.resolver is None:
            raise GracefulHTTPError(
                f"Loadout's endpoint plugin does not run: name it in VLLM_PLUGINS={NAME}",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        try:
            return await self.resolver.resolve(lora_name)
        except FailedPrecondition as error:
            raise VLLMValidationError(error.message, parameter="model") from error
        except LoadoutError as error:
            message = f"{lora_name}: the adapter store: {error.message}"
            raise GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE) from error


RESOLVER = LoadoutResolver()


def register() -> None:
    """Registers the resolver, if a store is named. vLLM may call it several times."""
    if os.environ.get("LOADOUT_STORE"):
        LoRAResolverRegistry.register_resolver("Loadout", RESOLVER)


class LoadoutEndpoint:
    """Starts the resolver in the API server, and closes its ways to load adapters past the store:
    they take paths of this machine from any caller."""

    name = NAME
    required_tasks = None

    def __init__(self) -> None:
        self._following: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        """Adds no routes."""

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Raises LoadoutError for invalid settings, which ends the server's start."""
        lora = state.vllm_config.lora_config if engine_client is not None else None
        if lora is None or not os.environ.get("LOADOUT_STORE"):
            return
        settings = read_settings(os.environ)
        models = state.openai_serving_models
        client = settings.client()
        folders = AdapterFolders(client, settings.cache, settings.cache_bytes)
        model = state.vllm_config.model_config
        shapes = await asyncio.to_thread(read_shapes, model.hf_config)
        served = [each.name for each in models.base_model_paths]
        RESOLVER.resolver = Resolver(
            client,
            folders,
            models,
            LoRARequest,
            settings.base_models or (*served, str(args.model)),
            lora.max_lora_rank,
            ModelShapes(model.get_total_num_hidden_layers(), shapes),
        )
        models.load_lora_adapter = models.unload_lora_adapter = _refuse
        # Held by the plugin, and so by the application, until the process ends.
        self._following = asyncio.create_task(follow(client, RESOLVER.resolver.changed))


async def _refuse(*_: Any, **__: Any) -> Any:
    """Answers a call of any route that loads or unloads an adapter."""
    # Not above: vLLM's other processes load this module, too, and have no routes.
    from vllm.entrypoints.serve import create_error_response

    return create_error_response(
        "the adapter store loads adapters by name: register them there",
        err_type="Forbidden",
        status_code=HTTPStatus.FORBIDDEN,
    )
