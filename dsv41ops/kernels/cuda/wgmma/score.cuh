// Score warps of the wgmma kernel: queries · rows, and probabilities.
#pragma once

#include "queries.cuh"

__device__ __forceinline__ void score(Shared& sh, const Params& p, int warp, int lane) {
    const int thread = warp * 32 + lane;
    if (RANKS > 1) cluster_wait();
    int count = 0, nth = 0, busy = 0;
    Unit next(p, first_unit());
    // Before them: no score warp multiplies the queries before.
    auto copy_next = [&] {
        if (next.num_blocks > 0) copy_queries(sh, p, next, thread);
    };
    copy_next();
#pragma unroll 1
    for (int number = first_unit(); number < p.num_units; number += units_apart(), ++nth) {
        const Unit unit = next;
        const int num_blocks = __shfl_sync(~0u, unit.num_blocks, 0);  // uniform, as the compiler sees it
        const Lens lens = load_lens(p, number + units_apart());
        float peak[2] = {NO_PEAK, NO_PEAK}, total[2] = {0.f, 0.f};
        const float2 turn = load_turn(p, unit.token, lane);
        const int own_head = unit.first_head + warp * 16 + (lane >> 2);
        const float sink[2] = {load_sink(p, own_head), load_sink(p, own_head + 8)};
        const float scale = p.scale_log2 / QUERY_SCALE;
        if (num_blocks > 0) take_queries(sh, busy++, thread);
        else next = Unit(p, number + units_apart(), lens), copy_next();
#pragma unroll 1
        for (int block = 0; block < num_blocks; ++block, ++count) {
            const int stage = __shfl_sync(~0u, count % STAGES, 0);  // descriptors in uniform registers
            wait_rows(sh, count);
            float s[32];
            const u32 rows = descriptor(stage_address(stage), 16), query = descriptor(query_address(), 16);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 32; ++k) {
                const u32 piece = (k & 3) * 32;
                wgmma_scores(s, query + offset((k >> 2) * HEADS * 128 + piece),
                             rows + offset((k >> 2) * COLUMNS_APART + piece), k > 0);
            }
            wgmma_commit();
            wgmma_wait();
            if (block == num_blocks - 1) {
                next = Unit(p, number + units_apart(), lens);
                score_sync();
                copy_next();
            }
            // Row 16 w + 4 n + i of the block: bit 8 n + i of mask w.
            const uint4 there = *reinterpret_cast<const uint4*>(sh.row_mask[stage]);
            const u32 masks[4] = {there.x, there.y, there.z, there.w};
            const bool whole = (there.x & there.y & there.z & there.w) == 0x0f0f0f0fu;
            const int bit = (lane >> 1 & 1) * 8 + (lane & 1) * 2;
            if (!whole) {
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!(masks[j >> 1] >> ((j & 1) * 16 + bit + (i & 1)) & 1)) s[j * 4 + i] = -INF;
            }
            float top[2] = {-INF, -INF};
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) top[i >> 1] = fmaxf(top[i >> 1], s[j * 4 + i]);
            bool higher = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
                top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2)) * scale;
                higher |= top[half] > peak[half] + PEAK_SLACK;
            }
            if (count >= 1) wait_barrier(sh.weights_empty, (count - 1) & 1);
            // One warp's heads at a time: the fade of a head is its own warp's business.
            const bool moves = __any_sync(~0u, higher);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float fade = 1.f;
                if (moves) {
                    const float next = fmaxf(peak[half], top[half]);
                    fade = exp2_fast(peak[half] - next);
                    peak[half] = next, total[half] *= fade;
                }
                if ((lane & 3) == 0) sh.fade[warp * 16 + half * 8 + (lane >> 2)] = fade;
            }
            if (lane == 0 && moves) sh.rescale = count + 1;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[j * 4 + i] = exp2_fast(s[j * 4 + i] * scale - peak[i >> 1]);
                    total[i >> 1] += s[j * 4 + i];
                }
            // Matrices: heads 0-7 and 8-15 of the warp, rows 8 j .. 8 j + 15.
            const int head = warp * 16 + (lane & 15);
            const u32 row = smem_address(sh.weights) + head * 128;
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                store_matrices(row + (((j + (lane >> 4)) ^ (head & 7)) << 4),
                               to_operands(s[j * 4], s[j * 4 + 1]), to_operands(s[j * 4 + 2], s[j * 4 + 3]),
                               to_operands(s[j * 4 + 4], s[j * 4 + 5]), to_operands(s[j * 4 + 6], s[j * 4 + 7]));
            publish();
            __syncwarp();
            arrive(sh.weights_full, lane);
        }
        if (nth > 0) wait_barrier(sh.unit_taken, (nth - 1) & 1);
        if (warp == 0) sh.turn[lane] = turn;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half] += __shfl_xor_sync(~0u, total[half], 1);
            total[half] += __shfl_xor_sync(~0u, total[half], 2);
            const int head = warp * 16 + half * 8 + (lane >> 2);
            if ((lane & 3) == 0 && unit.first_head + head < p.num_heads) {
                sh.factor[0][head] = output_factor(peak[half], total[half], sink[half]);
                p.lse[unit.token * p.lse_token_stride + (unit.first_head + head) * p.lse_head_stride] =
                    log_sum(peak[half], total[half]);
            }
        }
        __syncwarp();
        arrive(sh.unit_done, lane);
    }
}
