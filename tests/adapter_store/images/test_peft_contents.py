"""What PEFT itself saves besides A and B, read and compiled: the segments are PEFT's tensors, and
compute what PEFT computes."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.reading.files import AdapterFile
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.images.compile import compile_image
from adapter_store.images.plan.announcement import content_of
from adapter_store.images.plan.plan import plan_image
from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from tests.support.store.format_2 import hashes_of
from tests.support.store.peft_models import (
    DOWN,
    EMBEDDING,
    EXPERTS,
    GATE,
    HEAD,
    HIDDEN,
    UP,
    VOCAB,
    WIDTH,
    A,
    B,
    K,
    Q,
    V,
    Values,
    adapt,
    compiled,
    deltas_of,
    layout,
    make_model,
    module,
    moe,
    moe_layout,
    tied,
)

pytestmark = pytest.mark.matrix


def check_format_1(checkpoint: Checkpoint, kind: str) -> None:
    with pytest.raises(IncompatibleAdapter, match=kind) as caught:
        compile_image(checkpoint, layout(image_format=1))
    assert caught.value.reason == "FORMAT_TOO_OLD"


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_bias_of_b_is_scaled_as_peft_scales_it(tmp_path, use_rslora):
    options = {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 3}}
    adapted = adapt(tmp_path, lora_bias=True, use_rslora=use_rslora, **options)
    checkpoint, values = compiled(tmp_path)
    x = torch.randn(7, HIDDEN)
    for name in (Q, V):
        layer = module(adapted, name)
        scale = layer.scaling["default"]
        assert values[name, SegmentKind.BIAS].equal(scale * layer.lora_B["default"].bias)
        added = x @ values[name, A].T @ values[name, B] + values[name, SegmentKind.BIAS]
        torch.testing.assert_close(layer.base_layer(x) + added, layer(x))
    assert checkpoint.segment_kinds == (SegmentKind.BIAS,)
    check_format_1(checkpoint, "bias")


def test_magnitudes_of_dora_are_pefts(tmp_path):
    """The norms of DoRA are the server's to compute: here by their definition."""
    names = ["q_proj", "k_proj", "embed_tokens", "lm_head"]
    adapted = adapt(tmp_path, use_dora=True, target_modules=names, save_embedding_layers=False)
    checkpoint, values = compiled(tmp_path)
    assert checkpoint.segment_kinds == (SegmentKind.MAGNITUDE,)
    for name in (Q, K, HEAD):
        layer, x = module(adapted, name), torch.randn(7, HIDDEN)
        magnitude = values[name, SegmentKind.MAGNITUDE]
        assert magnitude.equal(layer.lora_magnitude_vector["default"].weight)
        weight = layer.base_layer.weight + values[name, B].T @ values[name, A]
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
        bias = layer.base_layer.bias
        torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), layer(x))
    layer, ids = module(adapted, EMBEDDING), torch.arange(VOCAB)
    magnitude = values[EMBEDDING, SegmentKind.MAGNITUDE]
    assert magnitude.equal(layer.lora_magnitude_vector["default"].weight)
    weight = layer.base_layer.weight + values[EMBEDDING, A] @ values[EMBEDDING, B]
    torch.testing.assert_close(weight * magnitude / weight.norm(dim=0), layer(ids))
    check_format_1(checkpoint, "magnitude")


def test_trained_tokens_are_rows_by_their_ids(tmp_path):
    """PEFT saves them in the config's order; an image has them in that of their ids."""
    adapted = adapt(tmp_path, trainable_token_indices=[30, 5, 39, 6])
    checkpoint, values = compiled(tmp_path)
    assert checkpoint.segment_kinds == (SegmentKind.ROW_IDS, SegmentKind.ROWS)
    ids = values[EMBEDDING, SegmentKind.ROW_IDS]
    assert ids.tolist() == [5, 6, 30, 39]
    assert plan_image(checkpoint, layout()).added_tokens == 0
    embedding = module(adapted, EMBEDDING)
    assert values[EMBEDDING, SegmentKind.ROWS].equal(embedding(ids))
    check_format_1(checkpoint, "rows")


