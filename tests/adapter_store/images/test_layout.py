import dataclasses
import json

import pytest

from adapter_store.checkpoint.reading.digest import canonical_json
from adapter_store.images.plan import layout as layout_module
from adapter_store.images.plan.layout import from_text, layout_id, to_text, validate
from contract.images.dtypes import DataType
from contract.images.layouts import runs
from contract.images.targets import Target, TargetKind
from servicekit.errors import InvalidArgument


def linear(name: str, layer: int | None, group: str = "", **fields) -> Target:
    defaults = {"in_features": 8, "out_features": 8}
    return Target(name, layer, group or name, TargetKind.LINEAR, **{**defaults, **fields})


def test_the_tiny_layout_is_valid_and_round_trips(make_layout):
    layout = make_layout()
    validate(layout)
    text = to_text(layout)
    assert from_text(text) == layout
    assert layout_id(from_text(text)) == layout_id(layout)
    assert text == canonical_json(json.loads(text))


def test_what_earlier_releases_wrote_is_read(make_layout):
    layout = dataclasses.replace(make_layout(), base_model='"targets": [')
    data = json.loads(to_text(layout))
    targets = data.pop("targets")
    data["aliases"] = ['"targets":[', "tiny"]
    assert from_text(json.dumps({**data, "targets": targets})) == layout
    assert from_text(json.dumps({**data, "targets": []})).targets == ()


def test_slices_round_trip(make_layout):
    layout = make_layout(targets=(linear("a", 0, in_slice=(0, 4), out_slice=(4, 8)),))
    validate(layout)
    assert from_text(to_text(layout)) == layout


def test_runs_are_embedding_layers_head(make_layout):
    layout = make_layout()
    layers = [layout.targets[start].layer for start, _ in runs(layout)]
    assert layers == [None, 0, 1, None]
    covered = [index for start, end in runs(layout) for index in range(start, end)]
    assert covered == list(range(len(layout.targets)))


def test_identity_follows_everything(make_layout):
    layout = make_layout()
    target = layout.targets[3]
    others = [
        dataclasses.replace(layout, **change)
        for change in (
            {"base_model": "other"},
            {"config_sha256": "1" * 64},
            {"dtype": DataType.BFLOAT16},
            {"image_format": 2},
            {"targets": layout.targets[:-1]},
            {"targets": (*layout.targets[:-1], linear("lm_head", None, "head"))},
        )
    ]
    for change in ({"group": "x"}, {"out_slice": (0, 1)}, {"in_slice": (0, 1)}, {"layer": 7}):
        changed = dataclasses.replace(target, **change)
        others.append(dataclasses.replace(layout, targets=(changed,)))
    assert len({layout_id(other) for other in (layout, *others)}) == len(others) + 1


def test_identity_is_stable(make_layout):
    """As releases that had aliases in a layout computed it for a layout without any."""
    layout = make_layout(targets=(linear("model.layers.0.mlp.up_proj", 0, "layers.0.gate_up"),))
    assert layout_id(layout) == (
        "sha256:c886e54881884132e54607538dbe9a76962588219dc4bed5852cee346604850c"
    )


EMBEDDING = Target("embed", None, "embed", TargetKind.EMBEDDING, 8, 8)

BAD_LAYOUTS = {
    "base_model": {"base_model": ""},
    "base_model (control)": {"base_model": "a\nb"},
    "config_sha256": {"config_sha256": "abc"},
    "targets": {"targets": ()},
    "targets[0].name": {"targets": (linear("a b", 0),)},
    "targets[0].name (path)": {"targets": (linear("../a", 0),)},
    "targets[1].name": {"targets": (linear("a", 0), linear("a", 1))},
    "targets[0].group": {"targets": (Target("a", 0, "", TargetKind.LINEAR, 8, 8),)},
    "targets[0].layer": {"targets": (linear("a", -1),)},
    "targets[0].experts": {"targets": (linear("a", 0, experts=8),)},
    "targets[0].in_features": {"targets": (linear("a", 0, in_features=0),)},
    "targets[0].out_features": {"targets": (linear("a", 0, out_features=2**40),)},
    "targets[0].in_slice": {"targets": (linear("a", 0, in_slice=(0, 9)),)},
    "targets[0].in_slice (reversed)": {"targets": (linear("a", 0, in_slice=(4, 4)),)},
    "targets[0].out_slice": {"targets": (linear("a", 0, out_slice=(-1, 4)),)},
    "targets[1].layer (order)": {"targets": (linear("a", 1), linear("b", 0))},
    "targets[2].layer (twice)": {"targets": (linear("a", 0), linear("b", 1), linear("c", 0))},
    "targets[1].layer (between)": {"targets": (linear("a", 0), linear("b", None), linear("c", 1))},
    "targets[1].kind (after layers)": {"targets": (linear("a", 0), EMBEDDING)},
    "targets[0].kind (in layer)": {"targets": (dataclasses.replace(EMBEDDING, layer=0),)},
    "targets[2].group (apart)": {
        "targets": (linear("a", 0, "g"), linear("b", 0), linear("c", 0, "g"))
    },
    "targets[1].group (input)": {
        "targets": (linear("a", 0, "g"), linear("b", 0, "g", in_features=16))
    },
}


@pytest.mark.parametrize("culprit", BAD_LAYOUTS)
def test_senseless_layout_is_refused_by_field(make_layout, culprit):
    layout = dataclasses.replace(make_layout(), **BAD_LAYOUTS[culprit])
    with pytest.raises(InvalidArgument) as error:
        validate(layout)
    assert error.value.subject == f"layout.{culprit.split(' ')[0]}"


def test_a_model_without_layers_is_one_run(make_layout):
    layout = make_layout(targets=(EMBEDDING, linear("head", None)))
    validate(layout)
    assert list(runs(layout)) == [(0, 2)]


def test_a_large_layout_is_written_and_read_in_pieces(make_layout, monkeypatch):
    """Other threads run in between, not within one call of the json module."""
    lengths: list[int] = []

    def loads(text: str):
        lengths.append(len(text))
        return json.JSONDecoder().decode(text)

    def dumps(value) -> str:
        lengths.append(len(canonical_json(value)))
        return canonical_json(value)

    monkeypatch.setattr(layout_module, "canonical_json", dumps)
    monkeypatch.setattr(layout_module.json, "loads", loads)
    layout = make_layout(targets=tuple(linear(f"model.layers.{i}.x", i) for i in range(1000)))
    assert from_text(to_text(layout)) == layout
    assert len(lengths) == 1 + 1000 + 1
    assert max(lengths) < 1000
