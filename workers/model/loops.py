"""The loops that are compiled: over adapters' factors, rows, heads of sequences, and the values of a step.

All in one file, of which `compiled` takes the digest: what is kept on disk was made of these very lines. Memory comes
by address, sizes and strides in values of float32; nothing is checked here. `narrow`, `laid`, `rows`, `short`, `single`
and `stepping` say what each is for, and assert its conditions. Each sum has an order that depends on sizes alone. A
`table` has a line for each segment: first token, tokens, rank, the addresses of A [R, I] and of B as [R, O], then those
of their gradients; rank 0 is no adapter.

Two products do all the multiplying: `_across` sums along the rows of both of its factors, `_along` adds rows of one to
rows of the other. Both hold four rows by four in registers, and leave the long side to the processor's vectors.
"""

import numpy as np

from openrl.workers.model.compiled import compiled, floats, power_of_two

_SIZE = 4
"""Bytes of a float32."""
_LARGEST = np.float32(np.finfo(np.float32).max)
_HALF = np.float32(0.5)
_BLOCK = 64
"""Tokens whose share of a factor's gradient is summed while their rows are in the cache."""


@compiled
def add_shares(x_at, x_stride, num_in, y_at, y_stride, num_out, table, scales, inner_at):  # type: ignore[no-untyped-def]
    """y += scale * (x A^T) B^T for each segment; x A^T is kept."""
    for number in range(len(table)):
        start, rows, rank = table[number, 0], table[number, 1], table[number, 2]
        if rank == 0:
            continue
        x = floats(x_at + _SIZE * start * x_stride, rows * x_stride)
        y = floats(y_at + _SIZE * start * y_stride, rows * y_stride)
        a, b = floats(table[number, 3], rank * num_in), floats(table[number, 4], rank * num_out)
        h = floats(inner_at, rows * rank)
        _across(h, rank, np.float32(1), x, x_stride, a, num_in, rows, rank, num_in)
        _along(y, y_stride, scales[number], h, rank, 1, b, num_out, rows, rank, num_out)
        inner_at += _SIZE * rows * rank


@compiled
def share_gradients(dy_at, dy_stride, num_out, x_at, x_stride, num_in, dx_at, dx_stride, table, scales, inner_at):  # type: ignore[no-untyped-def]
    """Add the gradients of A and B, and with `dx_at` what comes through them to that of x."""
    for number in range(len(table)):
        start, rows, rank, scale = table[number, 0], table[number, 1], table[number, 2], scales[number]
        if rank == 0:
            continue
        x = floats(x_at + _SIZE * start * x_stride, rows * x_stride)
        dy = floats(dy_at + _SIZE * start * dy_stride, rows * dy_stride)
        a, b = floats(table[number, 3], rank * num_in), floats(table[number, 4], rank * num_out)
        da, db = floats(table[number, 5], rank * num_in), floats(table[number, 6], rank * num_out)
        h = floats(inner_at, rows * rank)
        inner_at += _SIZE * rows * rank
        dh = np.empty(rows * rank, np.float32)
        _across(dh, rank, scale, dy, dy_stride, b, num_out, rows, rank, num_out)
        if dx_at != 0:
            dx = floats(dx_at + _SIZE * start * dx_stride, rows * dx_stride)
            _along(dx, dx_stride, np.float32(1), dh, rank, 1, a, num_in, rows, rank, num_in)
        for first in range(0, rows, _BLOCK):
            few = min(_BLOCK, rows - first)
            at = first * rank
            _along(da, num_in, np.float32(1), dh[at:], 1, rank, x[first * x_stride :], x_stride, rank, few, num_in)
            _along(db, num_out, scale, h[at:], 1, rank, dy[first * dy_stride :], dy_stride, rank, few, num_out)


