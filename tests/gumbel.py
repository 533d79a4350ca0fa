"""An independent version of what the sampling kernels compute: Philox random numbers and the Gumbel rule."""

import numpy as np


def philox(key: int, counter: np.ndarray) -> list[np.ndarray]:
    """Philox 4x32-10 (Salmon et al. 2011): four streams of 32-bit numbers."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counter.astype(np.uint64), *(np.zeros(len(counter), np.uint64) for _ in range(3))]
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high0, high1 = product0 >> np.uint64(32), product1 >> np.uint64(32)
        c = [high1 ^ c[1] ^ np.uint64(k0), product1 & mask, high0 ^ c[3] ^ np.uint64(k1), product0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def gumbel_choice(logits_V: np.ndarray, key: int) -> int:
    """The token with the largest logit plus Gumbel noise. The kernels draw four numbers for each of their lanes."""
    V = len(logits_V)
    lanes = min(1024, max(1 << (V - 1).bit_length(), 16))
    noise = []
    for start in range(0, V, 4 * lanes):
        for bits in philox(key, np.arange(start, start + lanes)):
            signed = bits.astype(np.uint32).view(np.int32).astype(np.int64)
            uniform = np.where(signed < 0, -signed - 1, signed) / 2.0**31
            noise.append(-np.log(-np.log(np.clip(uniform, 2.0**-33, 1 - 2.0**-25))))
    return int(np.argmax(logits_V + np.concatenate(noise)[:V]))
