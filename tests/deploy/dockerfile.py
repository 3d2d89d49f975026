"""Reads a Dockerfile: stages, their instructions, what each of them is built upon."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """`base` is another stage, or an image. Instructions are (name, rest), in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        """Raises IndexError where there is none."""
        return self.all(name)[-1]

    @property
    def copies(self) -> list[tuple[str, list[str], str]]:
        """(stage or "" for the build context, sources, destination) of each COPY."""
        found = []
        for rest in self.all("COPY"):
            words = shlex.split(rest)
            options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
            *sources, destination = [word for word in words if not word.startswith("--")]
            found.append((options.get("from", ""), sources, destination))
        return found


@dataclass(frozen=True)
class Dockerfile:
    """`arguments` are those before the first stage, with their defaults, "" for none."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def chain(self, name: str) -> list[Stage]:
        """The stage, what it is built upon, and so on; images are no stages."""
        found = []
        while name in self.stages:
            found.append(self.stages[name])
            name = self.stages[name].base
        return found

    def environment(self, name: str) -> dict[str, str]:
        """What ENV sets in the stage and below."""
        found: dict[str, str] = {}
        for stage in reversed(self.chain(name)):
            for rest in stage.all("ENV"):
                found |= dict(word.split("=", 1) for word in shlex.split(rest))
        return found


def parse(path: Path) -> Dockerfile:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            current = Stage(alias, base)
            stages[alias] = current
        elif current is None:
            assert name == "ARG", line
            variable, _, default = rest.partition("=")
            arguments[variable] = default
        else:
            current.instructions.append((name, rest.strip()))
    return Dockerfile(arguments, stages)
