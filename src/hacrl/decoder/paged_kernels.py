"""Triton kernels for a cache in blocks: attention of one token step, and storing the keys and values of prompts.

A block holds the keys and values of BLOCK tokens for all layers. Tables hold addresses of blocks: the distance from an
anchor tensor in units of 16 bytes, so that memory can move without a new CUDA graph, and loads stay aligned.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
"""Tokens in a block."""
UNIT = 16
"""Bytes of a unit in which tables count."""
WARPS = 2
BUSY = 1024
"""Programs that keep a GPU busy. With fewer rows than that, each row's tokens are divided among several programs."""


SAMPLE_PARTS = 8
"""Most parts into which the logits of a row are divided when its next token is chosen."""


@triton.jit
def _attention_kernel(
    query, key, value, anchor, table, output, part_top, part_total, prompt_tokens, own_tokens,
    query_b, query_h, key_b, key_h, value_b, value_h, output_b, output_h, output_part, table_b, part_b,
    key_at, value_at, scale, softcap, window,
    REP: tl.constexpr, D: tl.constexpr, REP_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PER_UNIT: tl.constexpr, PARTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of one row and one key head over a part of its blocks; the first part also takes the new token."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    part = tl.program_id(2)
    n = tl.load(prompt_tokens + b)
    t = tl.load(own_tokens + b)
    first_own = (n + BLOCK - 1) // BLOCK
    blocks = first_own + (t + BLOCK - 1) // BLOCK
    d = tl.arange(0, D_BLOCK)
    in_d = d < D
    r = tl.arange(0, REP_BLOCK)
    in_q = (r < REP)[:, None] & in_d[None, :]
    q = tl.load(query + b * query_b + (h * REP + r)[:, None] * query_h + d[None, :], mask=in_q, other=0.0)
    if part == 0:
        new_key = tl.load(key + b * key_b + h * key_h + d, mask=in_d, other=0.0)
        new_value = tl.load(value + b * value_b + h * value_h + d, mask=in_d, other=0.0)
        place = anchor + tl.load(table + b * table_b + first_own + t // BLOCK) * PER_UNIT + (h * BLOCK + t % BLOCK) * D
        tl.store(place + key_at + d, new_key, mask=in_d)
        tl.store(place + value_at + d, new_value, mask=in_d)
        top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if HAS_SOFTCAP:
            top = softcap * (2 / (1 + tl.exp(-2 * top / softcap)) - 1)
        total = tl.full([REP_BLOCK], 1.0, tl.float32)
        acc = tl.zeros([REP_BLOCK, D_BLOCK], tl.float32) + new_value.to(tl.float32)[None, :]
    else:
        top = tl.full([REP_BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([REP_BLOCK], tl.float32)
        acc = tl.zeros([REP_BLOCK, D_BLOCK], tl.float32)

    offset = tl.arange(0, BLOCK)
    each = (blocks + PARTS - 1) // PARTS
    for j in range(part * each, tl.minimum((part + 1) * each, blocks)):
        own = j >= first_own
        i = (j - tl.where(own, first_own, 0)) * BLOCK + offset
        seen = i < tl.where(own, t, n)
        inside = seen[:, None] & in_d[None, :]
        if HAS_WINDOW:
            seen = seen & (tl.where(own, t, n + t) - i < window)
        place = anchor + tl.load(table + b * table_b + j) * PER_UNIT + h * BLOCK * D
        k = tl.load(place + key_at + offset[:, None] * D + d[None, :], mask=inside, other=0.0)
        v = tl.load(place + value_at + offset[:, None] * D + d[None, :], mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen so far
        shrink = tl.exp(top - base)
        weight = tl.exp(score - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    at_output = output + part * output_part + b * output_b + (h * REP + r)[:, None] * output_h + d[None, :]
    if PARTS == 1:
        tl.store(at_output, (acc / total[:, None]).to(output.dtype.element_ty), mask=in_q)
    else:
        tl.store(at_output, acc, mask=in_q)
        at_part = part * part_b + b * tl.num_programs(1) * REP + h * REP + r
        tl.store(part_top + at_part, top, mask=r < REP)
        tl.store(part_total + at_part, total, mask=r < REP)


@triton.jit
def _combine_kernel(
    parts, part_top, part_total, output, parts_part, parts_b, part_b, output_b, H,
    D: tl.constexpr, D_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row and one head: part 0 has seen the new token, so its maximum is finite."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, D_BLOCK)
    p = tl.arange(0, PARTS)
    top = tl.load(part_top + p * part_b + b * H + h)
    factor = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(part_total + p * part_b + b * H + h) * factor, 0)
    at = parts + p[:, None] * parts_part + b * parts_b + h * D + d[None, :]
    acc = tl.load(at, mask=(d < D)[None, :], other=0.0)
    result = tl.sum(acc * factor[:, None], 0) / total
    tl.store(output + b * output_b + h * D + d, result.to(output.dtype.element_ty), mask=d < D)


def parts_of(B: int, K: int) -> int:
    """Into how many parts the tokens of each row are divided."""
    return int(min(triton.next_power_of_2(triton.cdiv(BUSY, B * K)), 16))


def attention(
    query_BHD: Tensor, key_BKD: Tensor, value_BKD: Tensor, anchor: Tensor, table_BM: Tensor, places: tuple[int, int],
    prompt_tokens_B: Tensor, own_tokens_B: Tensor, scale: float, softcap: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """Store the new keys and values behind each row's own tokens, and attend to its prompt, own tokens and the new one.

    `table_BM` has the blocks of each row: those of its prompt, then its own. `places` are the layer's keys and values
    in a block, in elements from its start.
    """
    (B, H, D), K = query_BHD.shape, key_BKD.shape[1]
    parts = parts_of(B, K)
    output_BHD = torch.empty(B, H, D, dtype=query_BHD.dtype, device=query_BHD.device)
    acc_UBHD = output_BHD[None]
    top_UBH = total_UBH = output_BHD  # not used with one part
    if parts > 1:
        acc_UBHD = torch.empty(parts, B, H, D, dtype=torch.float32, device=query_BHD.device)
        top_UBH, total_UBH = torch.empty(2, parts, B, H, dtype=torch.float32, device=query_BHD.device)
    D_BLOCK = max(16, triton.next_power_of_2(D))
    _attention_kernel[(B, K, parts)](
        query_BHD, key_BKD, value_BKD, anchor, table_BM, acc_UBHD, top_UBH, total_UBH, prompt_tokens_B, own_tokens_B,
        *query_BHD.stride()[:2], *key_BKD.stride()[:2], *value_BKD.stride()[:2], *acc_UBHD.stride()[1:3],
        acc_UBHD.stride(0), table_BM.stride(0), B * H, *places, scale, softcap or 0.0, window or 0,
        REP=H // K, D=D, REP_BLOCK=max(16, triton.next_power_of_2(H // K)), D_BLOCK=D_BLOCK, BLOCK=BLOCK,
        PER_UNIT=UNIT // key_BKD.element_size(), PARTS=parts, HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None, num_warps=WARPS,
    )  # fmt: skip
    if parts > 1:
        _combine_kernel[(B, H)](
            acc_UBHD, top_UBH, total_UBH, output_BHD, *acc_UBHD.stride()[:2], B * H, output_BHD.stride(0), H,
            D=D, D_BLOCK=D_BLOCK, PARTS=parts, num_warps=1,
        )  # fmt: skip
    return output_BHD


@triton.jit
def _store_kernel(
    key, value, anchor, table, length, key_p, key_h, key_l, value_p, value_h, value_l, table_p, key_at, value_at,
    D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PER_UNIT: tl.constexpr,
):  # fmt: skip
    """Store one block of one prompt for one key head."""
    p = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    h = tl.program_id(2)
    n = tl.load(length + p)
    if j * BLOCK < n:
        offset = tl.arange(0, BLOCK)
        i = j * BLOCK + offset
        d = tl.arange(0, D_BLOCK)
        inside = (i < n)[:, None] & (d < D)[None, :]
        place = anchor + tl.load(table + p * table_p + j) * PER_UNIT + h * BLOCK * D + offset[:, None] * D + d[None, :]
        k = tl.load(key + p * key_p + h * key_h + i[:, None] * key_l + d[None, :], mask=inside, other=0.0)
        v = tl.load(value + p * value_p + h * value_h + i[:, None] * value_l + d[None, :], mask=inside, other=0.0)
        tl.store(place + key_at, k, mask=inside)
        tl.store(place + value_at, v, mask=inside)


def store_prompts(
    key_PKLD: Tensor, value_PKLD: Tensor, anchor: Tensor, table_PM: Tensor, places: tuple[int, int], length_P: Tensor
) -> None:
    """Store keys and values of the first `length_P` tokens of each prompt in its blocks."""
    P, K, L, D = key_PKLD.shape
    _store_kernel[(P, triton.cdiv(L, BLOCK), K)](
        key_PKLD, value_PKLD, anchor, table_PM, length_P, *key_PKLD.stride()[:3], *value_PKLD.stride()[:3],
        table_PM.stride(0), *places, D=D, D_BLOCK=max(16, triton.next_power_of_2(D)), BLOCK=BLOCK,
        PER_UNIT=UNIT // key_PKLD.element_size(),
    )  # fmt: skip


@triton.jit
def _choose_kernel(
    logits, source, completion, own_tokens, finished, seed, tops, totals, bests, wheres,
    V, logits_b, source_b, inverse_temperature, EACH: tl.constexpr,
    GREEDY: tl.constexpr, RESTRICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp and Gumbel-max of a part of a row's logits, in one pass over them.

    The token is drawn from `source` (-inf outside top-k and top-p).
    """
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = tl.load(completion + b)
    if tl.load(finished + c) == 0:
        # Each completion and token has its own random numbers, whatever else is in the batch.
        key = tl.load(seed) + c * 1048576 + tl.load(own_tokens + b)
        lane = tl.arange(0, BLOCK)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        where = tl.zeros([BLOCK], tl.int32)
        for start in range(part * EACH, tl.minimum((part + 1) * EACH, V), 4 * BLOCK):
            if not GREEDY:
                u0, u1, u2, u3 = tl.rand4x(key, start + lane)
            for quarter in tl.static_range(4):
                v = start + quarter * BLOCK + lane
                inside = v < V
                x = tl.load(logits + b * logits_b + v, mask=inside, other=-float("inf")) * inverse_temperature
                higher = tl.maximum(top, x)
                base = tl.where(higher == -float("inf"), 0.0, higher)
                total = total * tl.exp(top - base) + tl.exp(x - base)
                top = higher
                y = x
                if not GREEDY:
                    if RESTRICTED:
                        y = tl.load(source + b * source_b + v, mask=inside, other=-float("inf")) * inverse_temperature
                    u = u0 if quarter == 0 else (u1 if quarter == 1 else (u2 if quarter == 2 else u3))
                    # u may be 0, but not 1: the tail is cut at probability 2^-33.
                    y = y - tl.log(-tl.log(u + 1.1641532e-10))
                better = inside & (y > best)
                best = tl.where(better, y, best)
                where = tl.where(better, v, where)
        maximum = tl.max(top, 0)
        share = total * tl.exp(tl.where(top == -float("inf"), -float("inf"), top - maximum))
        highest = tl.max(best, 0)
        at = b * tl.num_programs(1) + part
        tl.store(tops + at, maximum)
        tl.store(totals + at, tl.sum(share, 0))
        tl.store(bests + at, highest)
        tl.store(wheres + at, tl.min(tl.where(best == highest, where, V), 0))


@triton.jit
def _record_kernel(
    logits, completion, own_tokens, token, position, finished, limit, tokens, logps, lengths, stop_ids,
    tops, totals, bests, wheres, num_stops, V, logits_b, T, inverse_temperature,
    PARTS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Choose the next token of one row among those of its parts, and record it with its log-probability.

    The log-probability is that of `logits`. A finished row stays as it is.
    """
    b = tl.program_id(0).to(tl.int64)
    c = tl.load(completion + b)
    if tl.load(finished + c) == 0:
        t = tl.load(own_tokens + b)
        at = b * PARTS + tl.arange(0, PARTS)
        top = tl.load(tops + at)
        best = tl.load(bests + at)
        maximum = tl.max(top, 0)
        share = tl.load(totals + at) * tl.exp(tl.where(top == -float("inf"), -float("inf"), top - maximum))
        norm = maximum + tl.log(tl.sum(share, 0))
        # The first of the largest; V - 1 if nothing is finite.
        chosen = tl.minimum(tl.min(tl.where(best == tl.max(best, 0), tl.load(wheres + at), V), 0), V - 1)
        logp = tl.load(logits + b * logits_b + chosen).to(tl.float32) * inverse_temperature - norm
        tl.store(token + b, chosen.to(tl.int64))
        tl.store(position + b, tl.load(position + b) + 1)
        tl.store(own_tokens + b, t + 1)
        tl.store(tokens + c * T + t, chosen)
        tl.store(logps + c * T + t, logp)
        tl.store(lengths + c, t + 1)
        k = tl.arange(0, STOPS)
        stops = tl.load(stop_ids + k, mask=k < num_stops, other=-1)
        if tl.max((stops == chosen).to(tl.int32), 0) > 0 or t + 1 >= tl.load(limit):
            tl.store(finished + c, 1)


def sample_tokens(
    logits_BV: Tensor, source_BV: Tensor, completion_B: Tensor, own_tokens_B: Tensor, token_B: Tensor,
    position_B: Tensor, finished_N: Tensor, limit: Tensor, seed: Tensor,
    tokens_NT: Tensor, logps_NT: Tensor, length_N: Tensor, stop_ids: Tensor, temperature: float,
) -> None:  # fmt: skip
    """Choose the next token of each row that is not finished and record it; a stop token or the limit finishes it."""
    (B, V), greedy = logits_BV.shape, temperature == 0
    BLOCK = min(1024, max(triton.next_power_of_2(V), 16))
    # Always the same number of parts, so that a row's rounding does not depend on the others.
    parts = min(SAMPLE_PARTS, triton.next_power_of_2(triton.cdiv(V, 4 * BLOCK)))
    each = triton.cdiv(V, 4 * BLOCK * parts) * 4 * BLOCK
    tops, totals, bests = torch.empty(3, B, parts, dtype=torch.float32, device=logits_BV.device)
    wheres = torch.empty(B, parts, dtype=torch.int32, device=logits_BV.device)
    inverse_temperature = 1.0 if greedy else 1 / temperature
    _choose_kernel[(B, parts)](
        logits_BV, source_BV, completion_B, own_tokens_B, finished_N, seed, tops, totals, bests, wheres,
        V, logits_BV.stride(0), source_BV.stride(0), inverse_temperature,
        EACH=each, GREEDY=greedy, RESTRICTED=source_BV is not logits_BV, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _record_kernel[(B,)](
        logits_BV, completion_B, own_tokens_B, token_B, position_B, finished_N, limit, tokens_NT, logps_NT, length_N,
        stop_ids, tops, totals, bests, wheres, len(stop_ids), V, logits_BV.stride(0), tokens_NT.stride(0),
        inverse_temperature, PARTS=parts, STOPS=triton.next_power_of_2(len(stop_ids)), num_warps=1,
    )  # fmt: skip
