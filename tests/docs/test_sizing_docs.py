"""The tables of sizes are what the services' code computes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapter_store.api.convert import from_layout as to_store_layout
from adapter_store.catalog.catalog import Catalog
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.plan.plan import plan_image
from bench.models import NAME as BENCH_NAME
from bench.models import SHAPES
from bench.store import catalog as store_catalog
from inference_svc.adapters.targets import build_layout
from inference_svc.model.architectures import load_description
from inference_svc.store.convert import from_layout
from tools import sizing
from tools.pages import sizing_docs
from tools.pages.sizing_docs import KUBERNETES_PATH
from tools.sizing_models import CARDS, MODELS

ASSETS = Path(__file__).parents[2] / "loadout" / "demo" / "assets"
NUM_ADAPTERS = 2_000


def test_the_tables_are_up_to_date() -> None:
    for path, tables in sizing_docs.render().items():
        page = path.read_text()
        assert sizing_docs.replaced(page, tables) == page, f"run `make docs`: {path}"


def test_the_table_of_pods_has_the_models_that_one_card_serves() -> None:
    rows = sizing_docs.render_kubernetes()["pods"].splitlines()[2:]
    named = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert named == [
        model
        for model in MODELS
        if not model.startswith("half") and any(sizing_docs.plan_card(model, gb) for gb in CARDS)
    ]
    assert "Llama-3.3-70B" not in named, "the page says so"


def test_production_has_at_least_what_the_table_says() -> None:
    [row] = [row for row in KUBERNETES_PATH.read_text().splitlines() if "| Llama-3.1-8B |" in row]
    _, _, _, memory, _, host, *_, model, store, _ = (cell.strip() for cell in row.split("|"))
    overlay = Path(sizing_docs.OVERLAY)
    [limit] = re.findall(r"limits:\n +memory: (\d+)Gi", (overlay / "inference.yaml").read_text())
    assert int(limit) >= int(memory.removesuffix("Gi"))
    assert f"LOADOUT_INFERENCE_HOST_MEMORY={host}\n" in (overlay / "inference.env").read_text()
    [volume] = re.findall(r"storage: (\d+)Gi", (overlay / "adapter-store.yaml").read_text())
    assert int(volume) >= int(store.removesuffix("Gi"))
    claim, *_ = re.findall(r"storage: (\d+)Gi", KUBERNETES_PATH.read_text())
    assert int(claim) >= int(model.removesuffix("Gi"))


def test_an_image_has_the_bytes_that_the_store_gives_it() -> None:
    checkpoint = open_checkpoint(ASSETS / "adapters" / "upper")
    description = load_description(ASSETS / "model")
    layout = build_layout(description, checkpoint.base_model, torch.bfloat16)
    stored = plan_image(checkpoint, replace(to_store_layout(from_layout(layout)), image_format=1))
    targets = tuple({name.rpartition(".")[2] for name in checkpoint.targets})
    kind = sizing.Adapters(checkpoint.rank, targets)
    assert sizing.image_bytes(layout, kind) == stored.total_bytes


def test_the_benchmarks_model_is_the_benchmarks() -> None:
    assert SHAPES[BENCH_NAME].values.items() <= sizing_docs.BENCH_200M.items()


def test_an_adapter_takes_so_much_of_the_catalog(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3", event_retention=NUM_ADAPTERS)
    store_catalog.fill(catalog, NUM_ADAPTERS)
    catalog.close()
    taken = sum(path.stat().st_size for path in tmp_path.iterdir()) / NUM_ADAPTERS
    assert 0.3 * sizing_docs.CATALOG_BYTES < taken < sizing_docs.CATALOG_BYTES


def test_the_number_of_stores_is_the_overlays() -> None:
    overlay = (sizing_docs.OVERLAY / "adapter-store.yaml").read_text()
    assert f"\n  replicas: {sizing_docs.NUM_STORES}\n" in overlay


def test_the_tool_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    sizing.main(["--rank", "4", "--", "--model", str(ASSETS / "model"), "--adapter-memory", "8MiB"])
    lines = capsys.readouterr().out.splitlines()
    printed = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert printed["`arena`"].startswith("8.0 MiB: ")
    assert {"`weights`", "`kv_pages`", "`workspace`", "image of one adapter"} <= set(printed)
