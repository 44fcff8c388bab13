"""What torch's attention of variable length computes, on a CPU: written out, in fp64.

torch has the operator for CUDA alone. Whoever imports this gives a CPU one, so that all that stands
around it (the public function, its derivative, a compiler's view of it) is torch's own.

Shape suffixes: T = tokens of all samples, H = heads, K = KV heads, E = head width, D = tokens of a
document.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

calls = Counter[str]()
"""How often the operator ran in this process."""
assert varlen.__all__, "importing it registers the operators"


def _documents(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Tensor, scale: float, left: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Of each document its place, queries, keys, values (H, D, E) and scores (H, D, D)."""
    groups = q_THE.shape[1] // k_TKE.shape[1]
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q_HDE, k_HDE, v_HDE = (
            x[begin:end].double().transpose(0, 1).repeat_interleave(times, dim=0)
            for x, times in ((q_THE, 1), (k_TKE, groups), (v_TKE, groups))
        )
        back_DD = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        is_seen_DD = (back_DD >= 0) & ((back_DD <= left) if left >= 0 else True)
        scores_HDD = (scale * q_HDE @ k_HDE.mT).masked_fill(~is_seen_DD, -torch.inf)
        yield slice(begin, end), q_HDE, k_HDE, v_HDE, scores_HDD


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")  # type: ignore[untyped-decorator]
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool, scale: float, window_size: list[int], *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls["forward"] += 1
    left, right = window_size
    longest = int((cu_seq_q[1:] - cu_seq_q[:-1]).max())
    assert right == 0 and is_causal == (left == -1) and longest <= max_q == max_k
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32
    assert int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == len(q)
    assert {*others} <= {None, q.shape[1] != k.shape[1]}, "torch 2.13 is told that heads share"
    output, sums = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for place, _, _, v_HDE, scores_HDD in _documents(q, k, v, cu_seq_q, scale, left):
        output[place] = (scores_HDD.softmax(-1) @ v_HDE).transpose(0, 1).to(q.dtype)
        sums[:, place] = scores_HDD.logsumexp(-1).float()
    return output, sums, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")  # type: ignore[untyped-decorator]
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,  # noqa: ARG001
    cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool,  # noqa: ARG001
    rng_state: Tensor, scale: float, window_size: list[int], *others: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    left, heads, kv_heads = window_size[0], q.shape[1], k.shape[1]
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for place, q_HDE, k_HDE, v_HDE, scores_HDD in _documents(q, k, v, cu_seq_q, scale, left):
        weights_HDD = scores_HDD.softmax(-1)
        grad_HDE = grad[place].double().transpose(0, 1)
        of_weights = grad_HDE @ v_HDE.mT
        of_scores = weights_HDD * (of_weights - (of_weights * weights_HDD).sum(-1, keepdim=True))
        of_q[place] = (scale * of_scores @ k_HDE).transpose(0, 1).to(q.dtype)
        for whole, of_heads in (
            (of_k, scale * of_scores.mT @ q_HDE),
            (of_v, weights_HDD.mT @ grad_HDE),
        ):
            shared = of_heads.view(kv_heads, heads // kv_heads, *of_heads.shape[1:]).sum(1)
            whole[place] = shared.transpose(0, 1).to(q.dtype)
    return of_q, of_k, of_v
