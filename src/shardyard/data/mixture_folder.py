"""The folder of a mixture: the tokenizer of all its sources, and mixture.json, written last, which
names the data set of each and the samples of it in a cycle."""

import json
from pathlib import Path

from shardyard.config.resolved import PartFacts
from shardyard.data.shards import damaged, read_facts

MIXTURE = "mixture.json"


def mixture_at(folder: Path) -> list[PartFacts]:
    """The sources of the mixture in a folder, as they lie on this machine.

    Raises:
        DataError: A data set is missing or incomplete, or the mixture cannot be read.
    """
    path = folder / MIXTURE
    try:
        content = json.loads(path.read_bytes())
        named = [(each["name"], each["slots"], each["folder"]) for each in content["parts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    return [
        PartFacts(name=name, slots=slots, data=read_facts((folder / place).resolve()))
        for name, slots, place in named
    ]
