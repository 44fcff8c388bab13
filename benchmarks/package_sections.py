"""Which section of Debian a package is in, by its one line of description: here and by Trainer.

The table is what ``apt-cache dumpavail`` prints: the description (text) and the section (label) of
each package. A section has at least 200 packages, and equal descriptions count once. Packages of
one source describe each other, so they are together in training or in validation.

A small BERT first learns the hidden words of all training texts. Then it learns some of the
labels: whole, by Shardyard and by Hugging Face Trainer from the same folder, and with adapters
(LoRA). Both also train the same BERT from random weights. Rates were chosen before any result
was seen.

    python -m benchmarks.package_sections
"""

import argparse
import csv
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_run import verb
from benchmarks.record import write_result
from shardyard.rundir.jsonl import read_evaluations
from shardyard.rundir.layout import RunDir

LEAST_PACKAGES, VALIDATION = 200, 10
"""Packages of a section; one source of so many is in the validation split."""
VOCABULARY, SEQ_LEN, BATCH, EPOCHS, HIDDEN_WORDS_EPOCHS = 8192, 32, 64, 3, 6
RATES = {"scratch": 1e-3, "tuned": 5e-4, "lora": 2e-3}
LORA = {"rank": 16, "alpha": 32, "modules_to_save": ["pooler"]}
TOLERANCE = 0.01
"""Most that Shardyard's mean accuracy may be below Trainer's."""

Row = tuple[str, str]
"""Description and section."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; 1 if accuracy is lower than Trainer's, or adapters learn little."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--as-trainer"]:
        where, begun_from, start, number = given[1:]
        train_by_trainer(Path(where), Path(begun_from), start=start, seed=int(number))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10_000, help="most labels to learn")
    parser.add_argument("--folder", type=Path, help="keep runs there, and take those that it has")
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(exist_ok=True)
        about = write_table(folder, parse_packages(available_packages()), most=asked.rows)
        model = hidden_words(folder)
        found: dict[str, Any] = {}
        for label, (train, begin) in CONTENDERS.items():
            runs = [train(folder, model, begin, seed) for seed in range(asked.seeds)]
            found[label] = {"accuracy": _spread(run["accuracy"] for run in runs), "runs": runs}
            print(f"{label}: {found[label]['accuracy']}", flush=True)
    settings = {
        "vocabulary": VOCABULARY, "seq_len": SEQ_LEN, "batch": BATCH, "epochs": EPOCHS,
        "hidden_words_epochs": HIDDEN_WORDS_EPOCHS, "rates": RATES, "lora": LORA,
        "model": _config(),
    }  # fmt: skip
    behind = max(
        found[f"trainer, {start}"]["accuracy"]["mean"]
        - found[f"shardyard, {start}"]["accuracy"]["mean"]
        for start in ("from random weights", "fine-tuned")
    )
    content = {"table": about, "settings": settings, "behind_trainer": behind, "found": found}
    write_result("package-sections", content, asked.out)
    return int(behind > TOLERANCE)


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {"mean": statistics.mean(found), "least": min(found), "most": max(found)}


# --- the table ------------------------------------------------------------------------------------


def available_packages() -> str:
    """What apt knows of every package, in English."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    answer = subprocess.run(
        ["apt-cache", "dumpavail"], env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout


def parse_packages(text: str) -> Iterator[tuple[str, Row]]:
    """Yield the source of each package, with its description and its section."""
    for stanza in text.split("\n\n"):
        found: list[tuple[str, str]] = re.findall(r"^([\w-]+): (.*)$", stanza, flags=re.MULTILINE)
        fields = dict(found)
        words = fields.get("Description") or fields.get("Description-en")
        if words and "Section" in fields:
            source = fields.get("Source", fields["Package"]).partition(" ")[0]
            yield source, (words, fields["Section"].rpartition("/")[2])


def write_table(
    folder: Path, packages: Iterable[tuple[str, Row]], *, most: int | None
) -> dict[str, Any]:
    """Write train.csv and validation.csv, and return what is in them."""
    first: dict[str, tuple[str, Row]] = {}
    for source, (words, section) in packages:
        first.setdefault(words, (source, (words, section)))
    sizes = Counter(section for _, (_, section) in first.values())
    splits: dict[str, list[Row]] = {"train": [], "validation": []}
    for source, row in sorted(first.values(), key=lambda each: _hash(each[1][0])):
        if sizes[row[1]] >= LEAST_PACKAGES:
            splits["train" if _hash(source) % VALIDATION else "validation"].append(row)
    (folder / "texts").mkdir(exist_ok=True)
    texts = "".join(json.dumps({"text": words}) + "\n" for words, _ in splits["train"])
    (folder / "texts" / "texts.jsonl").write_text(texts)
    unlabelled = len(splits["train"])
    splits["train"] = splits["train"][:most]
    for name, rows in splits.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    majority = Counter(section for _, section in splits["train"]).most_common(1)[0][0]
    held_out = [section for _, section in splits["validation"]]
    return {
        "rows": {name: len(rows) for name, rows in splits.items()},
        "texts_of_hidden_words": unlabelled,
        "sections": len({section for _, section in splits["train"]}),
        "majority": majority,
        "majority_accuracy": held_out.count(majority) / len(held_out),
        "sha256": {
            name: hashlib.sha256((folder / f"{name}.csv").read_bytes()).hexdigest()
            for name in splits
        },
    }


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


# --- Shardyard ------------------------------------------------------------------------------------


