"""What an export says of itself, wherever it was made."""

from pathlib import Path
from typing import Any

from shardyard.io.complete import COMPLETE
from shardyard.rundir.layout import RunDir
from shardyard.units import format_bytes

_FORMS = {
    "weights": "",
    "adapter": " of adapters in PEFT's format",
    "merged": " with adapters merged",
}


def sentence(told: dict[str, Any]) -> str:
    """What was exported and what was verified, for a person."""
    complete, verified = told["complete"], told["verified"]
    verb = "would export" if complete is None else "exported"
    if complete is not None and complete["was_there"]:
        verb = "had exported already"
    step = RunDir(Path()).checkpoint(told["step"]).name
    text = (
        f"{verb} {step}: {told['parameters']:,} parameters{_FORMS[told['form']]}, "
        f"{format_bytes(told['bytes'])}, {told['dtype']}, {len(told['files'])} file(s) in "
        f"{told['to']}\nverified: the checkpoint's {verified['files']} files, "
        f"{format_bytes(verified['bytes'])}, against its manifest"
    )
    if complete is None:
        return text
    read = "each held to" if complete["was_there"] else "SHA-256 of each in"
    return (
        f"{text}; {complete['files']} files exported, {read} {COMPLETE} ({complete['sha256'][:12]})"
    )