def test_trained_tokens_of_the_embedding_and_the_head(tmp_path):
    indices = {"embed_tokens": [3, 5], "lm_head": [4]}
    adapted = adapt(tmp_path, trainable_token_indices=indices)
    _, values = compiled(tmp_path)
    for name, ids in ((EMBEDDING, [3, 5]), (HEAD, [4])):
        delta = module(adapted, name).token_adapter.trainable_tokens_delta["default"]
        assert values[name, SegmentKind.ROW_IDS].tolist() == ids
        assert values[name, SegmentKind.ROWS].equal(delta)


def test_saved_modules_are_whole(tmp_path):
    """PEFT matches how names end: "norm" is every norm."""
    modules = ["embed_tokens", "lm_head", "k_proj", "input_layernorm", "model.norm"]
    adapted = adapt(tmp_path, modules_to_save=modules)
    checkpoint, values = compiled(tmp_path)
    found = {name for name, kind in values if kind is SegmentKind.FULL}
    norms = {"model.layers.0.input_layernorm", "model.norm"}
    assert found == {EMBEDDING, HEAD, K, f"{K}.bias", *norms}
    for name in found:
        own, what = (name[:-5], "bias") if name.endswith(".bias") else (name, "weight")
        saved = getattr(module(adapted, own).modules_to_save["default"], what)
        assert values[name, SegmentKind.FULL].equal(saved)
    assert checkpoint.segment_kinds == (SegmentKind.FULL,)
    check_format_1(checkpoint, "full")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_the_base_are_whole(tmp_path, bias):
    adapted = adapt(tmp_path, bias=bias)
    checkpoint, values = compiled(tmp_path)
    base = adapted.get_base_model().state_dict()
    names = {f"{name}.bias" for name in ((Q, K, V) if bias == "all" else (Q,))}
    assert {name for name, kind in values if kind is SegmentKind.FULL} == names
    for name in names:
        own = base[name.replace(".bias", ".base_layer.bias") if Q in name else name]
        assert values[name, SegmentKind.FULL].equal(own)
    check_format_1(checkpoint, "full")


def with_hashes(weights: Mapping[str, torch.Tensor]) -> Layout:
    of = layout()
    targets = [
        dataclasses.replace(
            target, base_hashes=hashes_of(weights[target.name]), base_dtype=DataType.FLOAT32
        )
        if target.name in weights
        else target
        for target in of.targets
    ]
    made = dataclasses.replace(of, targets=tuple(targets))
    validate(made)
    return made


@pytest.mark.parametrize("is_adapted", [True, False])
def test_what_is_saved_along_is_dropped_if_it_is_the_bases(tmp_path, is_adapted):
    """PEFT saves embeddings along by default: the server's hashes tell."""
    targets = ["q_proj", *(["embed_tokens", "lm_head"] if is_adapted else [])]
    save: dict[str, Any] = {} if is_adapted else {"save_embedding_layers": True}
    model = make_model()
    weights = {EMBEDDING: model.get_input_embeddings().weight.detach().clone()}
    weights[HEAD] = model.lm_head.weight.detach().clone()
    adapt(tmp_path, model, target_modules=targets, **save)
    checkpoint = open_checkpoint(tmp_path)
    assert {each.name for each in checkpoint.replacements} == {EMBEDDING, HEAD}
    _, values = compiled(tmp_path, with_hashes(weights))
    assert {kind for _, kind in values} == {A, B}
    assert {name for name, _ in values} == ({Q, EMBEDDING, HEAD} if is_adapted else {Q})

    _, values = compiled(tmp_path, with_hashes({**weights, HEAD: weights[HEAD] + 1}))
    assert values[HEAD, SegmentKind.FULL].equal(weights[HEAD])
    for image_format in (1, 2):
        with pytest.raises(IncompatibleAdapter, match="loadout strip IN OUT") as caught:
            compile_image(checkpoint, layout(image_format))
        assert caught.value.reason == "BASE_UNKNOWN"


