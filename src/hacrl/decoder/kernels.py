"""Triton kernels for CUDA that replace many small launches of a decoding step or a training step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

DECODE_BLOCK, DECODE_WARPS = 32, 2  # the fastest of seven pairs tried on an H200, at 256 and at 1,024 rows


@triton.jit
def _decode_attention_kernel(
    query, key, value, prompt_key, prompt_value, own_key, own_value, output, slot, prompt, length, step,
    query_b, query_h, key_b, key_h, value_b, value_h, output_b, output_h,
    prompt_p, prompt_h, prompt_l, own_s, own_h, own_t, scale, softcap, window,
    REP: tl.constexpr, D: tl.constexpr, REP_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of one row and one key head over the prompt's keys, the row's own keys and the new key."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.load(slot + b).to(tl.int64)
    p = tl.load(prompt + b).to(tl.int64)
    L = tl.load(length + p)
    t = tl.load(step)
    d = tl.arange(0, D_BLOCK)
    in_d = d < D
    new_key = tl.load(key + b * key_b + h * key_h + d, mask=in_d, other=0.0)
    new_value = tl.load(value + b * value_b + h * value_h + d, mask=in_d, other=0.0)
    tl.store(own_key + s * own_s + h * own_h + t * own_t + d, new_key, mask=in_d)
    tl.store(own_value + s * own_s + h * own_h + t * own_t + d, new_value, mask=in_d)

    r = tl.arange(0, REP_BLOCK)
    at_query = query + b * query_b + (h * REP + r)[:, None] * query_h + d[None, :]
    q = tl.load(at_query, mask=(r < REP)[:, None] & in_d[None, :], other=0.0)
    # Begin with the new token: it is always seen, so the maximum is finite from here on.
    top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    if HAS_SOFTCAP:
        top = softcap * (2 / (1 + tl.exp(-2 * top / softcap)) - 1)
    total = tl.full([REP_BLOCK], 1.0, tl.float32)
    acc = tl.zeros([REP_BLOCK, D_BLOCK], tl.float32) + new_value.to(tl.float32)[None, :]

    offset = tl.arange(0, BLOCK)
    for part in tl.static_range(2):
        n = L if part == 0 else t
        distance = L + t if part == 0 else t
        stride = prompt_l if part == 0 else own_t
        keys = prompt_key + p * prompt_p + h * prompt_h if part == 0 else own_key + s * own_s + h * own_h
        values = prompt_value + p * prompt_p + h * prompt_h if part == 0 else own_value + s * own_s + h * own_h
        for start in range(0, n, BLOCK):
            i = start + offset
            seen = i < n
            if HAS_WINDOW:
                seen = seen & (distance - i < window)
            inside = (i < n)[:, None] & in_d[None, :]
            k = tl.load(keys + i[:, None] * stride + d[None, :], mask=inside, other=0.0)
            v = tl.load(values + i[:, None] * stride + d[None, :], mask=inside, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)
            score = tl.where(seen[None, :], score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp(top - higher)
            weight = tl.exp(score - higher[:, None])
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            top = higher
    result = acc / total[:, None]
    at_output = output + b * output_b + (h * REP + r)[:, None] * output_h + d[None, :]
    tl.store(at_output, result.to(output.dtype.element_ty), mask=(r < REP)[:, None] & in_d[None, :])


def decode_attention(
    query_BHD: Tensor, key_BKD: Tensor, value_BKD: Tensor, prompt: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor],
    slot_B: Tensor, prompt_B: Tensor, length_P: Tensor, step: Tensor,
    scale: float, softcap: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """Store the new keys and values at `step`, and attend; `prompt` is (P, K, L, D) each, `own` (slots, K, T, D)."""
    (B, H, D), K = query_BHD.shape, key_BKD.shape[1]
    output_BHD = torch.empty(B, H, D, dtype=query_BHD.dtype, device=query_BHD.device)
    _decode_attention_kernel[(B, K)](
        query_BHD, key_BKD, value_BKD, *prompt, *own, output_BHD, slot_B, prompt_B, length_P, step,
        *query_BHD.stride()[:2], *key_BKD.stride()[:2], *value_BKD.stride()[:2], *output_BHD.stride()[:2],
        *prompt[0].stride()[:3], *own[0].stride()[:3], scale, softcap or 0.0, window or 0,
        REP=H // K, D=D, REP_BLOCK=max(16, triton.next_power_of_2(H // K)), D_BLOCK=max(16, triton.next_power_of_2(D)),
        BLOCK=DECODE_BLOCK, HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None, num_warps=DECODE_WARPS,
    )  # fmt: skip
    return output_BHD


@triton.jit
def _sample_kernel(
    logits, from_row, source, slot, token, position, finished, stream, step, seed,
    tokens, logps, lengths, stop_ids, num_stops, V, logits_b, source_b, T, inverse_temperature,
    GREEDY: tl.constexpr, RESTRICTED: tl.constexpr, BLOCK: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Sample the next token of one row: log-sum-exp and Gumbel-max in one pass over its logits, then bookkeeping.

    The token is drawn from `source` (-inf outside top-k and top-p); log-probabilities are recorded from `logits`.
    """
    b = tl.program_id(0)
    row = tl.load(from_row + b).to(tl.int64)
    s = tl.load(slot + b).to(tl.int64)
    t = tl.load(step)
    # Each completion and token has its own random numbers, whatever else is in the batch.
    key = tl.load(seed) + tl.load(stream + s) * 1048576 + t
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, 4 * BLOCK):
        if not GREEDY:
            u0, u1, u2, u3 = tl.rand4x(key, start + lane)
        for quarter in tl.static_range(4):
            v = start + quarter * BLOCK + lane
            inside = v < V
            x = tl.load(logits + row * logits_b + v, mask=inside, other=-float("inf")) * inverse_temperature
            higher = tl.maximum(top, x)
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.exp(x - base)
            top = higher
            y = x
            if not GREEDY:
                if RESTRICTED:
                    y = tl.load(source + row * source_b + v, mask=inside, other=-float("inf")) * inverse_temperature
                u = u0 if quarter == 0 else (u1 if quarter == 1 else (u2 if quarter == 2 else u3))
                # u may be 0, but not 1: the tail is cut at probability 2^-33.
                y = y - tl.log(-tl.log(u + 1.1641532e-10))
            better = inside & (y > best)
            best = tl.where(better, y, best)
            where = tl.where(better, v, where)
    maximum = tl.max(top, 0)
    norm = maximum + tl.log(tl.sum(total * tl.exp(tl.where(top == -float("inf"), -float("inf"), top - maximum)), 0))
    chosen = tl.minimum(tl.min(tl.where(best == tl.max(best, 0), where, V), 0), V - 1)
    logp = tl.load(logits + row * logits_b + chosen).to(tl.float32) * inverse_temperature - norm
    tl.store(token + b, chosen.to(tl.int64))
    tl.store(position + b, tl.load(position + b) + 1)
    if tl.load(finished + s) == 0:
        tl.store(tokens + s * T + t, chosen)
        tl.store(logps + s * T + t, logp)
        tl.store(lengths + s, t + 1)
        k = tl.arange(0, STOPS)
        stops = tl.load(stop_ids + k, mask=k < num_stops, other=-1)
        if tl.max((stops == chosen).to(tl.int32), 0) > 0:
            tl.store(finished + s, 1)


