"""Reading launch scripts without running them."""

import pytest

from spmd_rl.config.shell import read_script, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1  b='x y' c=\"z\"", ["a=1", "b=x y", "c=z"]),
        ("a=['console','wandb']", ["a=[console,wandb]"]),
        ('a=\'["console","wandb"]\'', ['a=["console","wandb"]']),
        ("f=$HOME/data/x", ["f=$HOME/data/x"]),
        ("n=${N:-32} m=${M}", ["n=32", "m=$M"]),
        ('p=${P:-"${ROOT:-/r}/models"}', ["p=/r/models"]),
        ("n=$((1024 * 2))", ["n=2048"]),
        ("n=$(((1024 + 1024) * 4))", ["n=8192"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_a_script_with_variables_arrays_and_a_continued_command() -> None:
    script = read_script(
        """#!/usr/bin/env bash
        set -x
        N=${N:-8}   # ranks
        length=$((1024 * 2))
        root="${HOME}/data"
        files="['$root/a.parquet', '$root/b.parquet']"
        MODEL="model.path=org/name \\
            model.remove=True"
        DATA=(
            data.files="$files"
            data.length=${length}   # tokens
        )
        LAUNCH=(python3)
        if [ "${USE_UV:-1}" != 0 ]; then
            LAUNCH=(uv run python3)
        fi
        "${LAUNCH[@]}" -m verl.trainer.main_ppo \\
            "${DATA[@]}" \\
            $MODEL \\
            trainer.total=$((length + N)) \\
            "$@"
        echo done
        """
    )
    assert script.module == "verl.trainer.main_ppo"
    assert script.words == [
        "data.files=['$HOME/data/a.parquet', '$HOME/data/b.parquet']",
        "data.length=2048",
        "model.path=org/name",
        "model.remove=True",
        "trainer.total=2056",
    ]
    assert script.unsure == []


def test_conditions_choose_the_branch_and_unknown_ones_are_reported() -> None:
    text = """mode=async
    if [ "$mode" = "sync" ]; then
        x=1
    elif [[ $mode == "async" ]]; then
        x=2
    else
        x=3
    fi
    if [ -f somewhere ]; then
        y=1
    else
        y=2
    fi
    python -m m x=$x y=$y"""
    script = read_script(text)
    assert script.words == ["x=2", "y=1"]
    assert script.unsure == ["if [ -f somewhere ]; then"]


def test_ray_job_submit_is_looked_through() -> None:
    script = read_script("ray job submit --runtime-env=x.yaml \\\n -- python3 -m recipe.dapo.main_dapo a=1")
    assert (script.module, script.words) == ("recipe.dapo.main_dapo", ["a=1"])
