"""Report which files are trained on, validated on and left out."""

from shardyard.config.resolved import DatasetMetadata


def split_rows(metadata: DatasetMetadata) -> list[tuple[str, str]]:
    """List files by split, as their names or data.eval_source decided: (label, files)."""
    found = [(part.name, part.data) for part in metadata.parts] or [("", metadata)]
    return [row for name, each in found for row in _rows(name, each)]


def split_lines(metadata: DatasetMetadata) -> list[str]:
    """The same as lines of a log."""
    return [f"{label}: {files}" for label, files in split_rows(metadata)]


def _rows(name: str, metadata: DatasetMetadata) -> list[tuple[str, str]]:
    of = f" of {name}" if name else ""
    rows = []
    if metadata.validation_files is not None:
        number = (
            metadata.eval_samples if metadata.num_classes is not None else metadata.eval_documents
        )
        unit = "pictures" if metadata.num_classes is not None else "documents"
        rows.append((f"validation files{of}", f"{metadata.validation_files} ({number:,} {unit})"))
    if metadata.left_out_files is not None:
        why = "not training data by name; to train on one, name the file in data.source"
        rows.append((f"left out{of}", f"{metadata.left_out_files} ({why})"))
    if metadata.rejected is not None:
        of_all = f"{metadata.rejected:,} of {metadata.rejected_of or 0:,} dialogues"
        rows.append((f"left out{of}", f"{of_all}, which the chat template rejects"))
    if metadata.true_pairs is not None:
        rows.append((f"true pairs{of}", f"{metadata.true_pairs:.1%} of the training pairs"))
    if metadata.empty_classes is not None:
        rows.append(("class folders without a picture", metadata.empty_classes))
    if metadata.unvalidated_classes is not None:
        rows.append(("classes without validation pictures", metadata.unvalidated_classes))
    if metadata.asked_files is not None:
        why = "named as validation or test data, and data.source names it"
        rows.append((f"trained on all the same{of}", f"{metadata.asked_files} ({why})"))
    return rows
