"""What a user gets wrong is said once, whatever the number of ranks."""

from tests.trainer.launched import new_mark, torchrun


def test_a_mistake_is_printed_once_and_ends_all_ranks() -> None:
    with torchrun(2, "-m", "spmd_rl.train", "experiment=tiny", "trainer.sead=1", mark=new_mark()) as process:
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert said.count("error: unknown key trainer.sead; did you mean") == 1, said
    assert "exitcode  : 2 " in said
    assert 'spmd_rl/train.py", line' not in said, said
