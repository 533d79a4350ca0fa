"""The built-in decoder: samples from the very weights that are trained, without a copy or a sync."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from hacrl.errors import TrainingDiverged, UserError
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.rollout import Completion, FinishReason


class NativeEngine:
    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        batch_size: int,
        autocast: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self.batch_size = batch_size
        self.autocast = autocast

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        generator = torch.Generator(self.device).manual_seed(seed)
        prompts_at_once = max(self.batch_size // params.num_generations, 1)
        results: list[list[Completion]] = []
        for start in range(0, len(prompts), prompts_at_once):
            chunk = prompts[start : start + prompts_at_once]
            flat = self._decode(chunk, params, generator)
            for position in range(len(chunk)):
                results.append(flat[position * params.num_generations :][: params.num_generations])
        return results

    def _decode(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, generator: torch.Generator
    ) -> list[Completion]:
        """One batch: every distinct prompt is read once, then all completions advance together.

        B is the number of completions that still run; finished ones leave the batch.
        """
        G, T = params.num_generations, params.max_completion_length
        longest = max(len(prompt) for prompt in prompts)
        ids_PL, mask_PL = pad_left(prompts, longest, self.stop_ids[0], self.device)
        cache = DynamicCache(config=self.model.config)
        logits_PV = self._forward(ids_PL, mask_PL, cache)
        if not bool(torch.isfinite(logits_PV).all()):
            raise TrainingDiverged("A model gives logits that are not finite, so nothing can be sampled from it.")
        try:
            cache.batch_repeat_interleave(G)
        except AttributeError:
            raise UserError(
                f"{type(self.model).__name__} keeps a state that is no key-value cache; such models cannot be sampled "
                "from yet. Use a transformer decoder (Llama, Qwen, Gemma, Mistral, GPT-NeoX, ...)."
            ) from None
        logits_BV = logits_PV.repeat_interleave(G, dim=0)
        mask_BL = mask_PL.repeat_interleave(G, dim=0)

        N = len(prompts) * G
        tokens_NT = torch.zeros(N, T, dtype=torch.long, device=self.device)
        logps_NT = torch.zeros(N, T, device=self.device)
        length_N = torch.zeros(N, dtype=torch.long, device=self.device)
        ended_N = torch.zeros(N, dtype=torch.bool, device=self.device)
        stopped: set[int] = set()
        row_B = torch.arange(N, device=self.device)
        stop_ids = torch.tensor(self.stop_ids, device=self.device)

        for t in range(T):
            token_B, logp_B = choose_tokens(logits_BV, params, generator)
            tokens_NT[row_B, t] = token_B
            logps_NT[row_B, t] = logp_B
            length_N[row_B] = t + 1
            done_B = torch.isin(token_B, stop_ids)
            ended_N[row_B] = done_B
            if params.stop:
                for b, row in enumerate(row_B.tolist()):
                    text = self.tokenizer.decode(tokens_NT[row, : t + 1])
                    if not done_B[b] and any(stop in text for stop in params.stop):
                        stopped.add(row)
                        done_B[b] = True
            if bool(done_B.all()) or t == T - 1:
                break
            if bool(done_B.any()):
                running = (~done_B).nonzero().squeeze(1)
                row_B, token_B, mask_BL = row_B[running], token_B[running], mask_BL[running]
                cache.batch_select_indices(running)
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(mask_BL), 1)], dim=1)
            logits_BV = self._forward(token_B[:, None], mask_BL, cache)

        completions = []
        rows = zip(tokens_NT.tolist(), logps_NT.tolist(), length_N.tolist(), ended_N.tolist(), strict=True)
        for row, (tokens, logps, length, ended) in enumerate(rows):
            reason: FinishReason = "stop" if ended or row in stopped else "length"
            completions.append(Completion(tokens[:length], logps[:length], reason, ended))
        return completions

    def _forward(self, ids_BL: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        """Logits after the last of the given tokens, in float32."""
        positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.model(
                input_ids=ids_BL,
                attention_mask=mask_BL,
                position_ids=positions_BL,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV


def pad_left(
    sequences: Sequence[Sequence[int]], length: int, pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, padded on the left so that all sequences end together."""
    ids = torch.full((len(sequences), length), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), length, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, length - len(sequence) :] = torch.tensor(sequence, dtype=torch.long)
        mask[row, length - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


def choose_tokens(logits_BV: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-probability before top-p and top-k."""
    if params.temperature == 0:
        token_B = logits_BV.argmax(1)
        return token_B, logits_BV.log_softmax(1).gather(1, token_B[:, None]).squeeze(1)
    logp_BV = (logits_BV / params.temperature).log_softmax(1)
    probs_BV = restrict(logp_BV, params.top_p, params.top_k).exp()
    token_B1 = torch.multinomial(probs_BV, 1, generator=generator)
    return token_B1.squeeze(1), logp_BV.gather(1, token_B1).squeeze(1)


def restrict(logp_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Log-probabilities with everything outside top-k, then outside the top-p nucleus, at -inf."""
    if top_k:
        kth_B1 = logp_BV.topk(min(top_k, logp_BV.shape[1]), dim=1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < kth_B1, -torch.inf).log_softmax(1)
    if top_p < 1:
        sorted_BV, order_BV = logp_BV.sort(dim=1, descending=True)
        # The nucleus is the smallest set that reaches top_p: a token is outside if those before it do.
        before_BV = sorted_BV.exp().cumsum(1) - sorted_BV.exp()
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, -torch.inf)
        logp_BV = torch.empty_like(logp_BV).scatter_(1, order_BV, sorted_BV)
    return logp_BV
