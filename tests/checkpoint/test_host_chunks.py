"""Host memory in pieces: what lies where, how much it takes, and that bits stay."""

import torch

from shardyard.checkpoint.staging import CHUNK_BYTES, HostCopy, host_buffers, packed


def rounded(size: int) -> int:
    """What torch takes for a request of pinned memory."""
    return 1 << (size - 1).bit_length()


def test_states_of_a_large_model_take_what_they_need_and_no_power_of_two_each() -> None:
    matrices = {"q": 4096 * 4096, "k": 4096 * 4096, "v": 4096 * 4096, "o": 4096 * 4096}
    matrices |= dict.fromkeys(("gate", "up", "down"), 4096 * 11008)
    sizes = {
        f"{state}.{block}.{name}": 4 * numbers
        for state in ("weight", "mean", "square")
        for block in range(32)
        for name, numbers in matrices.items()
    }
    sizes |= {f"{state}.embed": 4 * 32000 * 4096 for state in ("weight", "mean", "square")}
    whole = sum(sizes.values())
    _, used = packed(sizes)
    assert sum(map(rounded, sizes.values())) > 1.2 * whole  # a tensor at a time
    assert sum(map(rounded, used)) < 1.02 * whole


def test_no_two_tensors_share_a_byte_and_none_leaves_its_piece() -> None:
    sizes = {f"t{n}": 1 + (n * 37) % 501 for n in range(200)}
    places, used = packed(sizes, chunk_bytes=1024)
    assert len(used) > 10 and max(used) <= 1024
    for chunk, size in enumerate(used):
        ends = 0
        for name, place in sorted(places.items(), key=lambda item: item[1].begin):
            if place.chunk == chunk:
                assert place.begin >= ends and place.begin % 64 == 0
                ends = place.begin + sizes[name]
        assert ends <= size


def test_a_tensor_larger_than_a_piece_gets_one_that_others_fill_up() -> None:
    places, used = packed({"large": 1500, "small": 400}, chunk_bytes=1024)
    assert places["large"].chunk == places["small"].chunk == 0
    assert used == [1536 + 448]


def test_what_is_copied_has_the_same_bits_in_every_format_and_shape() -> None:
    held = {
        "fp32": torch.randn(33, 7), "bf16": torch.randn(129).bfloat16(), "none": torch.empty(0, 5),
        "step": torch.tensor(7.0), "mask": torch.tensor([True, False, True]),
        "ids": torch.arange(11), "across": torch.randn(6, 5).T,
    }  # fmt: skip
    copied = HostCopy().take_for_save(1, held, "{}")
    for name, tensor in held.items():
        assert copied[name].dtype == tensor.dtype and copied[name].is_contiguous()
        assert torch.equal(copied[name], tensor)


def test_memory_is_kept_from_save_to_save_and_made_anew_for_other_shapes() -> None:
    staging = HostCopy()
    first = staging.take_for_save(1, {"w": torch.ones(8)}, "{}")["w"]
    again = staging.take_for_save(2, {"w": torch.full((8,), 2.0)}, "{}")["w"]
    assert again.data_ptr() == first.data_ptr() and again.tolist() == [2.0] * 8
    other = staging.take_for_save(3, {"w": torch.ones(9)}, "{}")["w"]
    assert other.shape == (9,)


def test_what_is_allocated_is_what_the_tensors_need() -> None:
    held = {f"w{n}": torch.empty(1000 + n) for n in range(50)}
    buffers = host_buffers(held, pin=False, chunk_bytes=2**15)
    pieces = {buffer.untyped_storage().data_ptr(): buffer for buffer in buffers.values()}
    taken = sum(piece.untyped_storage().nbytes() for piece in pieces.values())
    needed = sum(4 * tensor.numel() for tensor in held.values())
    assert needed <= taken <= needed + 64 * len(held)
    assert len(pieces) > 1 and CHUNK_BYTES == 2**31
