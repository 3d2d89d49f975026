"""tests.support.workers.forked_workers: a run of files that pass, fail, and end a worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.all_tests import ROOT

pytestmark = pytest.mark.processes
FILES = {
    "conftest": "import pytest\n\n"
    "def pytest_configure(config):\n    config.addinivalue_line('markers', 'processes: x')\n\n"
    "@pytest.fixture(scope='session')\ndef server():\n    yield\n    open('gone', 'w').close()\n",
    "test_first": "import pytest\n\n@pytest.mark.processes\n"
    "def test_a(server):\n    pass\n\ndef test_b(server):\n    pass\n",
    "test_second": "import os\n\ndef test_c():\n    assert os.path.exists('gone')\n\n"
    "def test_d():\n    pass\n\ndef test_e():\n    pass\n",
    "test_all_pass": "import atexit\nfrom pathlib import Path\n\n"
    "def test_a(tmp_path, n=0):\n    atexit.register(Path('ended').touch)\n\n"
    "def test_b():\n    pass\n",
    "test_one_fails": "def test_c():\n    print('said')\n    assert 1 == 2\n",
    "test_ends": "import os\n\ndef test_d():\n    pass\n\ndef test_e():\n    os._exit(3)\n\n"
    "def test_f():\n    pass\n",
}


def run(folder, workers, *files):
    for name in files:
        (folder / f"{name}.py").write_text(FILES[name])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "tests.support.workers.forked_workers",
    ]
    command += ["-p", "no:xdist", "--rootdir", str(folder), f"--forked-workers={workers}"]
    done = subprocess.run(
        [*command, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_every_test_is_reported(tmp_path):
    status, text = run(tmp_path, 2, "test_all_pass", "test_one_fails")
    assert status == 1, text
    assert "1 failed, 2 passed" in text
    assert "assert 1 == 2" in text
    assert "said" in text, "what the test has printed"
    assert (tmp_path / "ended").exists(), "a worker calls its exit handlers"


def test_tests_of_a_worker_that_ends_fail(tmp_path):
    status, text = run(tmp_path, 1, "test_all_pass", "test_one_fails", "test_ends")
    assert status == 1, text
    assert "5 failed, 1 passed" in text
    assert "test_e: the worker that had this test ended before, with the status 3" in text
    assert "test_c: not run: all workers have ended" in text


def test_files_that_start_processes_come_first_and_their_servers_end(tmp_path):
    status, text = run(tmp_path, 1, "conftest", "test_first", "test_second")
    assert status == 0, text
    assert "5 passed" in text
