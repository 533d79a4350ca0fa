"""Chooses the engine that samples from a policy; `GenerateEngine` works with any model, and others are faster."""

from contextlib import suppress
from os import environ
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder.packing import Texts
from hacrl.decoder.plain import pad
from hacrl.decoder.policy import Policy
from hacrl.errors import UserError
from hacrl.rollouts.engine import (
    Engine,
    LocalEngine,
    SamplingParams,
    choose_tokens,
    cut_off,
    require_finite,
    uniform_numbers,
)
from hacrl.rollouts.native import NativeEngine
from hacrl.rollouts.rollout import Completion

CUDA_ENGINE = "HACRL_CUDA_ENGINE"
"""Environment variable that chooses the engine on CUDA: `paged`, or `graphed`, whose rows wait for the longest."""


def engine_of(policy: Policy, tokenizer: Tokenizer) -> Engine:
    """Return the fastest engine for this policy on its device; `generate` if the decoder cannot drive the model."""
    on_gpu = next(policy.model.parameters()).device.type == "cuda"
    common: Any = (tokenizer, policy.stop_ids, policy.config.rows_at_once(on_gpu), f"Agent {policy.config.id}")
    if policy.backbone is None:
        return GenerateEngine(policy.model, *common)
    if on_gpu:
        with suppress(ImportError):  # its kernels need Triton
            engine: Engine = cuda_engine()(policy.backbone, *common)
            return engine
    return NativeEngine(policy.backbone, *common)


def cuda_engine() -> Any:
    """The class of the engine that samples on CUDA."""
    chosen = environ.get(CUDA_ENGINE, "paged")
    if chosen == "graphed":
        from hacrl.rollouts.graphed import GraphedEngine

        return GraphedEngine
    if chosen != "paged":
        raise UserError(f"{CUDA_ENGINE}={chosen}: unknown engine; choose paged or graphed.")
    from hacrl.rollouts.paged import PagedEngine

    return PagedEngine


class GenerateEngine(LocalEngine):
    """Samples with transformers' `generate`: for models that the native engine cannot drive, and to compare with it."""

    def __init__(self, model: Any, *common: Any) -> None:
        super().__init__(*common)
        self.model = model

    def _sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]:
        G = params.num_generations
        rows = list(range(len(prompts) * G))
        completions: list[Completion] = []
        for start in range(0, len(rows), self.batch_size):
            completions += self._generate(prompts, rows[start : start + self.batch_size], params, seed)
            self._count(len(completions) - start)
        return [completions[i * G : (i + 1) * G] for i in range(len(prompts))]

    def _generate(self, prompts: Texts, rows: list[int], params: SamplingParams, seed: int) -> list[Completion]:
        model, T, pad_id = self.model, params.max_completion_length, self.stop_ids[0]
        device = next(model.parameters()).device
        ids_BL, mask_BL = pad([prompts[row // params.num_generations] for row in rows], pad_id, device, left=True)
        chooser = Chooser(uniform_numbers(rows, T, seed).to(device), params)
        config = GenerationConfig(do_sample=False, max_new_tokens=T, eos_token_id=self.stop_ids, pad_token_id=pad_id)
        # Replaces the model's own generation config, whose penalties and other options would change the distribution.
        published, model.generation_config = model.generation_config, config
        try:
            choosers = LogitsProcessorList([chooser])
            generated_BS = model.generate(input_ids=ids_BL, attention_mask=mask_BL, logits_processor=choosers)
        finally:
            model.generation_config = published
        sampled = zip(generated_BS[:, ids_BL.shape[1] :].tolist(), torch.stack(chooser.logps, 1).tolist(), strict=True)
        return [cut_off(self.tokenizer, tokens, logps, self.stop_ids, params.stop) for tokens, logps in sampled]


class Chooser(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that chooses each token with its own random numbers and leaves `generate` no other choice."""

    def __init__(self, uniform_BT: Tensor, params: SamplingParams) -> None:
        self.uniform_BT, self.params, self.logps = uniform_BT, params, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        t = len(self.logps)
        logits_BV = scores.float() if t else require_finite(scores.float())
        token_B, logp_B = choose_tokens(logits_BV, self.params, self.uniform_BT[:, t])
        self.logps.append(logp_B.float())
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B[:, None], 0.0)
