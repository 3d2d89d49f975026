"""The table of trainers and contents: it has all of them, and nothing is ignored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapter_store.checkpoint.features import WORDS, Feature
from adapter_store.checkpoint.formats.readers import TRAINERS
from adapter_store.images.plan.check import Server, check_folder
from tests.support.models.trained import Trainer
from tests.support.models.zoo import AdapterSpec, make_zoo
from tools.conformance import (
    APPLIED,
    CONTENTS,
    NOT_WRITTEN,
    OF_MIXTURE,
    WRITERS,
    mixture_server,
    server_of,
    verdicts,
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    unused = [AdapterSpec("unused", 1, ["q_proj"])]
    return Trainer.load(make_zoo("qwen2", tmp_path_factory.mktemp("zoo"), unused).model_dir)


@pytest.fixture(scope="module")
def server(trainer: Trainer) -> Server:
    return server_of(trainer.model_dir)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return mixture_server(tmp_path_factory.mktemp("mixture"))


def test_every_trainer_that_is_read_has_a_column() -> None:
    assert sorted(name for writer in WRITERS for name in writer.trainers) == sorted(
        trainer.name for trainer in TRAINERS
    )


def test_every_content_has_a_row() -> None:
    assert set(CONTENTS) == set(Feature) - {Feature.MLX}  # which is a column
    assert set(WORDS) == set(Feature)


@pytest.mark.slow
def test_every_cell_is_applied_or_refused_by_name() -> None:
    found = verdicts()
    cells = [cell for row in found.values() for cell in row.values()]
    assert APPLIED in cells
    for feature in OF_MIXTURE:
        assert set(found[feature].values()) == {APPLIED, NOT_WRITTEN}
    for cell in set(cells) - {APPLIED, NOT_WRITTEN}:
        who, _, name = cell.partition(": ")
        assert who in ("refused", "refused by the server"), cell
        assert name.strip("`"), cell


@pytest.mark.parametrize("feature", CONTENTS, ids=lambda feature: feature.value)
def test_a_content_is_recognised(
    feature: Feature, trainer: Trainer, server: Server, mixture: Server, tmp_path: Path
) -> None:
    of = mixture if feature in OF_MIXTURE else server
    report = check_folder(CONTENTS[feature](replace(trainer, folder=tmp_path)), server=of)
    assert feature.value in report.features
    others = {
        Feature.SAVED_ALONG: {"linear", "embedding"},
        Feature.LINEAR: set(),
        Feature.EMBEDDING: set(),
        Feature.HEAD: set(),
        Feature.FUSED: set(),
        Feature.EXPERTS: set(),
        Feature.EXPERT_PARAMETERS: set(),
    }
    assert set(report.features) - {feature.value} == others.get(feature, {"linear"})
    modules = {module.name for module in report.modules}
    assert report.server is not None
    if not report.server.refusals and feature not in {Feature.FUSED, *OF_MIXTURE}:
        assert {target.name for target in report.server.targets} == modules


def test_the_first_layer_alone_is_some_layers(trainer: Trainer, tmp_path: Path) -> None:
    folder = replace(trainer, folder=tmp_path).lora(layers_to_transform=0)
    assert check_folder(folder).features == ("linear", "layers")


def test_bytes_that_targets_share_count_once(
    trainer: Trainer, server: Server, tmp_path: Path
) -> None:
    """A of a fused module lies where its first target has it."""
    folder = CONTENTS[Feature.FUSED](replace(trainer, folder=tmp_path))
    report = check_folder(folder, server=server)
    assert report.server is not None
    q, k, v = report.server.targets
    a, b = 4 * 4 * 64, 4 * 4 * 64  # fp32, rank 4, 64 inputs, of q 64 outputs
    assert (q.num_bytes, k.num_bytes, v.num_bytes) == (a + b, b // 2, b // 2)
    assert report.server.image_bytes == a + 2 * b


def test_ranks_and_targets_of_a_server_count(trainer: Trainer, tmp_path: Path) -> None:
    folder = CONTENTS[Feature.LINEAR](replace(trainer, folder=tmp_path))
    small = server_of(trainer.model_dir, "--max-rank", "2", "--lora-targets", "q_proj")
    report = check_folder(folder, server=small)
    assert report.server is not None
    assert [each.message for each in report.server.refusals] == [
        "rank 4 is above this server's limit 2 (--max-rank)",
        "target v_proj is not among this server's --lora-targets (q_proj)",
    ]
