"""Items of a user's dataset as arrays, next to what transformers makes of the same items."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForCausalLM, LlamaConfig

from shardyard.config.schema.recipe import Recipe
from shardyard.data.own.items import ItemForm, kind_of

TEXT = ItemForm(kind="tokens", vocab_size=100)
IMAGES = {"task": {"name": "image_classification"}, "model": {"preset": "resnet50"}}
IMAGE = ItemForm(kind="image", num_classes=4)


@pytest.mark.parametrize("prompt", [0, 4])
def test_the_loss_of_labels_is_that_of_transformers(prompt: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 100, (13,))
    labels = ids.clone()
    labels[:prompt] = -100
    theirs = model(input_ids=ids[None], labels=labels[None]).loss.detach()
    fields = TEXT.fields({"input_ids": ids, "labels": labels})
    tokens, targets = torch.from_numpy(fields["tokens"]), torch.from_numpy(fields["targets"])
    logits = model(input_ids=tokens[None], position_ids=torch.from_numpy(fields["positions"])[None])
    ours = F.cross_entropy(logits.logits[0].detach(), targets, ignore_index=-100)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def test_padding_at_either_end_is_cut() -> None:
    plain = TEXT.fields([1, 2, 3, 4])
    for ids, mask in (([0, 0, 1, 2, 3, 4], [0, 0, 1, 1, 1, 1]), ([1, 2, 3, 4, 0], [1, 1, 1, 1, 0])):
        fields = TEXT.fields({"input_ids": ids, "attention_mask": mask})
        assert all(np.array_equal(fields[name], plain[name]) for name in plain)


def test_a_pair_is_shifted_already() -> None:
    fields = TEXT.fields((torch.tensor([5, 6, 7]), np.array([6, 7, -100])))
    assert fields["tokens"].tolist() == [5, 6, 7] and fields["targets"].tolist() == [6, 7, -100]
    assert TEXT.fields([5, 6])["tokens"].tolist() == [5], "a list of two ids is no pair"


def test_documents_of_one_item_need_the_setting_that_keeps_them_apart() -> None:
    item = {"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}
    with pytest.raises(ValueError, match=r"data\.attend_across_documents=false"):
        TEXT.fields(item)
    apart = ItemForm(kind="tokens", attends_across=False)
    assert apart.fields(item)["positions"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"input_ids": [1, 2], "token_type_ids": [0, 0]}, "would drop token_type_ids"),
        ({"tokens": [1, 2]}, "Return input_ids"),
        ([1], "has 1 tokens, and a sample needs 2"),
        ([1, 200], "token id 200 is outside the model's vocabulary of 100"),
        ([-1, 2, 3], "token id -1 is outside"),
        ([1.5, 2.0], "must be whole numbers"),
        ([[1, 2, 3]], "must be whole numbers (T,)"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "labels has 2 numbers, and input_ids 3"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "hide padding only"),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, "hide padding only"),
        ({"input_ids": [1, 2, 3], "position_ids": [1, 2, 3]}, "count up from 0"),
        (([1, 2], [1]), "it has 2 tokens and 1 targets"),
    ],
)
def test_a_wrong_item_of_tokens_says_what_is_right(item: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        TEXT.fields(item)
    assert words in str(caught.value)


def test_a_task_that_hides_tokens_takes_no_labels() -> None:
    masked = ItemForm(kind="tokens", is_causal=False)
    assert masked.fields([1, 2, 3])["tokens"].tolist() == [1, 2, 3]
    for item in ({"input_ids": [1, 2], "labels": [1, 2]}, ([1, 2], [2, 3])):
        with pytest.raises(ValueError, match="hides tokens itself"):
            masked.fields(item)


def test_images_of_all_usual_forms_are_the_same_bytes() -> None:
    pixels = np.arange(8 * 10 * 3, dtype=np.uint8).reshape(8, 10, 3)
    planes = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    for image in (Image.fromarray(pixels), pixels, torch.from_numpy(pixels), planes):
        for item in ((image, 2), {"image": image, "label": torch.tensor(2)}):
            fields = IMAGE.fields(item)
            assert np.array_equal(fields["image"], pixels) and int(fields["label"]) == 2
    floats = IMAGE.fields({"pixel_values": planes.double() / 255, "labels": 1})["image"]
    assert floats.dtype == np.float32 and floats.shape == (3, 8, 10)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ((np.zeros((8, 8), np.uint8), 0), "an image is a Pillow image"),
        ((np.zeros((8, 8, 3), np.float32), 0), "normalized floats (3, H, W)"),
        ((np.zeros((8, 8, 3), np.uint8), 4), "class 4 is not in 0 to 3"),
        ((np.zeros((8, 8, 3), np.uint8), 0.5), "return (image, class number)"),
        ({"image": np.zeros((8, 8, 3), np.uint8)}, "return (image, class number)"),
        (np.zeros((8, 8, 3), np.uint8), "return (image, class number)"),
    ],
)
def test_a_wrong_image_says_what_is_right(item: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        IMAGE.fields(item)
    assert words in str(caught.value)


def test_items_of_another_shape_than_the_first_are_named() -> None:
    form = ItemForm(kind="fields", shapes={"x": ("float32", (3,)), "y": ("int64", ())})
    assert form.fields({"x": [1.0, 2.0, 3.0], "y": 1})["x"].dtype == np.float32
    with pytest.raises(ValueError, match=r"x float32 \(2,\), y int64 \(\), and those of the first"):
        form.fields({"x": [1.0, 2.0], "y": 1})
    with pytest.raises(ValueError, match="name holds <U1, and a batch holds numbers"):
        ItemForm(kind="fields").fields({"name": "x"})


@pytest.mark.parametrize(
    ("item", "sections", "kind"),
    [
        ("a text", {}, "rows"),
        ({"text": "a text"}, {}, "rows"),
        ({"messages": []}, {"data": {"format": "chat"}}, "rows"),
        ({"frage": "?"}, {"data": {"format": "chat", "keys": {"prompt": "frage"}}}, "rows"),
        ([1, 2, 3], {}, "tokens"),
        ({"input_ids": [1], "prompt": "x"}, {}, "tokens"),
        ((0, 0), IMAGES, "image"),
        ({"x": [1.0]}, {"model": {"preset": None, "module": "m:build"}}, "fields"),
        ({"input_ids": [1]}, {"model": {"preset": None, "module": "m:build"}}, "tokens"),
        ({"text": "x"}, {"model": {"preset": None, "module": "m:build"}}, "rows"),
    ],
)  # fmt: skip
def test_the_first_item_says_the_kind(item: Any, sections: dict[str, Any], kind: str) -> None:
    assert kind_of(item, Recipe.model_validate(sections)) == kind
