"""BERT in our pass: transformers' own function, and dropout and masks at the right places."""

from dataclasses import replace

import torch
from transformers import BertForMaskedLM

from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.models.attention import sample_attention
from shardyard.models.build import build_on_meta, fill_weights, hf_config, materialize
from shardyard.models.forward import ForwardPass
from shardyard.models.random import SampleKeys

TINY = replace(PRESETS["bert-tiny"].shape, vocab_size=300)


def test_logits_and_gradients_are_those_of_transformers_own_bert() -> None:
    model = build_on_meta(TINY)
    materialize(model, torch.device("cpu"))
    fill_weights(model, folder=None, seed=0)
    model.double()  # in fp32 a small element of a gradient shows how a processor rounds large ones
    theirs = BertForMaskedLM._from_config(hf_config(TINY), attn_implementation="eager").double()
    theirs.load_state_dict(model.state_dict())
    run = ForwardPass(
        model,
        family_of("bert"),
        keys=SampleKeys(),
        attention=lambda positions_BL, _: sample_attention(
            positions_BL, is_causal=False, attend_across=False
        ),
    )
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, 17:] = 0
    segments = mask * (torch.arange(24) > 9)
    given = {"input_ids": tokens, "attention_mask": mask}
    alone = run(tokens, torch.arange(24) * mask, torch.arange(2))
    is_text = mask.bool()
    torch.testing.assert_close(alone[is_text], theirs(**given).logits[is_text])
    ours = run(tokens, torch.arange(24) * mask, torch.arange(2), segments)[is_text]
    expected = theirs(**given, token_type_ids=segments).logits[is_text]
    torch.testing.assert_close(ours, expected)
    ours.square().sum().backward()
    expected.square().sum().backward()
    wanted = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, wanted[name], rtol=1e-6, atol=1e-9, msg=name)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
