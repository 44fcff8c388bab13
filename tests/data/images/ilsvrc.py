"""A small tree of ImageNet's shape: two classes, a few pictures, a list of what there should be."""

import tarfile
from pathlib import Path

from tests.data.images.made import noise, saved

CLASSES = ("n01440764", "n15075141")
BOXES = """<annotation>
	<folder>val</folder>
	<filename>{name}</filename>
	<size><width>24</width><height>16</height><depth>3</depth></size>
	<object><name>{wnid}</name><pose>Unspecified</pose><bndbox><xmin>1</xmin></bndbox></object>
	<object><name>{wnid}</name><part><name>n99999999</name></part></object>
</annotation>
"""


def tree(
    folder: Path,
    *,
    train: int = 8,
    val: int = 4,
    by_solution: bool = False,
    size: tuple[int, int] = (24, 16),
) -> Path:
    """Write the tree below a folder; returns ``folder/ILSVRC``.

    Args:
        train: Pictures of each class.
        val: Pictures, of the classes in turn.
        by_solution: Write LOC_val_solution.csv in place of annotations.
        size: Of pictures, (width, height).
    """
    root = folder / "ILSVRC"
    for place, wnid in enumerate(CLASSES):
        _write(
            root / f"Data/CLS-LOC/train/{wnid}", [f"{wnid}_{n}" for n in range(train)], place, size
        )
    names = [f"ILSVRC2012_val_{n:08d}" for n in range(1, val + 1)]
    _write(root / "Data/CLS-LOC/val", names, 50, size)
    _write(root / "Data/CLS-LOC/test", ["ILSVRC2012_test_00000001"], 90, size)
    lists = root / "ImageSets/CLS-LOC"
    lists.mkdir(parents=True)
    lines = [f"{wnid}/{wnid}_{n} {n + 1}\n" for wnid in CLASSES for n in range(train)]
    (lists / "train_cls.txt").write_text("".join(lines))
    (lists / "val.txt").write_text("".join(f"{n} {i + 1}\n" for i, n in enumerate(names)))
    classes = {name: CLASSES[number % 2] for number, name in enumerate(names)}
    if by_solution:
        rows = [f"{name},{wnid} 1 2 3 4 {wnid} 5 6 7 8 \n" for name, wnid in classes.items()]
        (folder / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))
        return root
    boxes = root / "Annotations/CLS-LOC/val"
    boxes.mkdir(parents=True)
    for name, wnid in classes.items():
        (boxes / f"{name}.xml").write_text(BOXES.format(name=name, wnid=wnid))
    return root


def tar_of(root: Path, to: Path, *, mode: str = "w") -> Path:
    """The tree in one tar file."""
    with tarfile.open(to, mode) as tar:  # type: ignore[call-overload]
        tar.add(root, "ILSVRC")
    return to


def _write(folder: Path, names: list[str], seed: int, size: tuple[int, int]) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        (folder / f"{name}.JPEG").write_bytes(saved(noise(100 * seed + number, size), quality=100))
