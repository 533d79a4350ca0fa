"""The settings of one agent: how its model is opened, prompted, sampled and updated."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hacrl.config.strict import Count, Few, Label, Length, Options, Size, Strict


class LoraConfig(Strict):
    """Adapters beside a model's layers, in place of all its weights."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """What adapters add is multiplied by alpha / r."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the layers that get adapters; default: all linear layers but the output projection."""


class ModelSettings(Strict):
    """How a model is opened, prompted and updated: in a run, and in a warm-up before it."""

    max_prompt_length: Length = 512
    max_completion_length: Length = 256
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion, besides the model's end-of-turn tokens."""
    learning_rate: Annotated[float, Field(ge=0, le=10)] = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    """Training steps over which the learning rate rises to its full value."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0, le=1000)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    lora: LoraConfig | None = None
    """Train adapters only. Agents of a process with the same model, dtype and device share its weights."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments of 8 bits, by bitsandbytes, on CUDA."""
    optimizer_offload: bool = False
    """Keep float32 weights, gradients and moments in the computer's memory, and update there."""
    micro_batch_size: Size | None = None
    """Rollouts in one forward and backward pass; default: as many as fit into memory. Changes memory and speed only."""
    gradient_checkpointing: bool | None = None
    """Keep no activations inside layers, compute them again; default: where a rollout would not fit into memory."""
    sampling_batch_size: Size = 512
    """Completions decoded at once."""
    system_prompt: str | None = None
    prompt_suffix: str = ""
    """Added to the end of each prompt as it is, in a chat to the last message of the user."""
    chat_template_kwargs: Options = {}
    """Passed to the chat template, for example {enable_thinking: false}."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation. Weights and optimizer are float32 in either case: bfloat16 ones hardly move."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] = "auto"
    """auto: the first GPU if there is one."""
    trust_remote_code: bool = False
    fast: bool = True
    """False: the plain implementation, which computes the same and is what the fast one is tested against."""


class ResourcesConfig(Strict):
    """What a process takes of a Ray cluster."""

    num_cpus: Few = 1
    """Cores, and torch's threads."""
    num_gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """Default: 0 for `device: cpu` or where the cluster has no GPU, else 1."""
    custom: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = {}
    """Resources that nodes were started with: `ray start --resources='{"big": 1}'`."""


class AgentResources(ResourcesConfig):
    """What an agent takes of a Ray cluster; with `fsdp`, each of its processes."""

    sampler: ResourcesConfig | None = None
    """What a separate process for vLLM takes, with `engine: vllm`; null: vLLM runs in the agent's process."""


class Settings(ModelSettings):
    """Settings of an agent in a run. Given for the run they hold for all agents; an agent may override each."""

    num_generations: Annotated[int, Field(ge=1, le=65_536)] = 8
    """G: completions sampled for each prompt."""
    temperature: Annotated[float, Field(gt=0, le=1000)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    """0: no limit."""
    num_iterations: Few = 1
    """Passes over a batch."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off out of the objective (they still count in the baseline)."""
    log_kl: bool = True
    """Log the KL divergence to the starting model even when beta is 0; keeps a copy of its weights."""
    max_logprob_gap: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Largest mean difference, per token, between recorded and recomputed log-probabilities."""
    recompute_logprobs: bool | None = None
    """Take own old log-probabilities from the learner, not from the sampler; default: if dtype is bfloat16."""
    engine: Literal["native", "vllm"] = "native"
    """What samples: the built-in decoder on the weights that are trained, or vLLM, whose copy follows each update."""
    vllm: Options = {}
    """Passed to vllm.LLM, for example {gpu_memory_utilization: 0.4}."""
    sampler_ratio_max: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Weigh own rollouts by their probability for the learner over that for the sampler, at most this; null: do not."""
    resources: AgentResources = AgentResources()
    """What the agent takes of a Ray cluster, with `execution: ray`."""
    fsdp: Few = 1
    """Processes among which weights, gradients and optimizer are divided; with CUDA, a GPU each, from `device` on."""


class AgentConfig(Settings):
    """One agent: a model with its settings."""

    id: Label
    model: str
    """zoo:NAME, a local folder, or a Hugging Face hub id."""

    @model_validator(mode="after")
    def _possible_engine(self) -> Self:
        if self.engine == "vllm":
            if self.lora is not None:
                raise ValueError("engine: vllm samples from whole weights; use engine: native with lora")
            if (self.top_p < 1 or self.top_k) and self.temperature != 1:
                raise ValueError(
                    "engine: vllm reports log-probabilities before temperature or after top_p and top_k, and learning "
                    "needs those between; with top_p or top_k use temperature: 1, or engine: native"
                )
        elif self.resources.sampler is not None:
            raise ValueError("resources.sampler is the process of vLLM: add engine: vllm, or leave it out")
        if self.sampler_ratio_max is not None and not self.recomputes_logprobs:
            raise ValueError("sampler_ratio_max compares with the learner's own: add recompute_logprobs: true")
        return self

    @model_validator(mode="after")
    def _one_optimizer(self) -> Self:
        if self.optimizer == "adamw_8bit" and self.optimizer_offload:
            raise ValueError("optimizer_offload updates on the CPU, where adamw_8bit does not work; choose one of them")
        if self.fsdp > 1:
            for name in ("lora", "optimizer", "optimizer_offload", "engine"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"fsdp: an agent in several processes has no {name}; leave it out")
        return self

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the learner computes the old log-probabilities of its own rollouts anew."""
        return self.dtype == "bfloat16" if self.recompute_logprobs is None else self.recompute_logprobs
