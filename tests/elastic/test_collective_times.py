"""The store of `bench network`: where it listens, and for how long."""

import os
import socket
import subprocess
import sys
import time

import pytest

from shardyard.elastic.bench_worker import leave
from shardyard.elastic.rendezvous.c10d import connect_store, serve_store
from shardyard.rundir.network import NetworkBench
from tests.elastic.agents import wait_until
from tests.elastic.rendezvous.test_c10d import listening_at


def test_who_serves_the_store_waits_for_the_others_and_not_without_a_bound() -> None:
    store = serve_store("127.0.0.1", 0)
    began_s = time.monotonic()
    leave(store, 2, serves=True, within_s=0.3)  # the other rank is lost
    assert 0.3 <= time.monotonic() - began_s < 60
    other = connect_store("127.0.0.1", store.port)
    leave(other, 2, serves=False, within_s=3600.0)
    leave(store, 3, serves=True, within_s=3600.0)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who listens where")
def test_the_store_of_one_machine_listens_on_loopback_and_ends_with_the_measurement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bench = NetworkBench(
        collectives=("all_reduce",), begin_bytes=8, end_bytes=8, warmup=1, iterations=1,
        is_pairs=False, processes=1,
    )  # fmt: skip
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words = [bench.to_text(), "cpu", "here", "10"]  # seconds that it waits for the other rank
    with subprocess.Popen(
        [sys.executable, "-m", "shardyard.elastic.bench_worker", *words],
        env={**os.environ, **place, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        wait_until(lambda: bool(listening_at(port)))
        assert listening_at(port) == {"0100007F"}
        assert rank.wait(120) == 1
    assert not listening_at(port)
