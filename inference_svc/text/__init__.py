"""Text on both sides of the engine, which knows only token ids."""
