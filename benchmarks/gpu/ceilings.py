"""What this device reaches on the pieces of a training step: the bound that a step is held to.

    PYTHONPATH=src python -m benchmarks.gpu.ceilings --seconds 10

Matrix products in the shapes of a model (forward, gradient of the input, gradient of the weight),
long enough for clocks to settle under the power limit; the same in fp8; a copy and a sum in device
memory; attention by each of torch's kernels, and of documents with a mask or told their lengths;
what a weight's gradient takes that adds itself to an fp32 sum. The file is written anew after each
line;
``shardyard plan --calibrate`` takes it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.record import about, result_file
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.machine import probe
from shardyard.io.files import write_json
from shardyard.models.attention import (
    Attention,
    attention_by_length,
    document_starts,
    sample_attention,
)
from shardyard.parallel.device import available_device, select_device, synchronize
from shardyard.parallel.low_precision import add_product
from shardyard.planner.calibration import KIND

Work = Callable[[], Any]
_WINDOW_S = 0.5
"""Calls are timed together for about so long; between two windows the device is waited for."""
TFLOP = "TFLOP/s"
_DOCUMENTS = 8
_ATTENTION = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def main() -> int:
    """Measure line by line."""
    args = _arguments()
    machine = probe()
    device = torch.device("cpu") if args.rehearse else select_device(available_device(), 0)
    shape = PRESETS["llama-tiny" if args.rehearse else args.model].shape
    tokens = 128 if args.rehearse else args.tokens
    seconds = 0.02 if args.rehearse else args.seconds
    path = result_file(f"ceilings-{time.strftime('%H%M%S', time.gmtime())}", machine, args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "kind": KIND, **about(machine), "is_rehearsal": args.rehearse, "tokens": tokens,
        "lines": [],
    }  # fmt: skip
    for line in measure(shape, tokens, device=device, seconds=seconds):
        content["lines"].append(line)
        write_json(path, content)
        print(_shown(line), file=sys.stderr, flush=True)
    print(f"raw results: {path}", file=sys.stderr)
    return 0


def measure(
    shape: ModelShape, tokens: int, *, device: torch.device, seconds: float
) -> Iterator[dict[str, Any]]:
    """One line for each piece; what this torch or device lacks is a line with its reason."""
    pieces = [
        (_products(shape, tokens, device), seconds),
        (_weight_gradients(shape, tokens, device), seconds / 2),
        (_memory(device), seconds / 5),  # draws too little power for clocks to fall
        (_attention(shape, tokens, device), seconds / 2),
        (_attention_of_documents(shape, tokens, device), seconds / 2),
    ]
    for found, long_s in pieces:
        for head, per_call, prepare in found:
            yield {**head, **_timed(prepare, device, seconds=long_s, per_call=per_call)}


Piece = tuple[dict[str, Any], float, Callable[[], Work]]
"""What it is, FLOP or bytes of one call, and what makes a call: memory is taken only then."""


def _products(shape: ModelShape, tokens: int, device: torch.device) -> Iterator[Piece]:
    """The products of a block and of the head: tokens x inputs with inputs x outputs."""
    vocab = shape.vocab_size or 512
    heads = shape.queries_width
    matrices = {
        "q, o": (shape.hidden_size, heads),
        "gate, up": (shape.hidden_size, shape.intermediate_size),
        "down": (shape.intermediate_size, shape.hidden_size),
        "head": (shape.hidden_size, vocab),
    }
    for name, (inputs, outputs) in matrices.items():
        head = {
            "what": "product",
            "matrix": name,
            "shape": [tokens, inputs, outputs],
            "unit": TFLOP,
        }
        flop = 2.0 * tokens * inputs * outputs
        yield {**head, "format": "bf16"}, 3 * flop, _in_bf16(tokens, inputs, outputs, device)
        if name != "head":  # kept in bf16 in training
            yield {**head, "format": "fp8"}, flop, _in_fp8(tokens, inputs, outputs, device)


def _weight_gradients(shape: ModelShape, tokens: int, device: torch.device) -> Iterator[Piece]:
    """The product that makes a weight's gradient: as it is, and added to an fp32 sum by itself.

    What the second takes longer is what reading and writing the sum costs: all of it hides inside
    the product, or none (``parallel/low_precision.py``).
    """
    inputs, outputs = shape.hidden_size, shape.intermediate_size
    flop = 2.0 * tokens * inputs * outputs

    def factors() -> tuple[Tensor, Tensor]:
        x_TI, grad_TO = (
            torch.randn(tokens, size, device=device, dtype=torch.bfloat16)
            for size in (inputs, outputs)
        )
        return x_TI, grad_TO

    def alone() -> Work:
        x_TI, grad_TO = factors()
        return lambda: grad_TO.T @ x_TI

    def added() -> Work:
        x_TI, grad_TO = factors()
        total_OI = torch.zeros(outputs, inputs, device=device)
        return lambda: add_product(total_OI, grad_TO, x_TI)

    head = {"what": "weight gradient", "shape": [tokens, inputs, outputs], "unit": TFLOP}
    yield {**head, "sum": "none"}, flop, alone
    yield {**head, "sum": "fp32"}, flop, added


def _in_bf16(tokens: int, inputs: int, outputs: int, device: torch.device) -> Callable[[], Work]:
    def prepare() -> Work:
        x_TI, w_OI, grad_TO = (
            torch.randn(size, device=device, dtype=torch.bfloat16)
            for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )

        def forward_and_backward() -> None:
            x_TI @ w_OI.T
            grad_TO @ w_OI
            grad_TO.T @ x_TI

        return forward_and_backward

    return prepare


def _in_fp8(tokens: int, inputs: int, outputs: int, device: torch.device) -> Callable[[], Work]:
    def prepare() -> Work:
        x_TI, w_OI = (
            torch.randn(size, device=device).to(torch.float8_e4m3fn)
            for size in ((tokens, inputs), (outputs, inputs))
        )
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            x_TI, w_OI.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return prepare


def _memory(device: torch.device) -> Iterator[Piece]:
    """Reads and writes of device memory, more than any cache holds; and to the host and back."""
    size = 2**31 if device.type != "cpu" else 2**22
    numbers = size // 4

    def copy() -> Work:
        source, target = torch.ones(2, numbers, device=device).unbind()
        return lambda: target.copy_(source)

    def add() -> Work:
        total, more = torch.ones(2, numbers, device=device).unbind()
        return lambda: total.add_(more)

    def to_host() -> Work:
        source = torch.ones(numbers // 4, device=device)
        target = torch.empty(numbers // 4, pin_memory=device.type != "cpu")
        return lambda: target.copy_(source, non_blocking=True)

    yield {"what": "copy", "unit": "TB/s"}, 2.0 * size, copy
    yield {"what": "sum in place", "unit": "TB/s"}, 3.0 * size, add
    yield {"what": "copy to pinned host memory", "unit": "TB/s"}, size / 4, to_host


def _attention(shape: ModelShape, tokens: int, device: torch.device) -> Iterator[Piece]:
    """Causal attention of one sample: forward, and forward with backward."""
    heads, width = shape.num_attention_heads, shape.head_width
    flop = 4.0 * heads * tokens * tokens * width / 2  # half of all pairs
    for name in _ATTENTION:
        for has_backward in (False, True):
            head = {"what": "attention", "kernel": name, "backward": has_backward, "unit": TFLOP}
            prepare = _one_attention(
                SDPBackend.__members__[name], (1, heads, tokens, width), device,
                has_backward=has_backward,
            )  # fmt: skip
            yield head, flop * (3.5 if has_backward else 1), prepare


def _one_attention(
    backend: Any, size: tuple[int, ...], device: torch.device, *, has_backward: bool
) -> Callable[[], Work]:
    def prepare() -> Work:
        q_BHLD, k_BHLD, v_BHLD, grad_BHLD = (
            torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4)
        )
        inputs = [q_BHLD, k_BHLD, v_BHLD]
        for held in inputs:
            held.requires_grad_(has_backward)

        def call() -> None:
            with sdpa_kernel([backend]):
                out_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)
            if has_backward:
                torch.autograd.grad(out_BHLD, inputs, grad_BHLD)

        return call

    return prepare


def _attention_of_documents(
    shape: ModelShape, tokens: int, device: torch.device
) -> Iterator[Piece]:  # fmt: skip
    """A sample of equally long documents, forward and backward: by a mask, and told their lengths.

    The rate is that of what documents leave to compute, so that of a mask shows what it wastes.
    """
    heads, width, length = shape.num_attention_heads, shape.head_width, tokens // _DOCUMENTS
    flop = 3.5 * 4.0 * heads * tokens * length * width / 2
    positions_1L = torch.arange(tokens)[None] % length
    starts_1S = document_starts(positions_1L)

    def prepare(*, is_told: bool) -> Callable[[], Work]:
        def prepared() -> Work:
            q, k, v, grad = (
                torch.randn(1, tokens, heads, width, device=device, dtype=torch.bfloat16)
                .transpose(1, 2)
                .requires_grad_()
                for _ in range(4)
            )
            if is_told:
                attention: Attention = attention_by_length(starts_1S.to(device), tokens)
            else:
                attention = sample_attention(
                    positions_1L.to(device), is_causal=True, attend_across=False
                )

            def call() -> None:
                out = attention(q, k, v, scale=width**-0.5)
                torch.autograd.grad(out, (q, k, v), grad)

            return call

        return prepared

    head = {"what": "attention of documents", "documents": _DOCUMENTS, "unit": TFLOP}
    yield {**head, "by": "mask"}, flop, prepare(is_told=False)
    yield {**head, "by": "length"}, flop, prepare(is_told=True)


def _timed(
    prepare: Callable[[], Work], device: torch.device, *, seconds: float, per_call: float
) -> dict[str, Any]:
    """Rates of successive windows, in tera per second: a fall shows where clocks went down."""
    try:
        work = prepare()
        work()
        one_s = _seconds_of(work, 3, device) / 3
        calls = max(1, min(10**5, int(min(_WINDOW_S, seconds) / one_s)))
        windows: list[float] = []
        began = time.monotonic()
        while not windows or time.monotonic() - began < seconds:
            windows.append(calls * per_call / _seconds_of(work, calls, device) / 1e12)
    except (RuntimeError, NotImplementedError) as error:  # no such kernel here, or out of memory
        return {"status": "failed", "message": str(error).splitlines()[0][:300]}
    settled = windows[len(windows) // 2 :]
    return {"status": "ok", "rate": sum(settled) / len(settled), "windows": windows}


def _seconds_of(work: Work, calls: int, device: torch.device) -> float:
    synchronize(device)
    began = time.monotonic()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.monotonic() - began


def _shown(line: dict[str, Any]) -> str:
    named = ("what", "matrix", "format", "kernel")
    words = [str(line[key]) for key in named if key in line]
    if line.get("backward"):
        words.append("with backward")
    found = f"{line['rate']:.4g} {line['unit']}" if line["status"] == "ok" else line["message"]
    return f"{', '.join(words)}: {found}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="llama2-7b", choices=[*PRESETS], help="whose shapes")
    add("--tokens", type=int, default=4096, help="of one micro-batch")
    add("--seconds", type=float, default=10.0, help="of each product; others are shorter")
    add("--out", type=Path, default=Path(__file__).parents[1] / "results")
    add("--rehearse", action="store_true", help="tiny, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
