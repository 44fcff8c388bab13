"""The operators of a network for images, one row each: what the planner counts and times.

A row is made from the numbers of the network's config.json by the file of its kind
(``resnet.py`` and its neighbours), which stacks rows on a ``Tower``. All sizes are of one
sample, that is of one image.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal[
    "conv", "depthwise", "linear", "norm", "act", "pool", "squeeze", "scale", "add", "attention"
]
"""``squeeze`` averages and ``scale`` multiplies each channel of squeeze-and-excitation; ``add``
joins a residual branch, or adds positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of the forward pass."""

    name: str
    kind: Kind
    block: str = ""
    """The block that it is in, which recompute and sharding take as a whole; empty: none."""
    parameters: int = 0
    buffers: int = 0
    """Running mean and variance of a batch norm."""
    flops: int = 0
    """Forward, two for a multiply-add; 0 for operators that memory bounds."""
    input_elements: int
    output_elements: int
    saved_elements: int = 0
    """Elements of its output that a later backward needs."""
    saved_indices: int = 0
    """64-bit positions that max pooling keeps."""
    matrix: tuple[int, int, int] | None = None
    """Positions a sample, output and input channels of a convolution as a matrix product."""
    area: int = 1
    """Positions of its filter; the product's depth is this often its input channels."""
    is_first: bool = False
    """Whether it reads the image."""


@dataclass
class Tower:
    """Operators stacked so far, and the shape that the next one sees."""

    size: int
    """Pixels on a side."""
    channels: int
    operators: list[Operator] = field(default_factory=list)
    _block: str = ""

    @property
    def elements(self) -> int:
        """Return the number of elements that the next operator reads."""
        return self.channels * self.size**2

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """All that is stacked in here belongs to one block."""
        self._block = name
        yield
        self._block = ""

    def conv(
        self, name: str, channels: int, kernel: int, *, stride: int = 1, bias: bool = False
    ) -> None:
        """Dense, padded so that only the stride shrinks it."""
        before, inputs = self.elements, self.channels
        self.size, self.channels = -(-self.size // stride), channels
        weights = kernel**2 * inputs * channels
        self.push(
            Operator(
                name=name, kind="conv", parameters=weights + channels * bias,
                flops=2 * weights * self.size**2, input_elements=before,
                output_elements=self.elements, saved_elements=self.elements,
                matrix=(self.size**2, channels, _padded(inputs)), area=kernel**2,
            )
        )  # fmt: skip

    def depthwise(self, name: str, kernel: int, *, stride: int) -> None:
        """One filter for each channel."""
        before = self.elements
        self.size = -(-self.size // stride)
        weights = kernel**2 * self.channels
        self.push(
            Operator(
                name=name, kind="depthwise", parameters=weights, flops=2 * weights * self.size**2,
                input_elements=before, output_elements=self.elements,
                saved_elements=self.elements,
            )
        )  # fmt: skip

    def norm(self, name: str, *, saved: bool) -> None:
        """Batch normalisation."""
        elements = self.elements
        self.push(
            Operator(
                name=name, kind="norm", parameters=2 * self.channels, buffers=2 * self.channels,
                input_elements=elements, output_elements=elements,
                saved_elements=elements if saved else 0,
            )
        )  # fmt: skip

    def act(self, name: str) -> None:
        """An activation function."""
        self._elementwise(name, "act", saved=True)

    def add(self, name: str, *, saved: bool) -> None:
        """The sum with a residual branch."""
        self._elementwise(name, "add", saved=saved)

    def max_pool(self, name: str) -> None:
        """3x3, stride 2."""
        before, self.size = self.elements, -(-self.size // 2)
        self.push(
            Operator(
                name=name, kind="pool", input_elements=before, output_elements=self.elements,
                saved_elements=self.elements, saved_indices=self.elements,
            )
        )  # fmt: skip

    def squeeze_excite(self, name: str, squeezed: int) -> None:
        """Average, two small layers, and a factor for each channel."""
        size, wide = self.size, self.channels
        self._average(f"{name}.pool", "squeeze")
        self.linear(f"{name}.reduce", squeezed)
        self.act(f"{name}.act")
        self.linear(f"{name}.expand", wide)
        self.act(f"{name}.sigmoid")
        self.size = size
        self._elementwise(f"{name}.scale", "scale", saved=True)

    def linear(self, name: str, outputs: int, *, saved: bool = True) -> None:
        """With bias, on each position."""
        before, inputs = self.elements, self.channels
        self.channels = outputs
        self.push(
            Operator(
                name=name, kind="linear", parameters=inputs * outputs + outputs,
                flops=2 * inputs * outputs * self.size**2, input_elements=before,
                output_elements=self.elements, saved_elements=self.elements if saved else 0,
                matrix=(self.size**2, outputs, inputs),
            )
        )  # fmt: skip

    def classifier(self, classes: int) -> None:
        """Average over all positions, then the classes."""
        self._average("pool", "pool")
        self.linear("classifier", classes)

    def push(self, operator: Operator) -> None:
        """Stack one, in the block that is open."""
        self.operators.append(replace(operator, block=self._block, is_first=not self.operators))

    def _average(self, name: str, kind: Literal["pool", "squeeze"]) -> None:
        before, self.size = self.elements, 1
        self.push(
            Operator(
                name=name, kind=kind, input_elements=before, output_elements=self.channels,
                saved_elements=self.channels,
            )
        )  # fmt: skip

    def _elementwise(self, name: str, kind: Kind, *, saved: bool) -> None:
        elements = self.elements
        self.push(
            Operator(
                name=name, kind=kind, input_elements=elements, output_elements=elements,
                saved_elements=elements if saved else 0,
            )
        )  # fmt: skip


def _padded(channels: int) -> int:
    """Libraries pad the channels of an image to a multiple of 8 for the tensor cores."""
    return -(-channels // 8) * 8
