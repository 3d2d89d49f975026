"""Chooses the base model that an adapter is recorded for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from adapter_store.catalog.base_models import KnownBaseModels
from adapter_store.checkpoint.peft.config import names_local_path
from adapter_store.core import BaseModelChoice, BaseModelSource
from servicekit.errors import InvalidArgument

MAX_CANDIDATES = 8
"""How many base models a refusal lists."""
_SHOWN_CHARS = 160

_CACHED = re.compile(r"models--([^/\\]+)--([^/\\]+)")
"""The folder of a model in the cache of a hub's client, for ORG/NAME."""
_QUANTIZED = re.compile(r"(?i)(-unsloth)?(-bnb)?-[48]-?bits?$|-(awq|gptq)(-int[48])?$")
"""The endings of the names of quantized copies."""


def choose_base_model(
    given: str, in_config: str, known: KnownBaseModels, default: str = ""
) -> BaseModelChoice:
    """Returns the base model: the one that the caller has `given`, or else the one of the name's
    current version, the one that a server has registered under a name that matches the one
    `in_config`, a name `in_config` that is no local path, the caller's `default`, or the only one
    that servers have registered. Of several that match, one with a server now comes before the ones
    whose servers have left; else nothing depends on that: an outage must not send an adapter to
    another model.

    A version whose config named another model says nothing about this one. Raises InvalidArgument
    with the candidates if that leaves it open, or with a `default` the config names another model.
    """
    is_path = names_local_path(in_config)
    if given:
        reason = "as given" + _unlike(in_config, is_path, given, known)
        return BaseModelChoice(given, BaseModelSource.CALLER, reason)
    if _is_as_before(in_config, is_path, known):
        reason = "as in the version before"
        return BaseModelChoice(known.current, BaseModelSource.CURRENT_VERSION, reason)
    matching = _matching(in_config, is_path, known)
    if len(matching) == 1:
        reason = f"registered by a server, and the adapter's config names {_show(in_config)}"
        return BaseModelChoice(matching[0], BaseModelSource.SERVED, reason)
    if in_config and not is_path:
        if default:  # the server that is asked to load it cannot serve another model
            raise _undecided(in_config, matching, known)
        reason = "as the adapter's config names it" + _others(matching, known)
        return BaseModelChoice(in_config, BaseModelSource.CONFIG, reason)
    if default:
        reason = "the base model of the server that was asked to load it"
        reason += _unlike(in_config, is_path, default, known)
        return BaseModelChoice(default, BaseModelSource.DEFAULT, reason)
    if len(known.served) == 1:
        name = next(iter(known.served))
        reason = "the only one that servers have registered" + _unlike(
            in_config, is_path, name, known
        )
        return BaseModelChoice(name, BaseModelSource.ONLY_SERVED, reason)
    raise _undecided(in_config, matching, known)


def _is_as_before(in_config: str, is_path: bool, known: KnownBaseModels) -> bool:
    """Returns whether the current version's base model is this one's too."""
    if not known.current:
        return False
    if in_config and known.current == in_config:  # maybe a server has it under another name now
        return any(in_config in names for names in known.served.values())
    return is_path or in_config in ("", known.current_in_config)


def _matching(in_config: str, is_path: bool, known: KnownBaseModels) -> list[str]:
    """Returns the base models with a name that the config has, by the first of the rules that finds
    any; or else with that name without the ending for quantized copies: such adapters are trained
    on a quantized copy, and serve the model."""
    whole = set(_names_in(in_config, is_path))
    plain = {_QUANTIZED.sub("", name) for name in whole}
    return _named(whole, known) or _named(plain - whole, known)


def _named(candidates: Collection[str], known: KnownBaseModels) -> list[str]:
    for is_match in (_is_equal, _is_equal_but_case, _has_equal_end, _has_equal_end_elsewhere):
        found = [
            base_model
            for base_model, names in known.served.items()
            if any(is_match(name, each) for name in names for each in candidates)
        ]
        if found:
            return _with_server(found, known)
    return []


