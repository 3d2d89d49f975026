"""Which of a folder's files to fetch, and which checkpoint of several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from adapter_store.checkpoint.formats.select import check_file_names
from adapter_store.errors import InvalidAdapter, LimitExceeded
from contract.adapter_files import (
    CONFIG_FILE,
    MAX_FILES,
    PICKLE_FILE,
    WEIGHTS_FILE,
    checkpoint_step,
    is_adapter_file,
    is_plain_name,
    is_text_file,
)
from contract.folders import shown
from contract.words import listed
from servicekit.errors import InvalidArgument

AddressOf: TypeAlias = Callable[[str], str]
"""Returns the URI of a folder in a source."""
_PICKLE = re.compile(r"adapter_model.*\.(bin|pt|pth|pkl|ckpt)")
"""Names that trainers give to pickled weights."""


def check_file_name(name: str, subject: str) -> str:
    """Returns a plain file name, which cannot lead out of a folder. Raises InvalidArgument."""
    if not is_plain_name(name):
        raise InvalidArgument(f"{name[:160]!r} is not a plain file name", subject=subject)
    return name


def find_checkpoints(names: Iterable[str]) -> list[str]:
    """Returns the names that trainers give to checkpoints. A refusal has no others, because other
    files in a folder may be another tenant's."""
    return [name for name in names if checkpoint_step(name) is not None]


def choose_files(
    names: Iterable[str],
    where: str,
    below: Iterable[str] = (),
    address_of: AddressOf | None = None,
    *,
    allow_pickle: bool = False,
) -> list[str]:
    """Returns which of a folder's files make up the adapter, with its tokenizer's and its chat
    template's; `where` names the folder in errors.

    `below` are folders in it that may be adapters, which a refusal suggests as sources of their
    own; `address_of` returns the URI of one, by default its path below `where`.

    A pickle is chosen only if there is nothing better and `allow_pickle`.

    Raises InvalidAdapter if there is no config, no weights that may be read, or contents that would
    have to be applied and are not.
    """
    available = set(names)
    chosen = sorted(name for name in available if is_adapter_file(name))
    texts = sorted(name for name in available if is_text_file(name))
    if CONFIG_FILE not in chosen:
        raise InvalidAdapter(
            f"{where}: {CONFIG_FILE} is missing{_suggest(below, where, address_of)}",
            subject=CONFIG_FILE,
            reason="FILE_MISSING",
        )
    if len(chosen) == 1:
        if allow_pickle and PICKLE_FILE in available:
            check_file_names(available)
            return [CONFIG_FILE, PICKLE_FILE, *texts]
        raise _no_weights(available, where)
    if len(chosen) > MAX_FILES:
        raise LimitExceeded(
            f"{where}: {len(chosen)} files are more than {MAX_FILES}", subject=WEIGHTS_FILE
        )
    check_file_names(available)
    return [*chosen, *texts]


def _suggest(below: Iterable[str], where: str, address_of: AddressOf | None) -> str:
    """Returns a refusal's text about adapters in a folder, the newest checkpoint first."""
    found = sorted(below, key=_step, reverse=True)
    if not found:
        return ""
    place = address_of(found[0]) if address_of else f"{where.rstrip('/')}/{found[0]}"
    return f"; below it are {listed(found, 'others')}: register one of them, such as {place}"


def _step(folder: str) -> tuple[int, str]:
    step = checkpoint_step(folder)
    return (-1 if step is None else step), folder


def _no_weights(available: set[str], where: str) -> InvalidAdapter:
    pickle = min((name for name in available if _PICKLE.fullmatch(name)), default=None)
    if pickle is None:
        return InvalidAdapter(
            f"{where}: {WEIGHTS_FILE} is missing", subject=WEIGHTS_FILE, reason="FILE_MISSING"
        )
    pickle = shown(pickle)  # any bytes may be a name
    return InvalidAdapter(
        f"{where}: {pickle} is a pickle, which can run code when it is read; "
        f"save the adapter as {WEIGHTS_FILE}, or have the store's operator allow it with "
        "--allow-pickle-files",
        subject=pickle,
        reason="FILE_NOT_SAFETENSORS",
    )
