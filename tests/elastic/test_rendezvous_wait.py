"""What a waiting node says, and how often."""

import re

from shardyard.elastic.rendezvous.c10d import RendezvousWait


def test_lines_come_at_growing_intervals_and_end_with_the_wait() -> None:
    clock = [0.0]
    wait = RendezvousWait(3, now_s=lambda: clock[0])
    told = []
    with wait.waits_for(lambda: "others", within_s=3600.0):
        for second in range(3600):
            clock[0] = float(second)
            if wait.line() is not None:
                told.append(second)
    assert told[:7] == [5, 15, 35, 75, 155, 315, 615] and told[-1] - told[-2] == 300
    assert not wait.is_waiting and wait.line() is None


def test_a_line_names_what_is_silent_and_the_end_of_the_wait() -> None:
    clock = [0.0]
    wait = RendezvousWait(3, now_s=lambda: clock[0])
    with wait.waits_for(lambda: "other nodes at here:1: 1 of 4 came", within_s=90.0):
        wait.silence, clock[0] = "etcd at e:2 does not answer (e:2: refused)", 30.0
        assert re.fullmatch(
            r"node 3 waits for other nodes at here:1: 1 of 4 came\. etcd at e:2 does not answer "
            r"\(e:2: refused\)\. It gives up at \d\d:\d\d:\d\d, in 60 s\.",
            wait.line() or "",
        )
    assert not wait.silence
