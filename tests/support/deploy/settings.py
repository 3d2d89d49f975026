"""The settings of each service that pods and containers run."""

from __future__ import annotations

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings

CLASSES = {
    "adapter_store": ("LOADOUT_STORE_", StoreSettings),
    "inference_svc": ("LOADOUT_INFERENCE_", InferenceSettings),
}
DEMO_MODEL = "/opt/loadout/demo/model"
"""Where the images have the demo's model; see finish.sh."""
SAMPLE_SECRETS = {
    "LOADOUT_STORE_CATALOG_DSN": "postgresql+psycopg://loadout:x@postgres/loadout",
    "LOADOUT_INFERENCE_RENDEZVOUS_TOKEN": "a secret of all machines",
}
