"""Task files: what is read, and what is rejected with a reason."""

import json
from pathlib import Path

import pytest

from shardyard.data.eval_tasks.prompts import Example, build_examples
from shardyard.data.eval_tasks.rows import read_rows
from shardyard.data.eval_tasks.task_file import find_tasks, read_task
from shardyard.data.eval_tasks.token_requests import TokenRequests
from shardyard.errors import RequestError

GOOD = """\
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: "{{right}}"
doc_to_choice: choices
"""
ROWS = [
    {"question": "Up or down?", "choices": ["up", "down"], "right": 1},
    {"question": "Left?", "choices": ["yes", "no"], "right": 0},
]


def write(folder: Path, text: str) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = folder / "task.yaml"
    file.write_text(text)
    return file


def examples(folder: Path, text: str) -> list[Example]:
    task = read_task(write(folder, text))
    rows = read_rows(task, "test")
    return build_examples(task, rows, rows, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("process_docs: !function utils.process", r"line 8: !function names Python code"),
        ("process_results: utils.score", "process_results: it names Python code"),
        ("dataset_name: ARC-Easy", "dataset_name: datasets of the hub are not downloaded"),
        ("num_fewshots: 2", r"num_fewshots: no such key of a task. Did you mean num_fewshot\?"),
        ("repeats: 5", "repeats=5: only 1 is supported"),
        ("fewshot_config: {sampler: balanced}", "sampler='balanced' is not default or first_n"),
        ("metric_list: [{metric: f1}]", "metric 'f1': multiple_choice has acc, acc_norm"),
        ("metric_list: [{metric: acc, aggregation: median}]", "aggregation 'median' not supported"),
        ("validation_split: dev", "split 'dev' is not in data_files, which has test"),
        ("filter_list: [{name: a, filter: [{function: regex}]}]", "filter_list has no effect"),
        ("generation_kwargs: {until: x}", "generation_kwargs has no effect"),
        ("include: task.yaml", "must be one file, without a cycle"),
    ],
)
def test_a_key_without_effect_is_rejected(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        read_task(write(tmp_path, f"{GOOD}{line}\n"))


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("json\n", "allenai/ai2_arc\n").replace("multiple_choice", "generate_until")
    sampled = "generation_kwargs: {do_sample: true, top_p: 0.9}\n"
    steps = "filter_list: [{name: a, filter: [{function: map, mapping_dict: {}}]}]\n"
    with pytest.raises(RequestError) as caught:
        read_task(write(tmp_path, text + sampled + steps))
    for part in ("only local files are read", "only greedy decoding", "top_p not supported",
                 "filter 'map' is not one of regex"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("question", '"{{missing}}"', "row 0: the template .* does not render: 'missing'"),
        ("question", '"{{question.__class__}}"', "does not render"),
        ("question", '"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}'
         '{% endfor %}"', "takes more than"),
        ("choices", '"{{question}}"', "which is not a list of texts"),
        ("{{right}}", "{{right + 1}}", "gives '2', which is neither the number"),
        ("choices", '"{{[right]}}"', "must give a list of texts"),
    ],
)  # fmt: skip
def test_a_template_that_gives_something_else_names_its_row(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        examples(tmp_path, GOOD.replace(old, new))


def test_more_examples_than_rows_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="num_fewshot=2, but split 'test' has 1 rows"):
        examples(tmp_path, f"{GOOD}num_fewshot: 2\nfewshot_split: test\n")


def test_examples_in_the_task_file_come_first(tmp_path: Path) -> None:
    shots = "[{question: 'In?', choices: [on, off], right: 0}]"
    config = f"num_fewshot: 1\nfewshot_config: {{sampler: first_n, samples: {shots}}}\n"
    first, _ = examples(tmp_path, GOOD + config)
    assert first.contexts == ("In? on\n\nUp or down?",) * 2
    assert first.continuations == (" up", " down") and first.target == 1


def test_columns_of_a_table_have_the_type_of_all_their_values(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("n,x,t,b\n1,0.5,a,True\n2,,1,False\n")
    file = write(tmp_path, GOOD.replace("rows.jsonl", "rows.csv").replace("json\n", "csv\n", 1))
    rows = read_rows(read_task(file), "test")
    assert rows == [
        {"n": 1, "x": 0.5, "t": "a", "b": True},
        {"n": 2, "x": None, "t": "1", "b": False},
    ]


def test_an_unknown_task_names_those_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"no such file.*Did you mean shardyard_facts"):
        find_tasks(["shardyard_fact"])


class Letters:
    """A tokenizer whose tokens are characters; 0 begins a text."""

    bos_token_id: int | None = 0
    eos_token_id: int | None = None

    def decode(self, _: int) -> str:
        return "<s>"

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(each) for each in text]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9])
def test_windows_predict_each_token_once(length: int) -> None:
    text = "abcdefghi"[:length]
    windows = TokenRequests(Letters(), 4).windows(text)
    assert [token for each in windows for token in each.targets] == Letters().encode(text)
    read = "\0" + text
    for each in windows:
        inputs = "".join(map(chr, each.inputs))
        last = "".join(map(chr, each.targets[-1:]))
        assert len(inputs) <= 4 and f"{inputs}{last}" in read
    if length > 4:
        assert len(windows[-1].inputs) == 4, "the last one has all the context that fits"


def test_a_text_after_a_context() -> None:
    make = TokenRequests(Letters(), 4)
    request = make.continuation("ab ", "cd", "here")
    assert request.inputs == tuple(map(ord, "ab c")), "the space belongs to what is predicted"
    assert request.targets == tuple(map(ord, " cd"))
    assert make.continuation("", "ab", "here").inputs == (0, ord("a"))
    with pytest.raises(RequestError, match="here: 'bcdef' has 5 tokens after its context"):
        make.continuation("a", "bcdef", "here")
    with pytest.raises(RequestError, match="max_gen_toks=4 leaves no room"):
        make.generation("a", (), 4)


def test_a_tokenizer_without_a_first_or_last_token_is_rejected() -> None:
    letters = Letters()
    letters.bos_token_id = None
    with pytest.raises(RequestError, match="names neither bos_token nor eos_token"):
        TokenRequests(letters, 4)
