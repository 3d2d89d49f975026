"""The tables of the kernels' constants: whole, chosen by device and model, refused when wrong."""

from __future__ import annotations

import json

import pytest

from kernels import tuning

TABLES = sorted(tuning.FOLDER.glob("*.json"))
DEFAULT = tuning.read_table(tuning.path_of(tuning.DEFAULT))


@pytest.fixture(autouse=True)
def _default_again():
    yield
    tuning.use_device(tuning.DEFAULT)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_that_come_along_are_right(path):
    assert tuning.read_table(path, DEFAULT).keys() <= DEFAULT.keys()


def test_the_first_rule_that_fits_counts():
    assert tuning.constants("prefill", head_dim=128, itemsize=2)["block_n"] == 64
    assert tuning.constants("prefill", head_dim=256, itemsize=2)["block_n"] == 32
    assert tuning.constants("prefill", head_dim=256, itemsize=4)["block_n"] == 16


def test_constants_of_all_tables(tmp_path, monkeypatch):
    """What a device may run with that is not known yet."""
    [default] = tuning.all_constants("segments")[:1]
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    (tmp_path / "ACME.json").write_text(json.dumps({"segments": [{"positions": 8}]}))
    assert [rule["positions"] for rule in tuning.all_constants("segments")] == [
        8,
        default["positions"],
    ]


def test_a_devices_table_wins_where_it_has_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    (tmp_path / "ACME_GPU_9.json").write_text(
        json.dumps({"combine": [{"block_s": 8, "num_warps": 4}]})
    )
    before = tuning.constants("swiglu", size=64)
    assert tuning.use_device("ACME GPU 9")
    assert tuning.constants("combine", head_dim=128)["num_warps"] == 4
    assert tuning.constants("swiglu", size=64) == before
    assert not tuning.use_device("ACME GPU 8")
    assert tuning.constants("combine", head_dim=128)["num_warps"] == 2


def test_constants_are_overridden_for_a_while():
    before = tuning.constants("decode", head_dim=64)
    with tuning.overridden("decode", programs=3):
        assert tuning.constants("decode", head_dim=64) == {**before, "programs": 3}
    assert tuning.constants("decode", head_dim=64) == before
    with pytest.raises(AssertionError, match="decode has no \\['speed'\\]"), \
            tuning.overridden("decode", speed=1):  # fmt: skip
        pass


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"num_warps": 0}], "combine has num_warps 0: it must be a whole number of 1 or more"),
        ([{"num_warps": True}], "combine has num_warps True"),
        ([{"block_n": 48}], "combine has block_n 48: it must be a power of 2"),
        ([{"block_s": 16}], r"combine has \['block_s'\], needs \['block_s', 'num_warps'\]"),
        ([], "the last rule of combine must fit everything"),
        (
            [{"where": {"head_dim": [1, 2]}, "block_s": 8, "num_warps": 1}],
            "the last rule of combine must fit",
        ),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, rules, message):
    path = tmp_path / "ACME.json"
    path.write_text(json.dumps({"combine": rules}))
    with pytest.raises(ValueError, match=f"ACME.json: .*{message}"):
        tuning.read_table(path, DEFAULT)


def test_a_number_of_rows_may_be_0(tmp_path):
    """It switches something off; no other constant can."""
    path = tmp_path / "ACME.json"
    for most_rows in (0, 5):
        path.write_text(json.dumps({"beside": [{"most_rows": most_rows}]}))
        assert tuning.read_table(path, DEFAULT)["beside"] == [{"most_rows": most_rows}]
    path.write_text(json.dumps({"beside": [{"most_rows": -1}]}))
    with pytest.raises(ValueError, match="most_rows -1: it must be a whole number of 0 or more"):
        tuning.read_table(path, DEFAULT)


def test_every_default_serves_every_kernel_of_the_tree():
    """No table has a kernel that nothing asks for."""
    sources = "".join(
        path.read_text()
        for path in tuning.FOLDER.parent.rglob("*.py")
        if "tuning" not in path.parts
    )
    for kernel in DEFAULT:
        assert f'constants("{kernel}"' in sources or f'("{kernel}"' in sources, kernel
