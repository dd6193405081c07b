"""`spmd-rl plan`: what it prints and writes, and its exit codes."""

import importlib.util
import json
from pathlib import Path

import pytest

from spmd_rl.topology.command import main, parse_options
from spmd_rl.topology.shape import shipped

ARGV = ["model.shape=qwen3-8b", "cluster.nodes=2", "cluster.gpus_per_node=8", "actor.engine.fsdp.ulysses_size=2"]
PLANS = Path(__file__).parents[2] / "docs" / "plans"


def out(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(list(argv)) == code
    return capsys.readouterr().out


def test_the_view_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, *ARGV)
    for part in (
        "POOLS",
        "LAYOUTS",
        "RANKS",
        "PHASES OF A STEP",
        "PROCESS GROUPS",
        "TRAFFIC",
        "lower bound",
        "head-room",
    ):
        assert part in text
    assert "  rank 5: actor fsdp=5 dp=2 sp=1 | rollout dp=5\n" in text


def test_one_ranks_story(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, *ARGV, "--rank", "5")
    assert "rank 5: node0, local rank 5 (GPU 5); in pool 'global' it is r = 5 of 16" in text
    assert "dp = r // 2 = 2  sp = r % 2 = 1" in text
    assert "actor/sp: 4-5" in text
    assert main([*ARGV, "--rank", "16"]) == 2
    assert "--rank 16: the job has ranks 0..15" in capsys.readouterr().err


def test_json_holds_the_whole_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = json.loads(out(capsys, *ARGV, "--json"))
    assert plan["world_size"] == 16
    assert [role["role"] for role in plan["roles"]] == ["actor", "rollout"]
    sp = next(g for g in plan["process_groups"] if g["name"] == "actor/sp")
    assert sp["members"] == [[i, i + 1] for i in range(0, 16, 2)]
    assert main([*ARGV, "--json", str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    assert main([*ARGV, "--html", str(tmp_path / "no" / "plan.html")]) == 2


def test_suggestions_fit_and_the_others_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, *ARGV[:3], "--suggest")
    fits, others = text.split("THE OTHERS")
    assert "actor.engine.fsdp.ulysses_size=4" in fits
    assert "as configured" in fits
    assert "actor.engine.gradient_checkpointing=false" in others
    assert "memory: update on pool 'global' needs" in others


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--html"], "--html needs a value"),
        (["--rank", "five"], "--rank five is not a rank's number"),
        (
            ["--drawing"],
            "unknown option --drawing; options are --json [FILE], --html FILE, --rank N, --suggest, --verify,",
        ),
        (["actor.engine.fsdp.fsdp_sice=2"], "fsdp_size"),
        ([*ARGV, "--rank", "99"], "--rank 99: the job has ranks 0..15"),
    ],
)
def test_wrong_words_end_with_code_2(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")


def test_what_cannot_run_is_an_impossible_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, "actor.engine.fsdp.fsdp_size=3"]) == 2
    assert capsys.readouterr().err.startswith("impossible plan:\n  - actor.engine.fsdp.fsdp_size=3 does not divide")


def test_options_are_told_from_overrides() -> None:
    options, rest = parse_options(["--json", "a=1", "--html=x.html", "b=2", "--rank", "3", "--suggest"])
    assert (options.json, options.html, options.rank, options.suggest) == ("-", "x.html", 3, True)
    assert rest == ["a=1", "b=2"]


def test_verify_runs_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, "--verify"]) == 0
    assert "16 ranks" in capfd.readouterr().out


@pytest.mark.parametrize("shape", shipped())
def test_every_shipped_shape_has_a_preset(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    preset = Path(__file__).parents[2] / "configs" / "model" / f"{shape}.yaml"
    assert preset.exists() or shape == "smollm2-135m"


@pytest.mark.parametrize("name", ["fsdp8", "megatron_tp2_pp2_dp4", "pools_uneven"])
def test_the_pages_in_the_docs_are_what_the_tool_makes_now(name: str) -> None:
    spec = importlib.util.spec_from_file_location("make_plans", PLANS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    text, html = make.render(name)
    assert (PLANS / f"{name}.md").read_text() == text
    assert (PLANS / f"{name}.html").read_text() == html
    assert make.pools_page() == (PLANS.parent / "pools.md").read_text()
