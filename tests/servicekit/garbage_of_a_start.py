"""A program with little garbage of its own: what a start made is kept, and later garbage is not."""

from __future__ import annotations

import gc
import weakref

from servicekit import interpreter_gc


class Circle:
    def __init__(self) -> None:
        self.itself = self


def main() -> None:
    interpreter_gc.pause()
    assert not gc.isenabled()
    start = weakref.ref(Circle())
    interpreter_gc.resume()
    assert gc.isenabled()
    later = weakref.ref(Circle())
    gc.collect()
    assert start() is not None
    assert later() is None
    gc.unfreeze()
    gc.collect()
    assert start() is None
    print("kept")


if __name__ == "__main__":
    main()
