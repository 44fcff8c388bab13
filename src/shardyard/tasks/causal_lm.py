"""Predict the next token: text as it is, and a sample of it at the end."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from shardyard.config.resolved import Resolved
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.generate import generate
from shardyard.tasks.language import LanguageTask, vocabulary
from shardyard.tasks.token_losses import LanguageModel


class CausalLM(LanguageTask):
    """Each token predicts the one after it."""

    def sample(self, resolved: Resolved, mesh: Mesh, device: torch.device) -> str | None:
        """A prompt of the recipe and how the model goes on."""
        recipe, data = resolved.recipe, resolved.data
        if not recipe.task.generate_tokens:
            return None
        assert isinstance(self.computation, LanguageModel)  # checked: a module has no logits
        assert isinstance(recipe.data.seq_len, int)
        tokenizer = Tokenizer.from_file(str(Path(data.dir) / "tokenizer.json"))
        prompt = prompt_ids(tokenizer, recipe.task.prompt, data.bos_token)
        continuation = generate(
            self.computation,
            prompt,
            num_tokens=recipe.task.generate_tokens,
            seq_len=recipe.data.seq_len,
            vocab_size=vocabulary(resolved),
            seed=recipe.run.seed,
            mesh=mesh,
            device=device,
        )
        return str(tokenizer.decode([*prompt, *continuation]))


def prompt_ids(tokenizer: Tokenizer, text: str, bos_token: str | None) -> list[int]:
    """A prompt as documents begin in training, and without what a tokenizer puts behind a text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    return (ids if bos_id is None else [bos_id, *ids]) or [0]
