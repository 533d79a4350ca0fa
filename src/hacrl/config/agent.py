"""The settings of one agent: how its model is opened, prompted, sampled and updated."""

import os
from itertools import count
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hacrl.config.starting import agents_of
from hacrl.config.strict import Count, Few, Label, Length, Options, Size, Strict, written
from hacrl.errors import UserError, warn

SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""How terms of own rollouts are corrected for the sampler, by TRL's names."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM keeps room; adapters of a rank between two of them take that of the larger one."""
CORRECTION = "vllm_importance_sampling_"
RENAMED = (
    "`sampler_ratio_max: X` is now called `vllm_importance_sampling_clip_max: X`, with `vllm_importance_sampling_mode: "
    "token_truncate` and `vllm_importance_sampling_correction: true`. It is still read; please rename it."
)

MOST_COPIED = 1_000_000_000
"""Largest number of parameters of a model that is copied only to log the KL divergence to it."""


class LoraConfig(Strict):
    """LoRA: adapters beside a model's layers are trained in place of its weights."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The output of adapters is multiplied by alpha / r."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the layers that get adapters; default: all linear layers but the output projection."""


class ModelSettings(Strict):
    """How a model is opened, prompted and updated: in a run, and in a warm-up before it."""

    max_prompt_length: Length = 512
    """The longest prompt, in the agent's tokens; a longer one ends the run."""
    max_completion_length: Length = 256
    """In the agent's tokens; a longer one of another agent is dropped."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion, besides the model's end-of-turn tokens."""
    learning_rate: Annotated[float, Field(ge=0, le=10)] = 1e-6
    """Learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """`constant`; or `linear`, `cosine`: it falls to 0 at `max_steps`."""
    warmup_steps: Count = 0
    """Training steps over which the learning rate rises to its full value."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """AdamW's weight decay."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay rate of the mean of gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay rate of the mean of squared gradients."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1000)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """A larger gradient, own and foreign parts together, is scaled down to this norm."""
    lora: LoraConfig | None = None
    """Train adapters only. Agents in one process with the same model, dtype and device share the model's weights."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw`; or `adamw_8bit`: moments in 8 bits; needs bitsandbytes and CUDA."""
    optimizer_offload: bool = False
    """Keep float32 weights, gradients and moments in the computer's memory, and update weights there."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are added up; `bfloat16`, with dtype: bfloat16, takes 2 bytes a parameter less."""
    micro_batch_size: Size | None = None
    """Rollouts in one forward and backward pass; default: as many as fit into memory. Changes memory and speed only."""
    gradient_checkpointing: bool | None = None
    """Recompute activations inside layers instead of keeping them; default: if a rollout would not fit into memory."""
    sampling_batch_size: Size | None = None
    """Completions sampled at once, at most; default: 1024 with the built-in engine on a GPU, which samples fewer while
    memory is short; otherwise 512."""
    system_prompt: str | None = None
    """System message before every prompt that has none; it needs a chat template."""
    prompt_suffix: str = ""
    """Text added unchanged to the end of each prompt; in a chat, to the user's last message."""
    chat_template_kwargs: Options = {}
    """Options passed to the chat template, for example {enable_thinking: false}."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation. Weights and optimizer are always float32, because bfloat16 weights hardly move."""
    device: Annotated[str, written(r"^(auto|cpu|cuda(:[0-9]{1,3})?)$", "auto, cpu, cuda or cuda:NUMBER")] = "auto"
    """Device of the model; auto: the first GPU if there is one, else the CPU."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    fast: bool = True
    """False: use the plain implementation. It computes the same, and the fast one is tested against it."""


class ResourcesConfig(Strict):
    """Resources that a process takes from a Ray cluster."""

    num_cpus: Few = 1
    """CPU cores, and the number of torch's threads."""
    num_gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """GPUs; default: 0 for `device: cpu` or if the cluster has no GPU, else 1."""
    custom: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = {}
    """Custom resources that nodes were started with: `ray start --resources='{"big": 1}'`."""


