"""Predict the next token: text as it is, and a sample of it at the end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from shardyard.config.resolved import Resolved
from shardyard.data.chat_template import ChatTemplate, RenderError
from shardyard.data.chat_tokens import ChatTokens
from shardyard.data.encoders import LEARNT
from shardyard.data.micro_batch import IGNORED, MicroBatch
from shardyard.data.pieces import encoder_in
from shardyard.data.samples import Prepare, unchanged
from shardyard.data.tokenizer import TextEncoder
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.generate import generate
from shardyard.tasks.language import LanguageTask, vocabulary
from shardyard.tasks.token_losses import LanguageModel


class CausalLM(LanguageTask):
    """Each token predicts the one after it; of dialogues, where that is an answer's."""

    @classmethod
    def columns_of(cls, resolved: Resolved) -> Sequence[str]:
        """Which tokens are learnt, where the data say so."""
        return () if resolved.data.train_learnt is None else (LEARNT,)

    @classmethod
    def preparation(cls, resolved: Resolved, split: str) -> Prepare:  # noqa: ARG003
        """Takes the targets away that are not learnt."""
        return only_learnt if cls.columns_of(resolved) else unchanged

    def sample(self, resolved: Resolved, mesh: Mesh, device: torch.device) -> str | None:
        """A prompt of the recipe and how the model goes on, or what it answers."""
        recipe, data = resolved.recipe, resolved.data
        if not recipe.task.generate_tokens:
            return None
        assert isinstance(self.computation, LanguageModel)  # checked: a module has no logits
        assert isinstance(recipe.data.seq_len, int)
        tokenizer = Tokenizer.from_file(str(Path(data.dir) / "tokenizer.json"))
        prompt, is_asked = recipe.task.prompt, bool(self.columns_of(resolved))
        ends = frozenset[int]()
        if is_asked:
            try:
                ids, ends = question(encoder_in(Path(data.dir)), prompt)
            except RenderError as error:
                return f"no answer: the chat template does not take task.prompt alone: {error}"
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
            mesh=mesh,
            device=device,
            ends=ends,
            known=[each for each in tokenizer.get_vocab().values() if each < vocabulary(resolved)],
        )
        if is_asked:
            return f"{prompt}\n\n{tokenizer.decode(continuation).strip()}"
        return str(tokenizer.decode([*ids, *continuation]))


def only_learnt(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG001 - a Prepare
    """Nothing is predicted but the tokens that are marked as learnt."""
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
    template = ChatTemplate(encoder.files, name=encoder.name)
    tokens = ChatTokens(encoder.files["tokenizer.json"], template.source, name=encoder.name)
    said = {"role": "user", "content": tokens.hidden(text, is_answer=False)}
    ids, _ = tokens.encode(template.render([said], add_generation_prompt=True))
    return ids, frozenset(encoder.id_of(each) for each in (*tokens.special, encoder.end_token))
