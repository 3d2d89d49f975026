"""Collects facts for docs/api.md about the calls of both services from the code."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from adapter_store import errors as store_errors
from adapter_store.core import ROLES as STORE_ROLES
from adapter_store.core import Action as StoreAction
from contract import tokenizer_extract
from inference_svc import errors as inference_errors
from inference_svc.core import ROLES as INFERENCE_ROLES
from inference_svc.core import Action as InferenceAction
from loadout._rpc import calls
from servicekit import errors as general_errors
from servicekit.auth.principal import Roles
from servicekit.errors import ServiceError
from tools.syntax import walk

_REASON = re.compile(r"[A-Z]+(_[A-Z0-9]+)+")


@dataclass(frozen=True, slots=True)
class Service:
    """Facts about one service.

    `actions` and `again` have a row for each call. Tests compare `actions` with the answers of the
    real services. `readers` are modules outside its folder that refuse files for it.
    `explained` is a link to the page that explains its more specific reasons.
    """

    file: str
    folder: Path
    title: str
    actions: Mapping[str, enum.Enum]
    again: Mapping[str, str]
    roles: Roles[Any]
    errors: ModuleType
    readers: tuple[Path, ...] = ()
    explained: str = ""


def _again(*unary: calls.Call[Any], **others: str) -> dict[str, str]:
    """Returns whether each call may be retried, from the client's calls and from `others`."""
    return {call.rpc: "yes" if call.repeatable else "no" for call in unary} | others


_UNLESS_CONDITIONAL = "yes, without `if_current_digest`"
_STORE, _INFERENCE = StoreAction, InferenceAction

SERVICES = (
    Service(
        "loadout/adapter_store/v1/adapter_store.proto",
        Path(store_errors.__file__).parent,
        "Adapter store",
        {
            "RegisterAdapter": _STORE.PUBLISH,
            "UploadAdapter": _STORE.PUBLISH,
            "GetAdapter": _STORE.READ,
            "ListAdapters": _STORE.READ,
            "DeleteAdapter": _STORE.PUBLISH,
            "ListVersions": _STORE.READ,
            "RollbackAdapter": _STORE.PUBLISH,
            "PruneVersions": _STORE.PUBLISH,
            "PinAdapter": _STORE.PIN,
            "UnpinAdapter": _STORE.PIN,
            "RegisterLayout": _STORE.REGISTER_LAYOUT,
            "ListLayouts": _STORE.STATUS,
            "ForgetLayout": _STORE.FORGET_LAYOUT,
            "PullAdapter": _STORE.PULL,
            "GetText": _STORE.PULL,
            "ExportAdapter": _STORE.PULL,
            "WatchAdapters": _STORE.READ,
            "GetStoreStatus": _STORE.STATUS,
            "GetDebugInfo": _STORE.INSPECT,
        },
        _again(
            calls.get(""),
            calls.list_page(0, "", ""),
            calls.delete("", 0),
            calls.version_page("", 0, ""),
            calls.prune("", 1),
            calls.pin(""),
            calls.unpin(""),
            calls.layout_page(""),
            calls.forget_layout(""),
            calls.store_status(),
            RegisterAdapter=_UNLESS_CONDITIONAL,
            UploadAdapter=_UNLESS_CONDITIONAL,
            RollbackAdapter=_UNLESS_CONDITIONAL,
            RegisterLayout="yes",
            PullAdapter="yes, from the last `end_offset`",
            GetText="yes",
            ExportAdapter="yes",
            WatchAdapters="yes, from the last revision",
            GetDebugInfo="yes",
        ),
        STORE_ROLES,
        store_errors,
        (Path(tokenizer_extract.__file__),),
        " ([causes and next steps](adapters.md#reasons) of the most frequent ones)",
    ),
    Service(
        "loadout/inference/v1/inference.proto",
        Path(inference_errors.__file__).parent,
        "Inference service",
        {
            "Generate": _INFERENCE.GENERATE,
            "UploadImage": _INFERENCE.GENERATE,
            "Embed": _INFERENCE.GENERATE,
            "Score": _INFERENCE.GENERATE,
            "Classify": _INFERENCE.GENERATE,
            "Tokenize": _INFERENCE.GENERATE,
            "Detokenize": _INFERENCE.GENERATE,
            "ListResidentAdapters": _INFERENCE.OPERATE,
            "InspectAdapter": _INFERENCE.OPERATE,
            "LoadAdapter": _INFERENCE.LOAD,
            "UnloadAdapter": _INFERENCE.OPERATE,
            "PinAdapter": _INFERENCE.OPERATE,
            "UnpinAdapter": _INFERENCE.OPERATE,
            "PauseGeneration": _INFERENCE.OPERATE,
            "ResumeGeneration": _INFERENCE.OPERATE,
            "Sleep": _INFERENCE.OPERATE,
            "Wake": _INFERENCE.OPERATE,
            "GetServerInfo": _INFERENCE.INFO,
            "GetDebugInfo": _INFERENCE.INSPECT,
            "ProfileSteps": _INFERENCE.INSPECT,
        },
        _again(
            calls.upload_image(1, "", ""),
            calls.tokenize("", "", {}, None, None, False),
            calls.detokenize((), ""),
            calls.load("", pin=False),
            calls.unload(""),
            calls.pin_resident(""),
            calls.unpin_resident(""),
            calls.residents(0),
            calls.inspect(""),
            calls.pause("keep", None),
            calls.resume(),
            calls.sleep(weights=False),
            calls.wake(),
            calls.server_info(),
            Generate="yes, before its first response",
            Embed="yes, before its first response",
            Score="yes, before its first response",
            Classify="yes, before its first response",
            GetDebugInfo="yes",
            ProfileSteps="yes",
        ),
        INFERENCE_ROLES,
        inference_errors,
    ),
)


