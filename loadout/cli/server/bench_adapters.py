"""Which adapters `loadout bench` uses, and which of them it may unload and load again."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import typer

from loadout.cli.output import CommandFailed, error_text
from loadout.client import Client
from loadout.errors import PermissionDenied
from loadout.types import Adapter, ImageState


class Chosen(NamedTuple):
    """An adapter, and the reference to request it by."""

    ref: str
    adapter: Adapter

    @property
    def shape(self) -> Mapping[str, Any]:
        """The fields that its speed depends on, without its name."""
        return {
            "rank": self.adapter.rank,
            "targets": " ".join(sorted(self.adapter.targets)),
            "source_bytes": self.adapter.source_bytes,
        }


def choose(client: Client, layout_id: str, named: list[str], count: int) -> list[Chosen]:
    """Returns the `named` adapters, else the first `count` of this layout. Raises CommandFailed if
    there are none."""
    if named:
        return [Chosen(ref, client.get(ref)) for ref in named]
    if not count:
        return []
    servable = (each for each in client.list() if _is_servable(each, layout_id))
    found = list(islice(servable, count))
    if not found:
        raise CommandFailed(
            "the store has no adapter for this model: give --adapter, or --num-adapters 0"
        )
    return [Chosen(each.name, each) for each in found]


def loadable(client: Client, chosen: list[Chosen], count: int) -> list[str]:
    """Returns the references of at most `count` that are not pinned in the server. Raises
    CommandFailed if there are none, or without the role operator."""
    if not (chosen and count):
        return []
    try:
        pinned = {each.digest for each in client.residents() if each.pinned}
    except PermissionDenied as error:
        raise CommandFailed(
            f"--loads: {error_text(error, '; --loads 0 leaves loads out')}"
        ) from error
    left_out = [each.ref for each in chosen if each.adapter.digest in pinned]
    found = [each.ref for each in chosen if each.adapter.digest not in pinned]
    if not found:
        raise CommandFailed(
            "--loads: all these adapters are pinned, so the server keeps them loaded "
            "(--loads 0 leaves loads out)"
        )
    if left_out:
        typer.echo(f"not reloaded, because pinned: {', '.join(left_out)}", err=True)
    return found[:count]


def _is_servable(adapter: Adapter, layout_id: str) -> bool:
    """Accepts images that are not compiled yet: the warm-up round has them compiled."""
    usable = (ImageState.READY, ImageState.PENDING, ImageState.COMPILING)
    return any(
        each.layout_id == layout_id and each.state in usable for each in adapter.layout_states
    )
