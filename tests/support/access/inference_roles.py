"""The roles that may call each RPC of the inference service."""

from __future__ import annotations

GENERATORS = {"caller", "both", "neighbour", "root"}
OPERATORS = {"operator", "both", "neighbour", "root"}
ALLOWED = {
    "Generate": GENERATORS,
    "UploadImage": GENERATORS,
    "Embed": GENERATORS,
    "Score": GENERATORS,
    "Classify": GENERATORS,
    "Tokenize": GENERATORS,
    "Detokenize": GENERATORS,
    "InspectAdapter": OPERATORS,
    "LoadAdapter": OPERATORS | {"publisher"},
    "UnloadAdapter": OPERATORS,
    "PinAdapter": OPERATORS,
    "UnpinAdapter": OPERATORS,
    "ListResidentAdapters": OPERATORS,
    "GetServerInfo": GENERATORS | OPERATORS,
    # What tells of all tenants is for who is for all.
    "GetDebugInfo": {"root"},
    "ProfileSteps": {"root"},
    # And what every tenant's requests feel.
    "PauseGeneration": {"root"},
    "ResumeGeneration": {"root"},
    "Sleep": {"root"},
    "Wake": {"root"},
}
