// Queries of the wgmma kernel in shared memory, [head, column]: score warps copy them there as bf16 when they
// have no more use for the ones before, and make them f16 in place; of 64 heads producers make half.
#pragma once

#include "instructions.cuh"
#include "shared.cuh"

constexpr bool PRODUCERS_HELP = !FEW_HEADS && !BF16_ROWS;

// The pieces, 16 bytes each, of one of so many threads, and where they lie.
template <int WARPS, typename F>
__device__ __forceinline__ void for_query_pieces(Shared& sh, int thread, F&& f) {
    constexpr int AT_ONCE = 32 * WARPS / 64;  // heads
    const int piece = thread & 63;
    const u32 column = smem_address(sh.query[piece >> 3]);
#pragma unroll 2
    for (int i = 0; i < HEADS / AT_ONCE; ++i) {
        const int head = i * AT_ONCE + (thread >> 6);
        f(head, piece, column + head * 128 + (((piece & 7) ^ (head & 7)) << 4));
    }
}

__device__ __forceinline__ void score_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// They arrive at query_full.
__device__ __forceinline__ void copy_queries(Shared& sh, const Params& p, const Unit& unit, int thread) {
    const u16* from = p.q + unit.token * p.q_token_stride + unit.first_head * p.q_head_stride;
    const int heads_left = p.num_heads - unit.first_head;
    for_query_pieces<SCORE_WARPS>(sh, thread, [&](int head, int piece, u32 to) {
        const bool there = head < heads_left;
        copy16(to, reinterpret_cast<const u8*>(from + (there ? head * p.q_head_stride : 0) + piece * 8), there);
    });
    arrive_with_copies(sh.query_full);
}

// True if f16 does not hold one of a thread's.
__device__ __forceinline__ bool convert_queries(Shared& sh, int thread) {
    const u32 scale = (__float_as_uint(QUERY_SCALE) >> 16) * 0x10001u;  // twice, in bf16
    u32 top = 0;
    for_query_pieces<SCORE_WARPS + PRODUCERS_HELP * PRODUCER_WARPS>(sh, thread, [&](int, int, u32 at) {
        const uint4 v = load16(at);
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            words[k] = bf16_to_f16(mul_bf16x2(words[k], scale));
            top = larger(top, words[k]);
        }
        store16(at, make_uint4(words[0], words[1], words[2], words[3]));
    });
    return !is_finite(top);
}

// Those of the nth unit that has blocks, for all score warps.
__device__ __forceinline__ void take_queries(Shared& sh, int nth, int thread) {
    wait_barrier(sh.query_full, nth & 1);
    if (!BF16_ROWS && convert_queries(sh, thread)) sh.unfit[nth % BUSY] = 1;
    publish();
    score_sync();
}
