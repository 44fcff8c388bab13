"""Report which files are trained on, validated on and left out."""

from shardyard.config.resolved import DataFacts


def split_rows(facts: DataFacts) -> list[tuple[str, str]]:
    """What the names of files, or data.eval_source, decided: (label, files)."""
    found = [(part.name, part.data) for part in facts.parts] or [("", facts)]
    return [row for name, each in found for row in _rows(name, each)]


def split_lines(facts: DataFacts) -> list[str]:
    """The same as lines of a log."""
    return [f"{label}: {files}" for label, files in split_rows(facts)]


def _rows(name: str, facts: DataFacts) -> list[tuple[str, str]]:
    of = f" of {name}" if name else ""
    rows = []
    if facts.validation_files is not None:
        number = facts.eval_samples if facts.num_classes is not None else facts.eval_documents
        unit = "pictures" if facts.num_classes is not None else "documents"
        rows.append((f"validation files{of}", f"{facts.validation_files} ({number:,} {unit})"))
    if facts.left_out_files is not None:
        why = "not training data by name; to train on one, name the file in data.source"
        rows.append((f"left out{of}", f"{facts.left_out_files} ({why})"))
    if facts.rejected is not None:
        of_all = f"{facts.rejected:,} of {facts.rejected_of or 0:,} dialogues"
        rows.append((f"left out{of}", f"{of_all}, which the chat template rejects"))
    if facts.true_pairs is not None:
        rows.append((f"true pairs{of}", f"{facts.true_pairs:.1%} of the training pairs"))
    if facts.empty_classes is not None:
        rows.append(("class folders without a picture", facts.empty_classes))
    if facts.unvalidated_classes is not None:
        rows.append(("classes without validation pictures", facts.unvalidated_classes))
    if facts.asked_files is not None:
        why = "named as validation or test data, and data.source names it"
        rows.append((f"trained on all the same{of}", f"{facts.asked_files} ({why})"))
    return rows
