// A unit of the wgmma kernel in f32, by its value warps: for numbers that f16 does not hold.
#pragma once

#include "instructions.cuh"
#include "shared.cuh"

// Columns 16 lane .. 16 lane + 15 of one row, in f32.
template <int R>
__device__ __forceinline__ void read_row(const Pool& pool, u32 slot, int lane, float (&v)[16]) {
    const u32 page = slot / pool.page_size;
    const u64 row = slot - page * pool.page_size;  // pages may be longer than 2^32 bytes
    const u8* start = pool.bytes + static_cast<i64>(page) * pool.page_stride;
    if (R == 584 && lane >= 28) {
        const u8* from = start + row * 576 + 448 + (lane - 28) * 32;
#pragma unroll
        for (int i = 0; i < 16; ++i)
            v[i] = __uint_as_float(static_cast<u32>(reinterpret_cast<const u16*>(from)[i]) << 16);
        return;
    }
    const u8* from = start + row * row_stride(R) + lane * (R == 288 ? 8 : 16);
    float scale;
    if (R == 288) {
        const u32 pair = e4m3_to_f16(start[row * 288 + 256 + lane], false);
        asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;}" : "=f"(scale) : "r"(pair));
    } else {
        const u32 code = R == 584 ? start[static_cast<u64>(pool.page_size) * 576 + row * 8 + (lane >> 2)]
                                  : start[row * 528 + 512 + (lane >> 1)];
        scale = ue8m0(code);
    }
    u32 pairs[2][4];
    if (R == 288) {
        e2m1_to_f16(reinterpret_cast<const u32*>(from)[0], pairs[0]);
        e2m1_to_f16(reinterpret_cast<const u32*>(from)[1], pairs[1]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = e4m3_to_f16(reinterpret_cast<const u16*>(from)[i], false);
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}"
            : "=f"(v[i]), "=f"(v[i + 1]) : "r"(pairs[i / 8][i / 2 % 4]));
        v[i] *= scale, v[i + 1] *= scale;
    }
}

// A unit in f32, a head per warp at a time: for numbers that f16 does not hold.
__device__ __forceinline__ void attend_slowly(const Params& p, int number, int warp, int lane) {
    const Unit unit(p, number);
    for (int head = unit.first_head + own_rank() * VALUE_WARPS + warp; head < min(p.num_heads, unit.first_head + HEADS);
         head += SPLITS * VALUE_WARPS) {
        float q[16], acc[16], peak = -3.4e38f, total = 0.f;  // scores may be larger than elsewhere
        const u16* query = p.q + unit.token * p.q_token_stride + head * p.q_head_stride + lane * 16;
#pragma unroll
        for (int i = 0; i < 16; ++i) q[i] = __uint_as_float(static_cast<u32>(query[i]) << 16), acc[i] = 0.f;
#pragma unroll 1
        for (int i = 0; i < unit.swa_len + unit.topk_len; ++i) {
            const bool in_swa = i < unit.swa_len;
            const Pool& pool = in_swa ? p.swa : p.topk;
            const u32 slot = pool.indices[unit.token * pool.indices_stride + (in_swa ? i : i - unit.swa_len)];
            if (slot >= pool.num_slots) continue;
            float v[16], s = 0.f;
            if (RECORD == 0 || in_swa) read_row<SWA_RECORD>(pool, slot, lane, v);
            else read_row<TOPK_RECORD>(pool, slot, lane, v);
#pragma unroll
            for (int j = 0; j < 16; ++j) s += q[j] * v[j];
#pragma unroll
            for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
            s *= p.scale_log2;
            const float next = fmaxf(peak, s), fade = exp2_fast(peak - next), weight = exp2_fast(s - next);
            peak = next, total = total * fade + weight;
#pragma unroll
            for (int j = 0; j < 16; ++j) acc[j] = acc[j] * fade + weight * v[j];
        }
        float sum = total;
        if (p.sink != nullptr) sum += exp2_fast(p.sink[head] * LOG2E - peak);
        const float factor = total == 0.f ? 0.f : 1.f / sum;
        const float2 turn = load_turn(p, unit.token, lane);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            // Lanes 28 to 31 have the last 64 columns, a pair of them per step.
            const int pair = ((lane & 3) << 3) + j / 2;
            float2 turns = make_float2(__shfl_sync(~0u, turn.x, pair), __shfl_sync(~0u, turn.y, pair));
            if (lane < 28) turns = NO_TURN;
            turn_back(turns, acc[j], acc[j + 1]);
        }
        u32* to = reinterpret_cast<u32*>(p.out + unit.token * p.out_token_stride + head * p.out_head_stride + lane * 16);
#pragma unroll
        for (int j = 0; j < 16; j += 2) to[j / 2] = to_bf16x2(acc[j] * factor, acc[j + 1] * factor);
        if (lane == 0)
            p.lse[unit.token * p.lse_token_stride + head * p.lse_head_stride] = log_sum(peak, total);
    }
}
