"""Which settings of a service its user gave, by flag, by variable or in a file: those are left as
they are."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

STORE_PREFIX, INFERENCE_PREFIX = "LOADOUT_STORE_", "LOADOUT_INFERENCE_"


@dataclass(frozen=True)
class Given:
    """The settings that `flags` give; unless `only_flags`, also variables with `prefix`, and the
    file that a flag or variable names. They are known by the flags' names without `--`. The service
    reports their faults."""

    prefix: str
    flags: tuple[str, ...] = ()
    only_flags: bool = False

    def find(self, key: str) -> str | None:
        """Returns a setting's value, where lists are separated by commas; None if it is not
        given."""
        found = self._in_flags(key)
        if found:
            return found[-1]
        if self.only_flags:
            return None
        variable = self._variable(key)
        return self._file.get(key) if variable is None else variable

    def find_list(self, key: str) -> list[str]:
        """Returns the parts of a list, which flags may give one by one."""
        texts = self._in_flags(key) or [self.find(key) or ""]
        return [part.strip() for text in texts for part in text.split(",") if part.strip()]

    def complete(self, defaults: Mapping[str, object]) -> list[str]:
        """Returns the flags of those settings of `defaults` that are not given."""
        missing = [(key, value) for key, value in defaults.items() if self.find(key) is None]
        return [word for key, value in missing for word in (f"--{key}", str(value))]

    def variables(self) -> list[str]:
        """Returns the names of the variables with the prefix that are set."""
        return sorted(name for name in os.environ if name.upper().startswith(self.prefix))

    def _in_flags(self, key: str) -> list[str]:
        flag = f"--{key}"
        found = []
        for word, following in zip(self.flags, (*self.flags, "")[1:], strict=True):
            name, has_value, value = word.partition("=")
            if name == flag:
                found.append(value if has_value else following)
        return found

    def _variable(self, key: str) -> str | None:
        variables = {name.lower(): value for name, value in os.environ.items()}
        return variables.get(f"{self.prefix}{key.replace('-', '_')}".lower())

    @cached_property
    def _file(self) -> dict[str, str]:
        path = next(iter(self._in_flags("config")[-1:]), self._variable("config"))
        try:
            read = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        except (OSError, ValueError):
            return {}
        return {key.replace("_", "-"): _text(value) for key, value in read.items()}


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
