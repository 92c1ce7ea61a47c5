// Value warps of the wgmma kernel for 64 heads: the rows of a stage, added up by probability, 256 output
// columns per warpgroup.
#pragma once

#include "slow.cuh"
#include "values.cuh"

// x[i] of lane j of a quad to x[j] of its lane i.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4], int q) {
#pragma unroll
    for (int d = 1; d <= 2; d <<= 1) {
        const bool upper = q & d;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & d) continue;
            const u32 got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + d], d);
            (upper ? x[i] : x[i + d]) = got;
        }
    }
}

__device__ __forceinline__ void weigh(Shared& sh, const Params& p, int warp, int lane) {
    const int group = warp >> 2;  // 256 columns each
    const int head = (warp & 3) * 16 + (lane >> 2);
    if (RANKS > 1) cluster_wait();
    int count = 0, nth = 0, busy = 0;
    Lens lens = load_lens(p, first_unit());
#pragma unroll 1
    for (int number = first_unit(); number < p.num_units; number += units_apart(), ++nth) {
        const Unit unit(p, number, lens);
        lens = load_lens(p, number + units_apart());
        const int heads_left = p.num_heads - unit.first_head;
        float acc[2][64];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 64; ++i) acc[h][i] = 0.f;
#pragma unroll 1
        for (int block = 0; block < unit.num_blocks; ++block, ++count) {
            const int stage = count % STAGES;
            wait_rows(sh, count);
            wait_barrier(sh.weights_full, count & 1);
            if (block > 0 && sh.rescale == count + 1) {
                const float fade[2] = {sh.fade[head], sh.fade[head + 8]};
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 0; i < 64; ++i) acc[h][i] *= fade[i >> 1 & 1];
            }
            const u32 rows = smem_address(sh.rows[stage]) + group * 4 * COLUMNS_APART;
            const u32 weights = smem_address(sh.weights);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    wgmma_values(acc[h], descriptor(weights + k * 32, 16),
                                 descriptor(rows + h * 2 * COLUMNS_APART + row_offset(k * 16), COLUMNS_APART));
            wgmma_commit();
            wgmma_wait();
            free_stage(sh, stage, lane);
        }
        wait_barrier(sh.unit_done, nth & 1);
        const bool unfit = take_unfit(sh, unit, busy, warp, lane);
        const float factor[2] = {sh.factor[0][head], sh.factor[0][head + 8]};
        const int q = lane & 3;
        if (p.positions != nullptr && group == 1) {
#pragma unroll
            for (int j = 8; j < 16; ++j) {  // the last 64 columns
                const float2 turn = sh.turn[(j - 8) * 4 + q];
                turn_back(turn, acc[1][j * 4], acc[1][j * 4 + 1]);
                turn_back(turn, acc[1][j * 4 + 2], acc[1][j * 4 + 3]);
            }
        }
        __syncwarp();
        arrive(sh.unit_taken, lane);
        if constexpr (!BF16_ROWS) {
            if (unfit) {
                attend_slowly(p, number, warp, lane);
                continue;
            }
        }
        // A quad has two columns each of 8: four such pieces change hands, so that a lane stores 16 bytes.
        u16* out = p.out + unit.token * p.out_token_stride + (unit.first_head + head) * p.out_head_stride +
                   group * 256 + q * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 0; j < 16; j += 4) {
                    u32 x[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[i] = to_bf16x2(acc[h][(j + i) * 4 + half * 2] * factor[half],
                                         acc[h][(j + i) * 4 + half * 2 + 1] * factor[half]);
                    transpose_quad(x, q);
                    if (head + half * 8 < heads_left)
                        *reinterpret_cast<uint4*>(out + half * 8 * p.out_head_stride + h * 128 + j * 8) =
                            make_uint4(x[0], x[1], x[2], x[3]);
                }
    }
}
