"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as of vLLM."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from inference_svc.api.http.attending import attend
from inference_svc.api.http.errors import set_names
from inference_svc.api.http.request import Body, read_body, recognising
from inference_svc.api.service import Service
from inference_svc.store.catalog import Source

MAX_REF_CHARS = 512
MAX_PATH_CHARS = 4096

_NAMES = {
    "adapter": "lora_name",
    "ref": "lora_name",
    "name": "lora_name",
    "source_uri": "lora_path",
}


class LoadBody(Body):
    """`lora_path`: where the store is to fetch it from; null: it is registered already."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_REF_CHARS)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)] | None = None
    base_model: Annotated[str, Field(max_length=MAX_REF_CHARS)] | None = None
    pin: bool | None = None

    # Of vLLM: here a name may always be given new content, which becomes its next version.
    load_inplace: bool | None = None

    @property
    def source(self) -> Source | None:
        if self.lora_path is None:
            return None
        is_path = self.lora_path.startswith("/")
        uri = f"file://{quote(self.lora_path)}" if is_path else self.lora_path
        return Source(uri, self.base_model or "")


class UnloadBody(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_REF_CHARS)]

    # Of vLLM, where adapters have numbers.
    lora_int_id: int | None = None


class Adapters:
    """Both routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, request: Request) -> Response:
        set_names(request, _NAMES)
        with recognising(request) as caller:
            self._service.recognise(caller, "LoadAdapter")
        body = await read_body(request, LoadBody)
        await attend(
            request.receive,
            self._service.load(
                caller,
                body.lora_name,
                pin=bool(body.pin),
                source=body.source,
                subject="lora_name",
            ),
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        set_names(request, _NAMES)
        with recognising(request) as caller:
            self._service.recognise(caller, "UnloadAdapter")
        body = await read_body(request, UnloadBody)
        await attend(
            request.receive,
            self._service.unload(caller, body.lora_name, subject="lora_name"),
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
