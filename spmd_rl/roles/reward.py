"""The reward role: replies become scores, by functions in worker processes on the ranks that collect replies."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedTokenizerBase

from spmd_rl.data.batch import Batch
from spmd_rl.data.prompts import Prompt
from spmd_rl.rewards.scorer import Completion, Scored, Scorer

COUNTED = ("replies", "errors", "timeouts")


class Reward:
    """Decodes a rank's replies and scores them, one whole group at a time."""

    def __init__(self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> None:
        self.scorer, self.tokenizer = scorer, tokenizer
        self._counted: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """The functions, in the config's order."""
        return self.scorer.names

    def score(self, batch: Batch, prompts: Sequence[Prompt], n: int) -> Batch:
        """Add `score`, `reward/<function>` and `acc` [N], and the objects `text` and `error`.

        `prompts` are this rank's own, in the order of the batch's groups of n rows.
        """
        replies = [row.tolist() for row in batch["responses"].rows()]
        texts = self.tokenizer.batch_decode(replies, skip_special_tokens=True) if replies else []
        samples = batch["sample"].tolist()
        groups = [
            [
                Completion(prompt.row, prompt.uid, samples[i], prompt.text, texts[i], replies[i])
                for i in range(g * n, (g + 1) * n)
            ]
            for g, prompt in enumerate(prompts if len(batch) else [])
        ]
        scored = [s for group in self.scorer.score(groups) for s in group]
        batch["score"] = torch.tensor([s.score for s in scored], dtype=torch.float32)
        for name in self.scorer.names:
            batch[f"reward/{name}"] = torch.tensor([s.parts.get(name, 0.0) for s in scored], dtype=torch.float32)
        batch["acc"] = torch.tensor([_accuracy(s) for s in scored], dtype=torch.float32)
        rows = [c.row for group in groups for c in group]
        batch["prompt"] = [c.prompt_text for group in groups for c in group]
        batch["data_source"] = [row.data_source for row in rows]
        batch["ground_truth"] = [row.ground_truth for row in rows]
        batch["text"] = texts
        batch["error"] = [s.error for s in scored]
        batch["prediction"] = [s.extra.get("pred") for s in scored]
        return batch

    def counts(self, group: ProcessGroup) -> dict[str, float]:
        """Since the last call, over all ranks: `reward/replies`, of these the failed ones `reward/errors`, and
        `reward/timeouts`."""
        now = Counter(self.scorer.stats)
        fresh = torch.tensor([float(now[k] - self._counted[k]) for k in COUNTED])
        self._counted = now
        dist.all_reduce(fresh, group=group)
        return {f"reward/{name}": value for name, value in zip(COUNTED, fresh.tolist(), strict=True)}


def _accuracy(scored: Scored) -> float:
    """The function's own `acc`, else the score itself without the over-long penalty (as verl reads it)."""
    penalty = 0.0 if scored.error else scored.extra.get("overlong_reward", 0.0)
    return float(scored.extra.get("acc", scored.score - penalty))
