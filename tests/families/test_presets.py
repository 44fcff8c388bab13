"""The named shapes have the sizes that their publishers state."""

from dataclasses import replace

import pytest

from shardyard.families.presets import PRESETS

# Parameters as the model cards on the Hugging Face hub count them (safetensors metadata), unless
# another source is named.
PUBLISHED = [
    # arXiv:2302.13971, table 2: 6.7, 13.0, 32.5 and 65.2 B; exact: of huggyllama/llama-*
    ("llama1-7b", 6_738_415_616),
    ("llama1-13b", 13_015_864_320),
    ("llama1-33b", 32_528_943_616),
    ("llama1-65b", 65_285_660_672),
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
    ("llama3.1-8b", 8_030_261_248),
    ("llama3.1-70b", 70_553_706_496),
    ("llama3.1-405b", 405_853_388_800),
    ("llama3.2-1b", 1_235_814_400),
    ("llama3.2-3b", 3_212_749_824),
    ("llama3.3-70b", 70_553_706_496),
    ("mixtral-8x7b", 46_702_792_704),
    ("mixtral-8x22b", 140_630_071_296),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("phi3-mini-4k", 3_821_079_552),
    ("phi3-medium-4k", 13_960_238_080),
    ("phi4", 14_659_507_200),
    ("pythia-160m", 162_322_944),
    ("pythia-1.4b", 1_414_647_808),
    ("pythia-6.9b", 6_857_302_016),
    ("gpt-neox-20b", 20_554_567_680),
    ("olmo2-7b", 7_298_617_344),
    ("olmo2-13b", 13_716_198_400),
    ("olmo2-32b", 32_234_279_936),
    ("gemma2-2b", 2_614_341_888),
    ("gemma2-9b", 9_241_705_984),
    ("gemma2-27b", 27_227_128_320),
    # Without the 12 to 48 causal masks that the files of the smaller ones count too
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    # arXiv:2005.14165, table D.1: 174,600 M
    ("gpt3-175b", 174_600_000_000),
]


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED)
def test_a_preset_has_its_published_size(name: str, parameters: int) -> None:
    assert PRESETS[name].shape.parameters == pytest.approx(parameters, rel=3e-5)


def test_the_experts_a_token_visits_make_the_active_parameters() -> None:
    # Mixtral: 12.9 B (arXiv:2401.04088, section 1), 39 B for 8x22B (Mistral AI, April 2024);
    # Qwen3-30B-A3B: 3.3 B (its model card). All count the input embedding.
    for name, billions in (("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39), ("qwen3-30b-a3b", 3.35)):
        shape = PRESETS[name].shape
        active = shape.matmul_parameters + shape.embedding_parameters
        assert active / 1e9 == pytest.approx(billions, rel=0.01)


def test_bert_is_as_large_as_its_authors_say() -> None:
    # 340 M: arXiv:1810.04805, section 3; 335,174,458 with the head as transformers builds it, of
    # which its dense layer, norm and bias (1.08 M) are not counted here
    large = PRESETS["bert-large"].shape
    assert large.parameters == pytest.approx(340e6, rel=0.02)
    assert large.parameters == 335_174_458 - (1024**2 + 3 * 1024 + 30522)
    assert PRESETS["bert-1.5b"].shape.parameters == pytest.approx(1.5e9, rel=0.02)


def test_a_shape_counts_the_parameters_of_transformers_own_bert() -> None:
    """Checked against transformers, in the test only."""
    import torch
    from transformers import BertConfig, BertModel

    large = PRESETS["bert-large"].shape
    small = replace(large, num_hidden_layers=2, hidden_size=64, intermediate_size=256)
    with torch.device("meta"):
        model = BertModel(
            BertConfig(
                vocab_size=small.vocab_size,
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=16,
            ),
            add_pooling_layer=False,
        )
    assert sum(param.numel() for param in model.parameters()) == small.parameters


def test_every_preset_names_its_source() -> None:
    assert all(len(preset.source) > 20 for preset in PRESETS.values())
