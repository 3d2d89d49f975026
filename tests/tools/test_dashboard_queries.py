"""What panels make of known series, by promtool: of outages, of nothing at all, and of several
clusters."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tools.dashboards.__main__ import FOLDER
from tools.dashboards.preview.reading import asked, expand, panels, variables
from tools.dashboards.queries import INFERENCE, STORE
from tools.packaging.prometheus_package import programs

pytestmark = pytest.mark.processes

ALL = {
    **dict.fromkeys(("cluster", "namespace", "store_instance", "inference_instance"), ".*"),
    "inference_job": "gpus",
    "store_job": "stores",
}
BOARDS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}


class Answers:
    """Evaluates expressions after `hours` of these series, by the hour, without their names."""

    def __init__(self, folder: Path, series: dict[str, str], hours: int) -> None:
        self._path = folder / "panels.test.yml"
        self._series = [{"series": name, "values": values} for name, values in series.items()]
        self._hours = hours

    def check(self, expression: str, expected: dict[str, float]) -> None:
        """The answer has these values by label sets, and no others."""
        samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
        asked_for = {"expr": expression, "eval_time": f"{self._hours}h", "exp_samples": samples}
        test = {"interval": "1h", "input_series": self._series, "promql_expr_test": [asked_for]}
        self._path.write_text(yaml.safe_dump({"tests": [test]}))
        command = [str(programs().promtool), "test", "rules", str(self._path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def query(board: str, title: str) -> str:
    """The first of a panel, with All chosen."""
    [panel] = [each for each in panels(BOARDS[board]) if each["title"] == title]
    return expand(panel["targets"][0]["expr"], ALL)


def test_an_outage_counts_however_old_it_is(tmp_path: Path) -> None:
    """Three days: Grafana still finds the job, and the panel its targets."""
    series = {
        'loadout_inference_generated_tokens_total{job="gpus",instance="a:1"}': "1x9 stale",
        'up{job="gpus",instance="a:1"}': "1x9 0x90",
        'up{job="gpus",instance="b:1"}': "1x100",
        'up{job="theirs",instance="c:1"}': "0x100",
    }
    answers = Answers(tmp_path, series, hours=72)
    jobs = expand(asked(variables(BOARDS["fleet"])["inference_job"]), ALL)
    answers.check(jobs, {'{job="gpus"}': 1})
    answers.check(query("fleet", "Replicas down"), {"{}": 1})


def test_nothing_down_is_zero_and_no_target_is_nothing(tmp_path: Path) -> None:
    answers = Answers(tmp_path, {'up{job="gpus",instance="a:1"}': "1x9"}, hours=5)
    answers.check(query("fleet", "Replicas down"), {"{}": 0})
    answers.check(query("fleet", "Stores down"), {})
    answers.check(query("store", "Replicas down"), {})
    answers.check(query("fleet", "Firing alerts"), {"{}": 0})
    answers.check(expand(INFERENCE.or_zero("nothing"), ALL), {"{}": 0})
    answers.check(expand(STORE.or_zero("nothing"), ALL), {})


def test_a_replica_that_has_no_store_does_not_miss_it(tmp_path: Path) -> None:
    connected = "loadout_inference_store_connected"
    healthy = "loadout_inference_store_replicas_healthy"
    base_only = {f'{connected}{{job="gpus",instance="a:1"}}': "0x9"}
    Answers(tmp_path, base_only, hours=5).check(query("adapters", "Without the store"), {})
    cut_off = {
        f'{connected}{{cluster="{cluster}",job="gpus",instance="b:1"}}': f"{value}x9"
        for cluster, value in (("east", 0), ("west", 1))
    }
    asking = {
        f'{healthy}{{cluster="{cluster}",job="gpus",instance="b:1",replica="{replica}"}}': "1x9"
        for cluster in ("east", "west")
        for replica in ("s:1", "s:2")
    }
    answers = Answers(tmp_path, base_only | cut_off | asking, hours=5)
    answers.check(query("adapters", "Without the store"), {"{}": 1})


def test_each_catalog_has_its_own_line(tmp_path: Path) -> None:
    replicas = {
        f'loadout_store_adapters{{namespace="{space}",job="stores",instance="{host}:1"}}': f"{n}x9"
        for space, host, n in (("big", "a", 900), ("big", "b", 900), ("small", "a", 3))
    }
    expected = {'{namespace="big"}': 900.0, '{namespace="small"}': 3.0}
    Answers(tmp_path, replicas, hours=5).check(query("store", "Adapters"), expected)
