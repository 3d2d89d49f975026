"""The families of models: one module each, which turns config.json into a description.

A family is added by a module with FAMILIES (and a row of test_parity.py, which compares its logits
with transformers' logits): it is found by being here, and nothing else knows its name. Encoders are
in `encoders`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import encoders
from inference_svc.model.checkpoint.files import CONFIG, read_json
from inference_svc.model.checkpoint.generation_config import read_generation_config
from inference_svc.model.checkpoint.headers import is_same_content, tensor_names, tensors_named
from inference_svc.model.checkpoint.wrapper import BARE, HEADED, TEXT_ALONE, Wrapper
from inference_svc.model.config.keys import check_keys
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD, Decoder, EncoderInputs, Pictures
from inference_svc.model.description.encoder import TOKENS_HEAD
from inference_svc.model.quantised import plain_config, read_scheme
from inference_svc.model.quantised.chosen import with_chosen_format
from inference_svc.model.quantised.modules import with_stored_formats
from inference_svc.model.rope import Axes
from inference_svc.pictures.processor import read_processor
from inference_svc.results.classifier_rule import MAX_LABELS
from inference_svc.results.embedding_rule import Pooling

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""Values that transformers assumes for keys that config.json leaves out, unless a family's
`defaults` differ. A bias that is left out is absent."""
CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
PLACEHOLDERS = ("image_token_index", "image_token_id", "video_token_id", "audio_token_id")
"""Keys of tokens that stand for pictures, videos and sounds."""
EMBEDDING, HEAD = f"{EMBED_TOKENS}.weight", f"{LM_HEAD}.weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture, as config.json names it.

    `describe` makes a description of a config whose keys are known: the keys of `config.keys.READ`,
    and `reads`. `ignores` do not change the computation, nor do `accepts` with their value there.
    `defaults` are the values that transformers assumes for keys that config.json leaves out, where
    that differs from `DEFAULTS`. `pictures` describes how the decoder reads pictures;
    None: it does not.
    """

    architecture: str
    describe: Callable[[ConfigReader], Decoder]
    reads: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    accepts: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pictures: Callable[[ConfigReader, Decoder], Pictures] | None = None

    @property
    def module(self) -> str:
        """The name of the module that describes it."""
        describe = self.describe
        return (describe.func if isinstance(describe, partial) else describe).__module__


def describe_text_part(
    config: ConfigReader,
    parts: Mapping[str, str | Family],
    wrapper: Wrapper,
    ignores: frozenset[str] = frozenset(),
) -> Decoder:
    """Returns the decoder that `text_config` describes; `parts` has the family of each `model_type`
    of it, or its architecture, the default first. The model's own flag says whether the head is
    tied. `ignores` are keys that transformers does not read in it. Raises UnsupportedModel."""
    values = config.get("text_config")
    if not isinstance(values, Mapping):
        raise config.unsupported("text_config", "must describe the text part")
    kind = values.get("model_type") or next(iter(parts))
    if not isinstance(kind, str) or kind not in parts:
        raise config.unsupported(
            "text_config.model_type", f"supported are {', '.join(parts)}", kind
        )
    part, where = parts[kind], "config.json: text_config"
    family = families()[part] if isinstance(part, str) else part
    _check_keys(values, family, where, ignores)
    text = ConfigReader(values, {**DEFAULTS, **family.defaults}, where)
    decoder = family.describe(text)
    head = replace(decoder.head, is_tied=config.flag("tie_word_embeddings"))
    eos_token_ids = _token_ids(text, text.get("eos_token_id"))
    ids = (config.get(key) for key in PLACEHOLDERS)
    return replace(
        decoder,
        head=head,
        wrapper=wrapper,
        eos_token_ids=eos_token_ids,
        placeholder_ids=tuple({each: None for each in ids if type(each) is int}),
    )


@cache
def families() -> Mapping[str, Family]:
    """Returns all families of decoders by the name of their architecture."""
    return {each.architecture: each for each in _families_of(__name__, __path__)}


@cache
def encoder_families() -> Mapping[str, Family]:
    """Returns all families of encoders, by the name of each of their classes."""
    found = tuple(_families_of(encoders.__name__, encoders.__path__))
    stems = [each.architecture.removesuffix(encoders.MODEL) for each in found]
    pairs = zip(stems, found, strict=True)
    return {f"{stem}{end}": each for stem, each in pairs for end in encoders.CLASSES}


def _families_of(package: str, path: Iterable[str]) -> Iterator[Family]:
    names = sorted(each.name for each in pkgutil.iter_modules(path) if not each.ispkg)
    for name in names:
        yield from importlib.import_module(f"{package}.{name}").FAMILIES


def load_description(
    model_dir: Path, quantize: str = "none", *, with_pictures: bool = False
) -> Decoder:
    """Reads config.json, and the end tokens of generation_config.json where there is one. Weights
    have the formats of the checkpoint or, of a plain one, the format that `quantize` chooses.
    Without pictures a model that could read them is its text part alone; with them, also the file
    of its processor is read.

    Raises UnsupportedModel naming the key that is malformed or not honoured.
    """
    values = read_json(model_dir / CONFIG)
    scheme = read_scheme(values)
    values = plain_config(values)
    family = _family_of(values)
    _check_keys(values, family)
    config = ConfigReader(values, {**DEFAULTS, **family.defaults})
    decoder = family.describe(config)
    if with_pictures and family.pictures is not None:
        pictures = family.pictures(config, decoder)
        decoder = _with_pictures(decoder, pictures, model_dir)
    if decoder.encoder is not None:
        decoder = _with_encoders_head(decoder, decoder.encoder, values)
    if decoder.encoder is None:
        decoder = _without_head(decoder, values, tensor_names(model_dir))
    elif scheme is not None or quantize != "none":
        what = f"--quantize {quantize}" if scheme is None else "quantization_config"
        raise UnsupportedModel(f"{what}: encoders are served in plain weights only")
    is_said = "tie_word_embeddings" in values
    has_tied = decoder.head.is_tied and decoder.encoder is None
    if has_tied and _has_own_head(model_dir, decoder.wrapper, is_said=is_said):
        decoder = replace(decoder, head=replace(decoder.head, is_tied=False))
    if scheme is not None:
        decoder = with_stored_formats(decoder, scheme, tensor_names(model_dir))
    decoder = with_chosen_format(decoder, quantize, _dtype_of(values))
    eos_token_ids = read_generation_config(model_dir).get("eos_token_id")
    if eos_token_ids is None:
        eos_token_ids = config.get("eos_token_id")
    return replace(
        decoder,
        architecture=values["architectures"][0],
        config_sha256=_canonical_sha256(values),
        dtype=_dtype_of(values),
        eos_token_ids=_token_ids(config, eos_token_ids) or decoder.eos_token_ids,
    )


def _with_pictures(decoder: Decoder, found: Pictures, model_dir: Path) -> Decoder:
    """Returns the decoder with pictures, and the facts of their processor. Raises
    UnsupportedModel."""
    if found.size != decoder.hidden_size:
        raise UnsupportedModel(
            f"{CONFIG}: vision_config makes embeddings of {found.size} elements, and text_config "
            f"reads {decoder.hidden_size}; --max-prompt-images 0 serves the text alone"
        )
    num_taps = len(found.tower.taps)
    if num_taps >= decoder.num_layers:
        raise UnsupportedModel(
            f"{CONFIG}: vision_config: deepstack_visual_indexes has {num_taps} layers, and must "
            f"have fewer than the text, {decoder.num_layers}"
        )
    inputs = decoder.layer_inputs
    if inputs is not None and found.padding_id is not None:
        inputs = replace(inputs, of_padding=((found.token_id, found.padding_id),))
        decoder = replace(decoder, layer_inputs=inputs)
    facts = read_processor(model_dir, found.tiles)
    if found.axes is not None:
        decoder = _with_axes(decoder, found.axes)
    return replace(decoder, pictures=replace(found, facts=facts))


def _with_axes(decoder: Decoder, axes: Axes) -> Decoder:
    """Returns the decoder whose heads turn along these axes. Raises UnsupportedModel."""
    for rope, head_dim in decoder.ropes:
        num_pairs = rope.rotary_size(head_dim) // 2
        if sum(axes.sections) != num_pairs:
            raise UnsupportedModel(
                f"{CONFIG}: text_config: mrope_section = {list(axes.sections)}: their sum must be "
                f"{num_pairs}, half of what turns of a head"
            )
    return decoder.with_ropes(lambda rope: replace(rope, axes=axes))


def _without_head(decoder: Decoder, values: Mapping[str, Any], stored: list[str]) -> Decoder:
    """Returns the decoder of a checkpoint that lacks the head, by its class or by the names of its
    tensors. A model whose class has no head does not generate: its logits, which show whether a
    row is sound, are the embedding's."""
    if decoder.wrapper == TEXT_ALONE and EMBEDDING.removeprefix(HEADED) in stored:
        decoder = replace(decoder, wrapper=BARE)
    [name] = values["architectures"]
    if name in families() or HEAD in stored:
        return decoder
    head, is_of_tokens = replace(decoder.head, is_tied=True), name.endswith(TOKEN_CLASSIFIER)
    labels = _labels(values) if is_of_tokens or name.endswith(CLASSIFIER) else ()
    return replace(decoder, head=head, generates=False, labels=labels, labels_tokens=is_of_tokens)


