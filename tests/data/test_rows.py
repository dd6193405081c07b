"""Reading rows: the formats that are taken, and what is said about those that are not."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.rows import data_sources, is_set, load_rows

GSM8K = Path(__file__).parent / "gsm8k_20.jsonl"
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 9 + 9?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"split": "train", "index": 0},
}


def jsonl(path: Path, *rows: Any) -> SourceConfig:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return SourceConfig(files=[str(path)])


def test_verls_rows_are_read_unchanged(tmp_path: Path) -> None:
    (row,) = load_rows(jsonl(tmp_path / "t.jsonl", VERL_ROW), DataConfig())
    assert row.messages == VERL_ROW["prompt"]
    assert (row.data_source, row.ground_truth, row.extra_info) == ("openai/gsm8k", "18", {"split": "train", "index": 0})
    assert row.columns["ability"] == "math"
    assert "prompt" not in row.columns


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    rows = [VERL_ROW, {**VERL_ROW, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    from_parquet = load_rows(SourceConfig(files=[str(tmp_path / "t.parquet")]), DataConfig())
    from_jsonl = load_rows(jsonl(tmp_path / "t.jsonl", *rows), DataConfig())
    assert [vars(r) | {"where": ""} for r in from_parquet] == [vars(r) | {"where": ""} for r in from_jsonl]


def test_gsm8k_files_as_they_are() -> None:
    data = DataConfig(prompt_key="question", answer_key="answer", data_source="openai/gsm8k")
    rows = load_rows(SourceConfig(files=[str(GSM8K)]), data)
    assert len(rows) == 20
    assert rows[0].ground_truth == "72"
    assert rows[0].chat == [{"role": "user", "content": rows[0].messages}]
    assert rows[0].columns["answer"].endswith("#### 72")
    assert data_sources(rows) == ["openai/gsm8k"]


def test_size_keeps_the_first_rows_and_patterns_name_several_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(3)))
    source = SourceConfig(files=[str(tmp_path / "*.jsonl")], size=4)
    assert [r.messages for r in load_rows(source, DataConfig())] == ["a0", "a1", "a2", "b0"]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ('{"prompt": "x"', r"t\.jsonl:2: not a JSON object"),
        ("[1]\n", r"t\.jsonl:2: a row is a JSON object, this is a list"),
        ('{"question": "x"}\n', r"t\.jsonl:2: no column 'prompt' \(data\.prompt_key\); the columns are question"),
        ('{"prompt": ""}\n', r"t\.jsonl:2: the prompt is empty"),
        ('{"prompt": []}\n', r"t\.jsonl:2: a prompt is a string or a non-empty list"),
        ('{"prompt": 3}\n', r"t\.jsonl:2: a prompt is a string or a non-empty list of messages, this is 3"),
        ('{"prompt": [{"content": "x"}]}\n', r"t\.jsonl:2: a message is a dict with 'role' and 'content'"),
        ('{"prompt": [{"role": "user", "content": ""}]}\n', r"t\.jsonl:2: no message of the prompt has any content"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, second_line: str, message: str) -> None:
    source = jsonl(tmp_path / "t.jsonl", {"prompt": "fine"}, second_line)
    with pytest.raises(ConfigError, match=message):
        load_rows(source, DataConfig())


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "x"}\n\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:3: not a JSON object"):
        load_rows(SourceConfig(files=[str(tmp_path / "t.jsonl")]), DataConfig())


def test_bad_files(tmp_path: Path) -> None:
    def load(name: str, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        load_rows(SourceConfig(files=[str(tmp_path / name)]), DataConfig())

    with pytest.raises(ConfigError, match=r"gone\.jsonl: no such file"):
        load("gone.jsonl", None)
    with pytest.raises(ConfigError, match=r"empty\.jsonl: the file has no rows"):
        load("empty.jsonl", b"\n")
    with pytest.raises(ConfigError, match=r"t\.parquet: not a readable parquet file"):
        load("t.parquet", b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"t\.csv: unknown kind of file; \.jsonl and \.parquet are read"):
        load("t.csv", b"prompt\nx\n")


def test_an_answer_column_that_is_not_there(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", {"prompt": "x", "solution": "3"})
    with pytest.raises(ConfigError, match=r"no column 'answer' \(data\.answer_key\); the columns are prompt, solution"):
        load_rows(source, DataConfig(answer_key="answer"))


def test_a_source_is_files_or_a_task() -> None:
    assert not is_set(SourceConfig())
    with pytest.raises(ConfigError, match=r"data\.train: set one of files=\[\] and task=None"):
        load_rows(SourceConfig(), DataConfig())
    with pytest.raises(ConfigError, match="set one of"):
        load_rows(SourceConfig(files=["x.jsonl"], task="chain_sum", size=1), DataConfig())


def test_validation_leaves_out_what_training_has(tmp_path: Path) -> None:
    train = load_rows(jsonl(tmp_path / "t.jsonl", {"prompt": "a"}, {"prompt": "b"}), DataConfig())
    same_as_messages = {"prompt": [{"content": "a", "role": "user"}]}
    source = jsonl(tmp_path / "v.jsonl", same_as_messages, {"prompt": "c"}, {"prompt": "b"}, {"prompt": "d"})
    kept = load_rows(source, DataConfig(), train_rows=train)
    assert [(r.index, r.messages) for r in kept] == [(0, "c"), (1, "d")]
    source.exclude_train = False
    assert len(load_rows(source, DataConfig(), train_rows=train)) == 4
    with pytest.raises(ConfigError, match=r"every prompt of .* also occurs in the training set"):
        load_rows(SourceConfig(files=[str(tmp_path / "t.jsonl")]), DataConfig(), train_rows=train)


class TestTasks:
    @pytest.fixture(autouse=True)
    def _needs_reasoning_gym(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_a_task_by_name_is_seeded(self) -> None:
        source = SourceConfig(task="chain_sum", size=5, seed=3, task_kwargs={"max_terms": 2})
        rows = load_rows(source, DataConfig())
        assert [r.messages for r in rows] == [r.messages for r in load_rows(source, DataConfig())]
        assert rows[0].data_source == "reasoning_gym/chain_sum"
        terms = str(rows[0].messages).split(":")[1].strip(" =")
        assert int(rows[0].ground_truth) == eval(terms)  # chain_sum's own words: "…: 4 - 1 ="
        assert rows[0].extra_info["entry"]["answer"] == rows[0].ground_truth

    def test_validation_tops_up_with_fresh_problems(self) -> None:
        train = load_rows(SourceConfig(task="chain_sum", size=40, seed=0), DataConfig())
        # Seed 20's first 20 problems are seed 0's last 20: entry i of seed s is made from s + i.
        val = load_rows(SourceConfig(task="chain_sum", size=40, seed=20), DataConfig(), train_rows=train)
        assert len(val) == 40
        assert not {str(r.messages) for r in val} & {str(r.messages) for r in train}

    def test_an_unknown_task_names_the_nearest(self) -> None:
        with pytest.raises(
            ConfigError, match=r"unknown reasoning_gym task 'chain_sums'; the nearest .* is 'chain_sum'"
        ):
            load_rows(SourceConfig(task="chain_sums", size=1), DataConfig())

    def test_settings_that_the_task_refuses(self) -> None:
        with pytest.raises(ConfigError, match="'chain_sum' refuses task_kwargs"):
            load_rows(SourceConfig(task="chain_sum", size=1, task_kwargs={"no_such": 1}), DataConfig())

    def test_a_task_needs_a_size(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.train\.size=0"):
            load_rows(SourceConfig(task="chain_sum"), DataConfig())


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package `datasets`; .*install\.sh quickstart,hub \("):
        load_rows(SourceConfig(files=["hf:openai/gsm8k:main:train"]), DataConfig())
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="need the package `reasoning-gym`"):
        load_rows(SourceConfig(task="chain_sum", size=1), DataConfig())


def test_hub_data_sets_are_read_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((path, config, split))
        if path == "org/none":
            raise FileNotFoundError("no such data set")
        return [{"prompt": "a"}, {"prompt": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("hf:org/x", "hf:org/x:test", "hf:org/x:main:test"):
        assert [r.messages for r in load_rows(SourceConfig(files=[name]), DataConfig())] == ["a", "b"]
    assert asked == [("org/x", None, "train"), ("org/x", None, "test"), ("org/x", "main", "test")]
    with pytest.raises(ConfigError, match="hf:org/none: cannot be read: FileNotFoundError: no such data set"):
        load_rows(SourceConfig(files=["hf:org/none"]), DataConfig())
