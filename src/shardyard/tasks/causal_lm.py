"""Predict the next token: text as it is, and samples of what the model writes."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from shardyard.config.resolved import Resolved
from shardyard.data.chat import DialoguePrompts
from shardyard.data.chat_template import RenderError
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.samples import Prepare, identity_prepare
from shardyard.data.shards import LEARNT
from shardyard.data.tokenizer import TextEncoder
from shardyard.data.work_units import encoder_in
from shardyard.models.random import key_of
from shardyard.parallel.fsdp import reshard
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.base import GeneratedText
from shardyard.tasks.language import LanguageTask, vocabulary
from shardyard.tasks.token_losses import LanguageModel

# A sample of text from the model in training, to see what the loss does not say.


@torch.no_grad()
def generate(
    computation: LanguageModel, prompt: list[int], *, num_tokens: int, seq_len: int,
    vocab_size: int, seed: int, temperature: float, top_k: int = 0, mesh: Mesh,
    device: torch.device, ends: Collection[int] = (), valid_ids: Collection[int] | None = None,
    rows: int | None = None,
) -> list[int]:  # fmt: skip
    """Continue ``prompt`` by ``num_tokens`` tokens, or to one of ``ends``.

    Each is the likeliest, or at a temperature above 0 drawn by its probability.

    Args:
        top_k: Only this many of the likeliest tokens are drawn; 0: all.
        valid_ids: Ids that the tokenizer has; only these are drawn: a head may have more rows.
        rows: Samples of each forward pass, all of ``seq_len`` tokens, so that a compiled model gets
            the shape that it was compiled for; None: one sample, as short as may be.

    All ranks call it together: each forward pass is a collective. There is no KV cache: a short
    text is quicker than the code for one would be long.
    """
    computation.model.eval()
    draw = torch.Generator().manual_seed(key_of(seed, "generate") % 2**63)
    tokens = list(prompt)
    # where ranks share a sample, its length is that of training; what follows is not attended to
    is_split = mesh.layout.world_size != mesh.layout.data_ranks
    length = seq_len if is_split or rows is not None else None
    for _ in range(num_tokens):
        window = tokens[-seq_len:]
        batch = _batch(window, length or len(window), rows or 1, device)
        logits_V = _logits(computation, batch, len(window) - 1, mesh=mesh, vocab_size=vocab_size)
        tokens.append(_next_token(possible(logits_V.cpu(), valid_ids), temperature, top_k, draw))
        if tokens[-1] in ends:  # all ranks draw the same
            break
    computation.model.train()
    reshard(computation.roots)
    return tokens[len(prompt) :]


def possible(logits_V: Tensor, valid_ids: Collection[int] | None) -> Tensor:
    """Logits with those of ids that the tokenizer does not have at minus infinity."""
    if valid_ids is None:
        return logits_V
    ids = torch.tensor(sorted(valid_ids))
    return torch.full_like(logits_V, -torch.inf).index_copy(0, ids, logits_V[ids])


def _next_token(logits_V: Tensor, temperature: float, top_k: int, draw: torch.Generator) -> int:
    if not temperature:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        likeliest_k = logits_V.topk(top_k)
        logits_V = torch.full_like(logits_V, -torch.inf)
        logits_V[likeliest_k.indices] = likeliest_k.values
    probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=draw))


def _logits(
    computation: LanguageModel, batch: MicroBatch, index: int, *, mesh: Mesh, vocab_size: int
) -> Tensor:
    """Logits (V) of the one token at ``index``, the same to the last bit on every rank."""
    logits_BlV = computation.output(batch)
    row = _row(computation, index)
    whole_V = torch.zeros(vocab_size, device=batch.samples_B.device)
    if mesh.data_rank == 0 and row is not None and logits_BlV is not None:
        first = computation.token_losses.first
        whole_V[first : first + logits_BlV.shape[-1]] = logits_BlV[0, row].float()
    dist.all_reduce(whole_V)
    return whole_V


def _row(computation: LanguageModel, index: int) -> int | None:
    """Return this rank's index of a token of a sample; None if the rank does not hold it."""
    if computation.tokens_l is None:
        return index
    local_tokens: list[int] = computation.tokens_l.tolist()
    return local_tokens.index(index) if index in local_tokens else None


