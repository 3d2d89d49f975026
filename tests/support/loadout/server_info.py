"""A server's report of itself."""

from __future__ import annotations

from loadout import types

LIMITS = types.ServerLimits(64, 4, 8, 8, 64, 16, 1000)
SERVER = types.ServerInfo(
    "llama", "llama", "float32", "cpu", "", LIMITS, (types.MemoryUse("arena", 50, 200),), {}, ""
)
