"""Which process a fault strikes: ranks are dealt to nodes as these come."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.drill.case_state import CaseState, MissedInjection
from shardyard.drill.scene import TaggedProcesses
from shardyard.rundir.layout import RunDir

CHAIN = """
import subprocess, sys
depth = int(sys.argv[1])
if depth:
    below = [sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2], *sys.argv[3:]]
    subprocess.run(below, stdin=sys.stdin)
else:
    import os
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
"""A node's program, its agent, its fork server and its rank, which tells its number."""


@pytest.mark.heavy
def test_a_node_is_found_by_its_number_whichever_rank_it_has(tmp_path: Path) -> None:
    marked = TaggedProcesses()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", CHAIN, "3", CHAIN, "--node-rank", str(number)],
            env={**os.environ, **marked.environment}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for number in (1, 0)  # node 1 came first, so rank 0 is its
    ]  # fmt: skip
    try:
        pids = [int(node.stdout.readline()) for node in nodes if node.stdout is not None]
        run = RunDir(tmp_path)
        workers = [{"rank": rank, "node": "n", "pid": pid} for rank, pid in enumerate(pids)]
        run.events.write_text(
            json.dumps({"t": 1.0, "kind": "rendezvous", "attempt": 0, "workers": workers}) + "\n"
        )
        scene = CaseState(
            run=run, marked=marked, scratch=tmp_path, draw=random.Random(0), rank=1, node=1,
            is_launched=True, within_s=1.0,
        )  # fmt: skip
        scene.aim(at_node=True)
        assert (scene.rank, scene.node, scene.above_agent) == (0, 1, nodes[0].pid)
        scene.rank = 1
        scene.aim(at_node=False)
        assert (scene.rank, scene.node) == (1, 0)
        scene.node = 7
        with pytest.raises(MissedInjection, match="node 7"):
            scene.aim(at_node=True)
    finally:
        marked.kill_all()
        for node in nodes:
            node.communicate()
