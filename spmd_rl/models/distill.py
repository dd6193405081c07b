"""On-policy distillation: what a teacher thinks of each token, and the reverse KL of the student to it.

Agarwal et al., On-Policy Distillation of Language Models, arXiv 2306.13649: KL(student || teacher) on the student's own
samples. With the teacher's k likeliest tokens only, all others count as one: by the data-processing inequality that is
at most the whole KL, and it is the whole when k is the vocabulary.

Shapes: T tokens, C tokens of a chunk, H hidden size, V vocabulary, K tokens of the teacher.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def likeliest(
    hidden_TH: Tensor, weight_VH: Tensor, top_k: int, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """(ids [T, K], log-probs [T, K]) of the `top_k` likeliest tokens (-1: all, in order of their ids)."""
    ids, found = [], []
    for part in hidden_TH.split(chunk) if len(hidden_TH) else [hidden_TH]:
        logp_CV = torch.log_softmax((part @ weight_VH.T).float() / temperature, -1)
        if top_k < 0:
            values, places = logp_CV, torch.arange(logp_CV.shape[1], device=part.device).expand_as(logp_CV)
        else:
            values, places = logp_CV.topk(min(top_k, logp_CV.shape[1]), dim=-1)
        ids.append(places)
        found.append(values)
    return torch.cat(ids), torch.cat(found)


def reverse_kl(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    ids_TK: Tensor,
    teacher_TK: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """KL(student || teacher) over the teacher's tokens and the rest of the vocabulary as one: [T], differentiable.

    Logits exist for `chunk` tokens at a time, and again in the backward.
    """
    parts = [
        checkpoint(_chunk_kl, hidden_TH[at], weight_VH, ids_TK[at], teacher_TK[at], temperature, use_reentrant=False)
        for at in (slice(start, start + chunk) for start in range(0, max(len(hidden_TH), 1), chunk))
    ]
    return torch.cat(parts)


def _chunk_kl(hidden_CH: Tensor, weight_VH: Tensor, ids_CK: Tensor, teacher_CK: Tensor, temperature: float) -> Tensor:
    logits_CV = (hidden_CH @ weight_VH.T).to(torch.promote_types(hidden_CH.dtype, torch.float32)) / temperature
    student_CK = logits_CV.gather(1, ids_CK) - logits_CV.logsumexp(-1, keepdim=True)
    kl_C = (student_CK.exp() * (student_CK - teacher_CK)).sum(-1)
    if ids_CK.shape[1] == logits_CV.shape[1]:
        return kl_C
    rest_student_C, rest_teacher_C = (_rest(x) for x in (student_CK, teacher_CK))
    return kl_C + rest_student_C.exp() * (rest_student_C - rest_teacher_C)


def _rest(logp_CK: Tensor) -> Tensor:
    """log(1 - sum of the probabilities), kept away from log 0."""
    return torch.log((1 - logp_CK.exp().sum(-1)).clamp_min(1e-8))
