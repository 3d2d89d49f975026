"""Counts how often adapters are found on the device, by how calls are routed and how popularity is
skewed: `python -m tests.system.hit_shares`. Counts, not times, so the machine need not be quiet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.deploy.envoy import Envoy, round_robin
from tests.support.models.zoo import make_zoo
from tests.system.routed import Routed, adapters_of_w4, hit_share

ALPHAS = (0.3, 0.6, 1.0)
NUM_ADAPTERS = 200
NUM_WARM, NUM_COUNTED = 200, 500


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zoo = make_zoo("llama", folder / "zoo")
        (folder / "system").mkdir()
        with Routed(zoo, folder / "system") as system:
            names = system.register(NUM_ADAPTERS)
            replicas = list(system.replicas)
            with (
                Envoy(folder / "plain", replicas, round_robin) as plain,
                Envoy(folder / "hashing", replicas) as hashing,
            ):
                ways: dict[str, str | Sequence[str]] = {
                    "round robin": plain.address,
                    "Envoy": hashing.address,
                    "client": replicas,
                }
                for alpha in ALPHAS:
                    wanted = adapters_of_w4(names, alpha, NUM_WARM + NUM_COUNTED)
                    for way, addresses in ways.items():
                        share = hit_share(system, addresses, wanted, NUM_WARM)
                        print(f"alpha {alpha}, {way}: {share:.3f}", flush=True)


if __name__ == "__main__":
    main()