def roles_of(roles: Roles[Any], action: enum.Enum) -> list[str]:
    """Returns the roles that allow an action, by their names in the policy file."""
    return [name for name, allowed in roles.allowed.items() if action in allowed]


def meanings(service: Service) -> Iterator[tuple[type[ServiceError], str]]:
    """Yields the errors of a service's calls with their meanings.

    The general errors that the service raises come first, then its own, both in the order of the
    trees in the docstrings.
    """
    folders = service.folder, Path(general_errors.__file__).parent
    raised = {name for folder in folders for name, _ in _calls(folder)}
    for module in (general_errors, service.errors):
        for line in (module.__doc__ or "").splitlines():
            match = re.match(r"[ │]+[├└]─ (\w+)\s+(.+)", line)
            if match and (module is service.errors or match[1] in raised):
                yield getattr(module, match[1]), match[2]


def exact_reasons(service: Service) -> list[str]:
    """Returns the reasons that code gives to errors instead of their class's reason."""
    places = (service.folder, *service.readers)
    found = set(chain.from_iterable(map(_default_reasons, places)))
    for _, call in chain.from_iterable(map(_calls, places)):
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        unpacked = [arg.value for arg in call.args if isinstance(arg, ast.Starred)]
        values += (each for tuple_ in unpacked for each in getattr(tuple_, "elts", ()))
        texts = [value.value for value in values if isinstance(value, ast.Constant)]
        found.update(filter(_REASON.fullmatch, (t for t in texts if isinstance(t, str))))
    return sorted(found)


def _default_reasons(folder: Path) -> Iterator[str]:
    """Yields the defaults of parameters `reason` of functions under a folder, or of one module."""
    for path in folder.rglob("*.py") if folder.is_dir() else [folder]:
        for node in walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            for argument, default in zip(arguments, node.args.defaults, strict=True):
                text = getattr(default, "value", None)
                if argument.arg == "reason" and isinstance(text, str) and _REASON.fullmatch(text):
                    yield text


@cache
def _calls(folder: Path) -> tuple[tuple[str, ast.Call], ...]:
    """Returns the plain names that the modules under a folder, or one module, call."""
    return tuple(
        (node.func.id, node)
        for path in (folder.rglob("*.py") if folder.is_dir() else [folder])
        for node in walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