@compiled
def _across(out, out_stride, scale, a, a_stride, b, b_stride, num_rows, num_columns, size):  # type: ignore[no-untyped-def]
    """out [rows, columns] = scale * a [rows, size] b [columns, size]^T."""
    zero = np.float32(0)
    i = 0
    while i + 4 <= num_rows:
        a0, a1, a2, a3 = a[i * a_stride :], a[(i + 1) * a_stride :], a[(i + 2) * a_stride :], a[(i + 3) * a_stride :]
        j = 0
        while j + 4 <= num_columns:
            b0, b1 = b[j * b_stride :], b[(j + 1) * b_stride :]
            b2, b3 = b[(j + 2) * b_stride :], b[(j + 3) * b_stride :]
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
            for k in range(size):
                x0, x1, x2, x3 = a0[k], a1[k], a2[k], a3[k]
                y0, y1, y2, y3 = b0[k], b1[k], b2[k], b3[k]
                s00 += x0 * y0
                s01 += x0 * y1
                s02 += x0 * y2
                s03 += x0 * y3
                s10 += x1 * y0
                s11 += x1 * y1
                s12 += x1 * y2
                s13 += x1 * y3
                s20 += x2 * y0
                s21 += x2 * y1
                s22 += x2 * y2
                s23 += x2 * y3
                s30 += x3 * y0
                s31 += x3 * y1
                s32 += x3 * y2
                s33 += x3 * y3
            at = i * out_stride + j
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s00, scale * s01, scale * s02, scale * s03
            at += out_stride
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s10, scale * s11, scale * s12, scale * s13
            at += out_stride
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s20, scale * s21, scale * s22, scale * s23
            at += out_stride
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s30, scale * s31, scale * s32, scale * s33
            j += 4
        while j < num_columns:
            b0 = b[j * b_stride :]
            s0 = s1 = s2 = s3 = zero
            for k in range(size):
                y0 = b0[k]
                s0 += a0[k] * y0
                s1 += a1[k] * y0
                s2 += a2[k] * y0
                s3 += a3[k] * y0
            at = i * out_stride + j
            out[at] = scale * s0
            out[at + out_stride] = scale * s1
            out[at + 2 * out_stride] = scale * s2
            out[at + 3 * out_stride] = scale * s3
            j += 1
        i += 4
    while i < num_rows:
        a0 = a[i * a_stride :]
        for j in range(num_columns):
            b0 = b[j * b_stride :]
            s0 = zero
            for k in range(size):
                s0 += a0[k] * b0[k]
            out[i * out_stride + j] = scale * s0
        i += 1


@compiled
def _along(out, out_stride, scale, c, c_row, c_column, b, b_stride, num_rows, num_inner, size):  # type: ignore[no-untyped-def]
    """out [rows, size] += scale * c [rows, inner] b [inner, size]; c is at `row * c_row + inner * c_column`."""
    i = 0
    while i + 4 <= num_rows:
        o0, o1 = out[i * out_stride :], out[(i + 1) * out_stride :]
        o2, o3 = out[(i + 2) * out_stride :], out[(i + 3) * out_stride :]
        j = 0
        while j + 4 <= num_inner:
            b0, b1 = b[j * b_stride :], b[(j + 1) * b_stride :]
            b2, b3 = b[(j + 2) * b_stride :], b[(j + 3) * b_stride :]
            at = i * c_row + j * c_column
            c00, c01, c02, c03 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            at += c_row
            c10, c11, c12, c13 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            at += c_row
            c20, c21, c22, c23 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            at += c_row
            c30, c31, c32, c33 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            for k in range(size):
                y0, y1, y2, y3 = b0[k], b1[k], b2[k], b3[k]
                o0[k] += scale * (c00 * y0 + c01 * y1 + c02 * y2 + c03 * y3)
                o1[k] += scale * (c10 * y0 + c11 * y1 + c12 * y2 + c13 * y3)
                o2[k] += scale * (c20 * y0 + c21 * y1 + c22 * y2 + c23 * y3)
                o3[k] += scale * (c30 * y0 + c31 * y1 + c32 * y2 + c33 * y3)
            j += 4
        while j < num_inner:
            b0 = b[j * b_stride :]
            at = i * c_row + j * c_column
            c00, c10, c20, c30 = c[at], c[at + c_row], c[at + 2 * c_row], c[at + 3 * c_row]
            for k in range(size):
                y0 = scale * b0[k]
                o0[k] += c00 * y0
                o1[k] += c10 * y0
                o2[k] += c20 * y0
                o3[k] += c30 * y0
            j += 1
        i += 4
    while i < num_rows:
        o0 = out[i * out_stride :]
        j = 0
        while j + 4 <= num_inner:
            b0, b1 = b[j * b_stride :], b[(j + 1) * b_stride :]
            b2, b3 = b[(j + 2) * b_stride :], b[(j + 3) * b_stride :]
            at = i * c_row + j * c_column
            c00, c01, c02, c03 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            for k in range(size):
                o0[k] += scale * (c00 * b0[k] + c01 * b1[k] + c02 * b2[k] + c03 * b3[k])
            j += 4
        while j < num_inner:
            b0, c00 = b[j * b_stride :], c[i * c_row + j * c_column]
            for k in range(size):
                o0[k] += scale * (c00 * b0[k])
            j += 1
        i += 1


