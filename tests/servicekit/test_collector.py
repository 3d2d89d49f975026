import gc
import weakref

from servicekit import collector


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_what_a_start_made_is_kept_and_later_garbage_is_not() -> None:
    collector.pause()
    try:
        assert not gc.isenabled()
        start = weakref.ref(Circle())
        collector.resume()
        assert gc.isenabled()
        later = weakref.ref(Circle())
        gc.collect()
        assert start() is not None
        assert later() is None
    finally:
        gc.enable()
        gc.unfreeze()
    gc.collect()
    assert start() is None
