"""Texts that something would break on are refused by the name of their setting."""

import json
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.config.rules.data import MAPPINGS
from shardyard.config.schema.reference import settings
from shardyard.errors import RecipeError

WRONG = [
    ({"run": {"dir": "a\0b"}}, "run.dir='a\\x00b' holds the character NUL"),
    ({"data": {"source": ["a", "b\0"]}}, "data.source='b\\x00' holds the character NUL"),
    ({"data": {"source": "\ud800"}}, "data.source='\\ud800' is not valid Unicode text"),
    ({"task": {"prompt": "\udcff"}}, "task.prompt='\\udcff' is not valid Unicode text"),
    ({"launch": {"slurm": {"partition": "a\nb"}}}, "partition='a\\nb' holds the control character"),
    ({"launch": {"image": "a\x1b[2J"}}, "launch.image='a\\x1b[2J' holds the control character"),
    ({"launch": {"image": "a\x9b2J"}}, "launch.image='a\\x9b2J' holds the control character"),
    (
        {"launch": {"kubernetes": {"node_selector": {"a\nb": "c"}}}},
        "launch.kubernetes.node_selector='a\\nb' holds the control character",
    ),
    ({"cluster": {"file": "x" * 256}}, "has a name of 256 bytes in it, and file systems take 255"),
    ({"run": {"dir": "ä" * 128}}, "has a name of 256 bytes in it"),
    ({"model": {"path": "x/" * 1793}}, "has 3,586 bytes, and no path or name has more than 3,584"),
    ({"launch": {"image": "x" * 4000}}, "launch.image='xxx"),
    ({"data": {"source": ["a", "s3x://b/x"]}}, "source='s3x://b/x' is a URL that is not read: u"),
    ({"data": {"source": "file:///text"}}, "data.source='file:///text' is a URL that is not read"),
    ({"data": {"source": "https://me@host/x"}}, "source='https://host/x' holds what may be a pass"),
    ({"data": {"source": "https://host/x?X-Sig=a"}}, "Leave out the parts before @ and behind ?"),
    ({"data": {"source": "s3://"}}, "='s3://' names no place. Write s3://, then a bucket or host"),
    ({"data": {"source": "s3://b/a\nb"}}, "data.source='s3://b/a\\nb' holds the control character"),
    ({"data": {"source": ""}}, "data.source='' is empty. Write . if the current folder is meant."),
    ({"data": {"dir": "S3://bucket"}}, "data.dir='S3://bucket' is a URL"),
    ({"data": {"tokenizer": "https://huggingface.co/a/b"}}, "or a hub name such as owner/name."),
    ({"run": {"dir": "file:///runs"}}, "run.dir='file:///runs' is a URL"),
    ({"model": {"preset": None, "path": "s3://b/m"}}, "a repository of the Hugging Face hub is"),
    ({"model": {"preset": None, "hub": "https://huggingface.co/a/b"}}, "is written owner/name."),
    ({"cluster": {"file": "https://host/x.yaml"}}, "cluster.file='https://host/x.yaml' is a URL"),
    ({"launch": {"code": ["git+ssh://host/x"]}}, "launch.code='git+ssh://host/x' is a URL"),
    ({"run": {"dir": "~nobody-here/x"}}, "begins with the home folder of a user that is not known"),
]  # fmt: skip


def _check(content: dict[str, object], folder: Path) -> None:
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    check(load_recipe([file], ["model.preset=llama-tiny"]))


@pytest.mark.parametrize(("content", "words"), WRONG)
def test_a_text_that_something_breaks_on_is_refused_by_its_setting(
    content: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as refused:
        _check(content, tmp_path)
    assert words in str(refused.value)
    assert all(line.isprintable() for line in str(refused.value).splitlines())


def test_prose_may_have_lines_and_other_texts_any_letters(tmp_path: Path) -> None:
    _check(
        {
            "task": {"prompt": "two\r\nlines\tand \x1b"},
            "launch": {
                "image": "docker://a/b",
                "env": {"A": "two\nlines"},
                "slurm": {"constraint": "a&b|'c'"},
            },
            "data": {"source": ["a:b//c", "C:/x", "./s3://bucket", "s3://b/a@c/?", "gs://b"]},
            "run": {"dir": "Läufe/😀日本 (1)/$(x)/" + "x" * 255},
        },
        tmp_path,
    )


def test_every_setting_with_names_of_the_users_own_is_known() -> None:
    free = {name for name, setting in settings().items() if isinstance(setting.default, dict)}
    assert free | {"secrets"} == MAPPINGS
