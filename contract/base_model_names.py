"""Which base model an adapter's config may mean: names differ in case, organisation, quantization
and between a hub and the folders of its cache."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

_LOCAL_PATH = re.compile(r"[/~\\]|\.{1,2}([/\\]|$)|[A-Za-z]:[/\\]|file:|.*\\")
_CACHED = re.compile(r"models--([^/\\]+)")
"""The folder of a model in the cache of a hub's client, for NAME or ORG/NAME."""
_QUANTIZED = re.compile(r"(?i)(-unsloth)?(-bnb)?-[48]-?bits?$|-(awq|gptq)(-int[48])?$")
"""The endings of the names of quantized copies."""


def names_local_path(base_model: str) -> bool:
    """Returns whether a base model's name is a path on some trainer's machine: no hub and no
    operator names a model like this, and elsewhere it has no meaning."""
    return _LOCAL_PATH.match(base_model) is not None or base_model.count("/") > 1


def hub_name(path: str) -> str:
    """Returns the hub's name of the model whose folder in a hub's cache a path leads to; "" if it
    leads to none."""
    cached = _CACHED.search(path)
    return "" if cached is None else cached[1].replace("--", "/", 1)


def find_named(in_config: str, names_of: Mapping[str, Collection[str]]) -> list[str]:
    """Finds the base models that an adapter's config may mean.

    Args:
        in_config: The name or path in the config; "" if it has none.
        names_of: All names of each base model.

    Returns:
        The base models with a name that the config has, by the first of the rules that finds any;
        or else with that name without the ending for quantized copies: such adapters are trained
        on a quantized copy, and serve the model.
    """
    whole = set(_names_in(in_config))
    plain = {_QUANTIZED.sub("", name) for name in whole}
    return _named(whole, names_of) or _named(plain - whole, names_of)


def may_mean(in_config: str, names: Collection[str]) -> bool:
    """Returns whether a config may mean the model with these names: without a name it may mean any;
    copies of a model mostly keep the last part of its name."""
    found = set(_names_in(in_config))
    found |= {_QUANTIZED.sub("", name) for name in found}
    return not found or any(
        _has_equal_end_elsewhere(each, name) for each in found for name in names
    )


def _named(candidates: Collection[str], names_of: Mapping[str, Collection[str]]) -> list[str]:
    for is_match in (_is_equal, _is_equal_but_case, _has_equal_end, _has_equal_end_elsewhere):
        found = [
            base_model
            for base_model, names in names_of.items()
            if any(is_match(name, each) for name in names for each in candidates)
        ]
        if found:
            return found
    return []


def _names_in(in_config: str) -> Iterator[str]:
    """Yields the names that a config may mean: its own, or of a path the model whose folder in a
    hub's cache it is, and the last part."""
    if not names_local_path(in_config):
        yield from filter(None, [in_config])
        return
    yield in_config
    yield from filter(None, [hub_name(in_config), _end(in_config)])


def _is_equal(name: str, other: str) -> bool:
    return name == other


def _is_equal_but_case(name: str, other: str) -> bool:
    """Hubs do not tell names apart by case."""
    return name.casefold() == other.casefold()


def _has_equal_end(name: str, other: str) -> bool:
    """Returns whether the last parts are equal, and not both of an organisation."""
    return _has_equal_end_elsewhere(name, other) and not (_has_owner(name) and _has_owner(other))


def _has_equal_end_elsewhere(name: str, other: str) -> bool:
    """Returns whether the last parts are equal, maybe of different organisations."""
    end = _end(name)
    return end != "" and end == _end(other)


def _has_owner(name: str) -> bool:
    return "/" in name and not names_local_path(name)


def _end(name: str) -> str:
    """Returns the last part of a name or path, in lower case; "" if that means nothing
    elsewhere."""
    end = re.split(r"[/\\]", name.rstrip("/\\"))[-1].casefold()
    return "" if end in (".", "..", "~") else end
