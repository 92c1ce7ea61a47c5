// Score warps of the wgmma kernel for 32 or 16 heads: rows · queries, and probabilities. Every warp has 16
// rows of a block and all heads: of a lane, rows g and g + 8 and heads 8 j + 2 q and 8 j + 2 q + 1.
#pragma once

#include "queries.cuh"

// Whether any score warp says so.
__device__ __forceinline__ bool any_score_warp(bool yes) {
    int any;
    asm volatile("{\n.reg .pred p, r;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred r, 1, 128, p;\nselp.b32 %0, 1, 0, r;\n}"
        : "=r"(any) : "r"(static_cast<int>(yes)) : "memory");
    return any;
}

// Sums or maxima of the eight lanes that have a head, for each of a lane's heads.
template <typename F> __device__ __forceinline__ void reduce_lanes(float (&x)[LANE_HEADS], F&& f) {
#pragma unroll
    for (int d = 4; d <= 16; d <<= 1)
#pragma unroll
        for (int i = 0; i < LANE_HEADS; ++i) x[i] = f(x[i], __shfl_xor_sync(~0u, x[i], d));
}

// A lane's heads, in a table by head.
__device__ __forceinline__ void put_heads(float (&table)[HEADS], int q, const float (&x)[LANE_HEADS]) {
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) *reinterpret_cast<float2*>(&table[j * 8 + q * 2]) = make_float2(x[j * 2], x[j * 2 + 1]);
}

// A head per lane: its peak and sum in this CTA to those of all, which also gives everyone's factors.
__device__ __forceinline__ float2 join_stats(Shared& sh, float2 own, float sink, int lane) {
    const int rank = own_rank();
    if (lane < HEADS) sh.stats[rank][lane] = own;
    const int head = lane % HEADS;
    publish();
    __syncwarp();
    if (lane < SPLITS && lane != rank)
        send(remote(smem_address(sh.stats[rank]), lane), smem_address(sh.stats[rank]), sizeof(sh.stats[0]),
             remote(smem_address(&sh.stats_here), lane));
    wait_barrier(sh.stats_here, 0);
    float top = NO_PEAK, sum = 0.f;
#pragma unroll
    for (int r = 0; r < SPLITS; ++r) top = fmaxf(top, sh.stats[r][head].x);
#pragma unroll
    for (int r = 0; r < SPLITS; ++r) sum += sh.stats[r][head].y * exp2_fast(sh.stats[r][head].x - top);
    const float factor = output_factor(top, sum, sink);
#pragma unroll
    for (int r = 0; r < SPLITS; ++r)
        if (lane < HEADS) sh.factor[r][lane] = exp2_fast(sh.stats[r][head].x - top) * factor;
    const bool unfit = !BF16_ROWS && __any_sync(~0u, sum != sum);
    if (lane == 0) sh.unfit_somewhere = unfit;
    __syncwarp();
    return make_float2(top, sum);
}

