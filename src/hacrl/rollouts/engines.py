"""Chooses the engine that samples from a policy."""

from contextlib import suppress

from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder.policy import Policy
from hacrl.rollouts.engine import Engine
from hacrl.rollouts.generate import GenerateEngine
from hacrl.rollouts.native import NativeEngine


def engine_of(policy: Policy, tokenizer: Tokenizer) -> Engine:
    """Return the fastest engine for this policy on its device; `generate` if the decoder cannot drive the model."""
    common = (tokenizer, policy.stop_ids, policy.config.sampling_batch_size)
    if policy.backbone is None:
        return GenerateEngine(policy.model, *common)
    if policy.backbone.device.type == "cuda":
        with suppress(ImportError):  # its kernels need Triton
            from hacrl.rollouts.graphed import GraphedEngine

            return GraphedEngine(policy.backbone, *common)
    return NativeEngine(policy.backbone, *common)
