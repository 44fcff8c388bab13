"""Train on accelerators beside a bare FSDP2 loop and Hugging Face Trainer; write what came of it.

One command, no network:

    PYTHONPATH=src python -m benchmarks.gpu.run --minutes 9

Every contender does the same work (README.md) in processes of its own, one after the other. The
result file is rewritten after each, so that a run that is cut short leaves what it has.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NEEDED = {
    "torch": "2.11", "transformers": "5.17", "tokenizers": "0.23.1", "safetensors": "0.8",
    "numpy": "1.26.4", "pydantic": "2.11", "pyyaml": "6.0.1", "fsspec": "2024.6",
}  # fmt: skip
"""Distribution -> least version. ``accelerate`` is wanted by the Trainer alone."""
_TABLE = (
    "model", "variant", "recompute", "contender", "micro_batch", "status",
    "tokens_per_s_per_device", "mfu_full", "mfu_causal", "peak_gib",
)  # fmt: skip
_LEAST_SECONDS = 45.0
"""A cell that has less is not begun: building a large model takes most of it."""


def main() -> int:
    """Run all cells there is time for; returns 2 where packages are missing, else 0."""
    args = _arguments()
    missing = missing_packages()
    if missing:
        print(
            f"benchmarks.gpu.run needs {', '.join(missing)}, which this Python ({sys.executable}) "
            "does not have. Nothing was measured. Install them, from wheels where there is no "
            "network: benchmarks/gpu/README.md lists them.",
            file=sys.stderr,
        )
        return 2
    started = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        content, path = _measure_all(args, Path(scratch), started)
    print(table(content["cells"]))
    print(f"\nraw results: {path}", file=sys.stderr)
    return 0


def missing_packages(needed: dict[str, str] = NEEDED) -> list[str]:
    """``name>=version`` of each needed package that is not installed or too old."""
    wrong = []
    for name, least in needed.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name}>={least}")
            continue
        if _numbers(found) < _numbers(least):
            wrong.append(f"{name}>={least} (there is {found})")
    return wrong


def _measure_all(
    args: argparse.Namespace, scratch: Path, started: float
) -> tuple[dict[str, Any], Path]:
    # here and not above: without the needed packages these imports fail with a traceback
    from benchmarks.gpu.cells import LOADS, REHEARSAL, cells
    from benchmarks.gpu.measure import Session, conventions, prepare_data
    from benchmarks.gpu.variants import LOADS as VARIED
    from benchmarks.gpu.variants import VARIANTS, variant_cells
    from benchmarks.record import about, result_file
    from shardyard.hardware.probe import probe
    from shardyard.rundir.layout import write_json

    machine, place = _place(args, probe())
    measures_variants = args.variants is not None
    known = VARIED if measures_variants else LOADS
    loads = REHEARSAL if args.rehearse else {name: known[name] for name in args.models or known}
    planned = list(cells(list(loads.values()), args.recompute, args.contenders, place))
    if measures_variants:
        planned = list(variant_cells(list(loads.values()), args.variants or list(VARIANTS)))
    content: dict[str, Any] = {
        **about(machine),
        "devices": place.devices,
        "is_rehearsal": args.rehearse,
        "conventions": conventions(machine),
        "steps": args.steps,
        "warm_up": args.warm_up,
        "cells": [],
    }
    name = "variants" if measures_variants else "train"
    path = result_file(f"{name}-{time.strftime('%H%M%S', time.gmtime())}", machine, args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    session = Session(
        machine=machine, place=place, data=prepare_data(planned[0], place), scratch=scratch,
        steps=args.steps, warm_up=args.warm_up,
    )  # fmt: skip
    until = started + 60 * args.minutes - 15
    for done, cell in enumerate(planned):
        left_s = until - time.time()
        share_s = max(args.least_seconds + 1, left_s / (len(planned) - done))
        for line in session.measure(cell, seconds=min(left_s, share_s), least_s=args.least_seconds):
            content["cells"].append(line)
            content["seconds"] = round(time.time() - started, 1)
            write_json(path, content)
            print(_one_line(line), file=sys.stderr, flush=True)
    return content, path


def _place(args: argparse.Namespace, machine: Any) -> tuple[Any, Any]:
    """The machine to measure on, and where everything is."""
    from dataclasses import replace

    from benchmarks.gpu.cells import Place

    if args.rehearse:
        cores = len(os.sched_getaffinity(0))
        machine = replace(machine, device="cpu", name="CPU (rehearsal)", count=1, cores=cores)
    elif machine.device == "cpu":
        sys.exit(
            f"there is no accelerator on this machine ({machine.name}). This benchmark measures "
            "one; rehearse it on a CPU with --rehearse."
        )
    devices = args.devices or (1 if args.rehearse else machine.count)
    if not args.rehearse and devices > machine.count:
        sys.exit(f"--devices {devices}: this machine has {machine.count} x {machine.name}.")
    return machine, Place(
        device=machine.device,
        devices=devices,
        memory_bytes=machine.memory_bytes,
        source=args.source,
        vocab_size=512 if args.rehearse else 32000,
        prepared=args.prepared,
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line a try."""
    rows = [_TABLE, ("---",) * len(_TABLE)]
    rows += [tuple(_shown(line.get(key)) for key in _TABLE) for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _one_line(line: dict[str, Any]) -> str:
    return json.dumps({key: line.get(key) for key in _TABLE})


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 1 else f"{value:,.1f}"
    return str(value)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("+")[0].split(".") if part.isdigit()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="all of it, data preparation included")
    add("--models", nargs="+", help="presets; default: all that there are cells for")
    add("--variants", nargs="*", help="settings of our own against each other; default: all")
    add("--contenders", nargs="+", default=["shardyard", "bare", "trainer"])
    add("--recompute", nargs="+", default=["none", "selective", "full"])
    add("--steps", type=int, default=30, help="measured steps; fewer if time is short")
    add("--warm-up", type=int, default=5)
    add("--devices", type=int, help="accelerators to use; default: all, 1 in a rehearsal")
    add("--source", default="python-stdlib", help="text; default: Python's own files")
    add("--prepared", type=Path, default=Path("prepared"), help="folder of prepared data")
    add("--out", type=Path, default=Path(__file__).parents[1] / "results")
    add("--rehearse", action="store_true", help="tiny, on the CPU: does every line still run?")
    add("--least-seconds", type=float, default=_LEAST_SECONDS, help="begin no cell with less")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
