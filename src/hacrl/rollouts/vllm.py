"""Samples with vLLM, which has its own copy of the weights, in this process or another, and gets them when they change.

A learner computes log-probabilities after temperature and before top-p and top-k. vLLM reports raw ones, before all of
them, or processed ones, after all of them. Raw ones are right at temperature 1, processed ones without top-p and top-k.
"""

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder.packing import Texts
from hacrl.errors import UserError
from hacrl.rollouts.engine import SamplingParams, cut_off
from hacrl.rollouts.rollout import Completion
from hacrl.signs import advance

CHECKSUM_TOLERANCE = 1e-9
"""Largest relative difference of two sums. Both sides add the same numbers in float64, in another order."""
PROBE_LENGTH = 16
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability after an update. Rounding stays far below it, wrong weights do not."""

Sums = dict[str, tuple[float, float]]
Tokens = tuple[list[int], list[float]]
"""Token ids of a completion and their log-probabilities."""


class Sampler(Protocol):
    """A copy of a model in vLLM."""

    def reload(self, weights: dict[str, Tensor]) -> None: ...
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
        self, folder: str, dtype: str, max_length: int, batch_size: int, temperature: float, options: dict[str, Any]
    ) -> None:
        """`temperature` is that of rollouts. `options` are passed to vllm.LLM and override the settings made here."""
        vllm = import_vllm()
        settings = {
            "model": folder, "dtype": dtype, "max_model_len": max_length, "max_num_seqs": batch_size,
            "logprobs_mode": "raw_logprobs" if temperature == 1 else "processed_logprobs",
            "generation_config": "vllm",  # ignores the model's own sampling defaults
            "enable_prefix_caching": True, "disable_log_stats": True,
        }  # fmt: skip
        self._sampling_params = vllm.SamplingParams
        self.engine: Any = vllm.LLM(**{**settings, **options})

    def reload(self, weights: dict[str, Tensor]) -> None:
        match_threads()
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
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
        return self.engine.generate(inputs, requests, use_tqdm=False)


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
        self.version, self._has = version, 0

    def refresh(self) -> None:
        """Copy the model's current weights to vLLM; UserError if vLLM does not have them afterwards."""
        self.sampler.reload({name: tensor.detach() for name, tensor in self.model.state_dict().items()})
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
        if self._has != self.version():
            self.refresh()
        groups = self.sampler.generate(prompts, params, self.stop_ids, seed)
        advance(sum(map(len, groups)))
        ends = (self.stop_ids, params.stop)
        return [[cut_off(self.tokenizer, tokens, logps, *ends) for tokens, logps in group] for group in groups]


def import_vllm() -> Any:
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
    wide = ((name, tensor.detach().to(torch.float64)) for name, tensor in model.named_parameters() if tensor.numel())
    return {name: (float(values.sum()), float(values.abs().sum())) for name, values in wide}