TRAINED_ROWS: dict[str, Any] = {
    "of the embedding": [30, 5],
    "of the head": {"lm_head": [7]},
    "of both, saved once": {"embed_tokens": [3, 30], "lm_head": [3, 30]},
    "of both, apart": {"embed_tokens": [3, 30], "lm_head": [4]},
}


def weights_with_rows(base: torch.Tensor, values: Values) -> dict[str, torch.Tensor]:
    """Returns the embedding and the head with an image's segments in place of the base's rows."""
    found = {}
    for name in (EMBEDDING, HEAD):
        found[name] = values.get((name, SegmentKind.FULL), base).clone()
        if (name, SegmentKind.ROWS) in values:
            ids = values[name, SegmentKind.ROW_IDS].long()
            found[name][ids] = values[name, SegmentKind.ROWS]
    return found


def check_both(adapted: Any, base: torch.Tensor, values: Values) -> None:
    found = weights_with_rows(base, values)
    embedding, head = module(adapted, EMBEDDING), module(adapted, HEAD)
    assert embedding(torch.arange(VOCAB)).equal(found[EMBEDDING])
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(head(x), x @ found[HEAD].T)


@pytest.mark.parametrize("case", TRAINED_ROWS)
def test_trained_rows_of_a_tied_base_are_pefts(tmp_path, case):
    """Those of the embedding are the head's, too, and lie in the image once."""
    model = make_model(tied=True)
    base = model.get_input_embeddings().weight.detach().clone()
    adapted = adapt(tmp_path, model, trainable_token_indices=TRAINED_ROWS[case])
    checkpoint, values = compiled(tmp_path, tied(layout()))
    check_both(adapted, base, values)
    segments = compile_image(checkpoint, tied(layout())).plan.segments
    places = [each.offset for each in segments if each.kind is SegmentKind.ROWS]
    is_shared = case in ("of the embedding", "of both, saved once")
    assert (len(places), len(set(places))) == (
        *(1 if case == "of the head" else 2, 2 if case == "of both, apart" else 1),
    )
    assert is_shared == ((EMBEDDING, A) not in values and len(places) > len(set(places)))
    if case == "of both, saved once":
        with pytest.raises(IncompatibleAdapter, match="lm_head, of which the file has no rows"):
            compiled(tmp_path)


def test_rows_of_both_that_are_saved_once_are_another_adapter(tmp_path):
    """Its verdict is another where the base is not tied."""
    digests = set()
    for number, name in enumerate(["embed_tokens", "lm_head"]):
        indices = {"embed_tokens": [3], name: [3]}
        adapt(tmp_path / str(number), make_model(tied=True), trainable_token_indices=indices)
        digests.add(open_checkpoint(tmp_path / str(number)).digest)
    assert len(digests) == 2


COPIES: dict[str, tuple[list[str], list[str]]] = {
    "none differs": ([EMBEDDING, HEAD], []),
    "the embedding's, saved alone": ([EMBEDDING], [EMBEDDING]),
    "the head's, saved alone": ([HEAD], [HEAD]),
    "the head's": ([EMBEDDING, HEAD], [HEAD]),
    "the embedding's, which the head's replaces": ([EMBEDDING, HEAD], [EMBEDDING]),
}


