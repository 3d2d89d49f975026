import gc
import weakref

from servicekit import interpreter_gc


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_what_a_start_made_is_kept_and_later_garbage_is_not() -> None:
    interpreter_gc.pause()
    try:
        assert not gc.isenabled()
        start = weakref.ref(Circle())
        interpreter_gc.resume()
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
