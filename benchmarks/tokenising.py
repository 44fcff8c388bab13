"""What preparing text costs beside the tokenizer alone, and beside `datasets.map`.

The interpreter's own source code as JSON lines, repeated to each size; one tokenizer for all. Each
way is a process of its own, from reading the file to its end:

- shardyard: `python -m shardyard.data`, a worker on each core, which writes shards;
- own: the tokenizers library's `encode_batch_fast` on 1,000 documents at a time by its own
  threads; the lists of ids are dropped;
- datasets: `load_dataset` and `map(batched=True, num_proc=<cores>)` with transformers' tokenizer,
  as its documentation has it, but without the masks;
- datasets-fast: the same with `encode_batch_fast` instead of transformers' tokenizer.

They run in turn, each round in another order. Ratios are of one round; the median of rounds is
told. CPU seconds are those of a process and all that it started. `calls` are the parts that do the
work (`encode_batch_fast`, `map`) without start, reading and JSON. Wall times want an idle machine.

    python -m benchmarks.tokenising        # 20 MB three times, 300 MB once: some 10 minutes
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

BATCH = 1000
"""Documents at a time, as datasets' own default."""
CORES = len(os.sched_getaffinity(0))
BARS = {
    "own_per_cpu_s": 0.90,
    "own_per_s": 0.90,
    "datasets_per_s": 1.35,
}
"""Tokens of ours in a (CPU) second, of the other's at its best."""
FLAT = 1.10
"""CPU seconds a token at the largest size, of those at the smallest."""


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[20.0, 300.0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[3, 1], help="of each size")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--folder", type=Path, help="for files in between; None: a temporary one")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("--way", nargs=3, metavar=("WAY", "TEXT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        name, text, folder = args.way
        print(json.dumps(WAYS[name](Path(text), Path(folder))))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        sizes = dict(zip(args.megabytes, args.rounds, strict=True))
        measured = _measure(sizes, Path(folder), args.vocab_size)
    result = judge(measured)
    # Not above: the ways, which start from this file too, would pay for it.
    from benchmarks.record import write_result

    write_result("tokenising", {**result, "measured": measured}, args.out)
    print(table(result))
    return 0 if result["is_met"] else 1


