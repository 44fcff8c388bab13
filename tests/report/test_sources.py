"""The report's table of a mixture's sources."""

from types import SimpleNamespace
from typing import Any, cast

from shardyard.config.resolved import DatasetMetadata, SourceMetadata
from shardyard.report.page import sources
from shardyard.report.run_data import RunRecord


def test_times_read_count_samples_with_padding() -> None:
    facts: dict[str, Any] = {
        "dir": "/x", "fingerprint": "f", "vocab_size": 300, "train_tokens": 500, "eval_tokens": 9,
        "train_documents": 9, "eval_documents": 1, "unigram_entropy": 4.0,
    }  # fmt: skip
    part = SourceMetadata(name="a", slots=1000, data=DatasetMetadata(**facts, train_samples=10))
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