def _config() -> dict[str, Any]:
    return {
        "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512,
        "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def hidden_words(folder: Path) -> Path:
    """Learn the hidden words of the training texts; returns the folder of the model."""
    if (folder / "model").exists():
        return folder / "model"
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(_config()))
    run = _train(
        folder,
        "hidden-words",
        {
            "run": {"epochs": HIDDEN_WORDS_EPOCHS},
            "model": {"path": str(folder / "config"), "weights": "random"},
            "task": {"name": "masked_lm"},
            "data": {
                "source": str(folder / "texts"), "tokenizer": "train",
                "tokenizer_kind": "wordpiece", "vocab_size": VOCABULARY, "seq_len": 64,
                "eval_fraction": 0.02,
            },
            "optim": _optim(1e-3, BATCH),
        },
    )  # fmt: skip
    _call("export", str(run), "--to", str(folder / "model"), "--dtype", "float32")
    return folder / "model"


def ours(folder: Path, model: Path, start: str, seed: int) -> dict[str, Any]:
    """Train by Shardyard, and return the scores of the validation split."""
    run = folder / "runs" / f"{start}-{seed}"
    if not run.exists():
        _tune(folder, model, start, seed)
    return {"seed": seed, **read_evaluations(RunDir(run).metrics)[-1]["eval"]}


def _tune(folder: Path, model: Path, start: str, seed: int) -> None:
    weights: dict[str, Any] = {"path": str(model)}
    if start == "scratch":
        weights["weights"] = "random"
    if start == "lora":
        weights["lora"] = LORA
    _train(
        folder,
        f"{start}-{seed}",
        {
            "run": {"epochs": EPOCHS, "seed": seed},
            "model": weights,
            "task": {"name": "sequence_classification"},
            "data": {
                "source": str(folder / "train.csv"), "eval_source": str(folder / "validation.csv"),
                "tokenizer": str(model), "seq_len": SEQ_LEN, "too_long": "cut",
            },
            "optim": _optim(RATES[start], BATCH),
        },
    )  # fmt: skip


def _optim(lr: float, batch: int) -> dict[str, Any]:
    return {
        "name": "adamw", "lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01,
        "grad_clip": 1.0, "schedule": "linear", "min_lr_ratio": 0.0, "warmup_share": 0.1,
        "global_batch": batch, "micro_batch": batch,
    }  # fmt: skip


def _train(folder: Path, name: str, sections: dict[str, Any]) -> Path:
    recipe = {
        **sections,
        "run": {**sections["run"], "dir": str(folder / "runs"), "id": name},
        "data": {**sections["data"], "dir": str(folder / "prepared")},
        "precision": {"compute": "fp32"},
        "cluster": {"device": "cpu", "devices": 1},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    _call("train", str(path))
    return folder / "runs" / name


def _call(*words: str) -> None:
    answer = subprocess.run(verb(*words), capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"shardyard {words[0]} ended with {answer.returncode}:\n{answer.stderr}")


# --- Hugging Face Trainer -------------------------------------------------------------------------


def theirs(folder: Path, model: Path, start: str, seed: int) -> dict[str, Any]:
    """Train by Trainer in a process of its own, and return its scores."""
    scores = folder / f"trainer-{start}-{seed}.json"
    if not scores.exists():
        words = ["--as-trainer", str(folder), str(model), start, str(seed)]
        command = [sys.executable, "-m", "benchmarks.package_sections", *words]
        subprocess.run(command, stdout=sys.stderr, check=True)
    return {"seed": seed, **json.loads(scores.read_text())}


def train_by_trainer(folder: Path, model: Path, *, start: str, seed: int) -> None:
    """What a user of Trainer writes for this; writes the accuracy into the folder."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    rows = {name: _read(folder / f"{name}.csv") for name in ("train", "validation")}
    sections = sorted({section for _, section in rows["train"]})
    tokenizer = AutoTokenizer.from_pretrained(model)

    def samples(name: str) -> list[dict[str, Any]]:
        texts = tokenizer([words for words, _ in rows[name]], truncation=True, max_length=SEQ_LEN)
        labels = [sections.index(section) for _, section in rows[name]]
        return [
            {"input_ids": ids, "labels": label}
            for ids, label in zip(texts["input_ids"], labels, strict=True)
        ]

    set_seed(seed)
    config = AutoConfig.from_pretrained(
        model, num_labels=len(sections), hidden_dropout_prob=_config()["hidden_dropout_prob"]
    )
    opened: Any = AutoModelForSequenceClassification
    made = (
        opened.from_config(config)
        if start == "scratch"
        else opened.from_pretrained(model, config=config)
    )
    steps = EPOCHS * -(-len(rows["train"]) // BATCH)
    settings = TrainingArguments(
        output_dir=str(folder / "trainer"), num_train_epochs=EPOCHS, seed=seed,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=256,
        learning_rate=RATES[start], lr_scheduler_type="linear", warmup_steps=steps // 10,
        weight_decay=0.01, max_grad_norm=1.0, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=made, args=settings, train_dataset=samples("train"),
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    trainer.train()
    found = trainer.predict(samples("validation"))
    guessed = torch.tensor(found.predictions).argmax(dim=-1)
    right = (guessed == torch.tensor(found.label_ids)).double().mean()
    scores = folder / f"trainer-{start}-{seed}.json"
    scores.write_text(json.dumps({"accuracy": float(right)}))


def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [(row["text"], row["label"]) for row in csv.DictReader(file)]


CONTENDERS: dict[str, tuple[Callable[[Path, Path, str, int], dict[str, Any]], str]] = {
    "shardyard, fine-tuned": (ours, "tuned"),
    "trainer, fine-tuned": (theirs, "tuned"),
    "shardyard, LoRA": (ours, "lora"),
    "shardyard, from random weights": (ours, "scratch"),
    "trainer, from random weights": (theirs, "scratch"),
}
"""Name -> its program, and the weights that it begins from."""


if __name__ == "__main__":
    sys.exit(main())