def _unlike(in_config: str, is_path: bool, chosen: str, known: KnownBaseModels) -> str:
    """Returns an addition where the config names a model whose last part differs from all names of
    the chosen one, because an adapter of another model may fit, and compute nonsense."""
    names = set(_names_in(in_config, is_path))
    names |= {_QUANTIZED.sub("", name) for name in names}
    own = known.served.get(chosen, frozenset()) | {chosen}
    if not names or any(_has_equal_end_elsewhere(name, each) for name in names for each in own):
        return ""
    return f"; the adapter's config names {_show(in_config)}: make sure that it is the same model"


def _with_server(base_models: Collection[str], known: KnownBaseModels) -> list[str]:
    """Returns those with a server now, or else all."""
    return [each for each in base_models if each not in known.gone] or list(base_models)


def _names_in(in_config: str, is_path: bool) -> Iterator[str]:
    """Yields the names that a config may mean: its own, or of a path the model whose folder in a
    hub's cache it is, and the last part."""
    if not is_path:
        yield from filter(None, [in_config])
        return
    yield in_config
    cached = _CACHED.search(in_config)
    if cached is not None:
        yield f"{cached[1]}/{cached[2]}"
    yield from filter(None, [_end(in_config)])


def _is_equal(name: str, other: str) -> bool:
    return name == other


def _is_equal_but_case(name: str, other: str) -> bool:
    """Hubs do not tell names apart by case."""
    return name.casefold() == other.casefold()


def _has_equal_end(name: str, other: str) -> bool:
    """Returns whether the last parts are equal, and not both of an organisation."""
    return _has_equal_end_elsewhere(name, other) and not (_has_owner(name) and _has_owner(other))


def _has_equal_end_elsewhere(name: str, other: str) -> bool:
    """Returns whether the last parts are equal, maybe of different organisations: copies of a model
    mostly keep its name."""
    end = _end(name)
    return end != "" and end == _end(other)


def _has_owner(name: str) -> bool:
    return "/" in name and not names_local_path(name)


def _end(name: str) -> str:
    """Returns the last part of a name or path, in lower case; "" if that means nothing
    elsewhere."""
    end = re.split(r"[/\\]", name.rstrip("/\\"))[-1].casefold()
    return "" if end in (".", "..", "~") else end


def _show(name: str) -> str:
    return repr(name[:_SHOWN_CHARS])


def _list(candidates: Collection[str], known: KnownBaseModels) -> str:
    shown = [
        f"{_show(each)} (its servers have left)" if each in known.gone else _show(each)
        for each in sorted(candidates)[:MAX_CANDIDATES]
    ]
    text = ", ".join(shown)
    if len(candidates) > MAX_CANDIDATES:
        text += f" and {len(candidates) - MAX_CANDIDATES} others"
    return text


def _others(matching: Collection[str], known: KnownBaseModels) -> str:
    """Returns an addition about the base models that a config's name could mean, but does not
    name."""
    if not known.served:
        return ""
    which = "of that name are" if matching else "servers have registered"
    return (
        f"; {which} {_list(matching or known.served, known)}: if it is one of them, name it "
        "(loadout register --base-model NAME)"
    )


def _undecided(
    in_config: str, matching: Collection[str], known: KnownBaseModels
) -> InvalidArgument:
    kind = "a local path, " if names_local_path(in_config) else ""
    has = f"has {kind}{_show(in_config)}" if in_config else "has none"
    if matching:
        choice = f"which may be {_list(matching, known)}"
    elif known.served:
        choice = f"and servers have registered {_list(known.served, known)}"
    else:
        choice = "and no server has registered one"
    return InvalidArgument(
        "base_model: give the name of its base model (loadout register --base-model NAME): "
        f"adapter_config.json {has}, {choice}",
        subject="base_model",
    )
