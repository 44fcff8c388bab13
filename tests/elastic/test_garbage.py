"""The search for garbage is put off for a while, and goes on as it was before."""

import gc

import pytest

from shardyard.elastic.forkserver import no_search


def test_it_is_put_off_and_goes_on_whatever_happens() -> None:
    assert gc.isenabled()
    with no_search():
        assert not gc.isenabled()
        with no_search():
            pass
        assert not gc.isenabled()
    with pytest.raises(ImportError), no_search():
        raise ImportError
    assert gc.isenabled()
