"""Seconds from a killed worker to the next finished step: ours at its sizes, and plain torchrun.

    OMP_NUM_THREADS=1 python -m benchmarks.recovery [--kills 20] [--only KIND ...]

| kind | what | bar |
|---|---|---|
| tiny | llama-tiny on two CPU processes, at defaults | 1.0 s |
| large | 1 GiB of state a process, a snapshot every other step | tiny and 1.2 copies of the state |
| compiled | tiny, `model.compile=true`, a filled cache; processes parked, or not | tiny and 3 s |
| torchrun | plain torchrun with tiny's model (`torchrun_restart.py`) | 25 times tiny (rank 0) |

Kinds take turns, a few kills each, so that a busy machine treats them alike; rank 1 and rank 0 are
killed in turn, each once it has taken a dozen steps and a checkpoint is there. Of the large state
no byte may be read from a checkpoint. Where torchrun has not finished a step after 120 s it is
counted as hung, with 120 s, and started again. Phases, and how bytes are counted, are those of
`restart_phases.py`. The state is copied by as many processes at once as there are ranks, into
memory that was touched before. Writes one JSON file; seconds mean something on an idle machine.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import torchrun_restart
from benchmarks.real_run import end_by_signals, write_corpus
from benchmarks.record import write_result
from benchmarks.restart_phases import RECIPE, RunError, kill_in_one_run, summarize, total_s
from benchmarks.torchrun_restart import HUNG_S
from shardyard.rundir.layout import RunDir

TINY_S, COMPILED_S = 1.0, 3.0
COPIES = 1.2
TIMES = 25.0
"""Bars: see the table above."""
LARGE_BLOCKS = 15
"""1.06 GiB of fp32 weights and of AdamW's averages for each of two processes."""
KINDS = ("tiny", "large", "compiled", "torchrun")
_COMPILED = {
    "compiled": ("model.compile=true", "elastic.parked=true"),  # as auto has it with a compiler
    "compiled, not parked": ("model.compile=true", "elastic.parked=false"),
}
_FAILURES = 3
"""Starts of a kind that may come to nothing before the others go on without it."""


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--kills-a-start", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="of all our runs")
    args = parser.parse_args()
    end_by_signals()
    found = measure(args.only, args.kills, args.kills_a_start, args.settings)
    table = table_of(found["kills"], found["copy"])
    is_met = judge(table)
    content = {"settings": [*RECIPE, *args.settings], "is_met": is_met, "table": table, **found}
    write_result("recovery", content, args.out)
    for name, row in table.items():
        print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ")
    print(f"bars: {is_met}")
    return 0 if all(is_met.values()) and not found["failures"] else 1


def measure(
    only: Sequence[str],
    kills: int,
    kills_a_start: int,
    settings: Sequence[str] = (),
    *,
    large_blocks: int = LARGE_BLOCKS,
) -> dict[str, Any]:
    """So many kills of each kind, in turn.

    Returns:
        Rows by kind, the copy of the large state, and why starts ended early.
    """
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # filled by the first start
    try:
        write_corpus(folder / "text")
        wanted = _settings_of(folder, only, large_blocks)
        if "torchrun" in only:
            torchrun_restart.prepare(folder, **asked_of_torchrun())
        rows, failures = _take_turns(folder, wanted, only, kills, kills_a_start, settings)
        state_bytes = max((row["state_bytes"] for row in rows.get("large", ())), default=0)
        copy = copy_seconds(state_bytes, torchrun_restart.RANKS) if state_bytes else None
        return {"kills": rows, "copy": copy, "failures": failures}
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        shutil.rmtree(folder)


def _settings_of(
    folder: Path, only: Sequence[str], large_blocks: int
) -> dict[str, tuple[str, ...]]:
    """Of our runs, by kind."""
    wanted: dict[str, tuple[str, ...]] = {"tiny": ()} if "tiny" in only else {}
    if "large" in only:
        wanted["large"] = _large(folder / "model", large_blocks)
    return {**wanted, **(_COMPILED if "compiled" in only else {})}


def _large(folder: Path, blocks: int) -> tuple[str, ...]:
    """A model with much state and little to compute, as its config.json says."""
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512,
        "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": blocks,
        "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return (
        "model.preset=null", f"model.path={folder}", "model.weights=random", "data.seq_len=16",
        "optim.global_batch=2", "optim.micro_batch=1", "elastic.snapshot_every=2",
        "checkpoint.keep_last=1",
    )  # fmt: skip


def asked_of_torchrun() -> dict[str, int]:
    """Its settings, from ours; no second place names them."""
    ours = dict(word.split("=", 1) for word in RECIPE)
    return {
        "seq_len": int(ours["data.seq_len"]),
        "micro_batch": int(ours["optim.micro_batch"]),
        "every": int(ours["checkpoint.every"]),
        "vocab_size": int(ours["data.vocab_size"]),
    }


