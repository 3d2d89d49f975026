"""How adapters become resident: layout, store, host tier, arena, slots, residency."""
