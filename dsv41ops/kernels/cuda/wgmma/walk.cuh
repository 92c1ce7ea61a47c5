// Which rows the producer warps of the wgmma kernel have in which block.
#pragma once

#include "shared.cuh"

// The rows of a block that a producer warp looks up, one per lane: its own; of two CTAs that share rows, then the
// other one's warp's.
constexpr int KNOWN_ROWS = WARP_ROWS * SHARERS;
__device__ __forceinline__ int row_of(int warp, int lane) {
    if (SHARERS == 1) return warp * WARP_ROWS + lane;
    const int whose = lane / WARP_ROWS ^ cluster_rank();
    return whose * (BLOCK / SHARERS) + warp * WARP_ROWS + lane % WARP_ROWS;
}

// In a stage a row's pieces of 16 bytes are swizzled by its number of eight; those of a warp's first row by this.
__device__ __forceinline__ u32 first_swizzle(int warp) { return warp * WARP_ROWS % 8; }

constexpr int LOOKED_UP = 32 / KNOWN_ROWS;  // blocks at once
struct Rows {
    u32 data;          // where they lie, in 16 bytes
    u32 in_page;       // row number
    u32 exists;        // which do, the same in all lanes
};

// Of a lane's slot, of the window's cache or not.
__device__ __forceinline__ Rows find_rows(const Params& p, bool in_swa, u32 slot) {
    const bool valid = slot < (in_swa ? p.swa.num_slots : p.topk.num_slots);
    slot = valid ? slot : 0;
    Place at;
    if (ONE_RECORD) {
        at = locate<SWA_RECORD>(in_swa ? p.swa : p.topk, slot);
    } else {
        const Place in_window = locate<SWA_RECORD>(p.swa, slot), selected = locate<TOPK_RECORD>(p.topk, slot);
        at.row = in_swa ? in_window.row : selected.row;
        at.row_start = in_swa ? in_window.row_start : selected.row_start;
    }
    return {at.row_start, at.row, __ballot_sync(~0u, valid)};
}

// Of the blocks from this one on: a lane's, its row's place in the list of indices, whether that is within the
// length, and the slot, -1 if it is not.
__device__ __forceinline__ int own_block(const Unit& unit, int block, int lane) {
    return unit.first_block + block + lane / KNOWN_ROWS;
}
__device__ __forceinline__ int place_in_list(const Unit& unit, int block, int warp, int lane) {
    const int own = own_block(unit, block, lane);
    return (own < unit.swa_blocks ? own : own - unit.swa_blocks) * BLOCK + row_of(warp, lane % KNOWN_ROWS);
}
__device__ __forceinline__ bool is_listed(const Unit& unit, int block, int warp, int lane) {
    const bool in_swa = own_block(unit, block, lane) < unit.swa_blocks;
    return place_in_list(unit, block, warp, lane) < (in_swa ? unit.swa_len : unit.topk_len);
}
__device__ __forceinline__ int load_slot(const Params& p, const Unit& unit, int block, int warp, int lane) {
    const bool in_swa = own_block(unit, block, lane) < unit.swa_blocks;
    const int* indices = in_swa ? p.swa.indices : p.topk.indices;
    const i64 stride = in_swa ? p.swa.indices_stride : p.topk.indices_stride;
    const int at = place_in_list(unit, block, warp, lane);
    return is_listed(unit, block, warp, lane) ? indices[unit.token * stride + at] : -1;
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
    __device__ __forceinline__ u32 exists() const { return bits >> 8; }    // rows
};

__device__ __forceinline__ void put_row_mask(Shared& sh, int stage, const Block& block, int warp, int lane) {
    if (lane < KNOWN_ROWS / 4) sh.row_mask[stage][row_of(warp, lane * 4) / 4] = block.exists() >> lane * 4 & 15;
}

// The blocks of all units of this CTA in a row. Lengths are loaded a unit ahead of their use, slots some blocks.
struct Walk {
    // Of the block that was last given out: its rows are those from lane `first` on.
    Rows rows;
    int first;
    int left, in_swa, nth, busy_now;  // of those looked up: to come, from the last one on in the window, its number in its unit
    int number, block, busy, slot;    // the next ones to look up
    Unit unit;
    Lens lens;
    __device__ __forceinline__ Walk(const Params& p, int warp, int lane)
        : left(0), number(first_unit()), block(0), busy(0), unit(p, number, {p.swa.width, p.topk.width}) {
        // The first slots are loaded beside the lengths, as if these were whole.
        const Unit guess = unit;
        const int guessed = guess.num_blocks > 0 ? load_slot(p, guess, 0, warp, lane) : -1;
        unit = Unit(p, number);
        lens = load_lens(p, number + units_apart());
        if (guess.num_blocks > 0 && unit.num_blocks > 0 && guess.first_block == unit.first_block &&
            guess.swa_blocks == unit.swa_blocks)
            slot = is_listed(unit, 0, warp, lane) ? guessed : -1;
        else
            block = -LOOKED_UP, step(p, warp, lane);
    }
    __device__ __forceinline__ void step(const Params& p, int warp, int lane) {
        block += LOOKED_UP;
        while (block >= unit.num_blocks && number < p.num_units) {
            busy += unit.num_blocks > 0, block = 0, number += units_apart();
            unit = Unit(p, number, lens);
            lens = load_lens(p, number + units_apart());
        }
        slot = load_slot(p, unit, block, warp, lane);
    }
    __device__ __forceinline__ Block next(const Params& p, int warp, int lane) {
        if (left > 0) {
            first += KNOWN_ROWS, --left, --in_swa, ++nth;
        } else {
            if (number >= p.num_units) return {0};
            rows = find_rows(p, own_block(unit, block, lane) < unit.swa_blocks, slot);
            first = 0, left = min(LOOKED_UP, unit.num_blocks - block) - 1;
            in_swa = unit.swa_blocks - unit.first_block - block, nth = block, busy_now = busy;
            step(p, warp, lane);
        }
        return Block::of(in_swa > 0, nth == 0, busy_now, rows.exists >> first & ((1u << KNOWN_ROWS) - 1));
    }
};