@compiled
def norm(y_at, normal_at, factor_at, x_at, weight_at, num, size, eps):  # type: ignore[no-untyped-def]
    """The root-mean-square norm of each row, with the weight and without, and what was multiplied with."""
    factors, weight = floats(factor_at, num), floats(weight_at, size)
    for t in range(num):
        x, y = floats(x_at + _SIZE * t * size, size), floats(y_at + _SIZE * t * size, size)
        normal = floats(normal_at + _SIZE * t * size, size)
        squares = np.float32(0)
        for d in range(size):
            squares += x[d] * x[d]
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        factors[t] = factor
        for d in range(size):
            value = x[d] * factor
            normal[d] = value
            y[d] = value * weight[d]


@compiled
def norm_gradient(dx_at, dy_at, normal_at, factor_at, weight_at, beside_at, num, size):  # type: ignore[no-untyped-def]
    """Its gradient plus what comes past it."""
    factors, weight = floats(factor_at, num), floats(weight_at, size)
    for t in range(num):
        dx, dy = floats(dx_at + _SIZE * t * size, size), floats(dy_at + _SIZE * t * size, size)
        normal, beside = floats(normal_at + _SIZE * t * size, size), floats(beside_at + _SIZE * t * size, size)
        inner = np.float32(0)
        for d in range(size):
            inner += dy[d] * weight[d] * normal[d]
        inner /= np.float32(size)
        factor = factors[t]
        for d in range(size):
            dx[d] = beside[d] + factor * (dy[d] * weight[d] - normal[d] * inner)


@compiled
def norm_alone(y_at, x_at, x_stride, weight_at, num, size, eps):  # type: ignore[no-untyped-def]
    """`norm` for no gradient."""
    weight = floats(weight_at, size)
    for t in range(num):
        x, y = floats(x_at + _SIZE * t * x_stride, size), floats(y_at + _SIZE * t * size, size)
        squares = np.float32(0)
        for d in range(size):
            squares += x[d] * x[d]
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        for d in range(size):
            y[d] = x[d] * factor * weight[d]


@compiled
def heads(queries, keys, kept, rotation_at, num, size, eps):  # type: ignore[no-untyped-def]
    """Normalize and rotate. `queries` and `keys`: number of heads, weight, and where rows are read and written.

    `kept` is where normalized heads and their factors go; without it they go nowhere, without a weight there are none.
    """
    num_q = queries[0]
    for t in range(num):
        row_at = rotation_at + _SIZE * 2 * size * t
        place = t * (num_q + keys[0])
        _heads_of_token(queries, kept, place, row_at, t, size, eps)
        _heads_of_token(keys, kept, place + num_q, row_at, t, size, eps)


