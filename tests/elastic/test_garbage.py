"""The search for garbage is put off for a while, and goes on as it was before."""

import gc

import pytest

from shardyard.elastic.forkserver import gc_paused


def test_it_is_put_off_and_goes_on_whatever_happens() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()
