"""The streamed update on the CPU: one fused pass over a record chunk, compiled by numba, called from worker threads.

[Note: same bits anywhere] No fast-math: every operation is rounded on its own, in the order written, so an element's
result depends on that element only and not on its place in a chunk, a vector register or a loop's tail. Code that
computes the same in torch (torch_update.py) follows the same order.

[Note: tiles] Work goes in tiles that stay in the L1 cache: decode to float32, apply the rule, encode. Each loop then
touches few arrays; with more than four LLVM finds too many possible overlaps and gives up on vector code.

All in one file, and no constants from others: numba's cache looks only at the compiled function's own file.
"""

from __future__ import annotations

import numpy as np
from numba import njit

TILE = 2048
"""Elements."""
RULES = ("adamw", "sgd", "lion")
"""In the order of update's constants."""


def _jit(function):
    """Compiled at the first call, GIL released, cached on disk where a folder for it is writable."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no writable place for its cache
        return njit(**options)(function)


# gradient


@_jit
def grad_from_bf16(bits, scale, out):
    out_bits = out.view(np.uint32)
    for i in range(bits.size):
        out_bits[i] = np.uint32(bits[i]) << np.uint32(16)
    for i in range(bits.size):
        out[i] = out[i] * scale


@_jit
def grad_from_f32(values, scale, out):
    for i in range(values.size):
        out[i] = values[i] * scale


# split master


@_jit
def join(hi, lo, out):
    """hi: bfloat16 as int16; out: float32 master."""
    bits = out.view(np.int32)
    for i in range(hi.size):
        bits[i] = np.int32(np.int32(hi[i]) << np.int32(16)) + np.int32(lo[i])


@_jit
def split(master, hi, lo):
    bits = master.view(np.int32)
    for i in range(hi.size):
        b = bits[i]
        # any NaN becomes the canonical one, else the carry could turn it into a finite hi
        if (b & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000):
            b = np.int32(0x7FC00000)
        top = np.int32(b + np.int32(0x8000)) >> np.int32(16)
        hi[i] = np.int16(top)
        lo[i] = np.int16(b - np.int32(top << np.int32(16)))


# rules: p, g, m, v are float32 of equal length; `factor` is the segment's decay


@_jit
def adamw(p, g, m, v, factor, c):
    """torch.optim.AdamW's order of operations. factor: 1 - lr * weight_decay."""
    one_b1, b2, one_b2, inv_sqrt_bc2, eps, step_size = c
    for i in range(p.size):
        gi = g[i]
        mi = m[i] + one_b1 * (gi - m[i])
        vi = v[i] * b2 + (one_b2 * gi) * gi
        m[i] = mi
        v[i] = vi
        p[i] = p[i] * factor - step_size * mi / (np.sqrt(vi) * inv_sqrt_bc2 + eps)


@_jit
def sgd(p, g, m, factor, c):
    """torch.optim.SGD without dampening. factor: weight_decay (added to the gradient)."""
    lr, momentum = c
    for i in range(p.size):
        mi = m[i] * momentum + (g[i] + factor * p[i])
        m[i] = mi
        p[i] = p[i] - lr * mi


@_jit
def lion(p, g, m, factor, c):
    """Chen et al. 2023, algorithm 2. factor: 1 - lr * weight_decay."""
    lr, one_b1, one_b2 = c
    for i in range(p.size):
        mi = m[i]
        update = mi + one_b1 * (g[i] - mi)
        p[i] = p[i] * factor - lr * np.sign(update)
        m[i] = mi + one_b2 * (g[i] - mi)


@_jit
def update(split_weights, master, m, v, bf16_grad, f32_grad, segments, grad_scale, adamw_c, sgd_c, lion_c):
    """One pass over the segments of a chunk, in place. Many arguments: numba prunes `is None` on plain ones only.

    split_weights: (hi, lo) int16, or None and master float32; m, v: float32, v may be None; bf16_grad as uint16,
    or None and f32_grad; segments: (start, end int64, factor float32); one of the constants is not None.
    """
    starts, ends, factors = segments
    p_tile = np.empty(TILE, np.float32)
    g_tile = np.empty(TILE, np.float32)
    for s in range(starts.size):
        factor = factors[s]
        for a in range(starts[s], ends[s], TILE):
            b = min(a + TILE, ends[s])
            g = g_tile[: b - a]
            if bf16_grad is not None:
                grad_from_bf16(bf16_grad[a:b], grad_scale, g)
            if f32_grad is not None:
                grad_from_f32(f32_grad[a:b], grad_scale, g)
            if split_weights is not None:
                p = p_tile[: b - a]
                join(split_weights[0][a:b], split_weights[1][a:b], p)
            if master is not None:
                p = master[a:b]
            if adamw_c is not None:
                adamw(p, g, m[a:b], v[a:b], factor, adamw_c)
            if sgd_c is not None:
                sgd(p, g, m[a:b], factor, sgd_c)
            if lion_c is not None:
                lion(p, g, m[a:b], factor, lion_c)
            if split_weights is not None:
                split(p, split_weights[0][a:b], split_weights[1][a:b])


# compact record: 8-bit moments and residual

# [Note: rounding by value] A moment that changes by less than half a step would stand still for ever if it were rounded
# to nearest (with beta2 = 0.999, v moves by 0.1 %, and a step is 1.6 % or more). So values are rounded up with the
# probability that makes the mean right, and the random number is a hash of the exact value's bits and the optimizer
# step (`salt`): no generator, no state, the same result wherever the element lies.

