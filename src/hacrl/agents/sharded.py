"""The model of an agent in several processes. Each holds a part of it, and the whole model while it samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hacrl.agents.loading import limits_of, load_model, load_tokenizer, resolve_device
from hacrl.config import AgentConfig
from hacrl.decoder.policy import Policy, Score
from hacrl.learners.lora import with_same_weights
from hacrl.learners.ranks import Ranks
from hacrl.learners.weights import ShardedWeights, Weights, shard, whole
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.engines import engine_of
from hacrl.rollouts.reader import Reader
from hacrl.rollouts.rollout import Completion, Rollout
from hacrl.rollouts.vllm import Sampler
from hacrl.seeding import derive_seed
from hacrl.sources.policy import PolicySource
from hacrl.tasks.problem import Problem


class ShardedModel:
    """The part of an agent's model that one rank holds. An agent uses it in place of `AgentModel`."""

    def __init__(self, config: AgentConfig, index: int, seed: int, ranks: Ranks, entropy_gradient: bool) -> None:
        self.config, self.index, self.ranks = config, index, ranks
        self.seed = derive_seed(seed, ranks.rank)
        self.device = resolve_device(config.device)
        self.tokenizer = load_tokenizer(config)
        self._on_cpu = config.model_copy(update={"device": "cpu"})
        self.model = load_model(self._on_cpu)
        self.reader = Reader(config, self.tokenizer, *limits_of(self.model, self.tokenizer, config.id))
        self._whole = with_same_weights(self.model)
        self.policy = self._sharded(self.model, entropy_gradient)
        empty(self._whole)

    def _sharded(self, model: nn.Module, entropy_gradient: bool = False) -> Policy:
        policy = Policy(model, self.config, self.reader.stop_ids, lean=False, entropy_gradient=entropy_gradient)
        shard(policy, self.ranks, self.device)
        return policy

    def weights(self) -> Weights:
        return ShardedWeights(self.model)

    def source(self, version: Callable[[], int], sampler: Sampler | None = None) -> PolicySource:
        engine = GatheredEngine(self.config, self.model, self._whole, self.reader, self.device)
        return RankSource(self.ranks, self.config, self.index, self.seed, self.reader, engine, version)

    def starting_policy(self) -> Score:
        return self._sharded(load_model(self._on_cpu).requires_grad_(False)).score

    def save(self, folder: Path, weights: Weights) -> None:
        state = weights.state_dict(self.model)
        if self.ranks.rank == 0:
            self._whole.save_pretrained(folder, state_dict=state)
            self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path, weights: Weights) -> None:
        weights.load_state_dict(self.model, load_model(self._on_cpu, folder).state_dict())


class RankSource(PolicySource):
    """The source of one rank, which samples for its share of the problems."""

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self.ranks = ranks

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        own = range(len(problems))[self.ranks.rank :: self.ranks.size]
        rollouts = super().sample([problems[i] for i in own], step, sampling_round)
        for rollout in rollouts:
            rollout.prompt_index = own[rollout.prompt_index]
        return rollouts

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        return super().answer(problems[self.ranks.rank :: self.ranks.size], sampled)


class GatheredEngine:
    """Samples from the whole model, whose weights are in this process only while it samples."""

    def __init__(
        self, config: AgentConfig, sharded: nn.Module, model: Any, reader: Reader, device: torch.device
    ) -> None:
        self.config, self.sharded, self.model, self.reader, self.device = config, sharded, model, reader, device
        self.policy: Policy | None = None

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        with self._gathered():
            return self.engine.sample(prompts, params, seed) if prompts else []

    def release(self) -> None:
        if self.policy is not None:
            self.engine.release()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        dtype = getattr(torch, self.config.dtype)
        for parameter, shards in zip(self.model.parameters(), self.sharded.parameters(), strict=True):
            parameter.data = whole(shards).to(dtype)
        if self.policy is None:
            self.model.to(self.device).requires_grad_(False)
            self.policy = Policy(self.model, self.config, self.reader.stop_ids)
            self.engine = engine_of(self.policy, self.reader.tokenizer)
        elif self.policy.backbone is not None:
            self.policy.backbone.moved += 1
        try:
            yield
        finally:
            empty(self.model)
            if self.policy.backbone is not None and self.policy.backbone.lean is not None:
                for joined in self.policy.backbone.lean.joined:
                    joined.release()


def empty(model: nn.Module) -> None:
    """Free the memory of a model's weights."""
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
