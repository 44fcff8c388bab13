"""The report's tables of a mixture's sources and of validation sets."""

from types import SimpleNamespace
from typing import Any, cast

from shardyard.config.resolved import DatasetMetadata, EvalSetMetadata, SourceMetadata
from shardyard.report.page import eval_sets, eval_tasks, sources
from shardyard.report.run_data import RunRecord
from shardyard.units import ABSENT

FACTS: dict[str, Any] = {
    "dir": "/x", "fingerprint": "f", "vocab_size": 300, "train_tokens": 500, "eval_tokens": 9,
    "train_documents": 9, "eval_documents": 1, "unigram_entropy": 4.0,
}  # fmt: skip


def test_times_read_count_samples_with_padding() -> None:
    part = SourceMetadata(name="a", slots=1000, data=DatasetMetadata(**FACTS, train_samples=10))
    resolved = SimpleNamespace(
        data=SimpleNamespace(parts=(part,)),
        recipe=SimpleNamespace(data=SimpleNamespace(seq_len=100)),
        phases=(),
    )
    # 20 samples of 100 tokens, of which half are padding
    step = {"step": 2, "tokens": 1000, "samples": 20}
    record = SimpleNamespace(resolved=resolved, steps=[step], evaluations=[])
    (table,) = sources(cast(RunRecord, record))
    assert [row[table.heads.index("#times read")] for row in table.rows] == ["2.00"]


def test_each_validation_set_has_its_newest_scores() -> None:
    found = EvalSetMetadata(name="code", data=DatasetMetadata(**FACTS))
    new = EvalSetMetadata(name="new", data=DatasetMetadata(**FACTS))
    resolved = SimpleNamespace(data=SimpleNamespace(eval_sets=(found, new)))
    lines = [
        {"step": step, "eval": {"loss": 9.0}, "eval_sources": {"code": {"loss": loss, "top1": 0.5}}}
        for step, loss in ((1, 3.0), (2, 2.0))
    ]
    record = SimpleNamespace(resolved=resolved, evaluations=lines)
    (table,) = eval_sets(cast(RunRecord, record))
    assert [*table.heads] == ["set", "#tokens", "#loss", "#top1"]
    assert [*table.rows] == [("code", "9", "2.000", "0.500"), ("new", "9", ABSENT, ABSENT)]


def test_each_task_has_its_newest_scores() -> None:
    data = SimpleNamespace(eval_tasks={"arc": "arc.yaml", "new": "new.yaml"})
    resolved = SimpleNamespace(recipe=SimpleNamespace(data=data))
    lines = [
        {"step": step, "eval": {"loss": 9.0}, "eval_sources": {"arc": {"acc": acc}}}
        for step, acc in ((1, 0.25), (2, 0.5))
    ]
    record = SimpleNamespace(resolved=resolved, evaluations=lines)
    (table,) = eval_tasks(cast(RunRecord, record))
    assert [*table.rows] == [
        ("arc", "arc.yaml", "acc", "0.500"),
        ("new", "new.yaml", ABSENT, ABSENT),
    ]
