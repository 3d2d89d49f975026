"""The services that probes ask about, and the time that a drain takes."""

from __future__ import annotations

import adapter_store.app
import inference_svc.server
from servicekit.rpc.interceptor import QUIET_LIMIT_SECONDS
from servicekit.rpc.server import ANSWER_SECONDS

SERVICES = {
    "adapter_store": adapter_store.app.SERVICE,
    "inference_svc": inference_svc.server.SERVICE,
}
LAST_SECONDS = QUIET_LIMIT_SECONDS + ANSWER_SECONDS
"""What a drain takes besides its grace."""
END_SECONDS = 5.0
"""To end threads and processes, and to free the device."""
