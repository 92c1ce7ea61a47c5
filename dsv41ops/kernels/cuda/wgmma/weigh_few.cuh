// Value warps of the wgmma kernel for 32 or 16 heads: of a lane, columns 64 c + 16 w + g (and 8 more) of
// heads 8 j + 2 q and 8 j + 2 q + 1.
#pragma once

#include "slow.cuh"
#include "values.cuh"

using Sums = float[8][4 * EIGHTS];  // of a lane, by chunks of 64 columns

// By a number per head.
__device__ __forceinline__ void multiply(const float (&by)[HEADS], float (&sums)[4 * EIGHTS], int q) {
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(&by[j * 8 + q * 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j * 4 + i] *= i & 1 ? pair.y : pair.x;
    }
}

// A CTA of a cluster completes the chunks from this one on.
__device__ __forceinline__ int first_chunk(int rank) { return 8 * rank / SPLITS; }
constexpr int CHUNK_BYTES = 64 * HEADS * sizeof(float);

// Every CTA of the cluster sends every other its sums of the chunks that the other completes, through the
// first stage of each into the second of the other, lane by lane as they lie in registers.
__device__ __forceinline__ void join_parts(Shared& sh, Sums& acc, int warp, int lane) {
    static_assert(!FEW_HEADS || 8 * CHUNK_BYTES <= sizeof(sh.rows[0]) && (SPLITS - 1) * ((8 + SPLITS - 1) / SPLITS) <= 8, "stages");
    const int rank = own_rank(), first = first_chunk(rank), last = first_chunk(rank + 1), q = lane & 3;
    float4* sent = reinterpret_cast<float4*>(sh.rows[0]) + warp * 32 + lane;
    const float4* parts = reinterpret_cast<const float4*>(sh.rows[1]) + warp * 32 + lane;
    constexpr int APART = 32 * VALUE_WARPS;  // in these
    value_sync();  // no one multiplies the stages any more
    if (warp == 0 && lane < SPLITS && lane != rank) arrive_at(remote(smem_address(&sh.peers_ready), lane));
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        if (first <= c && c < last) continue;
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j)
            sent[(c * EIGHTS + j) * APART] = make_float4(acc[c][j * 4], acc[c][j * 4 + 1], acc[c][j * 4 + 2], acc[c][j * 4 + 3]);
    }
    publish();
    value_sync();
    if (warp == 0 && lane < SPLITS && lane != rank) {
        wait_for_cluster(sh.peers_ready, 0);
        const int begin = first_chunk(lane), end = first_chunk(lane + 1);
        send(remote(smem_address(sh.rows[1]) + (rank - (rank > lane)) * (end - begin) * CHUNK_BYTES, lane),
             smem_address(sh.rows[0]) + begin * CHUNK_BYTES, (end - begin) * CHUNK_BYTES,
             remote(smem_address(&sh.parts_here), lane));
    }
    __syncwarp();
    wait_barrier(sh.unit_done, 0);
    wait_barrier(sh.parts_here, 0);
    cluster_arrive();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        if (c < first || c >= last) continue;
        multiply(sh.factor[rank], acc[c], q);
#pragma unroll
        for (int n = 0; n < SPLITS - 1; ++n) {
            const float(&factor)[HEADS] = sh.factor[n + (n >= rank)];
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                const float2 pair = *reinterpret_cast<const float2*>(&factor[j * 8 + q * 2]);
                const float4 part = parts[((n * (last - first) + c - first) * EIGHTS + j) * APART];
                acc[c][j * 4] += part.x * pair.x, acc[c][j * 4 + 1] += part.y * pair.y;
                acc[c][j * 4 + 2] += part.z * pair.x, acc[c][j * 4 + 3] += part.w * pair.y;
            }
        }
    }
}

