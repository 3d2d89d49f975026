"""Reads the keys of a quantisation's config; every complaint names the key and its value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inference_svc.errors import UnsupportedModel

NEXT_STEP = "serve the plain checkpoint, or one in a format that docs/models.md lists"
MAX_NAMES = 200_000
"""More modules than any model has."""
_MAX_SHOWN_CHARS = 80


class Settings:
    """Values by key, of which `where` is the place in config.json. Every method raises
    UnsupportedModel for a value that has no meaning here."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value; the default if it is null or left out."""
        value = self.values.get(key)
        return default if value is None else value

    def refused(self, key: str, reason: str) -> UnsupportedModel:
        shown = shorten(self.values.get(key))
        return UnsupportedModel(f"{self.place_of(key)} = {shown}: {reason}; {NEXT_STEP}")

    def place_of(self, key: str) -> str:
        """Returns the place of a key for a message. Names of groups and unknown keys are a
        stranger's: a long one is cut, and one that cannot be printed is escaped."""
        is_plain = key.isprintable() and len(key) <= _MAX_SHOWN_CHARS
        return f"{self.where}.{key if is_plain else shorten(key)}"

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "must be true or false")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or abs(value) > 2**31:
            raise self.refused(key, "must be an integer")
        return value

    def one_of(self, key: str, choices: Collection[Any], default: Any = None) -> Any:
        """Returns a value that is one of these, of the same type."""
        value = self.get(key, default)
        for each in choices:
            if type(value) is type(each) and value == each:
                return value
        raise self.refused(key, f"supported here are {', '.join(map(repr, choices))}")

    def group_size(self, default: int | None = None) -> int:
        """Returns the inputs that share a scale, 0 for all of an output: -1 in configs."""
        size = self.integer("group_size", default)
        if size != -1 and (size % 8 or not 8 <= size <= 65536):
            raise self.refused("group_size", "must be -1, or a multiple of 8 up to 65536")
        return 0 if size == -1 else size

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a list of texts, empty if it is null or left out."""
        value = self.get(key, [])
        is_list = isinstance(value, list) and len(value) <= MAX_NAMES
        if not is_list or not all(isinstance(each, str) for each in value):
            raise self.refused(key, "must be a list of names")
        return tuple(value)

    def part(self, key: str) -> Settings | None:
        """Returns the object below a key; None if it is null or left out."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refused(key, "must be an object")
        return Settings(value, self.place_of(key))

    def require_known(self, known: Collection[str]) -> None:
        """Raises UnsupportedModel for a key that is not among these, unless its value is empty: it
        may change the maths."""
        for key, value in self.values.items():
            if key not in known and not _is_empty(value):
                raise self.refused(key, "not known, and it may change the maths")

    def require_empty(self, key: str, reason: str) -> None:
        if not _is_empty(self.values.get(key)):
            raise self.refused(key, reason)


def words(*lists: str) -> frozenset[str]:
    return frozenset(" ".join(lists).split())


def shorten(value: Any) -> str:
    """Returns a value of a stranger's file for a message, cut if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value in many brackets"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def model_dtype(config: Mapping[str, Any]) -> str:
    """Returns the dtype of a config.json, or of its text part, by torch's name; float32 if it names
    none that is served."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key)).removeprefix("torch.")
            if name in ("float16", "bfloat16", "float32"):
                return name
    return "float32"


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")