@pytest.mark.parametrize("case", COPIES)
def test_copies_of_a_tied_base_are_pefts(tmp_path, case):
    """The base has one weight for both: what is loaded last is both's."""
    saved, changed = COPIES[case]
    model = make_model(tied=True)
    base = model.get_input_embeddings().weight.detach().clone()
    adapt(tmp_path, copy.deepcopy(model), save_embedding_layers=True)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for name in (EMBEDDING, HEAD):
        key = f"base_model.model.{name}.weight"
        tensors[key] = base + (name in changed)
        if name not in saved:
            del tensors[key]
    save_file(tensors, path)
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.PeftModel.from_pretrained(model, str(tmp_path)).eval()
    hashed = tied(with_hashes({EMBEDDING: base, HEAD: base}))
    _, values = compiled(tmp_path, hashed)
    check_both(adapted, base, values)
    assert {kind for _, kind in values} == {
        A,
        B,
        *([SegmentKind.FULL] if changed == saved[-1:] else []),
    }


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_lora_and_saved_modules_of_a_tied_base_are_of_one_of_the_two(tmp_path, name):
    module_name = name.rpartition(".")[2]
    options: list[dict[str, Any]] = [
        {"modules_to_save": [module_name]},
        {"target_modules": [module_name], "save_embedding_layers": False},
    ]
    for number, each in enumerate(options):
        folder = tmp_path / str(number)
        adapt(folder, make_model(tied=True), **each)
        _, values = compiled(folder, tied(layout()))
        assert {target for target, _ in values if target != Q} == {name}


@pytest.mark.parametrize("kind", ["qwen3", "gptoss"])
@pytest.mark.parametrize("width", [WIDTH, HIDDEN], ids=["oblong", "square"])
@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",)])
def test_parameters_of_experts_are_pefts(tmp_path, kind, width, parameters):
    names = [f"mlp.experts.{name}" for name in parameters]
    options = {"target_parameters": names, "rank_pattern": {"experts.down_proj": 3}}
    adapted = adapt(tmp_path, moe(kind, width), **options)
    checkpoint, values = compiled(tmp_path, moe_layout(kind, width))
    assert checkpoint.segment_kinds == ()
    assert {each.name for each in checkpoint.experts} == {
        f"{EXPERTS}.{name}" for name in parameters
    }
    layer = module(adapted, EXPERTS)
    while hasattr(layer, "parameter_name"):
        delta = layer.get_delta_weight("default").detach()
        delta = delta.mT if kind == "gptoss" else delta  # [experts, out, in]
        if layer.parameter_name == "down_proj":
            found = deltas_of(values, DOWN, width, HIDDEN)
            torch.testing.assert_close(torch.stack(found), delta)
        else:
            gate, up = (torch.stack(deltas_of(values, name, HIDDEN, width)) for name in (GATE, UP))
            order = torch.cat([gate, up], 1)
            if kind == "gptoss":
                order = torch.stack([gate, up], 2).flatten(1, 2)
            torch.testing.assert_close(order, delta)
        layer = layer.base_layer
    assert (GATE, A) in values or len(parameters) == 1
    with pytest.raises(IncompatibleAdapter, match="experts") as caught:
        compile_image(checkpoint, dataclasses.replace(layout(1), targets=(Q_OF_FORMAT_1,)))
    assert caught.value.reason == "FORMAT_TOO_OLD"


def test_a_parameter_is_read_once_to_be_compiled(tmp_path, monkeypatch):
    """Not once for each expert."""
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    adapt(tmp_path, moe("qwen3", WIDTH), target_parameters=names)
    checkpoint = open_checkpoint(tmp_path)
    num_read = 0
    read_into = AdapterFile.read_into

    def counted(file: AdapterFile, offset: int, buffer: memoryview) -> None:
        nonlocal num_read
        num_read += buffer.nbytes
        read_into(file, offset, buffer)

    monkeypatch.setattr(AdapterFile, "read_into", counted)
    compile_image(checkpoint, moe_layout("qwen3", WIDTH))
    assert num_read == sum(record.length_bytes for record in checkpoint.records)


Q_OF_FORMAT_1 = Target(Q, 0, "qkv", TargetKind.LINEAR, HIDDEN, HIDDEN)


