"""Names of training, validation and test files, held to the datasets library where it says one."""

import pytest

from shardyard.config.split_names import Kind, NamedSplit, split_in, splits_of


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("my_train_file_00001.jsonl", "train"),
        ("training", "train"),
        ("validation.jsonl.gz", "validation"),
        ("valid.txt", "validation"),
        ("wiki.valid.tokens", "validation"),
        ("val2017", "validation"),
        ("DEV-clean", "validation"),
        ("test-00000-of-00001.parquet", "test"),
        ("testing_data.json", "test"),
        ("evaluation.csv", "eval"),
        ("latest.jsonl", None),
        ("tests", None),
        ("contest.jsonl", None),
        ("trainer.jsonl", None),
        ("evaluations.jsonl", None),
        ("devices.jsonl", None),
    ],
)
def test_a_keyword_counts_between_separators(name: str, split: NamedSplit | None) -> None:
    assert split_in(name) == split


def splits(kind: Kind, *names: str) -> list[str | None]:
    found = splits_of(dict.fromkeys(names, kind))
    return [found.get(name) for name in names]


def test_the_innermost_name_of_a_file_of_rows_decides() -> None:
    assert splits("rows", "train/test-1.jsonl", "dev/train.jsonl", "data/en/val/0.parquet") == [
        "test",
        "train",
        "validation",
    ]


def test_files_about_a_dataset_are_no_part_of_its_splits() -> None:
    dataset: dict[str, Kind] = {"README.md": "text", "LICENSE.txt": "text", "a/train.jsonl": "rows"}
    assert splits_of(dataset) == {
        "README.md": "about",
        "LICENSE.txt": "about",
        "a/train.jsonl": "train",
    }
    assert splits_of({"README.md": "text", "a.jsonl": "rows", "train.py": "code"}) == {}


def test_running_text_is_named_next_to_training_text_only() -> None:
    assert splits("text", "wiki.train.tokens", "wiki.valid.tokens", "docs/test-plan.md") == [
        "train",
        "validation",
        None,
    ]
    assert splits("text", "train/a.txt", "test/b.txt") == ["train", "test"]
    assert splits("text", "notes.txt", "validation.txt", "dev-log.md") == [None, "validation", None]


def test_source_code_is_divided_by_folders_at_the_top_next_to_train_only() -> None:
    project = ("train.py", "eval.py", "src/test_model.py", "tests/test_a.py", "test/b.py")
    assert splits("code", *project) == [None] * len(project)
    assert splits("code", "train/a.py", "valid/test_b.py", "test/c.py") == [
        "train",
        "validation",
        "test",
    ]
