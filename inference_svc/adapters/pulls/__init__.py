"""Pulls images from the adapter store, in threads, and verifies them.

pace          How fast large images come beside steps on the same processors.
part_checks   The check of each part where it was written.
threads       The threads that pull images and verify them.
headers       Reads headers of images.
pull          One pull: its progress, its memory, and its events for the engine.
registration  Mapped images that a device copies from where they lie.
image_source  The adapter store as a Protocol, and the images that it shares.
"""
