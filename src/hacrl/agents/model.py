"""The loaded model of one agent, which its source and its learner share."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hacrl.agents.loading import (
    Bases,
    limits_of,
    load_base,
    load_model,
    load_model_config,
    load_tokenizer,
    positions_of,
    source_of,
)
from hacrl.config import AgentConfig
from hacrl.decoder.policy import Policy, Score
from hacrl.errors import UserError
from hacrl.learners.lora import Adapter, base_model, with_same_weights
from hacrl.learners.weights import MasterWeights, Weights, cast_parameters
from hacrl.rollouts.engine import Engine
from hacrl.rollouts.engines import engine_of
from hacrl.rollouts.reader import Reader
from hacrl.rollouts.vllm import VLLM, Sampler, VLLMEngine, require_vllm
from hacrl.seeding import ADAPTER, derive_seed
from hacrl.signs import doing
from hacrl.sources.policy import PolicySource


def vllm_of(config: AgentConfig, beside: bool = False) -> VLLM:
    """Start vLLM with an agent's model, in this process; `beside`: the agent is in this process too."""
    check_vllm(config)
    length = config.max_prompt_length + config.max_completion_length
    limits = length, config.rows_at_once(), config.temperature
    with doing(f"starting vLLM with {config.model}"):
        try:
            return VLLM(base_model(source_of(config)), config.dtype, *limits, config.vllm, config.lora, beside)
        except ValueError as error:  # an unknown option or kind of model, or too little memory
            raise UserError(f"agents.{config.id}: vLLM refuses to start: {' '.join(str(error).split())}") from error


def check_vllm(config: AgentConfig) -> None:
    """Raise UserError if vLLM cannot run here, or cannot take texts as long as the settings allow. Reads no weights."""
    require_vllm()
    positions, wanted = positions_of(load_model_config(config)), config.max_prompt_length + config.max_completion_length
    if positions is not None and wanted > positions:
        raise UserError(
            f"agents.{config.id}: max_prompt_length ({config.max_prompt_length}) and max_completion_length "
            f"({config.max_completion_length}) allow {wanted} tokens, but {config.model} has {positions} positions, "
            "beyond which vLLM does not go. Lower one of them."
        )


class AgentModel:
    """Model, tokenizer and, with `lora`, adapters of an agent, in this process."""

    def __init__(
        self,
        config: AgentConfig,
        index: int,
        seed: int,
        bases: Bases | None = None,
        entropy_gradient: bool = False,
    ) -> None:
        """`bases` holds the models that agents with adapters share in this process."""
        self.config, self.index, self.seed = config, index, seed
        self.adapter: Adapter | None = None
        self._base: nn.Module | None = None
        with doing(f"loading {config.model}"):
            self.tokenizer = load_tokenizer(config)
            if config.lora is None:
                self.model = load_model(config)
            else:
                self._base = load_base(config, {} if bases is None else bases)
                self.model = with_same_weights(self._base)
                self.adapter = self._adapter(self.model)
        self.device = next(self.model.parameters()).device
        self.reader = Reader(config, self.tokenizer, *limits_of(self.model, self.tokenizer, config.id))
        self.policy = Policy(self.model, config, self.reader.stop_ids, entropy_gradient=entropy_gradient)

    def _adapter(self, model: nn.Module) -> Adapter:
        return Adapter(model, self.config, source_of(self.config), derive_seed(self.seed, ADAPTER, self.index))

    def weights(self) -> Weights:
        """Return the weights to be trained."""
        config, policy = self.config, self.policy
        gradient_dtype = getattr(torch, config.gradient_dtype)
        return MasterWeights(self.model, policy.dtype, config.optimizer_offload, gradient_dtype, policy.captures)

    def freeze(self) -> None:
        """Make this a model that only answers: no gradients, and all weights in the dtype it computes in."""
        cast_parameters(self.model.requires_grad_(False), self.policy.dtype)

    def source(self, version: Callable[[], int] = lambda: 0, sampler: Sampler | None = None) -> PolicySource:
        """A source that samples from the model. `version` counts updates; `sampler` is a vLLM that runs elsewhere."""
        engine: Engine
        if self.config.engine == "vllm":
            vllm = sampler or vllm_of(self.config, beside=True)
            engine = VLLMEngine(vllm, self.model, self.tokenizer, self.reader.stop_ids, version)
        else:
            engine = engine_of(self.policy, self.tokenizer)
        return PolicySource(self.config, self.index, self.seed, self.reader, engine, version)

    def starting_policy(self) -> Score:
        """Return the scoring function of the starting model, which is never updated."""
        config = self.config
        if self._base is None:
            model = load_model(config)
        else:
            model = with_same_weights(self._base)
            if base_model(source_of(config)) != source_of(config):
                self._adapter(model)  # training continues from saved adapters
        start = Policy(model.requires_grad_(False), config, self.reader.stop_ids)
        cast_parameters(start.model, self.policy.dtype)
        return start.score

    def save(self, folder: Path, weights: Weights) -> None:
        if self.adapter is None:
            self.model.save_pretrained(folder, state_dict=weights.state_dict(self.model))
        else:
            self.adapter.save(folder, weights)
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path, weights: Weights) -> None:
        if self.adapter is None:
            weights.load_state_dict(self.model, load_model(self.config, folder).state_dict())
        else:
            self.adapter.load(folder, weights)
