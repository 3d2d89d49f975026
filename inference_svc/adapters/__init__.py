"""How adapters become resident: from the adapter store into the arena, and to a row of its table.

pulls         pulls images from the adapter store, in threads, and verifies them
memory        the images in a memory: extents, rows, users, and which ones leave
residency     Tracks who waits for which adapter, or sum, and who uses it; wires the rest.
sums          Sums of adapters: waiting and running ones, and the checks of their parts.
loader        Moves loads from state to state, and starts and ends pulls.
load_states   Adapters on their way: each in one state, and the transitions between them.
prefetch      Loads adapters before a request needs them, within a share of the bandwidth.
popularity    Counts how often each adapter was requested lately.
layout        The parts of this model that adapters may change, and the contents of their images.
targets       Makes a layout of a decoder, and groups the ones that are computed together.
projections   The targets of projections: their modules, and how else adapters call these.
picture_targets  The targets of vision towers and connectors.
load_metrics  Metrics of loads: counts, times and spans.
"""
