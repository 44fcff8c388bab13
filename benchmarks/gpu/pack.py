"""Fills a folder with what one_call.sh needs and a machine without network lacks.

    PYTHONPATH=src python -m benchmarks.gpu.pack --to carried --most-mib 64

========== ==================================================================================
wheels/    pydantic and what it needs, torchao; for the Python and the platform over there
prepared/  Python's own files as tokens, with a tokenizer of 32,000 entries trained on them
compiled/  what an earlier call compiled: its `out/compiled`, copied here by `--compiled`
========== ==================================================================================

The code is not in it: bring the checkout as well (`git archive` makes 7 MB of it).
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_WHEELS = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions",
    "torchao",
)  # fmt: skip
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MIB = 2**20


def main() -> int:
    """Fill the folder; returns 1 where it is larger than it may be, or a step failed."""
    args = _arguments()
    try:
        pack_wheels(args.to / "wheels", python=args.python)
        prepare_text(args.to / "prepared")
    except subprocess.CalledProcessError as error:
        print(f"{args.to} is not whole: `{' '.join(error.cmd[:5])} ...` failed.", file=sys.stderr)
        return 1
    if args.compiled is not None:
        shutil.copytree(args.compiled, args.to / "compiled", dirs_exist_ok=True)
    problem = too_large(args.to, most_mib=args.most_mib)
    print(problem or f"{args.to}: {size_bytes(args.to) / MIB:.1f} MiB", file=sys.stderr)
    return 1 if problem else 0


def pack_wheels(folder: Path, *, python: str) -> None:
    """Download the wheels that a machine with torch and transformers may lack."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms,
            "-c", str(_ROOT / "constraints.txt"), "-d", str(folder), *_WHEELS,
        ],
        check=True,
    )  # fmt: skip


def prepare_text(folder: Path) -> None:
    """Tokens of Python's own files, as the benchmark would prepare them there in a minute."""
    subprocess.run(
        [
            sys.executable, "-m", "shardyard", "prepare",
            str(Path(__file__).parent / "text.yaml"), f"data.dir={folder.resolve()}",
        ],
        check=True,
    )  # fmt: skip


def size_bytes(folder: Path) -> int:
    """Of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def too_large(folder: Path, *, most_mib: float) -> str | None:
    """Why the folder cannot be carried, and what makes most of it; None where it can."""
    size = size_bytes(folder)
    if size <= most_mib * MIB:
        return None
    parts = sorted(((size_bytes(part), part.name) for part in folder.iterdir()), reverse=True)
    most = ", ".join(f"{name} {part / MIB:.1f}" for part, name in parts if part)
    return (
        f"{folder} has {size / MIB:.1f} MiB, and {most_mib:g} can be carried ({most}). Remove what "
        "is not needed there, or allow more with --most-mib."
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--to", type=Path, default=Path("carried"), help="the folder; default: carried")
    add("--most-mib", type=float, default=64.0, help="upper bound of the whole folder")
    add("--python", default="3.12", help="version of the Python over there")
    add("--compiled", type=Path, help="the folder `compiled` that an earlier call brought back")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
