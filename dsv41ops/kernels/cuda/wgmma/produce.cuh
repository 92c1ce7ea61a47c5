// Producer warps of the wgmma kernel for quantised rows: as bytes into a ring, from there as f16 into a stage.
#pragma once

#include "instructions.cuh"
#include "queries.cuh"
#include "walk.cuh"

// Whether eight lanes take what lies in one cache line, not eight pieces from a row's begin on: fewer bytes of
// shared memory pass by, for a few more instructions.
constexpr bool BY_LINES = HEADS == 16 || SHARERS > 1;

// Rows first .. first + BATCH - 1 of the warp into a ring, eight lanes a row; ones that do not exist
// become zeros.
template <int R>
__device__ __forceinline__ void copy_rows(const Pool& pool, const Rows& rows, int first, u32 ring, int lane) {
    constexpr int LANES = 32 / BATCH, PIECES = (R == 584 ? 576 : R) / 16;
    const int own = lane / LANES;
    const bool there = rows.exists >> (first + own) & 1;
    const u8* row = pool.bytes + static_cast<u64>(__shfl_sync(~0u, rows.data, first + own)) * 16;
    // The first piece; before the row's begin, if the eight lanes take what lies in one cache line.
    const int before = BY_LINES ? static_cast<int>(reinterpret_cast<u64>(row) >> 4 & (LANES - 1)) : 0;
    const int piece = lane % LANES - before;
    const u8* from = row + piece * 16;
    hold(from);
    const u32 to = ring + own * RING_PITCH + piece * 16;
#pragma unroll
    for (int i = 0; i < PIECES + (BY_LINES ? LANES - 1 : 0); i += LANES)
        if ((!BY_LINES || i >= LANES || piece >= -i) && (i + LANES <= PIECES || piece < PIECES - i))
            copy16(to + i * 16, from + i * 16, there);
    if constexpr (R == 584) {
        // All scales of a page follow all its data.
        const u32 in_page = __shfl_sync(~0u, rows.in_page, first + own);
        const u64 scales = static_cast<u64>(pool.page_size) * 576 - static_cast<u64>(in_page) * 568;
        if (lane % LANES == 0) copy_few<8>(to + (before * 16 + 576), from + (before * 16 + scales), there);
    }
}

// What a lane takes of a batch out of the ring: columns 16 lane .. 16 lane + 15 of every row, some
// lanes the second half first, so that neither these loads nor the stores that follow meet in a bank.
template <int R> __device__ __forceinline__ int second_first(int lane) {
    return (lane >> 2 ^ lane >> (R == 288 ? 4 : 3)) & 1;
}
struct Batch {
    uint2 first[BATCH], second[BATCH];
    u32 code[BATCH];  // of the scale
    uint4 rest;       // of 584-byte rows: a piece of a bf16 part, eight lanes a row
};

template <int R>
__device__ __forceinline__ void take_rows(const u8 (&ring)[BATCH][RING_PITCH], int lane, Batch& batch) {
    const int swap = second_first<R>(lane);
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        if constexpr (R == 288) {
            const u8* from = ring[r] + lane * 8;
            batch.first[r].x = *reinterpret_cast<const u32*>(from + swap * 4);
            batch.second[r].x = *reinterpret_cast<const u32*>(from + (swap ^ 1) * 4);
            batch.code[r] = ring[r][256 + lane];
        } else {
            const u8* from = ring[r] + lane * 16;
            batch.first[r] = *reinterpret_cast<const uint2*>(from + swap * 8);
            batch.second[r] = *reinterpret_cast<const uint2*>(from + (swap ^ 1) * 8);
            batch.code[r] = R == 584 ? ring[r][576 + (lane >> 2)] : ring[r][512 + (lane >> 1)];
        }
    }
    static_assert(BATCH == 4, "eight lanes a row");
    if constexpr (R == 584)
        batch.rest = *reinterpret_cast<const uint4*>(&ring[0][0] + (lane >> 3) * RING_PITCH + 448 + (lane & 7) * 16);
}