class AgentResources(ResourcesConfig):
    """Resources that an agent takes from a Ray cluster; with `fsdp`, each of its processes takes them."""

    sampler: ResourcesConfig | None = None
    """Resources of a separate process for vLLM, with `engine: vllm`; null: vLLM runs in the agent's process."""


class Settings(ModelSettings):
    """Settings of an agent in a run. Set for the run, they hold for all agents; an agent may override them."""

    num_generations: Annotated[int, Field(ge=1, le=65_536)] = 8
    """G: completions sampled for each prompt."""
    temperature: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Temperature of sampling, and of the log-probabilities of learning."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the likeliest tokens with this total probability. Log-probabilities are taken before it."""
    top_k: Count = 0
    """Sample from the k most likely tokens only; 0: no limit."""
    num_iterations: Few = 1
    """Passes over the rollouts of a step."""
    mask_truncated_completions: bool = False
    """Leave cut-off completions out of the objective, not out of the baseline."""
    log_kl: bool | None = None
    """Log the KL divergence to the starting model even if beta is 0. This keeps a copy of its weights, except with
    lora; default: if the model has at most 1e9 parameters, or lora."""
    max_logprob_gap: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Largest mean difference, per token, between recorded and recomputed log-probabilities; beyond it the run ends."""
    recompute_logprobs: bool | None = None
    """Take old log-probabilities of own rollouts from the learner, not the sampler; default: if dtype is bfloat16, or
    with `vllm_importance_sampling_correction`."""
    engine: Literal["native", "vllm"] = "native"
    """`native` samples from the trained weights, `vllm` from a copy with vLLM."""
    vllm: Options = {}
    """Options passed to vllm.LLM, for example {gpu_memory_utilization: 0.4}."""
    vllm_importance_sampling_correction: bool | None = None
    """Multiply terms of own rollouts by the learner's probability over the sampler's; default: with `engine: vllm`."""
    vllm_importance_sampling_mode: SamplerCorrection = "sequence_mask"
    """Ratios of each `token` or of whole answers (`sequence`), cut at the bounds (`truncate`) or 0 beyond (`mask`)."""
    vllm_importance_sampling_clip_max: Annotated[float, Field(gt=0, le=1e6)] | None = 3.0
    """Upper bound of these ratios; null: none."""
    vllm_importance_sampling_clip_min: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Lower bound of these ratios; null: none."""
    offload_idle: bool = False
    """While the agent does not learn, keep its moments and float32 weights in the computer's memory, not on the GPU."""
    resources: AgentResources = AgentResources()
    """Resources that the agent takes from a Ray cluster, with `execution: ray`."""
    fsdp: Few = 1
    """Number of processes that divide weights, gradients and optimizer; with CUDA, a GPU each, from `device` on."""


