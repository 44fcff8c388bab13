"""How quick is the page of all runs, and what does it hold and send?

    python -m benchmarks.serve_runs [--runs 1000 10000] [--rounds 5]
    python -m benchmarks.serve_runs --pages-of ../old/.venv/bin/python .venv/bin/python

Folders of runs are written, and a server of its own process is started and asked over HTTP:

| figure | what | bar |
|---|---|---|
| cold | the list, nothing kept from before | 0.5 s of 1,000 runs, 3 s of 10,000 |
| warm | the same by a new server that finds what the last one kept | 0.15 s, 0.3 s |
| curves | 100 runs of 10,000 steps overlaid, first time asked | 1 s, 1 MB sent |
| polling | bytes a second of a page with 100 curves, of a folder that rests | 1 KB |
| memory | largest of the server | 300 MB |
| first chart | the page in Chromium, from opening it: 1,000 runs; 100 curves | 1 s, 1.5 s |
| all charts | the same to the last chart on the screen | - |
| list | the same to the first rows of the table | - |

The pages of files are in the cache of the system, as after a first look at the folder. Medians of
the rounds. With ``--pages-of`` only the pages of several checkouts are measured, in turns; under
``chrt -r 1`` where others use the machine, too. Writes one JSON file.
"""

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.browser import browser
from benchmarks.record import write_result
from shardyard.report.serve.index import FILE
from shardyard.rundir.jsonl import METRIC_KEYS
from shardyard.rundir.layout import RunDir
from shardyard.rundir.manifest import git_state

BARS = {1000: {"cold_s": 0.5, "warm_s": 0.15}, 10_000: {"cold_s": 3.0, "warm_s": 0.3}}
CURVES_BAR_S, CURVES_BAR_BYTES = 1.0, 10**6
FIRST_CHART_BAR_MS = {"list": 1000, "curves": 1500}
POLLING_BAR_BYTES_PER_S, MEMORY_BAR_BYTES = 1000, 300 * 10**6
_BEGAN_T = 1_795_000_000.0
_PAGE_S = 2.0
_LONG_RUNS, _LONG_STEPS = 100, 10_000


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages-of", type=Path, nargs="+", default=[], metavar="PYTHON",
                        help="interpreters of checkouts")  # fmt: skip
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    if args.pages_of:
        return compare_pages(args.pages_of, runs=args.runs[0], rounds=args.rounds, out=args.out)
    folder = Path(tempfile.mkdtemp(prefix="serve-runs-"))
    try:
        lists = [measure_list(folder / str(n), n, rounds=args.rounds) for n in args.runs]
        curves = measure_curves(folder / "long", rounds=args.rounds)
        pages = {
            "list": measure_page(folder / str(args.runs[0]), [], rounds=args.rounds),
            "curves": measure_page(folder / "long", long_names(), rounds=args.rounds),
        }
    finally:
        shutil.rmtree(folder)
    is_met = (
        curves["seconds"] <= CURVES_BAR_S
        and curves["sent_bytes"] <= CURVES_BAR_BYTES
        and curves["polling_bytes_per_s"] <= POLLING_BAR_BYTES_PER_S
    )
    for row in lists:
        bars = BARS.get(row["runs"], {})
        is_met &= all(row[name] <= bar for name, bar in bars.items())
        print(
            f"{row['runs']:,} runs: cold {row['cold_s']:.3f} s, warm {row['warm_s']:.3f} s {bars}"
        )
    peak = max(row["peak_bytes"] for row in [*lists, curves])
    is_met &= peak <= MEMORY_BAR_BYTES
    sent, polled = curves["sent_bytes"] / 1e6, curves["polling_bytes_per_s"]
    print(
        f"{_LONG_RUNS} curves of {_LONG_STEPS:,} steps: {curves['seconds']:.3f} s, {sent:.2f} MB; "
        f"a folder at rest {polled:.0f} bytes a second; memory {peak / 1e6:.0f} MB"
    )
    for name, bar_ms in FIRST_CHART_BAR_MS.items():
        page = pages[name]
        is_met &= page["first_chart_ms"] <= bar_ms
        print(
            f"page, {name}: first chart {page['first_chart_ms']:.0f} ms ({bar_ms}), all charts "
            f"{page['all_charts_ms']:.0f} ms"
        )
    content = {"lists": lists, "curves": curves, "pages": pages, "is_met": is_met}
    write_result("serve-runs", content, args.out)
    return 0 if is_met else 1