// Codes of scales that f16 does not hold: harmless if nothing but zeros has them, as in a row that
// does not exist. True if something else has.
__device__ __forceinline__ bool excuse_zeros(Batch& batch) {
    bool unfit = false;
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        const u32 bits = batch.first[r].x | batch.first[r].y | batch.second[r].x | batch.second[r].y;
        if ((bits & 0x7f7f7f7fu) == 0 && batch.code[r] != 255) batch.code[r] = 127;
        unfit |= batch.code[r] - 113u > 21u;
    }
    return unfit;
}

// A batch as f16: a lane's pieces of every row, the first one first.
struct Converted {
    uint4 first[BATCH], second[BATCH], rest;
};

// True if f16 does not hold one of this lane's numbers.
template <int R> __device__ __forceinline__ bool convert_rows(Batch& batch, Converted& to, int lane) {
    bool unfit = false;
    if constexpr (R != 288) {
        const bool has_columns = R != 584 || lane < 28;
        bool outside = false;
#pragma unroll
        for (int r = 0; r < BATCH; ++r) outside |= batch.code[r] - 113u > 21u;
        if (__any_sync(~0u, outside && has_columns)) unfit = excuse_zeros(batch) && has_columns;
    }
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        u32 words[8];
        u32 scale;
        if constexpr (R == 288) {
            scale = __byte_perm(e4m3_to_f16(batch.code[r], false), 0, 0x1010);
            e2m1_to_f16(batch.first[r].x, words), e2m1_to_f16(batch.second[r].x, words + 4);
        } else {
            scale = batch.code[r] * 0x04000400u - 112u * 0x04000400u;  // 2^(code - 127), twice
            const u32 raw[4] = {batch.first[r].x, batch.first[r].y, batch.second[r].x, batch.second[r].y};
#pragma unroll
            for (int i = 0; i < 8; ++i) words[i] = e4m3_to_f16(raw[i >> 1], i & 1);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = mul_f16x2(words[i], scale);
        to.first[r] = make_uint4(words[0], words[1], words[2], words[3]);
        to.second[r] = make_uint4(words[4], words[5], words[6], words[7]);
    }
    if constexpr (R == 584) {
        const uint4 v = make_uint4(bf16_to_f16(batch.rest.x), bf16_to_f16(batch.rest.y), bf16_to_f16(batch.rest.z),
                                   bf16_to_f16(batch.rest.w));
        unfit |= !is_finite(larger(larger(larger(larger(0, v.x), v.y), v.z), v.w));
        to.rest = v;
    }
    return unfit;
}

// Into a stage that begins, for this warp, at `stage`: rows `row` and following.
template <int R>
__device__ __forceinline__ void store_rows(const Converted& batch, u32 stage, u32 swizzle, int row, int lane) {
    const u32 at = (stage + (lane >> 2) * COLUMNS_APART + (lane & 3) * 32 + second_first<R>(lane) * 16) ^ swizzle * 16;
    if (R != 584 || lane < 28) {
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            const u32 to = (at ^ ((row + r) & 7) * 16) + row_offset(row + r);
            store16(to, batch.first[r]), store16(to ^ 16, batch.second[r]);
        }
    }
    if constexpr (R == 584) {
        const int own = row + (lane >> 3);
        store16(stage + 7 * COLUMNS_APART + row_offset(own) + ((lane & 7) ^ (own & 7) ^ swizzle) * 16, batch.rest);
    }
}

// Keeps what was computed before a wait before it.
__device__ __forceinline__ void hold(Converted& batch) {
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        uint4 &a = batch.first[r], &b = batch.second[r];
        asm volatile("" : "+r"(a.x), "+r"(a.y), "+r"(a.z), "+r"(a.w), "+r"(b.x), "+r"(b.y), "+r"(b.z), "+r"(b.w));
    }
}

// A warp's rows of a stage, from there into the other CTA's.
__device__ __forceinline__ void share_rows(Shared& sh, int stage, u32 rows, int warp, int lane) {
    constexpr u32 BYTES = WARP_ROWS * ROW_BYTES;
    publish();
    __syncwarp();
    if (lane == 0) {
        if (warp == 0) expect_bytes(sh.rows_full[stage], PRODUCER_WARPS * BYTES);
        send(others(rows), rows, BYTES, others(smem_address(&sh.rows_full[stage])));
    }
}

