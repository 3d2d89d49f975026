from __future__ import annotations

import pytest

from adapter_store.__main__ import NOISY_LOGGERS, main


def test_clients_that_log_requests_are_noisy():
    for name in ("botocore.auth", "urllib3.connectionpool", "httpx2", "httpcore2.http11"):
        assert name.split(".")[0] in NOISY_LOGGERS


@pytest.mark.parametrize("key", ["use_dora", "r", "lora_dropout"])
def test_keys_that_have_a_verdict_cannot_be_allowed(key, tmp_path, capsys):
    data_dir = tmp_path / "data"
    flags = ["--allow-config-keys", f"note,{key}", "--data-dir", str(data_dir)]
    assert main(flags) == 2
    assert f"--allow-config-keys: leave out {key}: known to this release" in capsys.readouterr().err
    assert not data_dir.exists()