def test_a_parameter_that_is_a_weight_is_a_linear_layer(tmp_path):
    parameters = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    adapted = adapt(tmp_path, target_parameters=parameters, alpha_pattern={"v_proj.weight": 3})
    checkpoint, values = compiled(tmp_path)
    assert list(checkpoint.targets) == [K, Q, V]
    for name in (K, Q, V):
        delta = module(adapted, name).get_delta_weight("default")
        torch.testing.assert_close(values[name, B].T @ values[name, A], delta)


def test_invocation_tokens_are_of_the_record_and_not_of_the_image(tmp_path):
    adapt(tmp_path, alora_invocation_tokens=[5, 3, 5])
    checkpoint, values = compiled(tmp_path)
    assert checkpoint.invocation_tokens == (5, 3, 5)
    assert values.keys() == {(Q, A), (Q, B)}
    check_format_1(checkpoint, "invocation tokens")


@pytest.mark.parametrize("option", ["trainable_token_indices", "modules_to_save"])
def test_added_tokens_are_rows_behind_the_bases(tmp_path, option):
    """Where PEFT saves the resized base along, it says how to save without."""
    model = make_model()
    weights = {EMBEDDING: model.get_input_embeddings().weight.detach().clone()}
    added = [VOCAB, VOCAB + 1]
    with warnings.catch_warnings(action="ignore"):
        model.resize_token_embeddings(VOCAB + 2)
    value = added if option == "trainable_token_indices" else ["embed_tokens"]
    adapted = adapt(tmp_path, model, save_embedding_layers=False, **{option: value})
    ids = torch.tensor(added)
    if option == "modules_to_save":
        with torch.no_grad():
            module(adapted, EMBEDDING).weight[:VOCAB] = weights[EMBEDDING]
        adapted.save_pretrained(str(tmp_path), save_embedding_layers=False)
    of = with_hashes(weights)
    checkpoint, values = compiled(tmp_path, of)
    assert values[EMBEDDING, SegmentKind.ROW_IDS].tolist() == added
    assert content_of(plan_image(checkpoint, of), of).added_tokens == 2
    assert values[EMBEDDING, SegmentKind.ROWS].equal(module(adapted, EMBEDDING)(ids))
    with warnings.catch_warnings(action="ignore"):
        adapted.save_pretrained(str(tmp_path), save_embedding_layers=True)
    with pytest.raises(InvalidAdapter, match="save with save_embedding_layers=False"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("where", ["rows of the head", "a copy of the embedding"])
def test_added_tokens_are_refused_where_lora_of_the_embedding_lacks_them(tmp_path, where):
    """PEFT makes A of as many tokens as rows: others would be read beyond its end."""
    model = make_model()
    base = model.get_input_embeddings().weight.detach().clone()
    rows = {"lm_head": [3, 5]} if where == "rows of the head" else None
    targets = ["q_proj", "embed_tokens"]
    options = {"target_modules": targets, "trainable_token_indices": rows}
    adapt(tmp_path, model, save_embedding_layers=False, **options)
    of = with_hashes({EMBEDDING: base})
    compile_image(open_checkpoint(tmp_path), of)
    if rows is not None:
        path = tmp_path / "adapter_config.json"
        ids = {"lm_head": [VOCAB, VOCAB + 1]}
        fields = json.loads(path.read_text()) | {"trainable_token_indices": ids}
        path.write_text(json.dumps(fields))
    else:
        path = tmp_path / "adapter_model.safetensors"
        copy = torch.cat([base, torch.ones(1, HIDDEN)])
        name = f"base_model.model.{EMBEDDING}.base_layer.weight"
        save_file({**load_file(path), name: copy}, path)
    with pytest.raises(IncompatibleAdapter, match="not A and B") as caught:
        compile_image(open_checkpoint(tmp_path), of)
    assert caught.value.reason == "SHAPE_MISMATCH"
