"""`make audit` with a service of advisories, and without one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools.packaging import audit
from tools.packaging.constraints import Pin

pytestmark = pytest.mark.processes  # pip-audit

PINS = {
    "good": Pin("==1.0", frozenset()),
    "bad": Pin("==2.0", frozenset()),
    "both": Pin(">=3.0,<=4.0", frozenset()),
}


class Advisories:
    """An OSV: its answers, by package and version. `asked` is what it was asked about."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.status = 200
        advisories = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                about = (query["package"]["name"], query["version"])
                advisories.asked.append(about)
                body = json.dumps(advisories.answer(*about)).encode()
                self.send_response(advisories.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/query"

    def answer(self, name: str, version: str) -> dict:
        if (name, version) not in (("bad", "2.0"), ("both", "3.0")):
            return {}
        fixed = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.1"}]}]
        package = {"name": name, "ecosystem": "PyPI"}
        affected = {"package": package, "ranges": fixed, "versions": [version]}
        return {"vulns": [{"id": f"PYSEC-{name}", "details": "x", "affected": [affected]}]}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def advisories() -> Iterator[Advisories]:
    served = Advisories()
    yield served
    served.stop()


def test_each_version_is_asked_about_and_what_is_known_is_named(advisories):
    found = audit.audit(PINS, advisories.url)
    assert set(advisories.asked) == {
        ("good", "1.0"),
        ("bad", "2.0"),
        ("both", "3.0"),
        ("both", "4.0"),
    }
    assert sorted(found) == [
        "bad 2.0: PYSEC-bad, fixed in: 2.1",
        "both 3.0: PYSEC-both, fixed in: 2.1",
    ]


def test_without_an_answer_nothing_is_called_safe(advisories, monkeypatch, capsys):
    advisories.status = 503
    monkeypatch.setattr(audit, "read", lambda text: PINS)
    assert audit.main(["--osv-url", advisories.url]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: not audited, no answer from an advisory service: ")


def test_without_a_service_it_says_so(advisories):
    advisories.stop()
    with pytest.raises(audit.NoAnswer, match="Connection refused"):
        audit.audit(PINS, advisories.url)