__device__ __forceinline__ void weigh_few(Shared& sh, const Params& p, int warp, int lane) {
    const int q = lane & 3, g = lane >> 2;
    int count = 0, nth = 0, busy = 0;
    if (RANKS > 1) cluster_wait();
    Lens lens = load_lens(p, first_unit());
#pragma unroll 1
    for (int number = first_unit(); number < p.num_units; number += units_apart(), ++nth) {
        const Unit unit(p, number, lens);
        lens = load_lens(p, number + units_apart());
        const int heads_left = p.num_heads - unit.first_head;
        Sums acc;
#pragma unroll
        for (int c = 0; c < 8; ++c)
#pragma unroll
            for (int i = 0; i < 4 * EIGHTS; ++i) acc[c][i] = 0.f;
#pragma unroll 1
        for (int block = 0; block < unit.num_blocks; ++block, ++count) {
            const int stage = count % STAGES;
            wait_rows(sh, count);
            wait_barrier(sh.weights_full, count & 1);
            if (block > 0 && sh.rescale == count + 1) {
#pragma unroll
                for (int c = 0; c < 8; ++c) multiply(sh.fade, acc[c], q);
            }
            const u32 rows = descriptor(smem_address(sh.rows[stage]), COLUMNS_APART);
            const u32 weights = descriptor(smem_address(sh.weights), 16);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    wgmma_few<1>(acc[c], rows + offset(c * COLUMNS_APART + row_offset(k * 16)), weights + offset(k * 32), 1);
            wgmma_commit();
            wgmma_wait();
            free_stage(sh, stage, lane);
        }
        bool unfit;
        if constexpr (SPLITS > 1) {
            join_parts(sh, acc, warp, lane);
            unfit = sh.unfit_somewhere;
        } else {
            wait_barrier(sh.unit_done, nth & 1);
            unfit = take_unfit(sh, unit, busy, warp, lane);
#pragma unroll
            for (int c = 0; c < 8; ++c) multiply(sh.factor[0], acc[c], q);
        }
        if (p.positions != nullptr) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 turn = sh.turn[(warp * 16 + half * 8 + g) >> 1];  // of the last 64 columns
                const bool odd = g & 1;
#pragma unroll
                for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& own = acc[7][j * 4 + half * 2 + i];
                        const float other = __shfl_xor_sync(~0u, own, 4);
                        float x = odd ? other : own, y = odd ? own : other;
                        turn_back(turn, x, y);
                        own = odd ? y : x;
                    }
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
        // Through shared memory, 16 columns of all heads at a time, so that a lane stores 16 bytes.
        const u32 finished = smem_address(SPLITS > 1 ? sh.query[warp] : sh.finished[warp]);
        auto place = [&](int head, int half) { return finished + head * 32 + ((half ^ (head >> 2 & 1)) << 4); };
        const int own = lane >> 1, half = lane & 1;
        u16* out = p.out + unit.token * p.out_token_stride + (unit.first_head + own) * p.out_head_stride + warp * 16 + half * 8;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if (c < first_chunk(own_rank()) || c >= first_chunk(own_rank() + 1)) continue;
#pragma unroll
            for (int j = 0; j < EIGHTS; j += 2) {
                u32 x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* from = &acc[c][(j + (i >> 1)) * 4 + (i & 1) * 2];
                    x[i] = to_bf16x2(from[0], from[1]);
                }
                store_transposed(place((j + (lane >> 4)) * 8 + (lane & 7), lane >> 3 & 1), x[0], x[1], x[2], x[3]);
            }
            __syncwarp();
            const uint4 low = load16(place(own, half));
            if (own < heads_left) *reinterpret_cast<uint4*>(out + c * 64) = low;
            if (HEADS > 16 && own + 16 < heads_left)
                *reinterpret_cast<uint4*>(out + 16 * p.out_head_stride + c * 64) = load16(place(own + 16, half));
            __syncwarp();
        }
    }
    if (RANKS > 1) cluster_wait();  // the others have what was sent
}