def _with_encoders_head(
    decoder: Decoder, encoder: EncoderInputs, values: Mapping[str, Any]
) -> Decoder:
    """Returns an encoder with the classifier's head of its class, if the class has one. Raises
    UnsupportedModel for a class whose head is not computed."""
    [name] = values["architectures"]
    is_of_tokens = name.endswith(TOKEN_CLASSIFIER)
    if not (is_of_tokens or name.endswith(CLASSIFIER)):
        return decoder
    if encoder.head is None:
        raise UnsupportedModel(f"architectures = {[name]!r}: this class's head is not computed")
    if is_of_tokens:
        has_norm = encoder.head.norm is not None
        head = encoder.head._replace(pooling=Pooling.NONE) if has_norm else TOKENS_HEAD
        encoder = replace(encoder, head=head)
    return replace(decoder, encoder=encoder, labels=_labels(values), labels_tokens=is_of_tokens)


def _labels(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a classifier's outputs, as transformers does. Raises UnsupportedModel
    for names that are not of 0, 1, 2, ..."""
    named = values.get("id2label")
    if named is None:
        count = values.get("num_labels", 2)
        if type(count) is int and count > MAX_LABELS:
            raise UnsupportedModel(
                f"{CONFIG}: num_labels = {count}: at most {MAX_LABELS} are served"
            )
        named = {index: f"LABEL_{index}" for index in range(count if type(count) is int else 0)}
    found = {str(key): str(name) for key, name in named.items()} if isinstance(named, dict) else {}
    if not found or found.keys() != set(map(str, range(len(found)))):
        raise UnsupportedModel(f"{CONFIG}: id2label = {named!r}: must name the labels 0, 1, 2, ...")
    return tuple(found[str(index)] for index in range(len(found)))


def _has_own_head(model_dir: Path, wrapper: Wrapper, *, is_said: bool) -> bool:
    """Returns whether the checkpoint of a model whose head is its embedding, as its config says or
    by default means, has another head all the same: then that is served, as by transformers."""
    found = tensors_named(model_dir, wrapper, (EMBEDDING, HEAD))
    if len(found) < 2:  # weights are missing or not whole: their reader reports it
        return not is_said and HEAD in map(wrapper.text_name, tensor_names(model_dir))
    is_own = not is_same_content(found[EMBEDDING], found[HEAD])
    if is_own and is_said:
        logger.warning(
            "%s ties the head to the embedding, but %s has other values: these are served",
            CONFIG,
            HEAD,
        )
    return is_own


def _check_keys(
    values: Mapping[str, Any],
    family: Family,
    where: str = "config.json",
    ignores: frozenset[str] = frozenset(),
) -> None:
    ignored = {*family.ignores, *ignores}
    check_keys(values, family.architecture, family.reads, ignored, family.accepts, where)


def _dtype_of(values: Mapping[str, Any]) -> str:
    text = values.get("text_config")
    both = (values, text if isinstance(text, Mapping) else {})
    named = (each.get(key) for each in both for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, named), "float32"))


def _family_of(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    found = (each for name, each in families().items() if names in ([name], *_classes(name)))
    family = next(found, None)
    if family is None and isinstance(names, list) and len(names) == 1:
        family = encoder_families().get(str(names[0]))
    if family is not None:
        return family
    every = {each.architecture for each in encoder_families().values()}
    supported = [*sorted(families()), *sorted(every)]
    if not names:
        said = "config.json has no architectures, which name the model's class"
    else:
        said = f"config.json: architectures = {names!r}"
        known = [str([each]) for each in supported]
        close = difflib.get_close_matches(str(names), known, n=1, cutoff=0.9)
        said += f" (did you mean {close[0]}?)" if close else ""
    raise UnsupportedModel(
        f"{said}: supported is one of {', '.join(supported)}; docs/models.md lists the models"
    )


def _classes(architecture: str) -> tuple[list[str], ...]:
    """Returns the names of transformers' classes of a family without the head of its language
    model, as config.json has them: without any, and with a classifier's."""
    ends = "Model", CLASSIFIER, TOKEN_CLASSIFIER
    return tuple([architecture.replace("ForCausalLM", end)] for end in ends)


def _canonical_sha256(config: Mapping[str, Any]) -> str:
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _token_ids(config: ConfigReader, ids: Any) -> tuple[int, ...]:
    """Returns the end tokens that a config names in one of its ways."""
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise config.unsupported("eos_token_id", "must be one or several token ids", ids)
    return tuple(dict.fromkeys(ids))
