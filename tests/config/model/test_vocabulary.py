"""A tokenizer with added tokens makes its model larger; another model's tokenizer is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shardyard.config.model.vocabulary import parse_vocabulary, vocabulary_in
from shardyard.config.schema.data import Data
from shardyard.control.request import Request
from shardyard.data.tokenizer import TokenizerFiles, train_bpe, with_added_tokens
from shardyard.data.wordpiece import from_vocabulary
from shardyard.errors import RecipeError
from shardyard.families.shape import ModelShape
from tests.hub import saved_llama

LOOKS: dict[str, Any] = {"to_train": False, "needs_weights": False, "only_looks": True}
NEW = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 512 rows and its tokenizer of 512 tokens."""
    return saved_llama(tmp_path_factory.mktemp("llama") / "model")


def planned(*settings: str) -> ModelShape:
    return Request.read(settings, **LOOKS).required_shape


def copied(source: Path, folder: Path) -> Path:
    """The files of a tokenizer, without the model."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def with_more(source: Path, folder: Path, tokens: list[str]) -> Path:
    """The same tokenizer with tokens that transformers adds."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def changed(source: Path, folder: Path, *, change: Any) -> Path:
    """The same tokenizer with another tokenizer.json."""
    copied(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_plan_counts_rows_for_added_tokens(llama: Path, tmp_path: Path) -> None:
    before = planned(f"model.path={llama}")
    more = with_more(llama, tmp_path / "more", NEW)
    named = planned(f"model.path={llama}", f"data.tokenizer={more}")
    listed = planned(f"model.path={llama}", f"data.add_special_tokens={json.dumps(NEW)}")
    assert (before.vocab_size, named.vocab_size, listed.vocab_size) == (512, 514, 514)
    assert named.parameters - before.parameters == 2 * 2 * before.hidden_size  # table and head


def test_tokens_that_were_saved_into_the_models_folder_make_it_larger(
    tmp_path: Path,
) -> None:
    folder = saved_llama(tmp_path / "model")
    with_more(folder, folder, NEW)
    request = Request.read([f"model.path={folder}"], **LOOKS)
    assert request.required_shape.vocab_size == 514
    said = "embedding grows from 512 to 514 rows (new rows begin as the mean of the others)"
    assert said in request.growth_note


def test_rows_that_no_token_has_serve_before_any_is_added(tmp_path: Path) -> None:
    def shorten(content: dict[str, Any]) -> None:
        last = {token for token, number in content["model"]["vocab"].items() if number >= 509}
        for token in last:
            del content["model"]["vocab"][token]
        content["model"]["merges"] = [
            pair for pair in content["model"]["merges"] if "".join(pair) not in last
        ]

    folder = saved_llama(tmp_path / "model")
    short = changed(folder, tmp_path / "short", change=shorten)
    (folder / "tokenizer.json").write_bytes((short / "tokenizer.json").read_bytes())
    assert vocabulary_in(folder).size == 509  # type: ignore[union-attr]
    assert planned(f"model.path={folder}", f"data.add_tokens={json.dumps(NEW)}").vocab_size == 512


def swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[300:302]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def shorten(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    last = max(vocab, key=lambda token: vocab[token])
    del vocab[last]
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if "".join(pair) != last
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap, r"2 of 512 ids are other tokens \(\d+ is '.*', not '.*', .*data\.tokenizer=auto"),
        (shorten, r"it lacks 1 of the model's tokens \('"),
    ],
    ids=["other ids", "fewer tokens"],
)
def test_another_tokenizer_is_rejected_with_what_differs(
    llama: Path, tmp_path: Path, change: Any, said: str
) -> None:
    other = changed(llama, tmp_path / "other", change=change)
    with pytest.raises(RecipeError, match=said):
        planned(f"model.path={llama}", f"data.tokenizer={other}")
    # The rows of random weights have no meaning yet.
    random = ["model.weights=random", f"data.tokenizer={other}"]
    assert planned(f"model.path={llama}", *random).vocab_size == 512


def test_a_reserved_token_may_get_another_name(llama: Path, tmp_path: Path) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["added_tokens"][0]["content"] = "<|im_end|>"
        vocab = content["model"]["vocab"]
        vocab["<|im_end|>"] = vocab.pop("<|endoftext|>")

    renamed = changed(llama, tmp_path / "renamed", change=rename)
    assert planned(f"model.path={llama}", f"data.tokenizer={renamed}").vocab_size == 512


def test_words_of_a_larger_tokenizer_are_no_added_tokens(tmp_path: Path) -> None:
    folder = saved_llama(tmp_path / "model")

    def enlarge(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["another model's word"] = 512

    other = changed(folder, tmp_path / "other", change=enlarge)
    (folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    with pytest.raises(RecipeError, match=r"has 513 tokens, .* 512 rows, and not all tokens"):
        planned(f"model.path={folder}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.lora.rank=4"], r"2 tokens are new.*modules_to_save=\[embed_tokens, lm_head\]"),
        (["model.lora={rank: 4, modules_to_save: [lm_head]}"], "their rows would not be learnt"),
        (["model.frozen=[model.embed_tokens]"], r"freezes model\.embed_tokens\.weight, and 2"),
    ],
    ids=["adapters", "adapters and head", "frozen"],
)
def test_new_rows_that_would_not_be_learnt_are_rejected(
    settings: list[str], said: str, llama: Path
) -> None:
    with pytest.raises(RecipeError, match=said):
        planned(f"model.path={llama}", f"data.add_tokens={json.dumps(NEW)}", *settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['data.add_tokens=["a", "a"]'], r"'a' is blank, has control characters or is there twice"),
        (['data.add_tokens=["a"]', 'data.add_special_tokens=["a"]'], "is there twice"),
        (['data.add_tokens=[" "]'], "is blank"),
        (["model.lora={rank: 4, modules_to_save: [q_proj]}"], "no module outside of the blocks"),
        (["model.new_embeddings=random"], r"model\.new_embeddings=random is for loaded weights"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        planned("model.preset=llama-tiny", *settings)


def bpe() -> TokenizerFiles:
    return train_bpe(
        iter(["to be or not to be <think> that is the question " * 50]), vocab_size=280
    )


def word_piece() -> TokenizerFiles:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "be", "##e", "question"]
    return from_vocabulary("\n".join(words).encode(), {}, name="vocab.txt")


@pytest.mark.parametrize("made", [bpe, word_piece])
def test_tokens_are_added_as_transformers_adds_them(made: Any, tmp_path: Path) -> None:
    files = made()
    data = Data(add_special_tokens=tuple(NEW), add_tokens=("<think>", "question"))
    for folder, content in (
        ("theirs", files),
        ("ours", with_added_tokens(files, data)),
    ):
        (tmp_path / folder).mkdir()
        for name, each in content.items():
            (tmp_path / folder / name).write_bytes(each)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    theirs.add_tokens(NEW, special_tokens=True)
    theirs.add_tokens(["<think>", "question"])
    ours = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    for text in ("<|im_start|>to be<|im_end|>", "the <think> question"):
        assert ours(text).input_ids == theirs(text).input_ids
    content = (tmp_path / "ours" / "tokenizer.json").read_bytes()
    plain = parse_vocabulary(files["tokenizer.json"])
    assert plain is not None
    assert parse_vocabulary(content) == plain.with_tokens(data)
    assert Tokenizer.from_str(content.decode()).get_vocab() == {
        token: number
        for number, token in parse_vocabulary(content).tokens.items()  # type: ignore[union-attr]
    }
    added = with_added_tokens(files, data)
    assert with_added_tokens(added, data) is added, "they are there already"