__device__ __forceinline__ void score_few(Shared& sh, const Params& p, int warp, int lane) {
    const int thread = warp * 32 + lane, q = lane & 3;
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
        const float2 turn = load_turn(p, unit.token, lane);
        const int own_head = unit.first_head + lane % HEADS;
        const float sink = load_sink(p, own_head);
        float peak[LANE_HEADS], limit[LANE_HEADS], total[LANE_HEADS];  // above the limit a score moves the peak
#pragma unroll
        for (int i = 0; i < LANE_HEADS; ++i) peak[i] = NO_PEAK, limit[i] = -INF, total[i] = 0.f;
        const float scale = p.scale_log2 / QUERY_SCALE;
        if (num_blocks > 0) take_queries(sh, busy++, thread);
        else next = Unit(p, number + units_apart(), lens), copy_next();
#pragma unroll 1
        for (int block = 0; block < num_blocks; ++block, ++count) {
            const int stage = __shfl_sync(~0u, count % STAGES, 0);  // descriptors in uniform registers
            wait_rows(sh, count);
            float s[2 * LANE_HEADS];
            const u32 rows = descriptor(stage_address(stage), 16), query = descriptor(query_address(), 16);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 32; ++k)
                wgmma_few<0>(s, rows + offset((k >> 2) * COLUMNS_APART + (k & 3) * 32),
                             query + offset((k >> 2) * HEADS * 128 + (k & 3) * 32), k > 0);
            wgmma_commit();
            wgmma_wait();
            // Row 16 w + 4 n + i of the block: bit 8 n + i of word w.
            const u32 there = reinterpret_cast<const u32*>(sh.row_mask[stage])[warp];
            const int bit = (lane >> 4) * 8 + (lane >> 2 & 3);
            bool higher = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool exists = there >> (bit + half * 16) & 1;
#pragma unroll
                for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& x = s[j * 4 + half * 2 + i];
                        x = exists ? x : -INF;
                        higher |= x > limit[j * 2 + i];
                    }
            }
            const bool moves = any_score_warp(higher);
            if (block == num_blocks - 1) next = Unit(p, number + units_apart(), lens), copy_next();
            if (count >= 1) wait_barrier(sh.weights_empty, (count - 1) & 1);
            if (moves) {
                float top[LANE_HEADS];
#pragma unroll
                for (int i = 0; i < LANE_HEADS; ++i) top[i] = fmaxf(s[(i >> 1) * 4 + (i & 1)], s[(i >> 1) * 4 + (i & 1) + 2]);
                reduce_lanes(top, [](float a, float b) { return fmaxf(a, b); });
                if (lane < 4) put_heads(sh.tops[warp], q, top);
                score_sync();
                float fade[LANE_HEADS];
#pragma unroll
                for (int i = 0; i < LANE_HEADS; ++i) {
                    const int head = (i >> 1) * 8 + q * 2 + (i & 1);
                    float next = NO_PEAK;
#pragma unroll
                    for (int w = 0; w < SCORE_WARPS; ++w) next = fmaxf(next, sh.tops[w][head]);
                    next = fmaxf(peak[i], next * scale);
                    fade[i] = exp2_fast(peak[i] - next);
                    peak[i] = next, total[i] *= fade[i], limit[i] = (next + PEAK_SLACK) * reciprocal(scale);
                }
                if (warp == 0 && lane < 4) put_heads(sh.fade, q, fade);
                if (thread == 0) sh.rescale = count + 1;
            }
#pragma unroll
            for (int i = 0; i < 2 * LANE_HEADS; ++i) {
                const int head = (i >> 2) * 2 + (i & 1);
                s[i] = exp2_fast(s[i] * scale - peak[head]);
                total[head] += s[i];
            }
            // Matrices: heads 8 j .. 8 j + 7 and the warp's rows 0-7 and 8-15, transposed.
#pragma unroll
            for (int j = 0; j < EIGHTS; j += 2) {
                const int head = (j + (lane >> 4)) * 8 + (lane & 7), piece = warp * 2 + (lane >> 3 & 1);
                store_transposed(smem_address(sh.weights) + head * 128 + ((piece ^ (head & 7)) << 4),
                                 to_operands(s[j * 4], s[j * 4 + 1]), to_operands(s[j * 4 + 2], s[j * 4 + 3]),
                                 to_operands(s[j * 4 + 4], s[j * 4 + 5]), to_operands(s[j * 4 + 6], s[j * 4 + 7]));
            }
            publish();
            __syncwarp();
            arrive(sh.weights_full, lane);
        }
        if (num_blocks > 0) {
            reduce_lanes(total, [](float a, float b) { return a + b; });
            if (lane < 4) put_heads(sh.sums[warp], q, total);
            if (warp == 0 && lane < 4) put_heads(sh.peaks, q, peak);
            score_sync();
        }
        if (nth > 0) wait_barrier(sh.unit_taken, (nth - 1) & 1);
        if (warp == 0) {
            sh.turn[lane] = turn;
            float sum = 0.f, top = NO_PEAK;
            if (num_blocks > 0) {
#pragma unroll
                for (int w = 0; w < SCORE_WARPS; ++w) sum += sh.sums[w][lane % HEADS];
                top = sh.peaks[lane % HEADS];
            }
            bool writes = lane < HEADS && own_head < p.num_heads;
            if constexpr (SPLITS > 1) {
                const float2 all = join_stats(sh, make_float2(top, sh.unfit[0] ? __int_as_float(0x7fffffff) : sum), sink, lane);
                top = all.x, sum = all.y;
                writes &= own_rank() == 0 && !sh.unfit_somewhere;
            } else {
                if (lane < HEADS) sh.factor[0][lane] = output_factor(top, sum, sink);
            }
            if (writes) p.lse[unit.token * p.lse_token_stride + own_head * p.lse_head_stride] = log_sum(top, sum);
            __syncwarp();
        }
        arrive(sh.unit_done, lane);
    }
}
