// Which rows the producer warps of the wgmma kernel have in which block.
#pragma once

#include "shared.cuh"

// Where a producer warp's rows of a block lie, lane by lane.
struct Rows {
    u32 data;          // in 16 bytes
    u32 in_page;       // row number
    u32 exists;        // the same in all lanes
};

template <int R>
__device__ __forceinline__ Rows find_rows(const Pool& pool, int slot, int lane) {
    const bool valid = lane < WARP_ROWS && static_cast<u32>(slot) < pool.num_slots;
    Rows rows;
    rows.exists = __ballot_sync(~0u, valid);
    const Place at = locate<R>(pool, valid ? slot : 0);
    rows.data = at.row_start;
    rows.in_page = at.row;
    return rows;
}

// A lane's slot of a block, -1 if there is none.
__device__ __forceinline__ int load_slot(const Params& p, const Unit& unit, int block, int warp, int lane) {
    block += unit.first_block;
    const bool in_swa = block < unit.swa_blocks;
    const Pool& pool = in_swa ? p.swa : p.topk;
    const int at = (in_swa ? block : block - unit.swa_blocks) * BLOCK + warp * WARP_ROWS + lane;
    const bool there = lane < WARP_ROWS && at < (in_swa ? unit.swa_len : unit.topk_len);
    return there ? pool.indices[unit.token * pool.indices_stride + at] : -1;
}

// What a producer warp knows of a block.
struct Block {
    u32 bits;
    __device__ __forceinline__ static Block of(bool in_swa, bool first, int busy, u32 exists) {
        return {1u | in_swa << 1 | first << 2 | (busy & (BUSY - 1)) << 4 | exists << 8};
    }
    __device__ __forceinline__ bool more() const { return bits & 1; }      // none at the end
    __device__ __forceinline__ bool in_swa() const { return bits & 2; }    // whose cache
    __device__ __forceinline__ bool first() const { return bits & 4; }     // of its unit
    __device__ __forceinline__ u32 busy() const { return bits >> 4 & (BUSY - 1); }  // units before it with blocks
    __device__ __forceinline__ u32 exists() const { return bits >> 8; }    // the warp's rows
};

__device__ __forceinline__ void put_row_mask(Shared& sh, int stage, const Block& block, int warp, int lane) {
    if (lane < WARP_ROWS / 4) sh.row_mask[stage][warp * (WARP_ROWS / 4) + lane] = block.exists() >> lane * 4 & 15;
}

// The blocks of all units of this CTA in a row. Lengths are loaded a unit ahead of their use, slots a block.
struct Walk {
    int number, block, busy, slot;
    Unit unit;
    Lens lens;
    __device__ __forceinline__ Walk(const Params& p, int warp, int lane)
        : number(first_unit()), block(0), busy(0), unit(p, number, {p.swa.width, p.topk.width}) {
        // The first slots are loaded beside the lengths, as if these were whole.
        const bool guess = unit.num_blocks > 0;
        const int first = unit.first_block, swa_blocks = unit.swa_blocks, guessed = guess ? load_slot(p, unit, 0, warp, lane) : -1;
        unit = Unit(p, number);
        lens = load_lens(p, number + units_apart());
        const bool in_swa = first < unit.swa_blocks;
        if (guess && first == unit.first_block && unit.num_blocks > 0 && (in_swa || unit.swa_blocks == swa_blocks)) {
            const int at = (in_swa ? first : first - unit.swa_blocks) * BLOCK + warp * WARP_ROWS + lane;
            slot = at < (in_swa ? unit.swa_len : unit.topk_len) ? guessed : -1;
        } else {
            block = -1;
            step(p, warp, lane);
        }
    }
    __device__ __forceinline__ void step(const Params& p, int warp, int lane) {
        ++block;
        while (block >= unit.num_blocks && number < p.num_units) {
            busy += unit.num_blocks > 0, block = 0, number += units_apart();
            unit = Unit(p, number, lens);
            lens = load_lens(p, number + units_apart());
        }
        slot = load_slot(p, unit, block, warp, lane);
    }
    __device__ __forceinline__ Block next(const Params& p, Rows& rows, int warp, int lane) {
        if (number >= p.num_units) return {0};
        const bool in_swa = unit.first_block + block < unit.swa_blocks;
        if (ONE_RECORD || in_swa) rows = find_rows<SWA_RECORD>(in_swa ? p.swa : p.topk, slot, lane);
        else rows = find_rows<TOPK_RECORD>(p.topk, slot, lane);
        const Block found = Block::of(in_swa, block == 0, busy, rows.exists);
        step(p, warp, lane);
        return found;
    }
};
