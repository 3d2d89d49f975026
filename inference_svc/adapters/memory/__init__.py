"""The images in a memory: extents, rows, users, and which ones leave.

placement    Reserves memory for loads, by eviction or by draining.
tiers        The host tier and the arena: images, copies between them, pending changes.
image_slots  The images in one memory: rows, extents, users.
pins         Which images are pinned, for whom, and which room is left for others.
resident     One image in a memory.
eviction     Which images leave a memory for another one, in which order, and why.
extents      The allocator of a flat memory.
stages       Images of a model in stages, which have a part each.
"""
