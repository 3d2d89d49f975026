"""Which base model an adapter's config may mean: names differ in case, organisation, quantization
and between a hub and the folders of its cache. A quantized copy's name also tells the form of the
weights that the adapter was trained on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_LOCAL_PATH = re.compile(r"[/~\\]|\.{1,2}([/\\]|$)|[A-Za-z]:[/\\]|file:|.*\\")
_CACHED = re.compile(r"models--([^/\\]+)")
"""The folder of a model in the cache of a hub's client, for NAME or ORG/NAME."""


class TrainedForm(NamedTuple):
    """The form of the base model's weights that an adapter was trained on, such as "nf4". Servers
    hold that form if their own has one of the words `served_as`."""

    name: str
    served_as: frozenset[str]

    def is_served_as(self, form: str) -> bool:
        """Returns whether a server with weights of this form, "" for plain ones, may serve what the
        adapter was trained on."""
        return not self.served_as.isdisjoint(form.split())


def _form(name: str, *served_as: str) -> TrainedForm:
    return TrainedForm(name, frozenset(served_as or (name,)))


_4_BITS = _form("4-bit", "nf4", "int4", "mxfp4", "q4_0", "q4_1", "q4_k")
_8_BITS = _form("8-bit", "int8", "fp8", "q8_0")
_COPIES: Mapping[str, TrainedForm | None] = {
    r"(-unsloth)?-bnb-4-?bits?": _form("nf4"),
    r"(-unsloth)?-bnb-8-?bits?": _form("int8"),
    r"(-awq|-gptq)(-int4|-4-?bits?)?|-(quantized\.)?w4a16": _form("int4"),
    r"(-awq|-gptq)(-int8|-8-?bits?)|-(quantized\.)?w8a(8|16)": _form("int8"),
    r"-fp8(-dynamic|-block|-static)?": _form("fp8"),
    r"-mxfp4": _form("mxfp4"),
    r"(-unsloth|-mlx)?-4-?bits?": _4_BITS,
    r"(-unsloth|-mlx)?-8-?bits?": _8_BITS,
    r"-gguf": _form("gguf"),
    # GGUF files have the type of their weights in the name, such as "-Q4_K_M".
    r"([.-](ud|i1))?[.-][it]?q[0-9](_[a-z0-9_]+(\.gguf)?|\.gguf)": _form("gguf"),
    r"[.-](bf16|f16|f32)(\.gguf)?|\.gguf": None,
}
"""The endings of the names of copies, and the forms of their weights, as far as these tell."""
_COPY = re.compile(f"(?i)(?<=.)(?:{'|'.join(f'({each})' for each in _COPIES)})$")


def names_local_path(base_model: str) -> bool:
    """Returns whether a base model's name is a path on some trainer's machine: no hub and no
    operator names a model like this, and elsewhere it has no meaning."""
    return _LOCAL_PATH.match(base_model) is not None or base_model.count("/") > 1


def name_of_files(model: Path) -> str:
    """Returns the name of a model's folder, on the hub if it is one of the hub's cache, or of its
    file, without the type of its weights."""
    if model.is_file():
        return without_form(model.name)
    folder = model.resolve()
    is_cached = folder.parent.name == "snapshots"
    return (is_cached and hub_name(folder.parent.parent.name)) or folder.name


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
        or else with that name without the ending for quantized copies, or with a name that is its
        without both endings: adapters serve the model and all its copies, whichever of them they
        were trained on.
    """
    whole = set(_names_in(in_config))
    plain = set(map(without_form, whole))
    found = _named(whole, names_of) or _named(plain - whole, names_of)
    return found or _named(plain, {key: _with_plain(names) for key, names in names_of.items()})


def may_mean(in_config: str, names: Collection[str]) -> bool:
    """Returns whether a config may mean the model with these names: without a name it may mean any;
    copies of a model mostly keep the last part of its name."""
    found = _with_plain(set(_names_in(in_config)))
    return not found or any(
        _has_equal_end_elsewhere(each, name) for each in found for name in _with_plain(names)
    )


def without_form(name: str) -> str:
    """Returns the name of a model, or of a GGUF file, without the ending that tells the form of its
    weights, such as "-bnb-4bit" or "-Q4_K_M.gguf"."""
    return _COPY.sub("", name)


@lru_cache(maxsize=4096)
def trained_form(in_config: str) -> TrainedForm | None:
    """Returns the form of the weights that an adapter was trained on, by the name of a quantized
    copy in its config; None: the name tells none."""
    forms = map(_form_of, _names_in(in_config))
    return next((each for each in forms if each is not None), None)


def _form_of(name: str) -> TrainedForm | None:
    ending = _COPY.search(name)
    if ending is None:
        return None
    forms = (form for copy, form in _COPIES.items() if re.fullmatch(copy, ending[0], re.IGNORECASE))
    return next(forms)


def _with_plain(names: Collection[str]) -> set[str]:
    return {*names, *map(without_form, names)}


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
