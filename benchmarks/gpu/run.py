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
from collections.abc import Iterable, Sequence
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
    """Run all cells there is time for.

    Returns:
        0; 1 where no cell was measured; 2 where packages are missing.
    """
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
    return 0 if any(line["status"] == "ok" for line in content["cells"]) else 1


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
    from benchmarks.gpu.beside import newest_ceilings
    from benchmarks.gpu.clocks import Clocks
    from benchmarks.gpu.equal_losses import checked
    from benchmarks.gpu.measure import Session, conventions, prepare_data
    from benchmarks.record import about, result_file
    from shardyard.data.shards import read_metadata
    from shardyard.hardware.machine import probe
    from shardyard.io.files import write_json

    machine, place = _place(args, probe())
    planned = _planned(args, place)
    content: dict[str, Any] = {
        **about(machine),
        "devices": place.devices,
        "is_rehearsal": args.rehearse,
        "conventions": conventions(machine),
        "steps": args.steps,
        "warm_up": args.warm_up,
        "cells": [],
    }
    name = args.name or ("train" if args.variants is None else "variants")
    path = result_file(f"{name}-{time.strftime('%H%M%S', time.gmtime())}", machine, args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    session = Session(
        machine=machine, place=place, scratch=scratch, steps=args.steps, warm_up=args.warm_up,
        data=read_metadata(args.data) if args.data else prepare_data(planned[0], place),
        compiled=args.compiled, profile=args.profile, ceilings=newest_ceilings(args.out),
    )  # fmt: skip
    until = started + (args.seconds or 60 * args.minutes - 15)
    if args.by_turns:
        with Clocks(0 if args.rehearse else 1) as clocks:
            content["cells"] = session.by_turns(planned, turns=args.by_turns, until=until)
            content["clocks"] = clocks.take()
        content["seconds"] = round(time.time() - started, 1)
        write_json(path, content)
        return content, path
    fits: set[tuple[str, str, bool, str]] = set()
    for done, cell in enumerate(planned):
        if args.first_that_fits and _kind(cell) in fits:
            continue
        left_s = until - time.time()
        kinds = {_kind(later) for later in planned[done:]} if args.first_that_fits else ()
        share_s = max(args.least_seconds + 1, left_s / (len(kinds) or len(planned) - done))
        with Clocks(0 if args.rehearse else place.devices) as clocks:
            for found in session.measure(
                cell, seconds=min(left_s, share_s), least_s=args.least_seconds
            ):
                line = checked(found, content["cells"])
                content["cells"].append({**line, "clocks": clocks.take()})
                if line["status"] == "ok":
                    fits.add(_kind(cell))
                content["seconds"] = round(time.time() - started, 1)
                write_json(path, content)
                print(_one_line(line), file=sys.stderr, flush=True)
    return content, path


def _kind(cell: Any) -> tuple[str, str, bool, str]:
    """What cells have in common that differ in what is recomputed."""
    return cell.load.preset, cell.contender, cell.compile, cell.variant


def _planned(args: argparse.Namespace, place: Any) -> list[Any]:
    """The cells to measure, in their order."""
    from dataclasses import replace

    from benchmarks.gpu.cells import LOADS, REHEARSAL, cells, reference
    from benchmarks.gpu.limit import limit_cells
    from benchmarks.gpu.variants import LOADS as VARIED
    from benchmarks.gpu.variants import TURNS, VARIANTS, turn_cells, variant_cells

    if args.limit:
        return list(limit_cells(place))
    known = LOADS if args.variants is None else VARIED
    is_tiny = args.rehearse or args.tiny
    chosen = REHEARSAL if is_tiny else {name: known[name] for name in args.models or known}
    loads = [
        load if args.sequences is None else replace(load, sequences=args.sequences)
        for load in chosen.values()
    ]
    if args.by_turns:
        return turn_cells(loads[0], args.turns or list(TURNS), compile=not is_tiny)
    if args.variants is not None:
        return list(variant_cells(loads, args.variants or list(VARIANTS)))
    compiles = [word == "yes" for word in args.compile]
    found = list(
        cells(
            loads, args.recompute, args.contenders, place, compiles=compiles, settings=args.settings
        )
    )
    return [*_once(map(reference, found)), *found] if args.reference else found


def _once(found: Iterable[Any]) -> list[Any]:
    """The first of each kind; a larger micro-batch than the first tells the same losses."""
    firsts: dict[Any, Any] = {}
    for cell in found:
        firsts.setdefault(_kind(cell), cell)
    return list(firsts.values())


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
    from shardyard.data.shards import read_metadata

    vocab_size = 512 if args.rehearse else 32000
    return machine, Place(
        device=machine.device,
        devices=devices,
        memory_bytes=machine.memory_bytes,
        source=args.source,
        vocab_size=read_metadata(args.data).vocab_size if args.data else vocab_size,
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
    add("--seconds", type=float, help="all of it, instead of --minutes")
    add("--models", nargs="+", help="presets; default: all that there are cells for")
    add("--variants", nargs="*", help="settings of our own against each other; default: all")
    add("--contenders", nargs="+", default=["shardyard", "bare", "trainer"])
    add("--recompute", nargs="+", default=["none", "selective", "full"])
    add("--steps", type=int, default=30, help="measured steps; fewer if time is short")
    add("--warm-up", type=int, default=5)
    add("--devices", type=int, help="accelerators to use; default: all, 1 in a rehearsal")
    add("--source", default="python-stdlib", help="text; default: Python's own files")
    add("--prepared", type=Path, default=Path("prepared"), help="folder of prepared data")
    add("--data", type=Path, help="a folder of prepared data, taken as it is")
    add("--compile", nargs="+", choices=("yes", "no"), default=["no"], help="for all contenders")
    add("--settings", nargs="+", default=[], help="section.key=value, for our own contender")
    add("--sequences", type=int, help="a step and device, instead of what the model's cells have")
    add("--reference", action="store_true", help="first the losses of each without compilation")
    add(
        "--by-turns", type=int, default=0, metavar="N", help="settings in one process, N turns each"
    )
    add("--turns", nargs="+", help="which of them; default: all")
    add("--limit", action="store_true", help="what fits, tight, and out of memory on purpose")
    add("--first-that-fits", action="store_true", help="of --recompute only as many as it takes")
    add("--profile", action="store_true", help="take one more step of ours apart by kernels")
    add("--compiled", type=Path, help="a folder of compiled code, to read and to add to")
    add("--name", help="of the result file; default: train or variants")
    add("--out", type=Path, default=Path(__file__).parents[1] / "results")
    add("--tiny", action="store_true", help="a tiny model on this machine's own device")
    add("--rehearse", action="store_true", help="tiny, on the CPU: does every line still run?")
    add("--least-seconds", type=float, default=_LEAST_SECONDS, help="begin no cell with less")
    args = parser.parse_args()
    if args.settings and args.contenders != ["shardyard"]:
        parser.error("--settings are ours alone: add --contenders shardyard")
    if args.limit and args.rehearse:
        parser.error("--limit needs a device: a CPU's allocator has no such limit to meet")
    if args.variants is not None and (args.settings or args.compile != ["no"]):
        parser.error("variants have settings of their own: leave out --settings and --compile")
    return args


if __name__ == "__main__":
    sys.exit(main())