class AgentConfig(Settings):
    """One agent: a model with its settings."""

    id: Label
    """Name of the agent in metrics, files and on the command line."""
    model: Annotated[str, Field(min_length=1)]
    """zoo:NAME, a local folder, or a Hugging Face hub id."""

    @model_validator(mode="after")
    def _possible_engine(self) -> Self:
        if self.engine == "vllm":
            if self.lora is not None and self.lora.r > VLLM_RANKS[-1]:
                raise ValueError(f"lora.r: vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, not {self.lora.r}")
            if (self.top_p < 1 or self.top_k) and self.temperature != 1:
                raise ValueError(
                    "engine: vllm reports log-probabilities before temperature or after top_p and top_k, and learning "
                    "needs those between; with top_p or top_k use temperature: 1, or engine: native"
                )
        elif self.resources.sampler is not None:
            raise ValueError("resources.sampler is the process of vLLM: add engine: vllm, or leave it out")
        return self

    @model_validator(mode="after")
    def _possible_correction(self) -> Self:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if self.corrects_sampler and not self.recomputes_logprobs:
            raise ValueError(f"{CORRECTION}correction needs the learner's own: leave recompute_logprobs out")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"{CORRECTION}clip_min ({low}) must be less than {CORRECTION}clip_max ({high})")
        if low is None and high is None and self.vllm_importance_sampling_mode.endswith("truncate"):
            raise ValueError(f"{CORRECTION}mode: to truncate, set {CORRECTION}clip_max or {CORRECTION}clip_min")
        return self

    @model_validator(mode="after")
    def _one_optimizer(self) -> Self:
        if self.optimizer == "adamw_8bit" and self.optimizer_offload:
            raise ValueError("optimizer_offload updates on the CPU, where adamw_8bit does not work; choose one of them")
        if self.gradient_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError("gradient_dtype: bfloat16 is for models in bfloat16; add dtype: bfloat16, or leave it out")
        if self.offload_idle and self.optimizer_offload:
            raise ValueError(
                "optimizer_offload keeps in the computer's memory what offload_idle moves; choose one of them"
            )
        if self.fsdp > 1:
            for name in ("lora", "optimizer", "optimizer_offload", "gradient_dtype", "offload_idle", "engine"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"fsdp: an agent in several processes has no {name}; leave it out")
        return self

    def rows_at_once(self, on_gpu: bool = False) -> int:
        """The most completions that are sampled at once."""
        return self.sampling_batch_size or (1024 if on_gpu else 512)

    @property
    def corrects_sampler(self) -> bool:
        """Whether terms of own rollouts are multiplied by the learner's probability over the sampler's."""
        if self.vllm_importance_sampling_correction is None:
            return self.engine == "vllm" and self.recompute_logprobs is not False
        return self.vllm_importance_sampling_correction

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the learner computes the old log-probabilities of its own rollouts anew."""
        if self.recompute_logprobs is None:
            return self.dtype == "bfloat16" or self.corrects_sampler
        return self.recompute_logprobs


def with_current_names(data: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Copy the settings of a run, with the current names of renamed ones; warn if `where` names data of the user."""
    agents, found = data.get("agents"), False
    parts = [data, *(agents if isinstance(agents, list | tuple) else [])]
    for n, part in enumerate(parts):
        if not isinstance(part, dict) or "sampler_ratio_max" not in part:
            continue
        parts[n] = new = {key: value for key, value in part.items() if key != "sampler_ratio_max"}
        if part["sampler_ratio_max"] is None:  # so it stands in the files of earlier runs
            continue
        found = True
        if both := [key for key in new if key.startswith(CORRECTION) and key != f"{CORRECTION}correction"]:
            raise UserError(f"{where}: `sampler_ratio_max` is the old name of `{both[0]}`, and both are there.")
        new |= {f"{CORRECTION}correction": True, f"{CORRECTION}mode": "token_truncate"}
        new[f"{CORRECTION}clip_max"] = part["sampler_ratio_max"]
    if found and where:
        warn(f"{where}: {RENAMED}")
    return {**parts[0], "agents": parts[1:]} if len(parts) > 1 else parts[0]


def logs_kl(agent: AgentConfig, parameters: int) -> bool:
    """Whether an agent with so many parameters logs the KL divergence to its starting model."""
    if agent.log_kl is None:
        return agent.lora is not None or parameters <= MOST_COPIED
    return agent.log_kl


def with_ids(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which an agent that is just a model, or has no id, gets an id made from the model's name."""
    agents = settings.get("agents")
    if not isinstance(agents, list | tuple):
        return settings
    listed = [{"model": agent} if isinstance(agent, str | os.PathLike) else agent for agent in agents]
    taken = {agent["id"] if isinstance(agent, dict) else agent.id for agent in listed if _has_id(agent)}
    for position, agent in enumerate(listed):
        if isinstance(agent, dict):
            if isinstance(agent.get("model"), os.PathLike):
                agent = {**agent, "model": os.fspath(agent["model"])}
            name = agents_of([str(agent.get("model", ""))])[0]["id"]
            free = next(own for n in count(1) if (own := f"{name}-{n}" if n > 1 else name) not in taken)
            listed[position] = {"id": free, **agent}
            taken.add(listed[position]["id"])
    return {**settings, "agents": listed}


def _has_id(agent: Any) -> bool:
    return isinstance(agent, AgentConfig) or (isinstance(agent, dict) and isinstance(agent.get("id"), str))
