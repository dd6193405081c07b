"""Scores of a reward model against transformers' own forward, and distillation from a teacher."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from spmd_rl.models.loading import resolve
from spmd_rl.runtime.remote import here
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import train, with_trainer
from tests.world import Worlds

ENGINE = "{gradient_checkpointing: false, max_tokens_per_micro_batch: 2048}"
MODEL = ["reward.model.enable=true", f"reward.model.engine={ENGINE}", "reward.model.weight=0.5", "rollout.n=2"]
CLASSIFIER = [*MODEL, "reward.model.path=tiny-classifier"]
JUDGE = [
    *MODEL,
    "reward.model.kind=judge",
    "reward.model.path=tiny-digits",
    "reward.model.question='{prompt} is it {reply}? ({ground_truth})'",
    "reward.model.answers=['7y', n]",
]
TEACHER = [
    "teacher.enable=true",
    f"teacher.engine={ENGINE}",
    "teacher.path=tiny-digits",
    "teacher.reward_weight=0",
    "model.random_init=true",
    "model.seed=5",
    "rollout.n=4",
    "actor.optim.lr=5e-3",
]


def scored(trainer: Trainer) -> list[dict[str, Any]]:
    """The first step's replies."""
    batch = here(here(trainer.produce(1)).batch)  # type: ignore[union-attr]
    prompts = {p.uid: p.row for p in (trainer.prompts.rows.at(uid) for uid in set(batch["uid"].tolist()))}
    functions = [name for name in map(str, batch.rows.keys()) if name.startswith("reward/") and name != "reward/model"]
    return [
        {
            "chat": prompts[int(batch["uid"][i])].chat,
            "truth": prompts[int(batch["uid"][i])].ground_truth,
            "text": batch["text"][i],
            "model": float(batch["reward/model"][i]),
            "score": float(batch["score"][i]),
            "functions": sum(float(batch[name][i]) for name in functions),
        }
        for i in range(len(batch))
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_classifiers_score(worlds: Worlds, size: int) -> None:
    folder = resolve("tiny-classifier")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [row for rank in worlds[size].run(with_trainer, scored, CLASSIFIER) for row in rank]
    assert len(rows) == 8
    for row in rows:
        chat = [*row["chat"], {"role": "assistant", "content": row["text"]}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            score = model.model(torch.tensor([ids])).last_hidden_state[0, -1] @ model.score.weight[0]
        assert row["model"] == pytest.approx(float(score), abs=1e-4)
        assert row["score"] == pytest.approx(row["functions"] + 0.5 * row["model"], abs=1e-5)
    assert len({round(row["model"], 4) for row in rows}) > 4


def test_a_judges_probability(worlds: Worlds) -> None:
    folder = resolve("tiny-digits")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (rows,) = worlds[1].run(with_trainer, scored, JUDGE)
    for row in rows:
        text = f"{row['chat'][-1]['content']} is it {row['text']}? ({row['truth']})"
        chat = [{"role": "user", "content": text}]
        read = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        log_probs = []
        for answer in ("7y", "n"):
            ids, more = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (read, answer))
            with torch.no_grad():
                logp = torch.log_softmax(model(torch.tensor([ids + more])).logits[0].float(), -1)
            log_probs.append(sum(float(logp[len(ids) + i - 1, t]) for i, t in enumerate(more)))
        good, bad = (torch.tensor(x).exp() for x in log_probs)
        assert row["model"] == pytest.approx(float(good / (good + bad)), abs=1e-4)


def test_a_causal_model_is_no_classifier(worlds: Worlds) -> None:
    wrong = [*MODEL, "reward.model.path=tiny-digits"]
    with pytest.raises(AssertionError, match="so it is no sequence classifier"):
        worlds[1].run(train, wrong)


@pytest.mark.parametrize("top_k", [0, 8, -1])
def test_the_student_comes_nearer_to_its_teacher(worlds: Worlds, top_k: int) -> None:
    name = "actor/teacher_kl" if top_k == 0 else "actor/teacher_kl_loss"
    steps = worlds[2].run(train, [*TEACHER, f"teacher.top_k={top_k}"], 12)[0]
    first, last = (sum(m[name] for m in some) / 3 for some in (steps[:3], steps[-3:]))
    assert first > 0
    assert last < 0.8 * first


def test_a_teacher_of_other_words_is_refused(worlds: Worlds) -> None:
    with pytest.raises(AssertionError, match="has another vocabulary"):
        worlds[1].run(train, [*TEACHER, "teacher.path=smollm2-135m-instruct"])
