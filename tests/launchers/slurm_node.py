"""Stands in for the program of a node where a test is about Slurm and not about training.

What it does is the variable STAND_IN: ``end CODE``; ``digest NAME ...`` of variables;
or ``wait``: until SIGTERM, then a checkpoint is written, in SAVING_S seconds, and it ends with 143;
``wait-unsaved``: without one; ``outlive``: node 0 is killed, and the others end the run without it.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

SAVING_S = 1.0
OUTLIVING_S = 4.0


def main() -> None:
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    rank = int(os.environ["SLURM_PROCID"])
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    verb, _, code = os.environ["STAND_IN"].partition(" ")
    began = f"node {rank} of {os.environ['SLURM_NTASKS']} began, start {start}"
    if not verb.startswith("wait"):
        print(began, flush=True)
    if verb == "digest":  # shows that a value arrived, and not the value
        for name in code.split():
            print(hashlib.sha256(os.environb[name.encode()]).hexdigest(), flush=True)
        return
    if verb == "end":
        sys.exit(int(code))
    if verb == "outlive":
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(OUTLIVING_S)
        session = run_dir / "sessions" / f"{os.environ['SLURM_JOB_ID']}.{start}.json"
        session.parent.mkdir(exist_ok=True)
        session.write_text(json.dumps({"ended": "finished", "exit_code": 0}, indent=1))
        print("went on", flush=True)
        return

    def save(_number: int, _frame: object) -> None:
        if rank == 0 and verb != "wait-unsaved":
            time.sleep(SAVING_S)  # after the other nodes have ended
            (run_dir / "checkpoints").mkdir(exist_ok=True)
            (run_dir / "checkpoints" / "latest").write_text(f"step-{int(start) + 1:08d}\n")
        print("saved", flush=True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    print(began, flush=True)  # tests send the signals now
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
