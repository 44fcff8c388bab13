"""How long the command line takes to answer: `--help`, and a recipe that is refused.

Whole processes, wall time, one warm-up, nothing else running. The bars: medians of at most 0.3 s
and 0.7 s.

    python -m benchmarks.start_up
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.record import write_result

BARS_S = {"--help": 0.3, "config model.preset=llama-tiny optim.lr=fast": 0.7}


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    times_s = {words: _measure(words, args.runs) for words in BARS_S}
    rows = {
        words: {"bar_s": bar_s, "median_s": median(times_s[words]), "times_s": times_s[words]}
        for words, bar_s in BARS_S.items()
    }
    is_met = all(median(times_s[words]) <= bar_s for words, bar_s in BARS_S.items())
    write_result("start-up", {"is_met": is_met, "commands": rows}, args.out)
    for words, row in rows.items():
        print(f"shardyard {words}: median {row['median_s']:.3f} s, bar {row['bar_s']} s")
    return 0 if is_met else 1


def _measure(words: str, runs: int) -> list[float]:
    command = [str(Path(sys.executable).parent / "shardyard"), *words.split()]
    times_s = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False)
        times_s.append(round(time.perf_counter() - started, 4))
    return times_s[1:]


if __name__ == "__main__":
    sys.exit(main())