@compiled
def _heads_of_token(part, kept, place, rotation_at, t, size, eps):  # type: ignore[no-untyped-def]
    num_heads, weight_at, x_at, x_stride, out_at, out_stride = part
    normal_at, factor_at = kept
    half = size // 2
    cos, to_first = floats(rotation_at, size), floats(rotation_at + _SIZE * size, half)
    to_second = floats(rotation_at + _SIZE * (size + half), half)
    for head in range(num_heads):
        x = floats(x_at + _SIZE * (t * x_stride + head * size), size)
        out = floats(out_at + _SIZE * (t * out_stride + head * size), size)
        if weight_at == 0:
            for e in range(half):
                first, second = x[e], x[half + e]
                out[e] = first * cos[e] + second * to_first[e]
                out[half + e] = second * cos[half + e] + first * to_second[e]
            continue
        weight = floats(weight_at, size)
        squares = np.float32(0)
        for e in range(size):
            squares += x[e] * x[e]
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        if normal_at != 0:
            floats(factor_at + _SIZE * (place + head), 1)[0] = factor
            normal = floats(normal_at + _SIZE * (place + head) * size, size)
            for e in range(size):
                normal[e] = x[e] * factor
        for e in range(half):
            first, second = x[e] * factor * weight[e], x[half + e] * factor * weight[half + e]
            out[e] = first * cos[e] + second * to_first[e]
            out[half + e] = second * cos[half + e] + first * to_second[e]


@compiled
def heads_gradient(queries, keys, kept, rotation_at, num, size):  # type: ignore[no-untyped-def]
    """The gradients of what `heads` read; a part is heads, weight, place and strides of the upstream one, own place."""
    num_q = queries[0]
    for t in range(num):
        row_at = rotation_at + _SIZE * 2 * size * t
        place = t * (num_q + keys[0])
        _heads_gradient_of_token(queries, kept, place, row_at, t, size)
        _heads_gradient_of_token(keys, kept, place + num_q, row_at, t, size)


@compiled
def _heads_gradient_of_token(part, kept, place, rotation_at, t, size):  # type: ignore[no-untyped-def]
    num_heads, weight_at, dy_at, token_stride, head_stride, dx_at = part
    normal_at, factor_at = kept
    half = size // 2
    cos, to_first = floats(rotation_at, size), floats(rotation_at + _SIZE * size, half)
    to_second = floats(rotation_at + _SIZE * (size + half), half)
    for head in range(num_heads):
        dx = floats(dx_at + _SIZE * (t * num_heads + head) * size, size)
        dy = floats(dy_at + _SIZE * (t * token_stride + head * head_stride), size)
        for e in range(half):
            dx[e] = dy[e] * cos[e] + dy[half + e] * to_second[e]
            dx[half + e] = dy[half + e] * cos[half + e] + dy[e] * to_first[e]
        if weight_at == 0:
            continue
        weight = floats(weight_at, size)
        normal = floats(normal_at + _SIZE * (place + head) * size, size)
        factor = floats(factor_at + _SIZE * (place + head), 1)[0]
        inner = np.float32(0)
        for e in range(size):
            inner += dx[e] * weight[e] * normal[e]
        inner /= np.float32(size)
        for e in range(size):
            dx[e] = factor * (dx[e] * weight[e] - normal[e] * inner)


@compiled
def gated(out_at, gate_at, gate_stride, up_at, up_stride, num, size):  # type: ignore[no-untyped-def]
    """silu(gate) * up."""
    for t in range(num):
        out, gate = floats(out_at + _SIZE * t * size, size), floats(gate_at + _SIZE * t * gate_stride, size)
        up = floats(up_at + _SIZE * t * up_stride, size)
        for f in range(size):
            out[f] = gate[f] * _sigmoid(gate[f]) * up[f]


@compiled
def gated_gradient(dgate_at, dup_at, dout_at, gate_at, up_at, size):  # type: ignore[no-untyped-def]
    """All one row behind another, `size` values in all."""
    dgate, dup, dout = floats(dgate_at, size), floats(dup_at, size), floats(dout_at, size)
    gate, up = floats(gate_at, size), floats(up_at, size)
    for f in range(size):
        share = _sigmoid(gate[f])
        dup[f] = dout[f] * gate[f] * share
        dgate[f] = dout[f] * up[f] * share * (np.float32(1) + gate[f] * (np.float32(1) - share))


