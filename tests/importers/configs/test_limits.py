"""Small files that would take hours or gigabytes are rejected in one sentence, before any work."""

import json
import os
import time
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.errors import RequestError, StorageError
from shardyard.importers.configs.shell import read_script
from shardyard.importers.configs.source_file import read_files
from shardyard.io.files import read_user_file
from shardyard.io.yaml import read_yaml

pytestmark = pytest.mark.heavy


def bomb(levels: int) -> str:
    """YAML that stands for ten to the power of so many words."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\n{}\ntorchrun --nproc-per-node 2 train.py\n"
WRONG = {
    "bomb.yaml": (bomb(12), "expands to more than 200,000 values"),
    "self.yaml": ("a: &a [1, *a]\n", "recursive node"),
    "keys.json": (json.dumps({f"k{n}": n for n in range(60_000)}), "more than 20,000 values"),
    "list.json": (json.dumps({"a": [{"b": n} for n in range(60_000)]}), "more than 20,000 values"),
    "keys.toml": ("\n".join(f"k{n} = {n}" for n in range(60_000)), "more than 20,000 values"),
    "deep.json": ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deep"),
    "digits.json": ('{"a": ' + "9" * 5000 + "}", "a number that is too long"),
    "lines.sh": (SCRIPT.format("A=1\n" * 20_000), r"20,00\d lines"),
    "quote.sh": (SCRIPT.format('x "' + "a b\n" * 60_000), r"60,00\d lines"),
    "long.sh": (SCRIPT.format("echo " + "a " * 200_000), "characters that are read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_too_much_is_rejected_at_once(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    path = tmp_path / name
    path.write_text(text)
    begun = time.process_time()
    with pytest.raises(RequestError, match=said) as refused:
        for file in read_files(path):
            assert file.content is None
            read_script(file.text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "line",
    [
        "torchrun train.py --lr " + "9" * 5000,
        "export A=$((" + "9" * 4000 + " * " + "9" * 4000 + "))",
        "A=" + "(" * 50_000 + ")" * 50_000,
        "a" + " " * 100_000 + "b",
        "A=1\n" * 4_000,
    ],
    ids=["digits", "product", "parentheses", "spaces", "one name"],
)
def test_odd_lines_of_a_script_are_read_in_time(line: str) -> None:
    begun = time.process_time()
    assert read_script(SCRIPT.format(line))
    assert time.process_time() - begun < 5


def test_a_recipe_may_use_aliases_and_hold_many_labels(tmp_path: Path) -> None:
    text = "a: &a {b: 1}\nc: [*a, *a]\nlabels: {" + ", ".join(f"{n}: x" for n in range(2_000)) + "}"
    assert read_yaml(text, source="x")["c"] == [{"b": 1}, {"b": 1}]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {preset: llama-tiny}\nmodel2:\n" + "\n".join(
        f"  {line}" for line in bomb(10).splitlines()
    ))  # fmt: skip
    with pytest.raises(RequestError, match=r"recipe\.yaml expands to more than 200,000 values"):
        load_recipe([recipe])


def test_a_pipe_or_device_in_place_of_a_recipe_is_no_wait(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe", tmp_path / "recipe.yaml"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=r"is a named pipe, and no data came from it in 0\.1 s"):
        read_user_file(pipe, limit_bytes=100, within_s=0.1)
    with pytest.raises(RequestError, match="is a device, not a file"):
        load_recipe([device])
    with pytest.raises(RequestError, match="is a device, not a file"):
        read_files(device)


def test_a_pipe_that_a_command_writes_to_is_a_recipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"model: {preset: llama-tiny}\n")
    os.close(writer)
    assert load_recipe([Path(f"/dev/fd/{reader}")]).model.preset == "llama-tiny"
    os.close(reader)
