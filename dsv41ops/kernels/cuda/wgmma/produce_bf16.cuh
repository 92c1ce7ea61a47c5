// Producer warps of the wgmma kernel for bf16 rows: straight into a stage, as the tensor cores take them.
#pragma once

#include "instructions.cuh"
#include "walk.cuh"

__device__ __forceinline__ void produce_bf16(Shared& sh, const Params& p, int warp, int lane) {
    Walk walk(p, warp, lane);
#pragma unroll 1
    for (int count = 0;; ++count) {
        const Block block = walk.next(p, warp, lane);
        if (!block.more()) break;
        const int stage = count % STAGES;
        if (count >= STAGES) wait_empty(sh, count);
        // Columns 64 c .. 64 c + 63 of eight lanes, c up to 3, and 256 further.
        const u8* bytes = (block.in_swa() ? p.swa : p.topk).bytes + lane * 16;
        const u32 stage_rows = smem_address(sh.rows[stage]) + row_offset(row_of(warp, 0));
        const u32 to = stage_rows + (lane >> 3) * COLUMNS_APART + ((lane & 7) ^ first_swizzle(warp)) * 16;
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) {
            const bool there = block.exists() >> r & 1;
            const u8* from = bytes + static_cast<u64>(__shfl_sync(~0u, walk.rows.data, walk.first + r)) * 16;
            hold(from);
            const u32 at = (to ^ (r & 7) * 16) + row_offset(r);
            copy16(at, from, there), copy16(at + 4 * COLUMNS_APART, from + 512, there);
        }
        arrive_with_copies(sh.rows_full[stage]);
        put_row_mask(sh, stage, block, warp, lane);
        __syncwarp();
        arrive(sh.rows_full[stage], lane);
    }
    if (RANKS > 1) cluster_wait();
    commit(), wait_group<0>();
}