def _take_turns(
    folder: Path,
    wanted: Mapping[str, Sequence[str]],
    only: Sequence[str],
    kills: int,
    kills_a_start: int,
    settings: Sequence[str],
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    kinds = [*wanted, *(["torchrun"] if "torchrun" in only else [])]
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    failures: dict[str, list[str]] = {}
    starts = 0
    while due := [
        kind
        for kind in kinds
        if len(rows[kind]) < kills and len(failures.get(kind, ())) < _FAILURES
    ]:
        for kind in due:
            many = min(kills_a_start, kills - len(rows[kind]))
            begun, starts = len(rows[kind]), starts + 1
            try:
                if kind == "torchrun":
                    torchrun_restart.kill_in_one_start(folder, many, rows[kind])
                else:
                    run = RunDir(folder / "runs" / f"run-{starts}")
                    words = [*RECIPE, *settings, *wanted[kind]]
                    kill_in_one_run(folder, run, words, many, rows[kind])
            except RunError as error:
                failures.setdefault(kind, []).append(str(error))
                print(f"{kind}: {error}", file=sys.stderr)
            for row in rows[kind][begun:]:
                row["start_of_runs"] = starts
            shutil.rmtree(folder / "runs", ignore_errors=True)  # a state may be large
    return rows, failures


def copy_seconds(size: int, processes: int) -> dict[str, float]:
    """One copy of so many bytes, by so many processes at once: the slowest one's, medians of five.

    Returns:
        ``warm_s`` into memory that was touched before, ``first_s`` into new memory, as a new
        process has it.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    answers = context.Queue()
    copying = [
        context.Process(target=_copy, args=(size, barrier, answers), daemon=True)
        for _ in range(processes)
    ]
    for each in copying:
        each.start()
    found = [answers.get(timeout=600.0) for _ in copying]
    for each in copying:
        each.join()
    by_copy = [max(seconds) for seconds in zip(*found, strict=True)]
    return {"bytes": size, "warm_s": round(median(by_copy[1:]), 4), "first_s": round(by_copy[0], 4)}


def _copy(size: int, barrier: Any, answers: Any) -> None:
    state, place = np.ones(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
    seconds = []
    for _ in range(6):
        barrier.wait(timeout=600.0)
        began_s = time.perf_counter()
        np.copyto(place, state)
        seconds.append(time.perf_counter() - began_s)
    answers.put(seconds)


def table_of(
    kills: Mapping[str, Sequence[dict[str, Any]]], copy: Mapping[str, float] | None
) -> dict[str, dict[str, Any]]:
    """Medians by kind, and what they are beside each other."""
    table = {
        kind: _of_torchrun(rows) if kind == "torchrun" else _of_ours(rows)
        for kind, rows in kills.items()
        if rows
    }
    if "large" in table and copy is not None:
        table["large"] |= {"copy_s": copy["warm_s"], "first_copy_s": copy["first_s"]}
    tiny, torchrun = table.get("tiny"), table.get("torchrun")
    if tiny and torchrun:
        ratios = {
            who: round(torchrun[who] / tiny[who], 1)
            for who in ("rank_0_s", "another_s")
            if tiny[who] and torchrun[who]
        }
        table["torchrun beside tiny"] = {name.removesuffix("_s"): x for name, x in ratios.items()}
    return table


def _of_ours(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole = summarize(rows)
    compile_s = median(max(0.0, row["first step"] - row["usual step"]) for row in rows)
    return {
        "seconds": whole["total"],
        **_by_rank([(row["rank"], total_s(row)) for row in rows]),
        "first_step_beyond_usual_s": round(compile_s, 4),
        "its_share": round(compile_s / whole["total"], 3),
        **{key: whole[key] for key in ("state_mib", "read_bytes", "cached_bytes", "kills")},
    }


def _of_torchrun(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A hang counts with the time that was waited for it, which it is longer than."""
    seconds = [(row["rank"], row["seconds"] or HUNG_S) for row in rows]
    return {
        "seconds": round(median(each for _, each in seconds), 4),
        **_by_rank(seconds),
        "hung": sum(row["outcome"] == "hung" for row in rows),
        "ended": sum(row["outcome"] == "ended" for row in rows),
        "starts": len({row["start_of_runs"] for row in rows}),
        "kills": len(rows),
    }


def _by_rank(seconds: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    by_who = {
        "rank_0_s": [each for rank, each in seconds if rank == 0],
        "another_s": [each for rank, each in seconds if rank != 0],
    }
    return {who: round(median(found), 4) if found else None for who, found in by_who.items()}


def judge(table: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Bars of what was measured; those that need another kind beside them only with it."""
    tiny, large, compiled = (table.get(kind) for kind in ("tiny", "large", "compiled"))
    is_met = {}
    if tiny:
        is_met["tiny"] = tiny["seconds"] <= TINY_S
    if large:
        is_met["large reads no checkpoint"] = large["cached_bytes"] == 0
        if tiny and "copy_s" in large:
            is_met["large"] = large["seconds"] <= tiny["seconds"] + COPIES * large["copy_s"]
    if tiny and compiled:
        is_met["compiled"] = compiled["seconds"] <= COMPILED_S + tiny["seconds"]
    if "rank_0" in (beside := table.get("torchrun beside tiny", {})):
        is_met["torchrun"] = beside["rank_0"] >= TIMES
    return is_met


if __name__ == "__main__":
    sys.exit(main())
