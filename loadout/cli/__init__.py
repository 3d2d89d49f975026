"""The `loadout` command."""
