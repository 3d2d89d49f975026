"""The routes besides generation that trainers call, by vLLM's names: facts about the server, its
number of workers, and a reset of its prefix cache. Full weights cannot be pushed."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.api.http.request import admit, authenticated
from inference_svc.api.service import Service
from inference_svc.core import Action
from servicekit.errors import InvalidArgument

WEIGHT_ROUTES = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
NO_FULL_WEIGHTS = (
    "{0}: this server takes no weights of the base model, which all its adapters share. Train a "
    "LoRA adapter and push it: Client.push, loadout.integrations.trl, or POST /v1/load_lora_adapter"
)


class Trainers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def server_info(self, request: Request) -> Response:
        """Takes ?config_format=json, which is the default here. Raises InvalidArgument."""
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.INFO))
        config_format = request.query_params.get("config_format", "json")
        if config_format != "json":
            raise InvalidArgument("config_format must be json", subject="config_format")
        return JSONResponse({"vllm_config": self._vllm_config(), "loadout": self._facts()})

    async def world_size(self, request: Request) -> Response:
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.INFO))
        return JSONResponse({"world_size": 1})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Requires an operator of all tenants, who share the cache. Nobody needs it for the sake of
        adapters: cached pages are of one digest."""
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize_change(caller, "ResetPrefixCache"))
        await self._service.life_cycle.reset_prefix_cache(caller)
        return JSONResponse({"success": True})

    async def refuse_weights(self, request: Request) -> Response:
        """Raises HTTPException 501: full weights cannot be pushed."""
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.OPERATE))
        raise HTTPException(501, NO_FULL_WEIGHTS.format(request.url.path))

    def _vllm_config(self) -> dict[str, Any]:
        """Returns this server's facts by the names that vLLM has for them. Each server is one
        worker; replicas are servers of their own."""
        facts = self._service.facts
        lora = {"max_loras": facts.max_loras, "max_lora_rank": facts.max_lora_rank}
        return {
            "model_config": {
                "model": facts.base_model,
                "served_model_name": [facts.base_model, *facts.aliases],
                "dtype": f"torch.{facts.dtype}",
                "max_model_len": facts.max_model_len,
            },
            # Trainers push to this one address, however many ranks compute.
            "parallel_config": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "world_size": 1,
            },
            "scheduler_config": {
                "max_num_seqs": facts.max_sequences,
                "max_num_batched_tokens": facts.max_batch_tokens,
            },
            "lora_config": lora if self._service.has_store else None,
            "weight_transfer_config": None,
        }

    def _facts(self) -> dict[str, Any]:
        facts = self._service.facts
        return {
            "versions": facts.versions,
            "architecture": facts.architecture,
            "device": facts.device,
            "vocab_size": facts.vocab_size,
            "lora_targets": list(facts.lora_targets),
            "layout_id": self._service.layout_id,
        }
