"""A run on 3 hosts, then 2, then 4, then 3: the same samples, and the losses of a run left alone?

    python -m benchmarks.resize_hosts [--steps 120] [--mode MODE ...] [--dir DIR] [-- SETTING ...]

Hosts are network namespaces with a process each. One is killed, two come, the one that serves the
store is killed; beside it 2, 3 and 4 processes that nothing disturbs train the same recipe. The
modes, and what each has to show:

| mode | learning rate | sums | bar |
|---|---|---|---|
| usual | the quickstart's | fp32 | losses as near to an undisturbed run as those to each other |
| tenth | a tenth of it | fp32 | losses within 1e-5 of every undisturbed run |
| exact | the quickstart's | `precision.reduce=exact` | all losses, the last weights: equal bits |

In all of them each position of the stream is the same sample, and none is left out. The control of
`exact` is `usual`, whose losses and weights have to differ: else nothing would be shown. Needs
root. Writes one JSON file; load does not change what it shows.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, HostedRun, enter
from benchmarks.real_run import write_corpus
from benchmarks.record import write_result
from shardyard.checkpoint.bitwise_compare import compare_bits
from shardyard.drill.observations import read_observations
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir

WORLDS = (2, 3, 4)
"""Of the undisturbed runs."""
_CHANGES = ([3, 2, 4, 3], [3, 2, 3, 4, 3])
"""Numbers of hosts of the resized run; of the two that come, one may be ready first."""
BATCH = 8
STEPS_BETWEEN = 8
"""Of one number of hosts, at the least."""
MODES = {
    "usual": ("optim.lr=4e-3",),
    "tenth": ("optim.lr=4e-4",),
    "exact": ("optim.lr=4e-3", "precision.reduce=exact"),
}
SETTINGS = (
    "model.preset=llama-pocket",
    "data.vocab_size=2048",
    "data.seq_len=256",
    f"optim.global_batch={BATCH}",
    "optim.micro_batch=1",
    "parallel.strategy=FULL_SHARD",
    "cluster.device=cpu",
    "observe.sample_ids=true",
    "checkpoint.every=4",
)
HOSTED = (
    "cluster.nodes=3",
    "cluster.devices=1",
    "elastic.min_nodes=2",
    "elastic.max_nodes=4",
    "elastic.max_restarts=100",
    "elastic.join_interval_s=0",
)


def main() -> int:
    """Train, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="more than go by while hosts come")
    parser.add_argument("--mode", action="append", choices=MODES, help="one of them alone")
    parser.add_argument("--dir", type=Path, help="keep the runs here, and train none twice")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="of the recipe, in place of its own")
    args = parser.parse_args()
    enter("benchmarks.resize_hosts")
    folder = args.dir or Path(tempfile.mkdtemp(prefix="resize-hosts-"))
    hosts = [Host(rank) for rank in range(4)]
    found: dict[str, Any] = {}
    settings = [*SETTINGS, *args.settings, f"run.steps={args.steps}"]
    try:
        if not (folder / "text").is_dir():
            write_corpus(folder / "text")
        for mode in args.mode or MODES:
            found[mode] = judge(mode, *_train(folder, hosts, mode, settings))
            short = {name: value for name, value in found[mode].items() if name != "runs"}
            print(f"{mode}: {short}", flush=True)
    finally:
        for host in hosts:
            host.lose()
        if args.dir is None:
            shutil.rmtree(folder)
    is_met = all(row["is_met"] for row in found.values())
    content = {"is_met": is_met, "settings": settings, "hosted": HOSTED}
    write_result("resize-hosts", {**content, "modes": found}, args.out)
    return 0 if is_met else 1


def judge(mode: str, resized: RunDir, alone: dict[int, RunDir]) -> dict[str, Any]:
    """What a mode has to show, and does.

    Args:
        alone: Runs that nothing disturbed, by their number of processes.
    """
    left = {world: read_observations(run) for world, run in alone.items()}
    ours = read_observations(resized)
    losses = {world: [each["losses"][step] for step in sorted(each["losses"])]
              for world, each in left.items()}  # fmt: skip
    own, worlds = (
        [ours[name][step] for step in sorted(ours[name])] for name in ("losses", "worlds")
    )
    spread = max(_apart(one, other) for one in losses.values() for other in losses.values())
    nearest = max(min(abs(loss / each[step] - 1) for each in losses.values())
                  for step, loss in enumerate(own))  # fmt: skip
    farthest = max(_apart(own, each) for each in losses.values())
    bits = {world: compare_bits(run, resized) for world, run in alone.items()}
    outcomes = {verdict.outcome for verdict in bits.values()}
    is_met = {
        "usual": nearest <= spread and outcomes == {"different"},
        "tenth": farthest <= 1e-5,
        "exact": outcomes == {"equal"},
    }[mode]
    is_same = all(ours["samples"] == each["samples"] for each in left.values())
    is_whole = sorted(ours["samples"]) == list(range(len(own) * BATCH))
    changes = [world for world, _ in groupby(worlds)]
    return {
        "is_met": is_met and is_same and is_whole and changes in _CHANGES,
        "worlds": changes,
        "samples": "the same" if is_same and is_whole else "different",
        "steps_again": ours["steps_again"],
        "bits": {world: [verdict.outcome, verdict.why] for world, verdict in bits.items()},
        "greatest_between_undisturbed": spread,
        "greatest_to_nearest_undisturbed": nearest,
        "greatest_to_any_undisturbed": farthest,
        "runs": {"resized": {"losses": own, "worlds": worlds}, "alone": losses},
    }


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Greatest relative difference of the losses of a step."""
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


def _train(
    folder: Path, hosts: list[Host], mode: str, settings: Sequence[str]
) -> tuple[RunDir, dict[int, RunDir]]:
    """The resized run, and those that nothing disturbs."""
    data = (f"data.source={folder}/text", f"data.dir={folder}/prepared")
    words = [*settings, *data, *MODES[mode]]
    run = HostedRun(folder, RunDir(folder / f"{mode}-hosts"), [*words, *HOSTED], nodes=3)
    if not _has_finished(run.run):
        _resize(run, hosts)
    alone = {world: RunDir(folder / f"{mode}-{world}") for world in WORLDS}
    for world, left in alone.items():
        if not _has_finished(left):
            _train_alone(left, words, world)
    return run.run, alone


def _has_finished(run: RunDir) -> bool:
    return any(event["kind"] == "run_finished" for event in read_lines(run.events))


def _resize(run: HostedRun, hosts: list[Host]) -> None:
    run.begin(hosts)
    _wait_for_steps_of(3, run)
    hosts[2].lose()
    _wait_for_steps_of(2, run)
    run.come(hosts[2])
    run.come(hosts[3])
    _wait_for_steps_of(4, run)
    hosts[0].lose()  # which serves the store
    run.finish()


def _wait_for_steps_of(world: int, run: HostedRun) -> None:
    def have_come() -> bool | None:
        newest = run.steps()[-STEPS_BETWEEN:]
        is_enough = len(newest) == STEPS_BETWEEN
        return (is_enough and {line["world_size"] for line in newest} == {world}) or None

    run.wait(have_come)


def _train_alone(run: RunDir, settings: Sequence[str], world: int) -> None:
    words = [f"run.dir={run.path.parent}", f"run.id={run.run_id}", f"cluster.devices={world}"]
    command = [sys.executable, "-m", "shardyard", "train", *settings, *words]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
