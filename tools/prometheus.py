"""Runs and queries a real Prometheus server."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.packaging.prometheus_package import programs

POLL_S = 0.05
READY_TIMEOUT_S = 30.0
QUERY_TIMEOUT_S = 20.0
STOP_GRACE_S = 20.0
LOG_TAIL_LINES = 20

_LISTENING = re.compile(r'msg="Listening on".* address=(\S+)')


class PrometheusFailed(Exception):
    """The server died or did not become ready; the message has the end of its log."""


class QueryFailed(Exception):
    """The server refused a query; the message has the query and its reason."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer. `points` are (unix time, value), oldest first; a query at one moment
    gives one point."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """The newest."""
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Job:
    """Addresses with the same scrape settings. All their series get `labels`, and `metric_relabel`
    is the configuration's metric_relabel_configs. Several jobs may have the same name."""

    name: str
    addresses: Sequence[str]
    labels: Mapping[str, str] = field(default_factory=dict)
    metric_relabel: Sequence[Mapping[str, Any]] = ()


class Prometheus:
    """Runs a server on a free port within the context; it is ready on entry.

    `folder` is created and has its data, configuration and log. Raises ProgramMissing and
    PrometheusFailed.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        *,
        interval_s: float = 1.0,
        rule_files: Sequence[Path] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """Prepares the server. `interval_s` is the time between scrapes, their timeout, and the
        time between evaluations of rules."""
        self._folder = folder
        self._log_path = folder / "prometheus.log"
        self._configuration = _configuration(jobs, interval_s, rule_files)
        self._flags = flags
        self.url = ""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "prometheus.json"  # JSON is valid YAML
        config.write_text(json.dumps(self._configuration, indent=1))
        command = [
            str(programs().prometheus),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            *self._flags,
        ]
        with self._log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self.wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until the server answers queries. Raises PrometheusFailed."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.check_alive()
            self.url = self.url or self._find_url()
            if self.url and self._is_ready():
                return
            time.sleep(POLL_S)
        raise self._failure(f"was not ready after {timeout_s:.0f} s")

    def wait_up(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until every target has been scraped. Raises PrometheusFailed with the reason of a
        target that has not."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            targets = self.targets()
            if targets and all(target["health"] == "up" for target in targets):
                return
            if time.monotonic() > deadline_s:
                state = [(t["scrapeUrl"], t["health"], t["lastError"]) for t in targets]
                raise self._failure(f"could not scrape all of {state}")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raises PrometheusFailed if the server has ended by itself."""
        code = self._popen.poll()
        if code is not None:
            raise self._failure(f"ended with exit code {code}")

    def query(self, promql: str, at_s: float | None = None) -> list[Series]:
        """Evaluates `promql` at unix time `at_s`, or now. Raises QueryFailed."""
        when = {} if at_s is None else {"time": f"{at_s:.3f}"}
        return _series(self._ask("query", query=promql, **when))

    def query_range(self, promql: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """Evaluates `promql` between two unix times. Raises QueryFailed."""
        times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:.3f}"}
        return _series(self._ask("query_range", query=promql, **times))

    def label_values(self, label: str, selector: str = "") -> list[str]:
        """Returns the values of a label, in series of `selector` if it is given."""
        match = {"match[]": selector} if selector else {}
        return list(self._ask(f"label/{label}/values", **match))

    def targets(self) -> list[dict[str, Any]]:
        """Returns Prometheus' descriptions of targets: "labels", "health", "lastError", ..."""
        return list(self._ask("targets", state="active")["activeTargets"])

    def rules(self) -> list[dict[str, Any]]:
        """Returns Prometheus' descriptions of all rules: "name", "type", "health", ..."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Returns pending and firing alerts: "labels", "annotations", "state", ..."""
        return list(self._ask("alerts")["alerts"])

    def _ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=QUERY_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read().decode(errors="replace")
            raise QueryFailed(f"{path} {parameters}: {reason}") from None
        except OSError as error:
            self.check_alive()
            raise QueryFailed(f"{path} {parameters}: {error}") from error

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=QUERY_TIMEOUT_S):
                return True
        except OSError:  # HTTPError is one
            return False

    def _find_url(self) -> str:
        found = _LISTENING.search(self._log_path.read_text(errors="replace"))
        return f"http://{found[1]}" if found else ""

    def _stop(self) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _failure(self, what: str) -> PrometheusFailed:
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return PrometheusFailed("\n  ".join([f"Prometheus {what}; the end of its log:", *lines]))


def _configuration(
    jobs: Sequence[Job], interval_s: float, rule_files: Sequence[Path]
) -> dict[str, Any]:
    interval = f"{round(interval_s * 1000)}ms"
    return {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "rule_files": [str(path.resolve()) for path in rule_files],
        "scrape_configs": [
            {
                "job_name": f"{index}-{job.name}",  # names must differ
                "static_configs": [
                    {"targets": list(job.addresses), "labels": {"job": job.name, **job.labels}}
                ],
                "metric_relabel_configs": [dict(rule) for rule in job.metric_relabel],
            }
            for index, job in enumerate(jobs)
        ],
    }


def _series(answer: dict[str, Any]) -> list[Series]:
    """Parses any type of answer; a scalar becomes a series without labels."""
    result = answer["result"]
    if answer["resultType"] in ("scalar", "string"):
        return [Series({}, _points([result]))]
    return [
        Series(each["metric"], _points(each["values"] if "values" in each else [each["value"]]))
        for each in result
    ]


def _points(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(when), float(value)) for when, value in pairs)
