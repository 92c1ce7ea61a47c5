// What the value warps of the wgmma kernel do alike for many heads and for few.
#pragma once

#include "instructions.cuh"
#include "shared.cuh"

__device__ __forceinline__ void value_sync() { asm volatile("bar.sync 2, %0;" ::"n"(32 * VALUE_WARPS) : "memory"); }

// To producers, here and in the CTA that shares rows, and to score warps: the stage is added up.
__device__ __forceinline__ void free_stage(Shared& sh, int stage, int lane) {
    __syncwarp();
    arrive(sh.rows_empty[stage], lane), arrive(sh.weights_empty, lane);
    if (SHARERS > 1 && lane == 0) arrive_with_nothing(others(smem_address(&sh.rows_empty[stage])));
}

// Whether f16 does not hold a number of this unit; that is then forgotten. `busy`: units before this
// one that have blocks.
__device__ __forceinline__ bool take_unfit(Shared& sh, const Unit& unit, int& busy, int warp, int lane) {
    if (BF16_ROWS || unit.num_blocks == 0) return false;
    u32& flag = sh.unfit[busy++ % BUSY];
    const bool unfit = flag != 0;
    if (unfit) {
        value_sync();
        if (warp == 0 && lane == 0) flag = 0;
        value_sync();
    }
    return unfit;
}
