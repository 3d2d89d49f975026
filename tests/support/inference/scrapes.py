"""How many series a scrape of the inference service may have."""

from __future__ import annotations

MAX_SERIES = 5_600
