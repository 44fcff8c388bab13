"""A task in the format of lm-evaluation-harness, as its file describes it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]
Template = str | int | list[Any] | dict[str, Any]
Row = dict[str, Any]
"""A row of a task's data, by column."""


@dataclass(frozen=True, kw_only=True)
class Shots:
    """Examples with answers in front of each question."""

    number: int = 0
    sampler: Literal["default", "first_n"] = "default"
    split: str | None = None
    """Split that they come from; None: training, else validation, else test, as in the harness."""
    samples: tuple[dict[str, Any], ...] = ()
    """Rows in the task file itself."""


@dataclass(frozen=True, kw_only=True)
class TextFilter:
    """Steps that turn generated text into an answer."""

    name: str
    steps: tuple[Mapping[str, Any], ...]
    """Each has ``function`` and its options."""


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A task as its file describes it."""

    name: str
    path: str
    sha256: str
    """Digest of the file, of what it includes too."""
    output_type: OutputType
    data_files: Mapping[str, tuple[str, ...]]
    """Split -> its files."""
    folder: Path
    """Folder of the file, from which relative paths of data files start."""
    training_split: str | None
    validation_split: str | None
    test_split: str | None
    doc_to_text: Template
    doc_to_target: Template
    doc_to_choice: Template | None
    description: str
    target_delimiter: str
    fewshot_delimiter: str
    shots: Shots
    metrics: tuple[str, ...]
    match: Mapping[str, Any]
    """Options of exact_match."""
    until: tuple[str, ...]
    max_tokens: int
    filters: tuple[TextFilter, ...]

    @property
    def split(self) -> str:
        """The split that is scored."""
        split = self.test_split or self.validation_split
        assert split is not None
        return split

    @property
    def shot_split(self) -> str:
        """The split that examples with answers come from."""
        split = self.shots.split or self.training_split or self.validation_split
        return split or self.split

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**asdict(self), "folder": str(self.folder)}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "EvalTask":
        """Read what ``to_json`` made."""
        shots = content["shots"]
        return cls(
            **{
                **content,
                "folder": Path(content["folder"]),
                "data_files": {name: tuple(each) for name, each in content["data_files"].items()},
                "shots": Shots(**{**shots, "samples": tuple(shots["samples"])}),
                "metrics": tuple(content["metrics"]),
                "until": tuple(content["until"]),
                "filters": tuple(
                    TextFilter(name=each["name"], steps=tuple(each["steps"]))
                    for each in content["filters"]
                ),
            }
        )
