"""SGLang's HTTP calls for adapters. Blocking."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_SECONDS = 30.0
LOAD_SECONDS = 600.0
"""How long a load may take, which reads the files, or an unload, which waits for requests."""
MAX_ANSWER_BYTES = 16 << 20


class EngineError(Exception):
    """The engine refused a call, with its reason."""


class EngineAway(Exception):
    """The engine does not answer."""


class Engine:
    """SGLang at `url`, "http://host:port". `key` is its admin key, or else its API key; "" for
    none."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def loaded(self) -> dict[str, str]:
        """Returns the paths of the loaded adapters by name. Raises EngineAway and EngineError."""
        answer = self._call("/v1/models", None, TIMEOUT_SECONDS)
        models = answer.get("data", [])
        return {each["id"]: each["root"] for each in models if each.get("parent")}

    def load(self, name: str, path: str) -> None:
        """Loads an adapter under a name that nothing has. Raises EngineAway and EngineError."""
        self._call("/load_lora_adapter", {"lora_name": name, "lora_path": path}, LOAD_SECONDS)

    def unload(self, name: str) -> None:
        """Unloads an adapter; returns when its requests have ended. Raises EngineAway and
        EngineError."""
        self._call("/unload_lora_adapter", {"lora_name": name}, LOAD_SECONDS)

    def _call(self, route: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + route, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer = json.loads(response.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise EngineError(_reason(error.code, error.read(MAX_ANSWER_BYTES))) from None
        except (OSError, ValueError) as error:
            raise EngineAway(f"{self._url}{route}: {error}") from error
        if answer.get("success") is False:
            raise EngineError(str(answer.get("error_message")))
        return dict(answer)


def _reason(status: int, body: bytes) -> str:
    """Returns the engine's reason in an answer that is an error."""
    try:
        answer = json.loads(body)
        found = answer.get("error_message") or answer.get("message") or answer.get("error")
    except (ValueError, AttributeError):
        found = None
    return str(found or f"status {status}")
