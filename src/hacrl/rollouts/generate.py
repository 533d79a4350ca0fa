"""Samples with transformers' `generate`: for models that the native engine cannot drive, and to compare with it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from hacrl.decoder.padding import pad_left
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.native import require_finite, uniform_numbers
from hacrl.rollouts.rollout import Completion, FinishReason
from hacrl.rollouts.sampling import choose_tokens, length_at_stop


class GenerateEngine:
    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], batch_size: int
    ) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.stop_ids = list(stop_ids)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        G = params.num_generations
        rows = list(range(len(prompts) * G))
        completions: list[Completion] = []
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            completions += self._generate([prompts[row // G] for row in batch], batch, params, seed)
        return [completions[i * G : (i + 1) * G] for i in range(len(prompts))]

    def _generate(
        self, prompts: Sequence[Sequence[int]], rows: list[int], params: SamplingParams, seed: int
    ) -> list[Completion]:
        model: Any = self.model
        device = next(model.parameters()).device
        ids_BL, mask_BL = pad_left(prompts, max(map(len, prompts)), self.stop_ids[0], device)
        chooser = Chooser(uniform_numbers(rows, params.max_completion_length, seed).to(device), params)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=params.max_completion_length,
            eos_token_id=self.stop_ids,
            pad_token_id=self.stop_ids[0],
        )
        # Replaces the model's own generation config, whose penalties and other options would change the distribution.
        published, model.generation_config = model.generation_config, config
        try:
            generated_BS = model.generate(
                input_ids=ids_BL, attention_mask=mask_BL, logits_processor=LogitsProcessorList([chooser])
            )
        finally:
            model.generation_config = published
        logps_BT = torch.stack(chooser.logps, dim=1).tolist()
        completions = []
        for tokens, logps in zip(generated_BS[:, ids_BL.shape[1] :].tolist(), logps_BT, strict=True):
            ends = [t for t, token in enumerate(tokens) if token in self.stop_ids]
            length = ends[0] + 1 if ends else len(tokens)
            stop = length_at_stop(self.tokenizer, tokens[:length], 0, params.stop) if params.stop else None
            if stop is not None and not (ends and stop == length):
                completions.append(Completion(tokens[:stop], logps[:stop], "stop", False))
            else:
                reason: FinishReason = "stop" if ends else "length"
                completions.append(Completion(tokens[:length], logps[:length], reason, bool(ends)))
        return completions


class Chooser(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that chooses each token with its own random numbers and leaves `generate` no other choice."""

    def __init__(self, uniform_BT: Tensor, params: SamplingParams) -> None:
        self.uniform_BT, self.params = uniform_BT, params
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        t = len(self.logps)
        logits_BV = scores.float() if t else require_finite(scores.float())
        token_B, logp_B = choose_tokens(logits_BV, self.params, self.uniform_BT[:, t])
        self.logps.append(logp_B.float())
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B[:, None], 0.0)
