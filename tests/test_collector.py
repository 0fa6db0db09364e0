import gc

from pdserve.base.collector import freeze_objects


def test_collections_of_garbage_leave_out_what_was_there_before() -> None:
    freeze_objects()
    try:
        assert gc.get_freeze_count() > 1000
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    finally:
        gc.unfreeze()
