"""The reward role with a model: replies become questions to a classifier or a judge, its answers become scores.

Questions are made where the replies are (their texts are there), and travel as token ids. A question is a row with the
columns that any model role reads: `prompts` is what the model has read when its answer counts, `responses` the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spmd_rl.config import Config, ConfigError
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.prompts import Prompt


@dataclass
class Classifier:
    """A sequence classifier's score at the last token of the conversation."""

    tokenizer: PreTrainedTokenizerBase
    column: str = "values"
    """What the model makes: a value for the token that would come next."""
    rows_each: int = 1
    """Questions a reply."""

    def ask(self, prompt: Prompt, reply: str) -> list[tuple[list[int], list[int]]]:
        """(what is read, the answer's place) of each question."""
        chat = [*prompt.row.chat, {"role": "assistant", "content": reply}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        return [(self.tokenizer(text, add_special_tokens=False)["input_ids"], [0])]

    def score(self, sums_QN: Tensor) -> Tensor:
        """[N] from the summed columns of each reply's questions [rows_each, N]."""
        return sums_QN[0]


@dataclass
class Judge:
    """A causal LM is asked whether the reply is good; its probability of the good answer against the bad one.

    Zhang et al., Generative Verifiers: Reward Modeling as Next-Token Prediction, arXiv 2408.15240.
    """

    tokenizer: PreTrainedTokenizerBase
    question: str
    answers: Sequence[str]
    column: str = "log_probs"
    rows_each: int = 2

    def ask(self, prompt: Prompt, reply: str) -> list[tuple[list[int], list[int]]]:
        last = prompt.row.chat[-1]["content"]
        known = {"prompt": last, "reply": reply, "ground_truth": prompt.row.ground_truth}
        text = self.question
        for name, value in known.items():
            text = text.replace("{" + name + "}", str(value))
        chat = [{"role": "user", "content": text}]
        read = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer([read, *self.answers], add_special_tokens=False)["input_ids"]
        return [(ids[0], answer) for answer in ids[1:]]

    def score(self, sums_QN: Tensor) -> Tensor:
        return torch.sigmoid(sums_QN[0] - sums_QN[1])


Questions = Classifier | Judge


def make_questions(config: Config, tokenizer: PreTrainedTokenizerBase) -> Questions:
    """As `reward.model` says. ConfigError where the tokenizer has no chat template."""
    model = config.reward.model
    if not tokenizer.chat_template:
        raise ConfigError(f"reward.model.path={model.path}: its tokenizer has no chat template to show replies with")
    if model.kind == "judge":
        return Judge(tokenizer, model.question, model.answers)
    return Classifier(tokenizer)


def questions(batch: Batch, prompts: Sequence[Prompt], n: int, kind: Questions, most: int) -> Batch:
    """The rows for the model; question q of the reply in row r is row r · rows_each + q.

    `prompts` are this rank's own, in the order of the batch's groups of n rows. Raises ConfigError for a question of
    more than `most` tokens.
    """
    asked = [pair for i, text in enumerate(batch["text"]) for pair in kind.ask(prompts[i // n], text)]
    longest = max((len(read) + len(answer) for read, answer in asked), default=0)
    if longest > most:
        raise ConfigError(
            f"a question to the reward model has {longest} tokens > reward.model.engine.max_tokens_per_micro_batch="
            f"{most}; raise it, or shorten data.max_response_length"
        )
    out = Batch.empty_like(len(asked))
    each = torch.arange(kind.rows_each).repeat(len(batch))
    out["row_id"] = batch["row_id"].repeat_interleave(kind.rows_each) * kind.rows_each + each
    out["uid"] = batch["uid"].repeat_interleave(kind.rows_each)
    for name, place in (("prompts", 0), ("responses", 1)):
        out[name] = Ragged.from_rows([torch.tensor(pair[place]) for pair in asked], torch.int64)
    out["response_mask"] = out["responses"].map(lambda x: torch.ones(len(x)))
    return out


def add_scores(batch: Batch, answers: Batch, kind: Questions, weight: float) -> None:
    """Write `reward/model` [N], and add `weight` times it to `score`. `answers` are in `row_id` order."""
    place = {int(row): i for i, row in enumerate(answers["row_id"].tolist())}
    sums = answers[kind.column].row_sums().float()
    at = [[place[row * kind.rows_each + q] for row in batch["row_id"].tolist()] for q in range(kind.rows_each)]
    found = kind.score(torch.stack([sums[rows] for rows in at])) if len(batch) else torch.zeros(0)
    batch["reward/model"] = found
    batch["score"] = batch["score"] + weight * found
