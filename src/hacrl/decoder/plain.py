"""Plain log-probabilities of given completions under a model: padded rows, and all logits in memory.

`hacrl.decoder.scoring` is tested against this module, which also runs where the fast one cannot: see `fast`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from hacrl.decoder.padding import pad_left
from hacrl.decoder.scoring import TokenLogprobs


def completion_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    pad_id: int,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """log p(token | prompt, tokens before it) at the given temperature, for N completions.

    Prompts are padded on the left and completions on the right, so that all completions begin at the
    same column and only their positions go through the vocabulary projection.
    """
    device = next(model.parameters()).device
    T = max(len(completion) for completion in completions)
    ids_NL, prompt_mask_NL = pad_left(prompts, max(len(p) for p in prompts), pad_id, device)
    ids_NT = torch.full((len(completions), T), pad_id, dtype=torch.long)
    mask_NT = torch.zeros(len(completions), T, dtype=torch.bool)
    for row, completion in enumerate(completions):
        ids_NT[row, : len(completion)] = torch.tensor(completion, dtype=torch.long)
        mask_NT[row, : len(completion)] = True
    ids_NT, mask_NT = ids_NT.to(device), mask_NT.to(device)

    attention_NS = torch.cat([prompt_mask_NL, mask_NT.long()], dim=1)
    logits_NTV = model(
        input_ids=torch.cat([ids_NL, ids_NT], dim=1),
        attention_mask=attention_NS,
        position_ids=(attention_NS.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=T + 1,
    ).logits[:, :-1]
    logits_NTV = logits_NTV.to(torch.promote_types(logits_NTV.dtype, torch.float32))
    logp_NTV = (logits_NTV / temperature).log_softmax(-1)
    logp_NT = logp_NTV.gather(-1, ids_NT[..., None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_NT = -(logp_NTV.exp() * logp_NTV).sum(-1)
    return TokenLogprobs(torch.where(mask_NT, logp_NT, 0.0), mask_NT, entropy_NT * mask_NT)


class PlainScorer:
    def __init__(self, model: nn.Module, pad_id: int, entropy_gradient: bool = False) -> None:
        self.model, self.pad_id, self.entropy_gradient = model, pad_id, entropy_gradient

    def __call__(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> TokenLogprobs:
        return completion_logprobs(self.model, prompts, completions, temperature, self.pad_id, self.entropy_gradient)
