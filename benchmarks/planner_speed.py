"""How quick the planner is: searches on 1,024 and 16,384 GPUs, and `shardyard plan` as a process.

Bars: at least 10,000 legal layouts of Llama-2-70B on 1,024 GPUs within 1 s; 16,384 GPUs within 3 x
that; one plan, start of the process included, within 0.5 s. Nothing else should be running.

    python -m benchmarks.planner_speed
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import write_result
from shardyard.config.layout import Layout
from shardyard.families.presets import PRESETS
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.planner.layouts import search
from shardyard.planner.workload import Formats, Techniques, Workload

RECIPE = ("model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "cluster.nodes=2")
SEARCHES = {1024: 4096, 16384: 16384}
"""GPUs -> samples in a step."""

LEAST_LAYOUTS, BAR_SEARCH_S, BAR_RATIO, BAR_PROCESS_S = 10_000, 1.0, 3.0, 0.5


def time_search(gpus: int, global_batch: int, *, repeats: int) -> dict[str, Any]:
    """Search all legal layouts of Llama-2-70B on so many H100."""
    shape = PRESETS["llama2-70b"].shape
    cluster = cluster_of(instance("p5.48xlarge"), gpus // 8)
    workload = Workload(
        shape=shape,
        layout=Layout(dp_replicate=1, dp_shard=gpus, zero=3),
        seq_len=4096,
        micro_batch=1,
        global_batch=global_batch,
        formats=Formats(
            compute="bf16", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, reduce_bytes=4,
        ),
        techniques=Techniques(kernels="compiled"),
    )  # fmt: skip
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = search(workload, cluster)
        times_s.append(time.perf_counter() - start)
    return {
        "gpus": gpus,
        "global_batch": global_batch,
        "legal": found.legal,
        "fitting": found.fitting,
        "median_s": median(times_s),
        "times_s": times_s,
    }


def time_processes(*, repeats: int) -> dict[str, Any]:
    """`shardyard plan` with its search, from start to end of the process."""
    program = [str(Path(sys.executable).with_name("shardyard")), "plan", *RECIPE, "run.steps=1000"]
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(program, check=True, capture_output=True)
        times_s.append(time.perf_counter() - start)
    return {"command": "shardyard plan " + " ".join(RECIPE), "median_s": median(times_s),
            "times_s": times_s}  # fmt: skip


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    small, large = (
        time_search(gpus, batch, repeats=args.repeats) for gpus, batch in SEARCHES.items()
    )
    process = time_processes(repeats=args.repeats)
    ratio = large["median_s"] / small["median_s"]
    is_met = (
        small["legal"] >= LEAST_LAYOUTS
        and small["median_s"] <= BAR_SEARCH_S
        and ratio <= BAR_RATIO
        and process["median_s"] <= BAR_PROCESS_S
    )
    for row in (small, large):
        print(f"{row['gpus']:6,} GPUs: {row['legal']:,} legal layouts in {row['median_s']:.2f} s")
    print(f"16,384 against 1,024 GPUs: {ratio:.2f} x, bar {BAR_RATIO:g}")
    print(f"shardyard plan, whole process: {process['median_s']:.2f} s, bar {BAR_PROCESS_S} s")
    content = {"is_met": is_met, "searches": [small, large], "ratio": ratio, "process": process}
    write_result("planner-speed", content, args.out)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