def measure_list(folder: Path, count: int, *, rounds: int) -> dict[str, Any]:
    """Of so many short runs."""
    write_folder(folder, count, steps=20)
    rounds_s: dict[str, list[float]] = {"cold_s": [], "warm_s": []}
    peak = 0
    for _ in range(rounds):
        (folder / FILE).unlink(missing_ok=True)
        for way in rounds_s:
            with served(folder) as (port, process):
                began_s = time.monotonic()
                _, body = ask(port, "/api/runs")
                rounds_s[way].append(time.monotonic() - began_s)
                assert len(json.loads(body)) == count
                peak = max(peak, _peak_bytes(process.pid))
    medians = {way: round(median(all_s), 4) for way, all_s in rounds_s.items()}
    return {"runs": count, **medians, "rounds": rounds_s, "peak_bytes": peak}


def measure_curves(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Of long runs, all on one page."""
    names = long_names()
    for name in names:
        write_run(folder, name, steps=_LONG_STEPS)
    path = "/api/curves?y=loss&x=step&" + "&".join(f"run={name}" for name in names)
    seconds, sent, polled, peak = [], 0, 0.0, 0
    for _ in range(rounds):
        with served(folder) as (port, process):
            ask(port, "/api/runs")
            began_s = time.monotonic()
            sent, body = ask(port, path, zips=True)
            seconds.append(time.monotonic() - began_s)
            assert body
            polled = poll(port, ("/api/runs", path)) / _PAGE_S
            peak = max(peak, _peak_bytes(process.pid))
    return {
        "seconds": round(median(seconds), 4),
        "rounds": seconds,
        "sent_bytes": sent,
        "polling_bytes_per_s": round(polled, 1),
        "peak_bytes": peak,
    }


def long_names() -> list[str]:
    """Ids of the long runs."""
    return [f"run-{number:03d}" for number in range(_LONG_RUNS)]


def compare_pages(pythons: list[Path], *, runs: int, rounds: int, out: Path | None) -> int:
    """Measure the pages of several checkouts, one round of each after the other."""
    folder = Path(tempfile.mkdtemp(prefix="serve-runs-"))
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    try:
        write_folder(folder / "list", runs, steps=20)
        write_folder(folder / "curves", _LONG_RUNS, steps=_LONG_STEPS)
        for _ in range(rounds):
            for python in pythons:
                pages = found.setdefault(_commit_of(python), {})
                for name, ids in (("list", []), ("curves", long_names())):
                    times = measure_page_once(folder / name, ids, python=python)
                    for key, value in times.items():
                        pages.setdefault(name, {}).setdefault(key, []).append(value)
    finally:
        shutil.rmtree(folder)
    commits = {
        commit: {
            name: {**{key: median(values) for key, values in times.items()}, "rounds": times}
            for name, times in pages.items()
        }
        for commit, pages in found.items()
    }
    for commit, pages_of in commits.items():
        for name, page in pages_of.items():
            words = ", ".join(f"{key} {page[key]:.0f}" for key in page if key != "rounds")
            print(f"{commit[:8]}, {name}: {words}")
    realtime = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
    content = {"runs": runs, "is_realtime": realtime, "commits": commits}
    write_result("serve-pages", content, out)
    return 0


def _commit_of(python: Path) -> str:
    """Return the commit of the checkout that an interpreter's package is of."""
    where = "import shardyard; print(shardyard.__path__[0])"
    package = subprocess.check_output([python, "-c", where], text=True).strip()
    state = git_state(Path(package))
    assert state is not None
    return f"{state['commit']}{' with changes' if state['is_dirty'] else ''}"


def measure_page(folder: Path, names: list[str], *, rounds: int) -> dict[str, Any]:
    """Return the medians of a page's times over some rounds, and the times."""
    all_times = [measure_page_once(folder, names) for _ in range(rounds)]
    times = {key: [each[key] for each in all_times] for key in all_times[0]}
    return {**{key: median(values) for key, values in times.items()}, "rounds": times}


_WATCH = """
const times = window.drawn = { first: null, last: null, list: null };
const { stroke } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.stroke = function (...given) {
  times.last = performance.now();
  if (times.first === null) {
    times.first = 0;
    requestAnimationFrame(() => setTimeout(() => { times.first = performance.now(); }));
  }
  return stroke.apply(this, given);
};
document.addEventListener("DOMContentLoaded", () => {
  const rows = document.getElementById("rows");
  const note = () => { times.list ??= performance.now(); };
  new MutationObserver(note).observe(rows, { childList: true });
  const names = NAMES;
  if (!names.length || typeof state === "undefined") return;
  state.begun = true;  // the page of before view addresses
  names.forEach((id, k) => state.chosen.set(id, k % 12));
});
"""
"""Notes when a page has painted its first chart, drew on a canvas last, and listed runs."""
_REST_MS = 1200


def measure_page_once(
    folder: Path, names: list[str], *, python: Path = Path(sys.executable)
) -> dict[str, float]:
    """Time to charts in a browser that is open already; the server knows nothing yet.

    Args:
        names: Runs in the charts; empty: those that the page chooses itself.
        python: Interpreter whose page is measured.
    """
    view = "#" + "&".join(f"run={name}" for name in names) if names else ""
    (folder / FILE).unlink(missing_ok=True)
    with browser() as page, served(folder, python) as (port, _process):
        page.size(1280, 900)
        page.first(_WATCH.replace("NAMES", json.dumps(names)))
        page.open(f"http://127.0.0.1:{port}/{view}")
        page.until(f"drawn.first && drawn.list && performance.now() - drawn.last > {_REST_MS}")
        drawn = page.run("drawn")
    return {
        "first_chart_ms": drawn["first"], "all_charts_ms": drawn["last"], "list_ms": drawn["list"],
    }  # fmt: skip


def write_folder(folder: Path, count: int, *, steps: int) -> None:
    """Write runs of so many steps."""
    digits = 5 if steps < _LONG_STEPS else 3
    for number in range(count):
        write_run(folder, f"run-{number:0{digits}d}", steps=steps)


def write_run(folder: Path, name: str, *, steps: int) -> None:
    """A run that has finished."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    run.recipe.write_text("model: {preset: llama-tiny}\n")
    run.attempt(0).mkdir(parents=True)
    settings = {f"section.setting_{k}": {"value": k, "reason": "given"} for k in range(150)}
    settings |= {"optim.lr": {"value": int(name[-3:]) % 7 + 1, "reason": "given"}}
    run.resolved(0).write_text(json.dumps({"settings": settings}))
    place = {"attempt": 0, "generation": 0}
    kinds = ("run_started", "attempt_started", "first_step", "checkpoint_durable", "run_finished")
    events = [{"t": _BEGAN_T + k, "kind": kind, **place} for k, kind in enumerate(kinds)]
    events.append({"t": _BEGAN_T + 9, "kind": "attempt_ended", **place, "exit_code": 0})
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    usual = {**dict.fromkeys(METRIC_KEYS, 1.2345), **place, "world_size": 2}
    lines = (
        json.dumps({**usual, "step": step, "tokens": step * 4096, "loss": 3 + 5 / step})
        for step in range(1, steps + 1)
    )
    run.metrics.write_text("".join(f"{line}\n" for line in lines))


@contextmanager
def served(
    folder: Path, python: Path = Path(sys.executable)
) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """A server of its own process; its port."""
    command = [str(python), "-m", "shardyard", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        yield int(url.rstrip("/").rpartition(":")[2]), process
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def ask(port: int, path: str, *, zips: bool = False) -> tuple[int, bytes]:
    """An answer: how many bytes of content were sent, and the content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path, headers={"Accept-Encoding": "gzip"} if zips else {})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return len(body), body
    finally:
        connection.close()


def poll(port: int, paths: tuple[str, ...]) -> float:
    """Bytes of one look of a page that has seen it all, answers with their heads."""
    total = 0
    for path in paths:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            tag = answer.getheader("ETag") or ""
            connection.request("GET", path, headers={"If-None-Match": tag})
            answer = connection.getresponse()
            assert answer.status == 304
            head = sum(len(name) + len(value) + 4 for name, value in answer.getheaders())
            total += head + len(answer.read()) + len("HTTP/1.1 304 Not Modified\r\n\r\n")
        finally:
            connection.close()
    return total


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("the system does not tell a process's largest memory")


if __name__ == "__main__":
    sys.exit(main())
