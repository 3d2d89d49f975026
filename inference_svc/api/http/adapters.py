"""/v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from inference_svc.api.http.errors import set_names
from inference_svc.api.http.request import Body, admit, authenticated, read_body
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from inference_svc.api.service import Service
from inference_svc.store.types import Registered, Source

MAX_REF_CHARS = 512
MAX_PATH_CHARS = 4096

_NAMES = {
    "adapter": "lora_name",
    "ref": "lora_name",
    "name": "lora_name",
    "source_uri": "lora_path",
}


class LoadBody(Body):
    """`lora_path` is where the store fetches the adapter from; null if it is registered."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_REF_CHARS)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)] | None = None
    base_model: Annotated[str, Field(max_length=MAX_REF_CHARS)] | None = None
    pin: bool | None = None

    load_inplace: bool | None = None
    """Whether the name may move from other content to this."""

    @property
    def source(self) -> Source | None:
        if self.lora_path is None:
            return None
        is_path = self.lora_path.startswith("/")
        uri = f"file://{quote(self.lora_path)}" if is_path else self.lora_path
        return Source(uri, self.base_model or "")


class UnloadBody(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_REF_CHARS)]

    # vLLM's, where adapters have numbers.
    lora_int_id: int | None = None


class Adapters:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, request: Request) -> Response:
        set_names(request, _NAMES)
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize_change(caller, "LoadAdapter"))
        body = await read_body(request, LoadBody)
        loading = self._service.residents.load(
            caller,
            body.lora_name,
            pin=bool(body.pin),
            source=body.source,
            inplace_field="" if body.load_inplace else "load_inplace",
            subject="lora_name",
        )
        loaded = await cancel_on_disconnect(request.receive, loading)
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        if loaded.registered is not None:
            text += _describe(loaded.registered)
        return PlainTextResponse(text)

    async def unload(self, request: Request) -> Response:
        set_names(request, _NAMES)
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize_change(caller, "UnloadAdapter"))
        body = await read_body(request, UnloadBody)
        await cancel_on_disconnect(
            request.receive,
            self._service.residents.unload(caller, body.lora_name, subject="lora_name"),
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _describe(registered: Registered) -> str:
    """Returns the details of a successful registration."""
    text = ""
    if registered.base_model_reason:
        text += f" Its base model is {registered.base_model}: {registered.base_model_reason}."
    if registered.ignored_config_keys:
        keys = ", ".join(registered.ignored_config_keys)
        text += f" Keys of its config that are not known, and allowed by the operator: {keys}."
    return "".join((text, *(f" Warning: {warning}." for warning in registered.warnings)))