__device__ __forceinline__ void produce(Shared& sh, const Params& p, int warp, int lane) {
    // Blocks ahead of the one that is converted of which rows are copied.
    constexpr int AHEAD = (BATCHES + WARP_BATCHES - 1) / WARP_BATCHES;
    constexpr int READY = SHARERS;  // batches that are converted before their stage is free
    Walk walk(p, warp, lane);
    Block blocks[AHEAD + 1];
    auto copy = [&](const Block& block, int batch, int place) {
        const u32 ring = smem_address(sh.ring[warp][place]);
        if (block.more()) {
            const bool in_swa = block.in_swa();
            if (ONE_RECORD || in_swa) copy_rows<SWA_RECORD>(in_swa ? p.swa : p.topk, walk.rows, walk.first + batch * BATCH, ring, lane);
            else copy_rows<TOPK_RECORD>(p.topk, walk.rows, walk.first + batch * BATCH, ring, lane);
        }
        commit();
    };
#pragma unroll
    for (int i = 0; i < BATCHES; ++i) {
        if (i % WARP_BATCHES == 0) blocks[i / WARP_BATCHES] = walk.next(p, warp, lane);
        copy(blocks[i / WARP_BATCHES], i % WARP_BATCHES, i);
    }
    if (RANKS > 1) cluster_wait();
    const u32 swizzle = first_swizzle(warp);
    int place = 0;
#pragma unroll 1
    for (int count = 0; blocks[0].more(); ++count) {
        const int stage = count % STAGES;
        const u32 base = smem_address(sh.rows[stage]) + row_offset(row_of(warp, 0));
        const bool in_swa = ONE_RECORD || blocks[0].in_swa();
        bool unfit = false;
        auto convert = [&](int b, Converted& to) {
            const int coming = b + BATCHES;
            Batch batch;
            wait_group<BATCHES - 1>();
            __syncwarp();
            if (in_swa) take_rows<SWA_RECORD>(sh.ring[warp][place], lane, batch);
            else take_rows<TOPK_RECORD>(sh.ring[warp][place], lane, batch);
            __syncwarp();
            if (coming % WARP_BATCHES == 0) blocks[coming / WARP_BATCHES] = walk.next(p, warp, lane);
            copy(blocks[coming / WARP_BATCHES], coming % WARP_BATCHES, place);
            place = place == BATCHES - 1 ? 0 : place + 1;
            if (in_swa) unfit |= convert_rows<SWA_RECORD>(batch, to, lane);
            else unfit |= convert_rows<TOPK_RECORD>(batch, to, lane);
        };
        auto store = [&](int b, const Converted& from) {
            if (in_swa) store_rows<SWA_RECORD>(from, base, swizzle, b * BATCH, lane);
            else store_rows<TOPK_RECORD>(from, base, swizzle, b * BATCH, lane);
        };
        Converted ready[READY];
#pragma unroll
        for (int b = 0; b < READY; ++b) convert(b, ready[b]);
        if (count >= STAGES) {
#pragma unroll
            for (int b = 0; b < READY; ++b) hold(ready[b]);
            wait_empty(sh, count);
        }
#pragma unroll
        for (int b = 0; b < READY; ++b) store(b, ready[b]);
#pragma unroll
        for (int b = READY; b < WARP_BATCHES; ++b) convert(b, ready[0]), store(b, ready[0]);
        if (unfit) {
            u32& flag = sh.unfit[blocks[0].busy()];
            flag = 1;
            if (SHARERS > 1) store_remote(others(smem_address(&flag)), 1);
        }
        if (SHARERS > 1) share_rows(sh, stage, base, warp, lane);
        if (PRODUCERS_HELP && blocks[0].first()) {
            wait_barrier(sh.query_full, blocks[0].busy() & 1);
            if (convert_queries(sh, SCORE_WARPS * 32 + warp * 32 + lane)) sh.unfit[blocks[0].busy()] = 1;
        }
        put_row_mask(sh, stage, blocks[0], warp, lane);
        if (!READERS_PUBLISH) publish();
        __syncwarp();
        arrive(sh.rows_full[stage], lane);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) blocks[i] = blocks[i + 1];
    }
    wait_group<0>();
}