HASH = np.uint32(2654435761)
LEAST_SCALE = np.float32(1e-28)
"""Of a block's largest magnitude: the inverse of anything smaller overflows."""


@_jit
def join8(hi, lo, out):
    bits = out.view(np.int32)
    for i in range(hi.size):
        bits[i] = np.int32(np.int32(hi[i]) << np.int32(16)) + np.int32(np.int32(lo[i]) << np.int32(8))


@_jit
def split8(master, salt, hi, lo):
    """Rounds the master to 24 bits [Note: rounding by value], then splits it."""
    unsigned = master.view(np.uint32)
    for i in range(master.size):
        b = unsigned[i]
        rounded = (b + (np.uint32((b ^ salt) * HASH) >> np.uint32(24))) & np.uint32(0xFFFFFF00)
        special = np.uint32(0x7FC00000) if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else b
        unsigned[i] = rounded if (b & np.uint32(0x7F800000)) != np.uint32(0x7F800000) else special
    bits = master.view(np.int32)
    for i in range(hi.size):
        top = np.int32(bits[i] + np.int32(0x8000)) >> np.int32(16)
        hi[i] = np.int16(top)
        lo[i] = np.int8(np.int32(bits[i] - np.int32(top << np.int32(16))) >> np.int32(8))


@_jit
def absmax(values):
    """Of float32 values, compared as integers (a float maximum isn't vectorised without fast-math)."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    one = np.empty(1, np.int32)
    one[0] = largest
    return one.view(np.float32)[0]


@_jit
def decode8(codes, scale, levels, out):
    """codes: int8 or uint8; value = sign * (|code| / levels)^4 * scale."""
    unit = scale / np.float32(float(levels) ** 4)
    for i in range(codes.size):
        q = np.float32(codes[i])
        q2 = q * q
        out[i] = np.copysign(q2 * q2 * unit, q)


@_jit
def encode8(values, scale, levels, least, salt, codes):
    """Inverse of decode8 [Note: rounding by value]. A non-zero value gets at least `least` (v must not become zero)."""
    bits = values.view(np.uint32)
    inverse = np.float32(float(levels) ** 4) / scale
    for i in range(values.size):
        x = values[i]
        y = np.abs(x) * inverse
        q = np.floor(np.sqrt(np.sqrt(y)))
        q2 = q * q
        q4 = q2 * q2
        r = q + np.float32(1.0)
        r2 = r * r
        dither = np.float32(np.int32(np.uint32((bits[i] ^ salt) * HASH) >> np.uint32(8))) * np.float32(2.0**-24)
        if dither * (r2 * r2 - q4) < y - q4:
            q = r
        if q < least and y > np.float32(0.0):
            q = least
        codes[i] = np.int32(np.copysign(q, x))


@_jit
def update_compact(weights, m_codes, v_codes, scales, bf16_grad, f32_grad, segments, grad_scale, salt, adamw_c):
    """AdamW over a compact record. weights: (hi int16, lo int8); scales: (m, v float32, block: elements each).

    Segments start at multiples of block; the rest of a segment's last block is padding.
    """
    starts, ends, factors = segments
    m_scales, v_scales, size = scales
    p_tile = np.empty(size, np.float32)
    g_tile = np.empty(size, np.float32)
    m_tile = np.empty(size, np.float32)
    v_tile = np.empty(size, np.float32)
    for s in range(starts.size):
        for a in range(starts[s], ends[s], size):
            b = min(a + size, ends[s])
            block = a // size
            p, g, m, v = p_tile[: b - a], g_tile[: b - a], m_tile[: b - a], v_tile[: b - a]
            if bf16_grad is not None:
                grad_from_bf16(bf16_grad[a:b], grad_scale, g)
            if f32_grad is not None:
                grad_from_f32(f32_grad[a:b], grad_scale, g)
            join8(weights[0][a:b], weights[1][a:b], p)
            decode8(m_codes[a:b], m_scales[block], np.float32(127), m)
            decode8(v_codes[a:b], v_scales[block], np.float32(255), v)
            adamw(p, g, m, v, factors[s], adamw_c)
            split8(p, salt, weights[0][a:b], weights[1][a:b])
            m_scales[block] = max(absmax(m), LEAST_SCALE)
            v_scales[block] = max(absmax(v), LEAST_SCALE)
            encode8(m, m_scales[block], np.float32(127), np.float32(0), salt, m_codes[a:b])
            encode8(v, v_scales[block], np.float32(255), np.float32(1), salt, v_codes[a:b])


# norm

LANES = 1024


@_jit
def sumsq(bf16_grad, f32_grad, n, block, out):
    """out[k] = sum of squares of elements [k * block, (k + 1) * block) of n, in float64 and a fixed order."""
    lanes = np.empty(LANES, np.float64)
    tile = np.empty(LANES, np.float32)
    for k in range(out.size):
        lanes[:] = 0.0
        last = min((k + 1) * block, n)
        for a in range(k * block, last, LANES):
            b = min(a + LANES, last)
            x = tile[: b - a]
            if bf16_grad is not None:
                grad_from_bf16(bf16_grad[a:b], np.float32(1), x)
            if f32_grad is not None:
                x = f32_grad[a:b]
            for j in range(b - a):
                wide = np.float64(x[j])
                lanes[j] += wide * wide
        width = LANES
        while width > 1:
            width //= 2
            for j in range(width):
                lanes[j] += lanes[j + width]
        out[k] = lanes[0]