def judge(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of each size, and whether the bars are met.

    Args:
        measured: Megabytes -> rounds: way -> tokens, ``wall_s``, ``cpu_s`` and, of the calls alone,
            ``calls_wall_s``, ``calls_cpu_s``.
    """
    sizes = {size: _ratios(rounds) for size, rounds in measured.items()}
    costs = [
        median(one["shardyard"]["cpu_s"] / one["shardyard"]["tokens"] for one in rounds)
        for rounds in measured.values()
    ]
    flat = costs[-1] / costs[0]
    missed = [
        f"{name} at {size} MB: {ratios[name]:.3f}, bar {bar}"
        for size, ratios in sizes.items()
        for name, bar in BARS.items()
        if ratios.get(name, bar) < bar
    ]
    missed += [f"cost per token: {flat:.3f}, bar {FLAT}"] if flat > FLAT else []
    is_complete = all(set(WAYS) == set(one) for rounds in measured.values() for one in rounds)
    return {
        "is_met": not missed,
        "is_complete": is_complete,
        "missed": missed,
        "ratios": sizes,
        "cost_per_token": flat,
    }


def _ratios(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds: our tokens in a second beside theirs."""

    def against(way: str, theirs: str, ours: str) -> float:
        ratios = (
            one["shardyard"]["tokens"]
            / one["shardyard"][ours]
            / (one[way]["tokens"] / one[way][theirs])
            for one in rounds
        )
        return float(median(ratios))

    found = {
        "own_per_cpu_s": against("own", "cpu_s", "cpu_s"),
        "own_per_s": against("own", "wall_s", "wall_s"),
        "own_calls_per_cpu_s": against("own", "calls_cpu_s", "cpu_s"),
        "own_calls_per_s": against("own", "calls_wall_s", "wall_s"),
    }
    theirs = [way for way in ("datasets", "datasets-fast") if all(way in one for one in rounds)]
    for way in theirs:
        name = way.replace("-", "_")
        found[f"{name}_map_per_s"] = against(way, "calls_wall_s", "wall_s")
        found[f"{name}_map_per_cpu_s"] = against(way, "calls_cpu_s", "cpu_s")
    if theirs:
        found["datasets_per_s"] = min(against(way, "wall_s", "wall_s") for way in theirs)
        found["datasets_per_cpu_s"] = min(against(way, "cpu_s", "cpu_s") for way in theirs)
    return found


def table(result: dict[str, Any]) -> str:
    """The ratios as lines of text."""
    names = sorted({name for ratios in result["ratios"].values() for name in ratios})
    lines = [f"{'ratio':28}" + "".join(f"{size:>9} MB" for size in result["ratios"])]
    for name in names:
        cells = [ratios.get(name) for ratios in result["ratios"].values()]
        bar = f"   bar {BARS[name]}" if name in BARS else ""
        values = "".join(f"{'':>12}" if cell is None else f"{cell:12.3f}" for cell in cells)
        lines.append(f"{name:28}{values}{bar}")
    lines.append(f"{'cost per token':28}{result['cost_per_token']:12.3f}   bar {FLAT}")
    if not result["is_complete"]:
        lines.append("not beside datasets, which is not installed: pip install datasets")
    return "\n".join([*lines, *(f"missed: {words}" for words in result["missed"])])


def _measure(
    sizes: dict[float, int], folder: Path, vocab_size: int
) -> dict[str, list[dict[str, Any]]]:
    tokenizer = folder / "tokenizer"
    text = folder / "text.jsonl"
    measured = {}
    for megabytes, rounds in sizes.items():
        _write_text(text, megabytes)
        if not tokenizer.exists():
            _train(text, tokenizer, vocab_size)
        found = []
        for number in range(rounds):
            names = _installed()
            turn = number % len(names)
            order = [*names[turn:], *names[:turn]]
            found.append({name: _run(name, text, folder) for name in order})
        measured[f"{megabytes:g}"] = found
    return measured


def _installed() -> list[str]:
    return [name for name in WAYS if "datasets" not in name or find_spec("datasets")]


def _write_text(path: Path, megabytes: float) -> None:
    from shardyard.data.sources import list_files

    documents = [Path(file.path).read_text() for file in list_files("python-stdlib")]
    left = megabytes * 1e6
    with path.open("w") as file:
        while left > 0:
            for document in documents:
                if left > 0 and document:
                    file.write(json.dumps({"text": document}) + "\n")
                    left -= len(document.encode())


def _train(text: Path, folder: Path, vocab_size: int) -> None:
    from shardyard.data.tokenizer import train_bpe

    documents = (document for batch in _batches(text) for document in batch)
    folder.mkdir()
    for name, content in train_bpe(documents, vocab_size=vocab_size).items():
        (folder / name).write_bytes(content)


def _run(name: str, text: Path, folder: Path) -> dict[str, Any]:
    """One way as a process: what it tells, with its seconds and those of what it started."""
    command = [sys.executable, "-m", "benchmarks.tokenising", "--way", name, str(text), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    answer = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    assert status == 0, f"{name} ended with {os.waitstatus_to_exitcode(status)}"
    process.returncode = 0  # so that it is not waited for again
    told: dict[str, Any] = json.loads(answer.splitlines()[-1])
    print(f"{name}: {wall_s:.1f} s, {used.ru_utime + used.ru_stime:.1f} CPU s", file=sys.stderr)
    return {**told, "wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime}


def _shardyard(text: Path, folder: Path) -> dict[str, Any]:
    """The data program, which has no part that does nothing but encode."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        recipe = folder / "recipe.json"
        data = {"source": str(text), "dir": out, "tokenizer": str(folder / "tokenizer")}
        recipe.write_text(json.dumps({"data": data}))
        command = [sys.executable, "-m", "shardyard.data", str(recipe)]
        facts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    # Each document ends with a token of ours, which the others do not put there.
    documents = facts["train_documents"] + facts["eval_documents"]
    return {"tokens": facts["train_tokens"] + facts["eval_tokens"] - documents}


def _own(text: Path, folder: Path) -> dict[str, Any]:
    tokenizer = _open(folder)
    tokens, wall_s, cpu_s = 0, 0.0, 0.0
    for documents in _batches(text):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        wall_s += time.perf_counter() - began_s
        cpu_s += time.process_time() - began_cpu_s
        tokens += sum(map(len, ids))
    return {"tokens": tokens, "calls_wall_s": wall_s, "calls_cpu_s": cpu_s}


def _datasets(text: Path, folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(
            batch["text"],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return {"input_ids": encoded["input_ids"]}

    return _map(text, folder, encode)


def _datasets_fast(text: Path, folder: Path) -> dict[str, Any]:
    tokenizer = _open(folder)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    return _map(text, folder, encode)


def _map(
    text: Path, folder: Path, encode: Callable[[dict[str, list[str]]], dict[str, list[list[int]]]]
) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        read = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=cache)
        began_s, began_cpu_s = time.perf_counter(), _cpu_s()
        encoded = read.map(encode, batched=True, num_proc=CORES, remove_columns=["text"])
        wall_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
        lengths = encoded.data.column("input_ids").combine_chunks().value_lengths()
        return {"tokens": sum(lengths.to_pylist()), "calls_wall_s": wall_s, "calls_cpu_s": cpu_s}


def _cpu_s() -> float:
    """Of this process and of those that it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _open(folder: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _batches(text: Path) -> Iterator[list[str]]:
    documents = []
    with text.open("rb") as file:
        for line in file:
            documents.append(json.loads(line)["text"])
            if len(documents) == BATCH:
                yield documents
                documents = []
    if documents:
        yield documents


WAYS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "shardyard": _shardyard,
    "own": _own,
    "datasets": _datasets,
    "datasets-fast": _datasets_fast,
}


if __name__ == "__main__":
    sys.exit(main())