@compiled
def attend(places, sizes, lengths, scale):  # type: ignore[no-untyped-def]
    """Causal attention in each sequence by itself; all of [T, heads, size], weights [T, num_heads, longest]."""
    out_at, weights_at, q_at, k_at, v_at = places
    longest, num_heads, num_keys, size = sizes
    group = num_heads // num_keys
    wide, narrow, row = num_heads * size, num_keys * size, num_heads * longest
    start = 0
    for number in range(len(lengths)):
        length = lengths[number]
        for head in range(num_heads):
            at, of_key = start * wide + head * size, start * narrow + (head // group) * size
            out, q = floats(out_at + _SIZE * at, length * wide), floats(q_at + _SIZE * at, length * wide)
            k, v = floats(k_at + _SIZE * of_key, length * narrow), floats(v_at + _SIZE * of_key, length * narrow)
            weights = floats(weights_at + _SIZE * (start * row + head * longest), length * row)
            for first in range(0, length, 4):
                few, seen = min(4, length - first), min(first + 4, length)
                mine, outs = weights[first * row :], out[first * wide :]
                _across(mine, row, scale, q[first * wide :], wide, k, narrow, few, seen, size)
                for i in range(few):
                    _softmax(mine[i * row :], first + i + 1, seen)
                    for e in range(size):
                        outs[i * wide + e] = np.float32(0)
                _along(outs, wide, np.float32(1), mine, row, 1, v, narrow, few, seen, size)
        start += length


@compiled
def attend_gradient(places, sizes, lengths, scale):  # type: ignore[no-untyped-def]
    """The gradients of queries, keys and values; those of keys and values are added to what is there."""
    dq_at, dk_at, dv_at, dout_at, out_at, weights_at, q_at, k_at, v_at = places
    longest, num_heads, num_keys, size = sizes
    group = num_heads // num_keys
    wide, narrow, row = num_heads * size, num_keys * size, num_heads * longest
    dscores = np.empty(4 * longest, np.float32)
    start = 0
    for number in range(len(lengths)):
        length = lengths[number]
        for head in range(num_heads):
            at, of_key = start * wide + head * size, start * narrow + (head // group) * size
            out, q = floats(out_at + _SIZE * at, length * wide), floats(q_at + _SIZE * at, length * wide)
            dout, dq = floats(dout_at + _SIZE * at, length * wide), floats(dq_at + _SIZE * at, length * wide)
            k, v = floats(k_at + _SIZE * of_key, length * narrow), floats(v_at + _SIZE * of_key, length * narrow)
            dk, dv = floats(dk_at + _SIZE * of_key, length * narrow), floats(dv_at + _SIZE * of_key, length * narrow)
            weights = floats(weights_at + _SIZE * (start * row + head * longest), length * row)
            for first in range(0, length, 4):
                few, seen = min(4, length - first), min(first + 4, length)
                mine, outs, douts = weights[first * row :], out[first * wide :], dout[first * wide :]
                _across(dscores, longest, np.float32(1), douts, wide, v, narrow, few, seen, size)
                for i in range(few):
                    inner = np.float32(0)
                    for e in range(size):
                        inner += outs[i * wide + e] * douts[i * wide + e]
                    for j in range(seen):
                        dscores[i * longest + j] = scale * mine[i * row + j] * (dscores[i * longest + j] - inner)
                    for e in range(size):
                        dq[(first + i) * wide + e] = np.float32(0)
                _along(dq[first * wide :], wide, np.float32(1), dscores, longest, 1, k, narrow, few, seen, size)
                _along(dk, narrow, np.float32(1), dscores, 1, longest, q[first * wide :], wide, seen, few, size)
                _along(dv, narrow, np.float32(1), mine, 1, row, douts, wide, seen, few, size)
        start += length


@compiled
def attend_cached(out_at, q_at, q_stride, keys_at, values_at, table, first, sizes, scale):  # type: ignore[no-untyped-def]
    """One token of each sequence sees what a cache holds of it: positions [position, heads, size].

    `table`: where each sequence begins in the cache, and the token's own place behind that. With `first` above 0 it
    sees so many tokens alone, itself the last.
    """
    longest, num_heads, num_keys, size = sizes
    group, row = num_heads // num_keys, num_keys * size
    scores = np.empty(group * longest, np.float32)
    for t in range(len(table)):
        begin, last = table[t, 0], table[t, 1]
        unseen = max(0, last + 1 - first) if first > 0 else 0
        num = last + 1 - unseen
        for key in range(num_keys):
            at = _SIZE * ((begin + unseen) * row + key * size)
            k, v = floats(keys_at + at, num * row), floats(values_at + at, num * row)
            q = floats(q_at + _SIZE * (t * q_stride + key * group * size), group * size)
            out = floats(out_at + _SIZE * (t * num_heads + key * group) * size, group * size)
            _across(scores, longest, scale, q, size, k, row, group, num, size)
            for head in range(group):
                _softmax(scores[head * longest :], num, num)
            for e in range(group * size):
                out[e] = np.float32(0)
            _along(out, size, np.float32(1), scores, longest, 1, v, row, group, num, size)


@compiled
def add_to_columns(x_at, x_stride, num_in, y_at, y_stride, table, scales):  # type: ignore[no-untyped-def]
    """`add_shares` for modules whose outputs lie side by side: first column and number of outputs come with each."""
    for number in range(len(table)):
        start, rows, rank, a_at, b_at, column, num_out = table[number]
        x = floats(x_at + _SIZE * start * x_stride, rows * x_stride)
        y = floats(y_at + _SIZE * (start * y_stride + column), rows * y_stride)
        a, b, h = floats(a_at, rank * num_in), floats(b_at, rank * num_out), np.empty(rows * rank, np.float32)
        _across(h, rank, np.float32(1), x, x_stride, a, num_in, rows, rank, num_in)
        _along(y, y_stride, scales[number], h, rank, 1, b, num_out, rows, rank, num_out)


@compiled
def _softmax(row, num, size):  # type: ignore[no-untyped-def]
    """Make weights of the first `num` of `size` scores; the rest become 0."""
    highest = row[0]
    for j in range(1, num):
        highest = row[j] if row[j] > highest else highest
    total = np.float32(0)
    for j in range(num):
        row[j] = _exp(row[j] - highest)
        total += row[j]
    factor = np.float32(1) / total
    for j in range(num):
        row[j] *= factor
    for j in range(num, size):
        row[j] = np.float32(0)


@compiled
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x for x from 0 down, to 2 units of the last bit: 2^n times a polynomial, in vectors as the library's isn't."""
    x = x if not x < np.float32(-87) else np.float32(-87)
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1)
    return power * power_of_two(np.int32(whole))


@compiled
def _sigmoid(x):  # type: ignore[no-untyped-def]
    less = _exp(-abs(x)) if not x < np.float32(-87) else np.float32(0)
    return (np.float32(1) if x >= np.float32(0) else less) / (np.float32(1) + less)


@compiled
def square_sum(at, size):  # type: ignore[no-untyped-def]
    """In float64."""
    values = floats(at, size)
    total = 0.0
    for i in range(size):
        value = np.float64(values[i])
        total += value * value
    return total


@compiled
def adamw(values_at, grads_at, avg_at, avg_sq_at, size, by, writes):  # type: ignore[no-untyped-def]
    """Compute a step, write it if that is asked; return the sum of the squares of its updates, and if it is finite."""
    clip, decay, new1, beta2, new2, scale, root, eps = by
    values, grads = floats(values_at, size), floats(grads_at, size)
    avgs, avg_sqs = floats(avg_at, size), floats(avg_sq_at, size)
    squares, bad = 0.0, 0
    for i in range(size):
        grad, old = clip * grads[i], values[i]
        far = grad - avgs[i]
        avg = avgs[i] + new1 * far if new1 < _HALF else grad - far * (np.float32(1) - new1)
        avg_sq = beta2 * avg_sqs[i] + new2 * grad * grad
        new = decay * old - scale * avg / (np.sqrt(avg_sq) / root + eps)
        update = np.float64(new - old)
        squares += update * update
        bad += 0 if avg_sq <= _LARGEST else 1
        if writes:
            values[i], avgs[i], avg_sqs[i] = new, avg, avg_sq
    return squares, bad == 0
