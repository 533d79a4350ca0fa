"""Plain log-probabilities of given completions under a model: padded rows, and all logits in memory.

`hacrl.decoder.scoring` is tested against this module, which also runs where the fast one cannot: see `fast`.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hacrl.decoder.packing import Texts
from hacrl.decoder.scoring import TokenLogprobs


def pad(texts: Texts, pad_id: int, device: torch.device, left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, padded on the left so that all texts end together, or on the right."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    whole = partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
    ids, mask = whole(rows, padding_value=pad_id), whole([torch.ones_like(row) for row in rows])
    return ids.to(device), mask.to(device)


def completion_logprobs(
    model: nn.Module, prompts: Texts, completions: Texts,
    temperature: float, pad_id: int, entropy_gradient: bool = False,
) -> TokenLogprobs:  # fmt: skip
    """log p(token | prompt, tokens before it) at the given temperature, for N completions.

    Prompts are padded on the left and completions on the right, so that all completions begin at the
    same column and only their positions go through the vocabulary projection.
    """
    device = next(model.parameters()).device
    ids_NL, prompt_mask_NL = pad(prompts, pad_id, device, left=True)
    ids_NT, mask_NT = pad(completions, pad_id, device, left=False)
    attention_NS, mask_NT = torch.cat([prompt_mask_NL, mask_NT], dim=1), mask_NT.bool()
    logits_NTV = model(
        input_ids=torch.cat([ids_NL, ids_NT], dim=1),
        attention_mask=attention_NS,
        position_ids=(attention_NS.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=ids_NT.shape[1] + 1,
    ).logits[:, :-1]
    logits_NTV = logits_NTV.to(torch.promote_types(logits_NTV.dtype, torch.float32))
    logp_NTV = (logits_NTV / temperature).log_softmax(-1)
    logp_NT = logp_NTV.gather(-1, ids_NT[..., None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_NT = -(logp_NTV.exp() * logp_NTV).sum(-1)
    return TokenLogprobs(torch.where(mask_NT, logp_NT, 0.0), mask_NT, entropy_NT * mask_NT)
