"""How adapters become resident: from the adapter store into the arena, and to a row of its table.

residency     Tracks who waits for which adapter, or sum, and who uses it; wires the rest.
sums          Sums of adapters: waiting and running ones, and the checks of their parts.
loader        Moves loads from state to state, and starts and ends pulls.
load_states   Adapters on their way: each in one state, and the transitions between them.
placement     Reserves memory for loads, by eviction or by draining.
prefetch      Loads adapters before a request needs them, within a share of the bandwidth.
popularity    Counts how often each adapter was requested lately.
tiers         The host tier and the arena: images, copies between them, pending changes.
slots         The images in one memory: rows, extents, pins, users.
resident      One image in a memory.
eviction      Which images leave a memory for another one, in which order, and why.
extents       The allocator of a flat memory.
layout        The parts of this model that adapters may change, and the contents of their images.
targets       Makes a layout of a decoder, and groups the ones that are computed together.
pull_pace     How fast large images come beside steps on the same processors.
pull_threads  The threads that pull images and verify them.
pull          One pull: its progress, its memory, and its events for the engine.
image_source  The adapter store as a Protocol, and the messages of a pull.
load_metrics  Metrics of loads: counts, times and spans.
"""