def sample_tokens(
    logits_RV: Tensor, source_RV: Tensor, row_B: Tensor, slot_B: Tensor, token_B: Tensor, position_B: Tensor,
    finished_N: Tensor, stream_N: Tensor, step: Tensor, seed: Tensor,
    tokens_NT: Tensor, logps_NT: Tensor, length_N: Tensor, stop_ids: Tensor, temperature: float,
) -> None:  # fmt: skip
    """Choose each row's next token, record it at `step` in the row's slot, and mark rows that end with it."""
    V, greedy = logits_RV.shape[1], temperature == 0
    _sample_kernel[(len(token_B),)](
        logits_RV, row_B, source_RV, slot_B, token_B, position_B, finished_N, stream_N, step, seed,
        tokens_NT, logps_NT, length_N, stop_ids, len(stop_ids),
        V, logits_RV.stride(0), source_RV.stride(0), tokens_NT.stride(0), 1.0 if greedy else 1 / temperature,
        GREEDY=greedy, RESTRICTED=source_RV is not logits_RV, BLOCK=min(1024, max(triton.next_power_of_2(V), 16)),
        STOPS=triton.next_power_of_2(len(stop_ids)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _norm_weights(query_weight, key_weight, is_query, d, HALF: tl.constexpr):
    """Weights of the norms of queries and keys, for the first and the second half of each head."""
    query_a = tl.load(query_weight + d, mask=d < HALF, other=0.0)
    query_b = tl.load(query_weight + HALF + d, mask=d < HALF, other=0.0)
    key_a = tl.load(key_weight + d, mask=d < HALF, other=0.0)
    key_b = tl.load(key_weight + HALF + d, mask=d < HALF, other=0.0)
    return tl.where(is_query, query_a, key_a).to(tl.float32), tl.where(is_query, query_b, key_b).to(tl.float32)


@triton.jit
def _turn_kernel(
    x, query_weight, key_weight, cos, sin, output, x_s, x_h, cos_s, H, HEADS, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, H_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm, if there is one, and rotation of some heads of one token: (a, b) -> (a cos - b sin, b cos + a sin), where a
    and b are the halves of a head. The first H heads are queries, the others keys."""
    s = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * H_BLOCK + tl.arange(0, H_BLOCK)[:, None]
    d = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (h < HEADS) & (d < HALF)
    c = tl.load(cos + s * cos_s + d, mask=d < HALF, other=0.0).to(tl.float32)
    n = tl.load(sin + s * cos_s + d, mask=d < HALF, other=0.0).to(tl.float32)
    a = tl.load(x + s * x_s + h * x_h + d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + s * x_s + h * x_h + HALF + d, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        of_a, of_b = _norm_weights(query_weight, key_weight, h < H, d, HALF)
        # Rounded as a norm of its own would round it.
        a = (a * scale * of_a).to(output.dtype.element_ty).to(tl.float32)
        b = (b * scale * of_b).to(output.dtype.element_ty).to(tl.float32)
    to = output + (s * HEADS + h) * 2 * HALF + d
    tl.store(to, (a * c - b * n).to(output.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (b * c + a * n).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _turn_back_kernel(
    x, query_weight, key_weight, cos, sin, grad, output, sums, S, x_s, x_h, grad_s, grad_h, cos_s, H, HEADS, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, H_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of `_turn_kernel`. Each program takes some heads of many tokens and adds up the gradient of weights."""
    h = tl.program_id(1) * H_BLOCK + tl.arange(0, H_BLOCK)[:, None]
    d = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (h < HEADS) & (d < HALF)
    if NORM:
        of_a, of_b = _norm_weights(query_weight, key_weight, h < H, d, HALF)
        sum_a = tl.zeros([H_BLOCK, HALF_BLOCK], tl.float32)
        sum_b = tl.zeros([H_BLOCK, HALF_BLOCK], tl.float32)
    for s in range(tl.program_id(0).to(tl.int64), S, tl.num_programs(0)):
        c = tl.load(cos + s * cos_s + d, mask=d < HALF, other=0.0).to(tl.float32)
        n = tl.load(sin + s * cos_s + d, mask=d < HALF, other=0.0).to(tl.float32)
        y = tl.load(grad + s * grad_s + h * grad_h + d, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(grad + s * grad_s + h * grad_h + HALF + d, mask=inside, other=0.0).to(tl.float32)
        grad_a, grad_b = y * c + z * n, z * c - y * n
        if NORM:
            a = tl.load(x + s * x_s + h * x_h + d, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + s * x_s + h * x_h + HALF + d, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            a, b = a * scale, b * scale
            sum_a += grad_a * a
            sum_b += grad_b * b
            grad_a, grad_b = grad_a * of_a, grad_b * of_b
            along = ((tl.sum(grad_a * a, 1) + tl.sum(grad_b * b, 1)) / (2 * HALF))[:, None]
            grad_a, grad_b = scale * (grad_a - a * along), scale * (grad_b - b * along)
        to = output + (s * HEADS + h) * 2 * HALF + d
        tl.store(to, grad_a.to(output.dtype.element_ty), mask=inside)
        tl.store(to + HALF, grad_b.to(output.dtype.element_ty), mask=inside)
    if NORM:
        at = sums + (tl.program_id(0) * HEADS + h) * 2 * HALF + d
        tl.store(at, sum_a, mask=inside)
        tl.store(at + HALF, sum_b, mask=inside)


HEADS_OF_A_PROGRAM = 8
SUMS = 512
"""Programs over which the tokens of a backward pass are divided; each adds up gradients of the norms' weights."""
Norms = tuple[Tensor, Tensor, float]
"""Root-mean-square norms of queries and keys: their weights, and epsilon."""


def turn(x_SHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, queries: int, norms: Norms | None) -> Tensor:
    """Normalise heads, the first of which are queries and the others keys, and rotate them."""
    output_SHD, grid, sizes = _turning(x_SHD, x_SHD.shape[0])
    *weights, eps = norms or (x_SHD, x_SHD, 0.0)
    _turn_kernel[grid](
        x_SHD, *weights, cos_SD, sin_SD, output_SHD, *x_SHD.stride()[:2], cos_SD.stride(0),
        queries, x_SHD.shape[1], eps, NORM=norms is not None, **sizes,
    )  # fmt: skip
    return output_SHD


def turn_back(
    grad_SHD: Tensor, x_SHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, queries: int, norms: Norms | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `turn`: of its input, which is only read if there are norms, and of the weights of the norms."""
    S, H, D = grad_SHD.shape
    output_SHD, grid, sizes = _turning(grad_SHD, min(S, SUMS))
    sums_PHD = torch.empty(grid[0], H, D, dtype=torch.float32, device=grad_SHD.device) if norms else output_SHD
    *weights, eps = norms or (x_SHD, x_SHD, 0.0)
    _turn_back_kernel[grid](
        x_SHD, *weights, cos_SD, sin_SD, grad_SHD, output_SHD, sums_PHD, S, *x_SHD.stride()[:2],
        *grad_SHD.stride()[:2], cos_SD.stride(0), queries, H, eps, NORM=norms is not None, **sizes,
    )  # fmt: skip
    if norms is None:
        return output_SHD, None, None
    of_query, of_key = (part.sum(0) for part in sums_PHD.sum(0).split([queries, H - queries]))
    return output_SHD, of_query, of_key


def _turning(x_SHD: Tensor, programs: int) -> tuple[Tensor, tuple[int, int], dict[str, int]]:
    """Memory for the result, the grid, and sizes that the kernels are compiled for."""
    S, H, D = x_SHD.shape
    H_BLOCK = min(HEADS_OF_A_PROGRAM, triton.next_power_of_2(H))
    sizes = {"HALF": D // 2, "H_BLOCK": H_BLOCK, "HALF_BLOCK": triton.next_power_of_2(D // 2), "num_warps": 2}
    output_SHD = torch.empty(S, H, D, dtype=x_SHD.dtype, device=x_SHD.device)
    return output_SHD, (programs, triton.cdiv(H, H_BLOCK)), sizes


@triton.jit
def _swiglu_kernel(gate, up, output, gate_s, up_s, F, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    g = tl.load(gate + s * gate_s + f, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + s * up_s + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + s * F + f, (g * tl.sigmoid(g) * u).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate, up, grad, grad_gate, grad_up, gate_s, up_s, out_s, F, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    g = tl.load(gate + s * gate_s + f, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + s * up_s + f, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(grad + s * F + f, mask=inside, other=0.0).to(tl.float32)
    sig = tl.sigmoid(g)
    tl.store(grad_up + s * out_s + f, (y * g * sig).to(grad_up.dtype.element_ty), mask=inside)
    slope = sig * (1 + g * (1 - sig))
    tl.store(grad_gate + s * out_s + f, (y * u * slope).to(grad_gate.dtype.element_ty), mask=inside)


def swiglu(gate_SF: Tensor, up_SF: Tensor) -> Tensor:
    S, F = gate_SF.shape
    output = gate_SF.new_empty(S, F)
    BLOCK = min(1024, triton.next_power_of_2(F))
    grid = (S, triton.cdiv(F, BLOCK))
    _swiglu_kernel[grid](gate_SF, up_SF, output, gate_SF.stride(0), up_SF.stride(0), F, BLOCK=BLOCK)
    return output


def swiglu_backward(gate_SF: Tensor, up_SF: Tensor, grad_SF: Tensor) -> Tensor:
    """Gradients of gate and up, side by side in one tensor (S, 2 F)."""
    S, F = gate_SF.shape
    both = gate_SF.new_empty(S, 2 * F)
    BLOCK = min(1024, triton.next_power_of_2(F))
    tensors = (gate_SF, up_SF, grad_SF.contiguous(), both, both[:, F:])
    grid = (S, triton.cdiv(F, BLOCK))
    _swiglu_backward_kernel[grid](*tensors, gate_SF.stride(0), up_SF.stride(0), 2 * F, F, BLOCK=BLOCK)
    return both


@triton.jit
def _logprob_kernel(logits, target, logp, norm, entropy, V, logits_m, inverse_temperature, BLOCK: tl.constexpr):
    """Log-sum-exp, the target's log-probability and the entropy of one row in one pass."""
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + lane
        x = tl.load(logits + m * logits_m + v, mask=v < V, other=-float("inf")) * inverse_temperature
        higher = tl.maximum(top, x)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink, weight = tl.exp(top - base), tl.exp(x - base)
        total = total * shrink + weight
        weighted = weighted * shrink + tl.where(weight > 0, x * weight, 0.0)
        top = higher
    maximum = tl.max(top, 0)
    factor = tl.exp(tl.where(top == -float("inf"), -float("inf"), top - maximum))
    sum_ = tl.sum(total * factor, 0)
    log_norm = maximum + tl.log(sum_)
    chosen = tl.load(logits + m * logits_m + tl.load(target + m)) * inverse_temperature
    tl.store(logp + m, chosen - log_norm)
    tl.store(norm + m, log_norm)
    tl.store(entropy + m, log_norm - tl.sum(weighted * factor, 0) / sum_)


def logprobs(logits_MV: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), log-sum-exp and entropy of float32 logits."""
    M, V = logits_MV.shape
    logp_M, norm_M, entropy_M = (torch.empty(M, dtype=torch.float32, device=logits_MV.device) for _ in range(3))
    _logprob_kernel[(M,)](
        logits_MV, target_M, logp_M, norm_M, entropy_M, V, logits_MV.stride(0), 1 / temperature,
        BLOCK=min(2048, triton.next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    return logp_M, norm_M, entropy_M


@triton.jit
def _logit_gradient_kernel(
    logits, target, norm, grad, output, V, logits_m, output_m, inverse_temperature, factor, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to the projection's output, for one block of one row."""
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    x = tl.load(logits + m * logits_m + v, mask=inside, other=0.0)
    p = tl.exp(x * inverse_temperature - tl.load(norm + m))
    delta = (tl.where(v == tl.load(target + m), 1.0, 0.0) - p) * tl.load(grad + m) * factor
    if HAS_SOFTCAP:
        delta = delta * (1 - (x / softcap) * (x / softcap))
    tl.store(output + m * output_m + v, delta.to(output.dtype.element_ty), mask=inside)


def logit_gradient(
    logits_MV: Tensor, target_M: Tensor, norm_M: Tensor, grad_M: Tensor,
    temperature: float, scale: float, softcap: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    M, V = logits_MV.shape
    output_MV = torch.empty(M, V, dtype=dtype, device=logits_MV.device)
    BLOCK = min(2048, triton.next_power_of_2(V))
    _logit_gradient_kernel[(M, triton.cdiv(V, BLOCK))](
        logits_MV, target_M, norm_M, grad_M, output_MV, V, logits_MV.stride(0), output_MV.stride(0),
        1 / temperature, scale / temperature, softcap or 0.0, HAS_SOFTCAP=softcap is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return output_MV