def _batch(window: list[int], length: int, rows: int, device: torch.device) -> MicroBatch:
    """A micro-batch whose first sample is the window; other rows are padding."""
    tokens_BL = torch.zeros(rows, length, dtype=torch.int64, device=device)
    tokens_BL[0, : len(window)] = torch.tensor(window, device=device)
    positions_BL = torch.arange(length, device=device).repeat(rows, 1)
    samples_B = torch.full((rows,), -1, dtype=torch.int64, device=device)
    samples_B[0] = 0
    return MicroBatch(
        fields={"tokens": tokens_BL, "targets": tokens_BL, "positions": positions_BL},
        samples_B=samples_B,
        work=len(window),
    )


class CausalLM(LanguageTask):
    """Each token predicts the one after it; of dialogues, where that is an answer's."""

    @classmethod
    def columns_of(cls, resolved: Resolved) -> Sequence[str]:
        """Return the column of learnt tokens, where the data have one."""
        return () if resolved.data.train_learnt is None else (LEARNT,)

    @classmethod
    def preparation(cls, resolved: Resolved, split: str) -> Prepare:  # noqa: ARG003
        """Takes the targets away that are not learnt."""
        return mask_untrained_targets if cls.columns_of(resolved) else identity_prepare

    def generate_text(
        self, prompt: str, resolved: Resolved, mesh: Mesh, device: torch.device
    ) -> GeneratedText:
        """Return the model's continuation of a prompt; of chat data its answer."""
        recipe, data = resolved.recipe, resolved.data
        assert isinstance(self.computation, LanguageModel)  # checked: a module has no logits
        assert isinstance(recipe.data.seq_len, int) and isinstance(recipe.optim.micro_batch, int)
        tokenizer = Tokenizer.from_file(str(Path(data.dir) / "tokenizer.json"))
        is_asked = bool(self.columns_of(resolved))
        ends = frozenset[int]()
        if is_asked:
            try:
                ids, ends = question(encoder_in(Path(data.dir)), prompt)
            except RenderError as error:
                why = f"no answer: the chat template does not take the prompt by itself: {error}"
                return GeneratedText(prompt, why, why)
        else:
            ids = prompt_ids(tokenizer, prompt, data.bos_token)
        continuation = generate(
            self.computation,
            ids,
            num_tokens=recipe.task.generate_tokens,
            seq_len=recipe.data.seq_len,
            vocab_size=vocabulary(resolved),
            seed=recipe.run.seed,
            temperature=recipe.task.temperature,
            top_k=recipe.task.top_k,
            mesh=mesh,
            device=device,
            ends=ends,
            rows=recipe.optim.micro_batch if recipe.model.compile is True else None,
            valid_ids=[
                each for each in tokenizer.get_vocab().values() if each < vocabulary(resolved)
            ],
        )
        if is_asked:
            answer = str(tokenizer.decode(continuation).strip())
            return GeneratedText(prompt, answer, f"{prompt}\n\n{answer}")
        begin, whole = (tokenizer.decode(each) for each in (ids, [*ids, *continuation]))
        is_begun = whole.startswith(begin)
        text = whole.removeprefix(begin) if is_begun else tokenizer.decode(continuation)
        return GeneratedText(prompt, text, whole)


def mask_untrained_targets(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG001 - a Prepare
    """Ignore all targets but the tokens that are marked as learnt."""
    fields = dict(batch.fields)
    learnt_BL = fields.pop(LEARNT)[:, 1:] != 0
    fields["targets"] = torch.where(learnt_BL, fields["targets"], IGNORED)
    return replace(batch, fields=fields)


def prompt_ids(tokenizer: Tokenizer, text: str, bos_token: str | None) -> list[int]:
    """A prompt as documents begin in training, and without what a tokenizer puts behind a text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    return (ids if bos_id is None else [bos_id, *ids]) or [0]


def question(encoder: TextEncoder, text: str) -> tuple[list[int], frozenset[int]]:
    """A prompt as what a user says in a dialogue, up to where an answer begins, and the tokens at
    which one ends.

    Raises:
        RenderError: The template does not take it.
    """
    prompts = DialoguePrompts(encoder)
    ids = prompts.encode([{"role": "user", "content": text}])
    return ids, frozenset(
        encoder.id_of(each) for each in (*prompts.special_tokens, encoder.end_token)
    )
