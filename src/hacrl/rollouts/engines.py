"""Chooses the engine that samples from a policy."""

from transformers import PreTrainedTokenizerBase

from hacrl.decoder.layers import has_kernels
from hacrl.decoder.policy import Policy
from hacrl.rollouts.engine import Engine
from hacrl.rollouts.generate import GenerateEngine
from hacrl.rollouts.native import NativeEngine


def engine_of(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Return the fastest engine for this policy on its device; `generate` if the decoder cannot drive the model."""
    batch_size = policy.config.sampling_batch_size
    if policy.backbone is None:
        return GenerateEngine(policy.model, tokenizer, policy.stop_ids, batch_size)
    if policy.backbone.device.type == "cuda" and has_kernels():
        from hacrl.rollouts.graphed import GraphedEngine

        return GraphedEngine(policy.backbone, tokenizer, policy.stop_ids, batch_size)
    return NativeEngine(policy.backbone, tokenizer, policy.stop_ids, batch_size)
