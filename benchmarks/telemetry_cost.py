"""What telemetry costs: of a processor, of memory, and of a step beside it.

    python -m benchmarks.telemetry_cost [--minutes 10] [--pairs 10] [--steps 200]

First the process alone, as an agent starts it: eight devices every two seconds, by a stand-in for
NVIDIA's library each of whose calls sleeps as long as `--call-us` says. Counted are its processor
time after the first line, and its largest memory.

Then runs of llama-tiny on two CPU processes, by turns without it and with such a process beside
them; in the last third of each run with it one device hangs. The ratio of the median steps of each
pair is what it costs a step.

The bars: 0.3 % of a core, 40 MB, and a median ratio within 0.5 % of 1. Writes one JSON file.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.real_run import end_by_signals, running, verb, write_corpus
from benchmarks.record import write_result
from shardyard.io.polling import wait_for
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.telemetry import read_telemetry

FAKE_NVML = Path(__file__).parents[1] / "tests" / "telemetry" / "fake_nvml"
CORE_BAR, MEMORY_BAR_BYTES, STEP_BAR = 0.003, 40 * 10**6, 0.005
SETTINGS = (
    "model.preset=llama-tiny",
    "data.vocab_size=512",
    "data.seq_len=64",
    "optim.global_batch=8",
    "optim.micro_batch=4",
    "checkpoint.every=100000",
    "task.eval_every_steps=null",
    "cluster.device=cpu",
    "cluster.devices=2",
    "observe.telemetry_every_s=null",
)
_WARM_UP = 20
"""Steps of a run that are left out."""
_PATIENCE_S = 600.0


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of the process alone")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between its lines")
    parser.add_argument("--call-us", type=float, default=100.0, help="of each call of the library")
    parser.add_argument("--pairs", type=int, default=10, help="of runs without and with it")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    end_by_signals()
    call_s = args.call_us / 1e6
    alone = measure_alone(args.minutes * 60, every_s=args.every, call_s=call_s)
    print(
        f"{alone['core_share']:.2%} of a core (bar {CORE_BAR:.1%}), "
        f"{alone['peak_bytes'] / 1e6:.1f} MB (bar {MEMORY_BAR_BYTES / 1e6:.0f})"
    )
    pairs = measure_steps(args.pairs, steps=args.steps, every_s=args.every, call_s=call_s)
    ratio = median(pair["with_s"] / pair["without_s"] for pair in pairs) if pairs else None
    is_met = alone["core_share"] <= CORE_BAR and alone["peak_bytes"] <= MEMORY_BAR_BYTES
    if ratio is not None:
        print(f"a step beside it: {ratio:.4f} of one without, median of {len(pairs)} pairs")
        is_met = is_met and abs(ratio - 1) <= STEP_BAR
    content = {"devices": 8, "every_s": args.every, "call_s": call_s, "alone": alone}
    content |= {"step_ratio": ratio, "pairs": pairs, "is_met": is_met}
    write_result("telemetry-cost", content, args.out)
    return 0 if is_met else 1


def measure_alone(seconds: float, *, every_s: float, call_s: float) -> dict[str, Any]:
    """The process without anything beside it."""
    folder = Path(tempfile.mkdtemp(prefix="telemetry-cost-"))
    try:
        with telemetry(folder, every_s=every_s, call_s=call_s) as process:
            file = folder / "node-0.jsonl"
            wait_for(lambda: any(read_telemetry(file)), every_s=0.1, within_s=60)
            began_s, used_s = time.monotonic(), _processor_s(process.pid)
            time.sleep(seconds)
            took_s = time.monotonic() - began_s
            used_s = _processor_s(process.pid) - used_s
            peak = _peak_bytes(process.pid)
        samples = list(read_telemetry(file))
        return {
            "seconds": round(took_s, 1),
            "processor_s": round(used_s, 3),
            "core_share": round(used_s / took_s, 6),
            "peak_bytes": peak,
            "lines": len(samples),
            "bytes_of_a_line": round(file.stat().st_size / max(1, len(samples))),
        }
    finally:
        shutil.rmtree(folder)


def measure_steps(
    pairs: int, *, steps: int, every_s: float, call_s: float
) -> list[dict[str, float]]:
    """Median steps of runs without telemetry and with it beside them, by turns."""
    folder = Path(tempfile.mkdtemp(prefix="telemetry-cost-"))
    try:
        write_corpus(folder / "text")
        found = []
        for pair in range(pairs):
            order = ("without_s", "with_s") if pair % 2 else ("with_s", "without_s")
            row = {}
            for way in order:
                run = RunDir(folder / f"{way}-{pair}")
                beside = (
                    telemetry(folder, every_s=every_s, call_s=call_s)
                    if way == "with_s"
                    else nullcontext()
                )
                with beside:
                    row[way] = _median_step(run, folder, steps)
            found.append(row)
        return found
    finally:
        shutil.rmtree(folder)


def _median_step(run: RunDir, folder: Path, steps: int) -> float:
    """Of a run to its end; a device hangs from two thirds of its steps on."""
    words = [*SETTINGS, f"data.source={folder}/text", f"data.dir={folder}/prepared"]
    words += [f"run.dir={folder}", f"run.id={run.run_id}", f"run.steps={steps}"]
    _describe(folder, hang=[])
    with running(folder, verb("train", *words)) as process:
        wait_for(
            lambda: process.poll() is not None or _steps_done(run) >= steps * 2 // 3,
            every_s=0.5,
            within_s=_PATIENCE_S,
        )
        _describe(folder, hang=[3])
        if process.wait(_PATIENCE_S):
            raise SystemExit((folder / "log.txt").read_text()[-2000:])
    lines = read_steps(run.metrics)[_WARM_UP:]
    return float(median(line["step_time_s"] for line in lines))


def _steps_done(run: RunDir) -> int:
    return len(read_steps(run.metrics)) if run.metrics.exists() else 0


@contextmanager
def telemetry(
    folder: Path, *, every_s: float, call_s: float
) -> Iterator["subprocess.Popen[bytes]"]:
    """The process over eight devices that are not there."""
    _describe(folder, call_s=call_s)
    command: Sequence[str] = [
        sys.executable, "-m", "shardyard.telemetry", str(folder / "node-0.jsonl"),
        "--attempt=0", f"--every={every_s}", "--devices=8",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(FAKE_NVML), "FAKE_NVML": str(folder / "nvml.json")}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


def _describe(folder: Path, **world: Any) -> None:
    """What the devices do from now on."""
    file = folder / "nvml.json"
    before = json.loads(file.read_text()) if file.exists() else {"devices": 8}
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps({**before, **world}))
    scratch.replace(file)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("the system does not tell a process's largest memory")


if __name__ == "__main__":
    sys.exit(main())
