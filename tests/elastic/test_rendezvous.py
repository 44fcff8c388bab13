"""Where the agents of several nodes meet."""

import pytest

from shardyard.elastic.rendezvous import connect_store, serve_store


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_node_0_listens_where_the_others_look_for_it(host: str) -> None:
    store = serve_store(host, 0)
    connect_store(host, store.port).set("word", "here")
    assert store.get("word") == b"here"
