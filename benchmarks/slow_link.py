"""Does `shardyard bench network --pairs` name the node whose link is slow? On four hosts, each time
another one.

Hosts are network namespaces on one switch; each link is shaped, one of them to a fifth. With
--slurm a real Slurm runs on them and the command line submits to it; else the program of each node
is started as a scheduler would. Needs root; with --slurm Debian's slurmctld, slurmd, slurm-client.

    python -m benchmarks.slow_link --times 10 --slurm

Writes one JSON file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.hosts import PORT, Host, enter
from benchmarks.record import write_result
from benchmarks.slurm_hosts import slurm_on
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.control.bench import Answers
from shardyard.launchers.log_markers import NONCE_VARIABLE, parse
from shardyard.rundir.network import BENCH_VARIABLE, NetworkBench

SOUND_MBIT, SLOW_SHARE = 200, 0.2
SIZE_BYTES, ITERATIONS, WARMUP = 2 * 2**20, 5, 1


def shape(host: Host, *, is_slow: bool) -> None:
    """Both directions of a host's cable."""
    rate = SOUND_MBIT * (SLOW_SHARE if is_slow else 1.0)
    limit = ["root", "tbf", "rate", f"{rate:g}mbit", "burst", "64kb", "latency", "200ms"]
    for where in (["dev", f"cable-{host.rank}"], ["-n", host.name, "dev", "eth0"]):
        place, device = where[:-2], where[-2:]
        subprocess.run(["tc", *place, "qdisc", "replace", *device, *limit], check=True)


def measured_by_nodes(folder: Path, hosts: list[Host]) -> Answers:
    """Start the program of each node, as a scheduler would."""
    nodes = len(hosts)
    asked = NetworkBench(
        collectives=("all_reduce",), begin_bytes=SIZE_BYTES, end_bytes=SIZE_BYTES, warmup=WARMUP,
        iterations=ITERATIONS, is_pairs=True, processes=1,
    )  # fmt: skip
    os.environ.update({BENCH_VARIABLE: asked.to_text(), NONCE_VARIABLE: "nonce"})
    words = ["model.preset=llama-tiny", "cluster.device=cpu", f"cluster.nodes={nodes}"]
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe([], words)))
    logs = [folder / f"node-{host.rank}.txt" for host in hosts]
    programs = []
    for host, log in zip(hosts, logs, strict=True):
        place = ["--place", "given", "--node-rank", host.rank, "--nodes", nodes, "--session", "s"]
        place += ["--rendezvous", f"{hosts[0].address}:{PORT}", "--run-dir", folder / "run"]
        program = [sys.executable, "-m", "shardyard.node", recipe, *place]
        programs.append(host.start(list(map(str, program)), log))
    codes = [program.wait() for program in programs]
    if any(codes):
        raise SystemExit(f"{codes}\n" + "\n".join(log.read_text()[-2000:] for log in logs))
    answers = Answers()
    for line in logs[0].read_text().splitlines():
        marked = parse(line, nonce="nonce")
        if marked is not None and marked.kind == "answer":
            answers.take(marked.content)
    return answers


def measured_by_slurm(folder: Path, nodes: int) -> dict[str, Any]:
    """What the command line answers."""
    words = ["model.preset=llama-tiny", "cluster.device=cpu", f"cluster.nodes={nodes}"]
    words += ["cluster.devices=1", f"run.dir={folder}", "--on", "slurm", "--pairs", "--json"]
    words += ["--end", str(SIZE_BYTES), "--iters", str(ITERATIONS), "--warmup", str(WARMUP)]
    done = subprocess.run(
        [sys.executable, "-m", "shardyard", "bench", "network", *words, "--yes"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout:
        raise SystemExit(f"exit code {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """A line of JSON each time and a file of all; 0 if each was named and no other was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--out", type=Path, help="file of the result")
    given = parser.parse_args()
    enter("benchmarks.slow_link")
    hosts = [Host(rank) for rank in range(given.hosts)]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="slow-link-") as name:
        base = Path(name)
        slurm = slurm_on(hosts, base / "slurm") if given.slurm else None
        try:
            for time in range(given.times):
                slow = time % len(hosts)
                for host in hosts:
                    shape(host, is_slow=host.rank == slow)
                folder = base / f"time-{time}"
                folder.mkdir()
                if slurm is None:
                    answer = measured_by_nodes(folder, hosts).to_json()
                else:
                    answer = measured_by_slurm(folder, len(hosts))
                rates = {f"{each['a']}-{each['b']}": each["busbw_gbs"] for each in answer["pairs"]}
                line = {"slow": hosts[slow].name, "named": answer["slow_nodes"], "busbw_gbs": rates}
                lines.append(line)
                print(json.dumps(line), flush=True)
        finally:
            if slurm is not None:
                slurm.stop()
    right = sum(line["named"] == [line["slow"]] for line in lines)
    print(f"the slow link was named in {right} of {len(lines)}")
    content = {"hosts": given.hosts, "slurm": given.slurm, "right": right, "times": lines}
    write_result("slow-link", content, given.out)
    return 0 if right == given.times else 1


if __name__ == "__main__":
    sys.exit(main())
