"""The folder of a mixture: the tokenizer of all its sources, and mixture.json, written last, which
names the data set of each and the samples of it in a cycle."""

from pathlib import Path

from shardyard.config.resolved import SourceMetadata
from shardyard.data.shards import damaged, read_metadata
from shardyard.errors import JsonFileError
from shardyard.io.files import read_json_object

MIXTURE = "mixture.json"


def mixture_at(folder: Path) -> list[SourceMetadata]:
    """The sources of the mixture in a folder, as they lie on this machine.

    Raises:
        DataError: A data set is missing or incomplete, or the mixture cannot be read.
    """
    path = folder / MIXTURE
    try:
        content = read_json_object(path)
        named = [(each["name"], each["slots"], each["folder"]) for each in content["parts"]]
    except JsonFileError as error:
        raise damaged(path, f"it {error.reason}") from error
    except (OSError, KeyError, TypeError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    return [
        SourceMetadata(name=name, slots=slots, data=read_metadata((folder / place).resolve()))
        for name, slots, place in named
    ]
