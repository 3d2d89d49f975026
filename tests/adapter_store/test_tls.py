"""Where a store may listen without a policy. Certificates: service/test_tls.py."""

from __future__ import annotations

import pytest

from adapter_store.config import StoreSettings
from adapter_store.tls import check_exposure
from servicekit.errors import FailedPrecondition

LOOPBACK = ["127.0.0.1:0", "127.9.9.9:70", "localhost:70", "[::1]:70"]
EXPOSED = ["0.0.0.0:70", "[::]:70", "10.1.2.3:70", "store.internal:70", "[fe80::1]:70"]


@pytest.mark.parametrize("listen", LOOPBACK)
def test_loopback_needs_no_policy(listen):
    check_exposure(StoreSettings(listen=listen))


@pytest.mark.parametrize("listen", EXPOSED)
def test_other_addresses_need_a_policy_or_a_word(listen, tmp_path):
    with pytest.raises(FailedPrecondition, match="policy_file, or allow_open_access") as caught:
        check_exposure(StoreSettings(listen=listen))
    assert caught.value.message.startswith(f"listen: {listen} ")
    check_exposure(StoreSettings(listen=listen, allow_open_access=True))
    check_exposure(StoreSettings(listen=listen, policy_file=tmp_path / "policy.toml"))
