"""How a model embeds, by the files that sentence-transformers saves in its folder.

`modules.json` lists the steps behind the hidden states: a pooling, whose folder has its config,
perhaps dense layers, and perhaps a normalisation. `config_sentence_transformers.json` has the
prompts. `sentence_bert_config.json`, which older versions named after other families, has the most
tokens of an input, and whether it is in lower case; newer versions leave both to the files of the
tokenizer. A folder without these is a language model: the
last token has seen the others, so that its hidden state, normalised, is the vector. Of an encoder
it is the mean of all tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.dense import MAX_WEIGHTS, read_dense
from inference_svc.model.checkpoint.embedding_files import INPUTS, MODULES, PROMPTS
from inference_svc.model.checkpoint.files import CONFIG, TOKENIZER_CONFIG, read_json
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling

MAX_MODULES, MAX_PROMPTS, MAX_PROMPT_CHARS = 16, 64, 1 << 14
MAX_SEQUENCE = 1 << 30
"""More tokens than any context has."""

_FLAG = "pooling_mode_"
_POOLINGS = {
    "cls_token": Pooling.FIRST,
    "lasttoken": Pooling.LAST,
    "mean_tokens": Pooling.MEAN,
}
_MODES = {"cls": "cls_token", "mean": "mean_tokens"}
"""Names of `pooling_mode`, which newer versions save, where older ones have another."""
_MODULE = re.compile(r"sentence_transformers\.(?:\w+\.)*(\w+)")
_FOLDER = re.compile(r"[\w.-]*")


def read_embedding_rule(
    model_dir: Path, hidden_size: int, pooling: Pooling = Pooling.LAST
) -> EmbeddingRule:
    """Returns how a model of this hidden size embeds, which has this pooling unless its files name
    one. A rule that cannot be honoured has a `refusal` that names the file: such a model may still
    generate."""
    try:
        return _read(model_dir, EmbeddingRule(hidden_size, pooling))
    except UnsupportedModel as error:
        return EmbeddingRule(hidden_size, refusal=str(error))


def _read(model_dir: Path, rule: EmbeddingRule) -> EmbeddingRule:
    path = model_dir / CONFIG
    config = read_json(path) if path.exists() else {}
    if (model_dir / MODULES).exists():
        modules = _modules(model_dir)
        folders = [folder for kind, folder in modules if kind == "Pooling"]
        if len(folders) != 1:
            raise UnsupportedModel(f"{MODULES}: lists {len(folders)} poolings, not one")
        rule = replace(
            rule,
            pooling=_pooling(model_dir, folders[0], rule.size),
            is_normalised=any(kind == "Normalize" for kind, _ in modules),
        )
        rule = _with_dense(model_dir, rule, modules)
    rule = replace(rule, dimensions=_dimensions(config, rule.size))
    if (model_dir / PROMPTS).exists():
        prompts, default = _prompts(read_json(model_dir / PROMPTS))
        rule = replace(rule, prompts=prompts, default_prompt=default)
    max_tokens, lowercases = _inputs(model_dir)
    return replace(rule, max_tokens=max_tokens, lowercases=lowercases)


def _with_dense(
    model_dir: Path, rule: EmbeddingRule, modules: list[tuple[str, str]]
) -> EmbeddingRule:
    """Returns the rule with the dense layers, which stand between pooling and normalisation. Raises
    UnsupportedModel."""
    kinds = [kind for kind, _ in modules]
    places = [place for place, kind in enumerate(kinds) if kind == "Dense"]
    if not places:
        return rule
    end = kinds.index("Normalize") if "Normalize" in kinds else len(kinds)
    if not kinds.index("Pooling") < places[0] <= places[-1] < end:
        raise UnsupportedModel(f"{MODULES}: a Dense must stand behind Pooling, before Normalize")
    layers, size, num_left = [], rule.size, MAX_WEIGHTS
    for place in places:
        layers.append(read_dense(model_dir, modules[place][1], size, num_left))
        size, num_left = len(layers[-1].weight), num_left - layers[-1].weight.size
    return replace(rule, size=size, hidden_size=rule.size, dense=tuple(layers))


def _inputs(model_dir: Path) -> tuple[int, bool]:
    """Returns the most tokens of an input, 0 for no such limit, and whether it is in lower case, by
    the first file that has content. Raises UnsupportedModel."""
    files = ((name, model_dir / name) for name in INPUTS)
    found = ((name, read_json(path)) for name, path in files if path.exists())
    where, config = next(((name, config) for name, config in found if config), (INPUTS[0], {}))
    most, lowercases = config.get("max_seq_length"), config.get("do_lower_case", False)
    if most is not None and (type(most) is not int or not 1 <= most <= MAX_SEQUENCE):
        raise UnsupportedModel(
            f"{where}: max_seq_length = {most!r}: must be from 1 to {MAX_SEQUENCE}, or null"
        )
    if not isinstance(lowercases, bool):
        raise UnsupportedModel(f"{where}: do_lower_case = {lowercases!r}: must be true or false")
    if most is None and (model_dir / MODULES).exists():
        most = _tokenizer_limit(model_dir / TOKENIZER_CONFIG)
    return most or 0, lowercases


def _tokenizer_limit(path: Path) -> int:
    """Returns the most tokens of an input by a tokenizer's config, 0 for none: without a limit
    transformers writes 10^30."""
    most = read_json(path).get("model_max_length") if path.exists() else None
    return most if type(most) is int and 1 <= most <= MAX_SEQUENCE else 0


def _dimensions(config: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """Returns the lengths that the model was trained for, if its config lists them."""
    listed = config.get("matryoshka_dimensions") or []
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise UnsupportedModel(f"{CONFIG}: matryoshka_dimensions must be a list of integers")
    if any(not 1 <= each <= size for each in listed):
        raise UnsupportedModel(f"{CONFIG}: matryoshka_dimensions must be from 1 to {size}")
    return tuple(sorted(set(listed)))


def _modules(model_dir: Path) -> list[tuple[str, str]]:
    """Returns the kind and the folder of each step."""
    modules = []
    for each in _read_list(model_dir / MODULES):
        found = each if isinstance(each, dict) else {}
        kind = _MODULE.fullmatch(str(found.get("type")))
        folder = found.get("path")
        if kind is None or not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            raise UnsupportedModel(f"{MODULES}: an entry is not as sentence-transformers saves it")
        if kind[1] not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise UnsupportedModel(
                f"{MODULES}: {kind[1]} is not supported: supported are Transformer, Pooling, Dense "
                "and Normalize"
            )
        modules.append((kind[1], folder))
    return modules


def _read_list(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path.name} cannot be read: {error}") from error
    if not isinstance(content, list) or len(content) > MAX_MODULES:
        raise UnsupportedModel(f"{path.name} must be a list of at most {MAX_MODULES} modules")
    return content


def _pooling(model_dir: Path, folder: str, size: int) -> Pooling:
    config, where = read_json(model_dir / folder / CONFIG), f"{folder}/{CONFIG}"
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if config.get(key, size) != size:
            raise UnsupportedModel(f"{where}: {key} = {config[key]!r}: must be {size}")
    chosen = [
        key.removeprefix(_FLAG)
        for key, value in config.items()
        if key.startswith(_FLAG) and value is True
    ]
    modes = config.get("pooling_mode") or []
    for mode in modes if isinstance(modes, list) else [modes]:
        chosen.append(_MODES.get(str(mode), str(mode)))
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise UnsupportedModel(
            f"{where}: pools {', '.join(chosen) or 'nothing'}: supported is one of "
            f"{', '.join(_POOLINGS)}"
        )
    pooling = _POOLINGS[chosen[0]]
    if config.get("include_prompt") is False and pooling is not Pooling.LAST:
        raise UnsupportedModel(f"{where}: include_prompt = false is not supported")
    return pooling


def _prompts(config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Returns the prompts by name, and the name of the default one; "" for none."""
    found, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(found, dict) or len(found) > MAX_PROMPTS:
        raise UnsupportedModel(f"{PROMPTS}: prompts must be at most {MAX_PROMPTS}, by name")
    for text in found.values():
        if not isinstance(text, str) or len(text) > MAX_PROMPT_CHARS:
            raise UnsupportedModel(
                f"{PROMPTS}: prompts must be texts of at most {MAX_PROMPT_CHARS} characters"
            )
    if default and default not in found:
        raise UnsupportedModel(f"{PROMPTS}: default_prompt_name = {default!r} is no prompt")
    return found, default
