"""Chooses the base model that an adapter is recorded for."""

from __future__ import annotations

from collections.abc import Collection

from adapter_store.catalog.tables.base_models import KnownBaseModels
from adapter_store.core import BaseModelChoice, BaseModelSource
from contract.base_model_names import find_named, may_mean, names_local_path
from contract.words import listed
from servicekit.errors import InvalidArgument

_SHOWN_CHARS = 160


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
        reason = "as given" + _unlike(in_config, given, known)
        return BaseModelChoice(given, BaseModelSource.CALLER, reason)
    if _is_as_before(in_config, is_path, known):
        reason = "as in the version before"
        return BaseModelChoice(known.current, BaseModelSource.CURRENT_VERSION, reason)
    matching = _matching(in_config, known)
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
        reason += _unlike(in_config, default, known)
        return BaseModelChoice(default, BaseModelSource.DEFAULT, reason)
    if len(known.served) == 1:
        name = next(iter(known.served))
        reason = "the only one that servers have registered" + _unlike(in_config, name, known)
        return BaseModelChoice(name, BaseModelSource.ONLY_SERVED, reason)
    raise _undecided(in_config, matching, known)


def _is_as_before(in_config: str, is_path: bool, known: KnownBaseModels) -> bool:
    """Returns whether the current version's base model is this one's too."""
    if not known.current:
        return False
    if in_config and known.current == in_config:  # maybe a server has it under another name now
        return any(in_config in names for names in known.served.values())
    return is_path or in_config in ("", known.current_in_config)


def _matching(in_config: str, known: KnownBaseModels) -> list[str]:
    """Returns the base models with a name that the config has. Of several the ones with a server
    now come first."""
    return _with_server(find_named(in_config, known.served), known)


def _unlike(in_config: str, chosen: str, known: KnownBaseModels) -> str:
    """Returns an addition where the config names a model whose last part differs from all names of
    the chosen one, because an adapter of another model may fit, and compute nonsense."""
    own = known.served.get(chosen, frozenset()) | {chosen}
    if may_mean(in_config, own):
        return ""
    return f"; the adapter's config names {_show(in_config)}: make sure that it is the same model"


def _with_server(base_models: Collection[str], known: KnownBaseModels) -> list[str]:
    """Returns those with a server now, or else all."""
    return [each for each in base_models if each not in known.gone] or list(base_models)


def _show(name: str) -> str:
    return repr(name[:_SHOWN_CHARS])


def _list(candidates: Collection[str], known: KnownBaseModels) -> str:
    shown = [
        f"{_show(each)} (its servers have left)" if each in known.gone else _show(each)
        for each in sorted(candidates)
    ]
    return listed(shown, "others")


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
