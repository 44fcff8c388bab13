"""A path on the command line is held to what a path among the settings is held to."""

import importlib
import shlex
from pathlib import Path

import click
import pytest

from shardyard.cli import _EXAMPLES, _VERBS, main
from shardyard.io.path_option import LocalPath
from shardyard.node.main import command as node

COMMANDS = {
    **{verb: importlib.import_module(f"shardyard.cli.{verb}").command for verb in _VERBS},
    "node": node,
}
EXPORT = COMMANDS["export"]
PATHS = [
    pytest.param(param, id=f"{verb}-{param.name}")
    for verb, command in COMMANDS.items()
    for each in (command, *getattr(command, "commands", {}).values())
    for param in each.params
    if isinstance(param.type, click.Path) or param.name == "run"
]
WRONG = {
    "s3://bucket/x": "is a URL, which is not opened here. Give a path",
    "https://me:word@host/x?X-Sig=a": "'https://host/x' is a URL",
    "a\x1b[2J": "holds the control character",
    "x" * 300: "has a name of 300 bytes in it",
    "x/" * 2000: "has 4,000 bytes, and no path or name has more than",
    "~nobody-here/x": "begins with the home folder of a user that is not known",
    "": "is empty",
}


@pytest.mark.parametrize("param", PATHS)
def test_every_path_of_every_verb_is_one_of_this_machine_or_refused_by_its_name(
    param: click.Parameter, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    through = f"{file}/x"
    wrong = WRONG | {through: f"leads through {file}, which is a file, not a folder"}
    assert isinstance(param.type, LocalPath)
    if param in EXPORT.params:  # --to may be in object storage: the next test
        del wrong["s3://bucket/x"]
    for text, words in wrong.items():
        with pytest.raises(click.BadParameter) as refused:
            param.type.convert(text, param, None)
        message = refused.value.format_message()
        assert words in message
        assert message.isprintable()
        assert param.get_error_hint(None).strip("'") in message


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://bucket", "a prefix is missing, and objects of a whole bucket would be mixed"),
        ("s3://Bucket_/x", "'Bucket_' is not a name of a bucket"),
        ("s3://bucket/../x", "is not a place in S3"),
        ("gs://bucket/x", "is a URL, which is not opened here. Give a path"),
    ],
)
def test_an_export_to_what_is_no_place_in_s3_is_refused_and_writes_no_folder_of_that_name(
    place: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "some-run", "--to", place]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_named_by_more_letters_than_a_file_name_has_is_a_wrong_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "x" * 300]) == 2
    assert "'RUN': 'xxx" in capsys.readouterr().err


def test_a_home_folder_that_no_shell_has_put_in_is_found() -> None:
    assert LocalPath(path_type=Path).convert("~/runs", None, None) == Path.home() / "runs"


@pytest.mark.parametrize("verb", _VERBS)
def test_the_help_of_a_verb_ends_with_an_example_that_parses_and_the_exit_codes(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"Example:  {_EXAMPLES[verb]}" in printed and "75 lost node" in printed
    name, called, *rest = shlex.split(_EXAMPLES[verb])
    assert (name, called) == ("shardyard", verb)
    command = COMMANDS[verb]
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(verb, rest)
