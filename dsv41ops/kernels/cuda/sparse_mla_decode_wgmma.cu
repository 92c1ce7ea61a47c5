// Sparse MLA decode on Hopper with wgmma, for many tokens of many heads: persistent CTAs, each with
// a queue of (token, 64 heads), in three roles that overlap across blocks of 64 rows and across
// tokens.
//
// Producer warps copy rows as bytes into a small ring of their own by cp.async and from there write
// them as f16 into a stage of shared memory: e4m3 and e2m1 times their scales are exact there for
// the scales that real caches have. Score warps multiply queries by a stage and turn scores into
// probabilities. Value warps add up the stage's rows by probability, 256 output columns per
// warpgroup. A token with a scale or a number that f16 does not hold is computed again, slowly, by
// the value warps in f32.
//
// Compile-time: SWA_RECORD and RECORD (row bytes; RECORD 0: no compressed cache).

#include "common.cuh"

constexpr int HEADS = 64;
constexpr int BLOCK = 64;               // rows
constexpr int STAGES = 2;
constexpr int BUSY = 8;                 // more than the units that any roles are apart, empty ones aside
constexpr int VALUE_WARPS = 8, SCORE_WARPS = 4, PRODUCER_WARPS = 4;
constexpr int THREADS = 32 * (VALUE_WARPS + SCORE_WARPS + PRODUCER_WARPS);
constexpr int WARP_ROWS = BLOCK / PRODUCER_WARPS;
// Registers per thread, 64 Ki in all.
#define VALUE_REGISTERS 160
#define SCORE_REGISTERS 80
#define PRODUCER_REGISTERS 112
constexpr float PEAK_SLACK = 8.f;       // probabilities may reach 2^PEAK_SLACK before a rescale
constexpr float QUERY_SCALE = 8.f;      // small queries keep their bits in f16, large ones fit

// A row in a producer warp's ring, and how many rows one cp.async group has.
constexpr int RING_PITCH = max_of(SWA_RECORD, RECORD) == 584 ? 592 : max_of(SWA_RECORD, RECORD);
constexpr int BATCH = 4;
constexpr int BATCHES = 2;

struct Shared {
    alignas(1024) u8 rows[STAGES][8][BLOCK * 128];  // f16: columns 64 c .. 64 c + 63 of all rows, swizzled
    alignas(1024) u8 query[8][HEADS * 128];
    alignas(1024) u8 weights[HEADS * 128];          // f16 probabilities [head, row]
    alignas(16) u8 ring[PRODUCER_WARPS][BATCHES][BATCH][RING_PITCH];
    alignas(16) int slots[PRODUCER_WARPS][4][WARP_ROWS];
    alignas(16) float fade[HEADS];                  // what older blocks are multiplied by
    float factor[HEADS];                            // of the finished output
    alignas(16) float2 turn[32];                    // and its rotation
    alignas(16) u32 row_mask[STAGES][PRODUCER_WARPS];  // rows that exist
    u32 rescale;                                    // the last block that older ones fade for
    u32 unfit[BUSY];                                // f16 does not hold a number of that unit
    u64 rows_full[STAGES], rows_empty[STAGES], weights_full, weights_empty;
    u64 unit_done, unit_taken;
};
__device__ unsigned shared_bytes = sizeof(Shared);
static_assert(sizeof(Shared) <= 232448, "shared memory of an SM");

// ---------------------------------------------------------------- instructions

__device__ __forceinline__ void store16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint4 load16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address)
                 : "memory");
    return v;
}
template <int N> __device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// A matrix in shared memory, 128-byte swizzle. `lead`: bytes between 64-wide pieces of a dimension
// that lies in memory order; 8 rows of the other are 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 lead) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(lead >> 4) << 16 |
           static_cast<u64>(1024 >> 4) << 32 | static_cast<u64>(1) << 62;
}

// scores [64 heads, 64 rows] (+)= queries [64, 16] · rows [64, 16]^T
__device__ __forceinline__ void wgmma_scores(float (&d)[32], u64 a, u64 b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}
// out [64 heads, 128 columns] += weights [64, 16] · rows [16, 128]
__device__ __forceinline__ void wgmma_values(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b));
}
// Four 8x8 matrices of 16 bits from mma fragments to rows in shared memory, one row per lane.
__device__ __forceinline__ void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}

// ---------------------------------------------------------------- the queue

// The rows of a unit in blocks: the window's, then the selection's.
struct Unit {
    i64 token;
    int first_head, swa_len, topk_len, swa_blocks, num_blocks;
    __device__ __forceinline__ Unit(const Params& p, int unit) {
        token = unit / p.head_groups;
        first_head = unit % p.head_groups * HEADS;
        swa_len = clamp(p.swa.lens[token], 0, p.swa.width);
        topk_len = RECORD ? clamp(p.topk.lens[token], 0, p.topk.width) : 0;
        swa_blocks = (swa_len + BLOCK - 1) / BLOCK;
        num_blocks = swa_blocks + (topk_len + BLOCK - 1) / BLOCK;
    }
};

// ---------------------------------------------------------------- producers

// Where a producer warp's 16 rows of a block lie, lane by lane, in 16 bytes.
struct Rows {
    u32 data;
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

// Rows first .. first + BATCH - 1 of the warp into the ring; ones that do not exist become zeros.
template <int R, bool ZERO_FILL>
__device__ __forceinline__ void copy_rows(const Pool& pool, const Rows& rows, int first, u32 ring, int lane) {
    const u8* bytes = pool.bytes + lane * 16;
    hold(bytes);
    auto source = [&](int r) { return pool.bytes + static_cast<u64>(__shfl_sync(~0u, rows.data, first + r)) * 16; };
    auto there = [&](int r) { return !ZERO_FILL || (rows.exists >> (first + r) & 1); };
    if constexpr (R == 288) {
#pragma unroll
        for (int r = 0; r < BATCH; r += 2) {
            const int own = r + (lane >> 4), piece = lane & 15;
            copy16(ring + own * RING_PITCH + piece * 16, source(own) + piece * 16, there(own));
        }
        const int own = lane >> 1 & (BATCH - 1), piece = 16 + (lane & 1);
        const u8* from = source(own) + piece * 16;
        if (lane < 2 * BATCH) copy16(ring + own * RING_PITCH + piece * 16, from, there(own));
    } else {
#pragma unroll
        for (int r = 0; r < BATCH; ++r)
            copy16(ring + r * RING_PITCH + lane * 16, bytes + static_cast<u64>(__shfl_sync(~0u, rows.data, first + r)) * 16,
                   there(r));
        const int own = (R == 584 ? lane >> 2 : lane) & (BATCH - 1);
        const u8* from = source(own);
        if constexpr (R == 528) {
            if (lane < BATCH) copy16(ring + own * RING_PITCH + 512, from + 512, there(own));
        } else {
            const int piece = 32 + (lane & 3);
            if (lane < 4 * BATCH) copy16(ring + own * RING_PITCH + piece * 16, from + piece * 16, there(own));
            // All scales of a page follow all its data.
            const u32 in_page = __shfl_sync(~0u, rows.in_page, first + own);
            const u8* scales = from - in_page * 576 + static_cast<u64>(pool.page_size) * 576 + in_page * 8;
            if (lane < 4 * BATCH && (lane & 3) == 0) copy_few<8>(ring + own * RING_PITCH + 576, scales, there(own));
        }
    }
}

template <bool ZERO_FILL>
__device__ __forceinline__ void copy_batch(const Params& p, bool in_swa, const Rows& rows, int first, u32 ring, int lane) {
    if (ONE_RECORD)
        copy_rows<SWA_RECORD, ZERO_FILL>(in_swa ? p.swa : p.topk, rows, first, ring, lane);
    else if (in_swa) copy_rows<SWA_RECORD, ZERO_FILL>(p.swa, rows, first, ring, lane);
    else copy_rows<TOPK_RECORD, ZERO_FILL>(p.topk, rows, first, ring, lane);
}

// bf16 to f16; true if that loses a large number.
__device__ __forceinline__ bool bf16_to_f16(u32 word, u32& to) {
    const float low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000u);
    to = to_f16x2(low, high);
    return !(fabsf(low) < 65000.f) || !(fabsf(high) < 65000.f);
}

// Eight e2m1 to f16, in order. The upper byte of their f16 is looked up by the magnitude, the lower
// one is 0.
__device__ __forceinline__ void e2m1_to_f16(u32 word, u32 (&to)[4]) {
    const u32 even = word << 4;  // signs at the top of bytes: of odd elements in word, of even ones here
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 bytes = __byte_perm(0x3e3c3800u, 0x46444240u, (half ? word >> 16 : word) & 0x7777u);
        u32 signs;  // selectors from 8 on spread a byte's top bit
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(even), "r"(word), "r"(half ? 0xfbea : 0xd9c8));
        bytes |= signs & 0x80808080u;
        to[half * 2] = __byte_perm(bytes, 0, 0x1404), to[half * 2 + 1] = __byte_perm(bytes, 0, 0x3424);
    }
}

// What a lane takes of a batch out of the ring: columns 16 lane .. 16 lane + 15 of every row, the
// second half first where `swap` is set.
struct Batch {
    uint2 first[BATCH], second[BATCH];
    u32 code[BATCH];  // of the scale
    uint4 rest;       // of 584-byte rows: a piece of a bf16 part, eight lanes a row
};

template <int R>
__device__ __forceinline__ void take_rows(const u8 (&ring)[BATCH][RING_PITCH], int lane, int swap, Batch& batch) {
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

// A batch as f16 into a stage, rows `row` and following. True if f16 does not hold one of this
// lane's numbers. `at`: where the lane's first piece of row 0 goes; row r of eight turns its
// pieces by r.
template <int R>
__device__ __forceinline__ bool store_rows(Batch& batch, u32 stage, u32 at, int row, int lane) {
    bool unfit = false;
    const bool has_columns = R != 584 || lane < 28;
    if constexpr (R != 288) {
        bool outside = false;
#pragma unroll
        for (int r = 0; r < BATCH; ++r) outside |= batch.code[r] - 113u > 21u;
        if (__any_sync(~0u, outside && has_columns)) unfit = excuse_zeros(batch) && has_columns;
    }
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        const int turn = (row + r) & 7;
        const u32 to = (at ^ turn * 16) + (row + r) * 128;
        u32 first[4], second[4];
        if constexpr (R == 288) {
            const u32 scale = __byte_perm(e4m3_to_f16(batch.code[r], false), 0, 0x1010);
            e2m1_to_f16(batch.first[r].x, first), e2m1_to_f16(batch.second[r].x, second);
#pragma unroll
            for (int i = 0; i < 4; ++i) first[i] = mul_f16x2(first[i], scale), second[i] = mul_f16x2(second[i], scale);
        } else {
            const u32 scale = batch.code[r] * 0x04000400u - 112u * 0x04000400u;  // 2^(code - 127), twice
            first[0] = mul_f16x2(e4m3_to_f16(batch.first[r].x, false), scale);
            first[1] = mul_f16x2(e4m3_to_f16(batch.first[r].x, true), scale);
            first[2] = mul_f16x2(e4m3_to_f16(batch.first[r].y, false), scale);
            first[3] = mul_f16x2(e4m3_to_f16(batch.first[r].y, true), scale);
            second[0] = mul_f16x2(e4m3_to_f16(batch.second[r].x, false), scale);
            second[1] = mul_f16x2(e4m3_to_f16(batch.second[r].x, true), scale);
            second[2] = mul_f16x2(e4m3_to_f16(batch.second[r].y, false), scale);
            second[3] = mul_f16x2(e4m3_to_f16(batch.second[r].y, true), scale);
        }
        if (has_columns) {
            store16(to, make_uint4(first[0], first[1], first[2], first[3]));
            store16(to ^ 16, make_uint4(second[0], second[1], second[2], second[3]));
        }
    }
    if constexpr (R == 584) {
        const int own = row + (lane >> 3);
        uint4 v;
        unfit |= bf16_to_f16(batch.rest.x, v.x), unfit |= bf16_to_f16(batch.rest.y, v.y);
        unfit |= bf16_to_f16(batch.rest.z, v.z), unfit |= bf16_to_f16(batch.rest.w, v.w);
        store16(stage + 7 * (BLOCK * 128) + own * 128 + ((lane & 7) ^ (own & 7)) * 16, v);
    }
    return unfit;
}

// The blocks of all units of this CTA in a row.
struct Walk {
    int number, block, busy;  // of the units before this one, those with blocks
    Unit unit;
    __device__ __forceinline__ Walk(const Params& p) : number(blockIdx.x), block(-1), busy(0), unit(p, blockIdx.x) {}
    __device__ __forceinline__ bool next(const Params& p) {
        if (number >= p.num_units) return false;
        ++block;
        while (block >= unit.num_blocks) {
            busy += unit.num_blocks > 0, block = 0, number += gridDim.x;
            if (number >= p.num_units) return false;
            unit = Unit(p, number);
        }
        return true;
    }
};

// What a producer warp knows of a block before it has the rows.
struct Block {
    bool more, in_swa;
    int busy;
};

__device__ __forceinline__ void produce(Shared& sh, const Params& p, int warp, int lane) {
    static_assert(WARP_ROWS == 4 * BATCH && BATCHES == 2, "the loop below");
    Walk walk(p);
    int num_indexed = 0;
    // The slots of the next block, into shared memory: a register would be waited for at once.
    auto copy_slots = [&] {
        Block block{walk.next(p), false, 0};
        if (block.more) {
            block.in_swa = walk.block < walk.unit.swa_blocks, block.busy = walk.busy;
            const Pool& pool = block.in_swa ? p.swa : p.topk;
            const int at = (block.in_swa ? walk.block : walk.block - walk.unit.swa_blocks) * BLOCK +
                           warp * WARP_ROWS + lane;
            const bool there = at < (block.in_swa ? walk.unit.swa_len : walk.unit.topk_len);
            int* to = &sh.slots[warp][num_indexed++ & 3][lane];
            if (lane < WARP_ROWS) {
                if (there) copy_few<4>(smem_address(to), pool.indices + walk.unit.token * pool.indices_stride + at, true);
                else *to = -1;
            }
        }
        return block;
    };
    auto find = [&](const Block& block, int count) {
        const int slot = sh.slots[warp][count & 3][lane & (WARP_ROWS - 1)];
        if (ONE_RECORD) return find_rows<SWA_RECORD>(block.in_swa ? p.swa : p.topk, slot, lane);
        if (block.in_swa) return find_rows<SWA_RECORD>(p.swa, slot, lane);
        return find_rows<TOPK_RECORD>(p.topk, slot, lane);
    };
    auto copy = [&](const Block& block, const Rows& rows, int batch) {
        const u32 ring = smem_address(sh.ring[warp][batch & 1]);
        if (block.more) {
            if (rows.exists == 0xffffu) copy_batch<false>(p, block.in_swa, rows, batch * BATCH, ring, lane);
            else copy_batch<true>(p, block.in_swa, rows, batch * BATCH, ring, lane);
        }
        commit();
    };
    const int swap = lane >> 2 & 1;
    auto take = [&](const Block& block, int place, Batch& batch) {
        wait_group<BATCHES - 1>();
        __syncwarp();
        if (ONE_RECORD || block.in_swa)
            take_rows<SWA_RECORD>(sh.ring[warp][place], lane, swap, batch);
        else
            take_rows<TOPK_RECORD>(sh.ring[warp][place], lane, swap, batch);
        __syncwarp();
    };
    Block now = copy_slots(), next = copy_slots();
    commit();
    wait_group<0>();
    __syncwarp();
    Rows rows = find(now, 0);
    Batch batches[2];  // one is taken out of the ring while the other is converted
    copy(now, rows, 0), copy(now, rows, 1);
    take(now, 0, batches[0]);
    copy(now, rows, 2);
#pragma unroll 1
    for (int count = 0; now.more; ++count) {
        const int stage = count % STAGES;
        const u32 base = smem_address(sh.rows[stage]) + warp * WARP_ROWS * 128;
        const u32 at = base + (lane >> 2) * (BLOCK * 128) + (lane & 3) * 32 + swap * 16;
        const u32 exists = rows.exists;
        if (count >= STAGES) wait_barrier(sh.rows_empty[stage], (count / STAGES - 1) & 1);
        bool unfit = false;
        Block last;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            take(b < 3 ? now : next, (b + 1) & 1, batches[(b + 1) & 1]);
            if (b == 1) {
                rows = find(next, count + 1);
                last = copy_slots();  // arrives with the group that follows
            }
            copy(b < 1 ? now : next, rows, (b + 3) & 3);
            if (ONE_RECORD || now.in_swa)
                unfit |= store_rows<SWA_RECORD>(batches[b & 1], base, at, b * BATCH, lane);
            else
                unfit |= store_rows<TOPK_RECORD>(batches[b & 1], base, at, b * BATCH, lane);
        }
        if (lane == 0) sh.row_mask[stage][warp] = exists;
        if (unfit) sh.unfit[now.busy % BUSY] = 1;
        publish();
        __syncwarp();
        arrive(sh.rows_full[stage], lane);
        now = next, next = last;
    }
    wait_group<0>();
}

// ---------------------------------------------------------------- scores

__device__ __forceinline__ void score_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ int blocks_of(const Params& p, int number) {
    return number < p.num_units ? Unit(p, number).num_blocks : 0;
}

// A thread's pieces of the queries, 16 bytes each, and where they lie: [head, column] in the layout of
// a stage. It turns the bf16 that it copied there into f16, in place.
template <int UNROLL, typename F>
__device__ __forceinline__ void for_query_pieces(Shared& sh, int thread, F&& f) {
    const int piece = thread & 63;
#pragma unroll UNROLL
    for (int head = thread >> 6; head < HEADS; head += 2)
        f(head, piece, smem_address(sh.query[piece >> 3]) + head * 128 + (((piece & 7) ^ (head & 7)) << 4));
}

__device__ __forceinline__ void copy_queries(Shared& sh, const Params& p, int number, int thread) {
    if (number < p.num_units) {
        const int token = number / p.head_groups, first_head = number % p.head_groups * HEADS;
        const u16* from = p.q + token * p.q_token_stride + first_head * p.q_head_stride;
        for_query_pieces<2>(sh, thread, [&](int head, int piece, u32 to) {
            const bool there = first_head + head < p.num_heads;
            copy16(to, reinterpret_cast<const u8*>(from + (there ? head * p.q_head_stride : 0) + piece * 8), there);
        });
    }
    commit();
}

// True if f16 does not hold one of them.
__device__ __forceinline__ bool convert_queries(Shared& sh, int thread) {
    bool unfit = false;
    for_query_pieces<4>(sh, thread, [&](int, int, u32 at) {
        const uint4 v = load16(at);
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float low = __uint_as_float(words[k] << 16) * QUERY_SCALE;
            const float high = __uint_as_float(words[k] & 0xffff0000u) * QUERY_SCALE;
            unfit |= !(fabsf(low) < 65000.f) || !(fabsf(high) < 65000.f);
            words[k] = to_f16x2(low, high);
        }
        store16(at, make_uint4(words[0], words[1], words[2], words[3]));
    });
    return unfit;
}

__device__ __forceinline__ void score(Shared& sh, const Params& p, int warp, int lane) {
    const int thread = warp * 32 + lane;
    int count = 0, nth = 0, busy = 0;
    int next_blocks = blocks_of(p, blockIdx.x);
    copy_queries(sh, p, blockIdx.x, thread);
#pragma unroll 1
    for (int number = blockIdx.x; number < p.num_units; number += gridDim.x, ++nth) {
        const int num_blocks = next_blocks;
        wait_group<0>();
        if (num_blocks > 0) {
            if (convert_queries(sh, thread)) sh.unfit[busy % BUSY] = 1;
            ++busy;
            publish();
            score_sync();
        }
        float peak[2] = {NO_PEAK, NO_PEAK}, total[2] = {0.f, 0.f};
        const float scale = p.scale_log2 / QUERY_SCALE;
        const u64 query = descriptor(smem_address(sh.query), 16);
        const u64 stages[STAGES] = {descriptor(smem_address(sh.rows[0]), 16), descriptor(smem_address(sh.rows[1]), 16)};
#pragma unroll 1
        for (int block = 0; block < num_blocks; ++block, ++count) {
            const int stage = count % STAGES;
            wait_barrier(sh.rows_full[stage], count / STAGES & 1);
            float s[32];
            const u64 rows = stage ? stages[1] : stages[0];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 32; ++k) {
                const u64 at = ((k >> 2) * 8192 + (k & 3) * 32) >> 4;
                wgmma_scores(s, query + at, rows + at, k > 0);
            }
            wgmma_commit();
            // What the next unit needs: its lengths while the first block is multiplied, its queries
            // when the last one is.
            if (block == 0) next_blocks = blocks_of(p, number + gridDim.x);
            wgmma_wait();
            if (block == num_blocks - 1) {
                score_sync();  // no warp overwrites queries that another still multiplies
                copy_queries(sh, p, number + gridDim.x, thread);
            }
            // Row 16 w + n of the block: bit n of mask w.
            const uint4 there = *reinterpret_cast<const uint4*>(sh.row_mask[stage]);
            const u32 masks[4] = {there.x, there.y, there.z, there.w};
            const bool whole = (there.x & there.y & there.z & there.w) == 0xffffu;
            float top[2] = {-INF, -INF};
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[j * 4 + i] *= scale;
                    if (!whole && !(masks[j >> 1] >> ((j & 1) * 8 + (lane & 3) * 2 + (i & 1)) & 1)) s[j * 4 + i] = -INF;
                    top[i >> 1] = fmaxf(top[i >> 1], s[j * 4 + i]);
                }
            bool higher = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
                top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
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
                    s[j * 4 + i] = exp2_fast(s[j * 4 + i] - peak[i >> 1]);
                    total[i >> 1] += s[j * 4 + i];
                }
            // Matrices: heads 0-7 and 8-15 of the warp, rows 8 j .. 8 j + 15.
            const int head = warp * 16 + (lane & 15);
            const u32 row = smem_address(sh.weights) + head * 128;
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                store_matrices(row + (((j + (lane >> 4)) ^ (head & 7)) << 4),
                               to_f16x2(s[j * 4], s[j * 4 + 1]), to_f16x2(s[j * 4 + 2], s[j * 4 + 3]),
                               to_f16x2(s[j * 4 + 4], s[j * 4 + 5]), to_f16x2(s[j * 4 + 6], s[j * 4 + 7]));
            publish();
            __syncwarp();
            arrive(sh.weights_full, lane);
        }
        const i64 token = number / p.head_groups;
        const int first_head = number % p.head_groups * HEADS, heads_left = p.num_heads - first_head;
        const float2 turn = load_turn(p, token, lane);
        if (nth > 0) wait_barrier(sh.unit_taken, (nth - 1) & 1);
        if (warp == 0) sh.turn[lane] = turn;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half] += __shfl_xor_sync(~0u, total[half], 1);
            total[half] += __shfl_xor_sync(~0u, total[half], 2);
            const int head = warp * 16 + half * 8 + (lane >> 2);
            if ((lane & 3) == 0 && head < heads_left) {
                float sum = total[half];
                if (p.sink != nullptr) sum += exp2_fast(p.sink[first_head + head] * LOG2E - peak[half]);
                sh.factor[head] = total[half] == 0.f ? 0.f : reciprocal(sum);
                p.lse[token * p.lse_token_stride + (first_head + head) * p.lse_head_stride] =
                    total[half] == 0.f ? -INF : (peak[half] + log2_fast(total[half])) * LN2;
            }
        }
        __syncwarp();
        arrive(sh.unit_done, lane);
        if (num_blocks == 0) {
            next_blocks = blocks_of(p, number + gridDim.x);
            copy_queries(sh, p, number + gridDim.x, thread);
        }
    }
}

// ---------------------------------------------------------------- values

__device__ __forceinline__ void value_sync() { asm volatile("bar.sync 2, 256;" ::: "memory"); }

// Columns 16 lane .. 16 lane + 15 of one row, in f32.
template <int R>
__device__ __forceinline__ void read_row(const Pool& pool, u32 slot, int lane, float (&v)[16]) {
    const u32 page = slot / pool.page_size, row = slot - page * pool.page_size;
    const u8* start = pool.bytes + static_cast<i64>(page) * pool.page_stride;
    if (R == 584 && lane >= 28) {
        const u8* from = start + row * 576 + 448 + (lane - 28) * 32;
#pragma unroll
        for (int i = 0; i < 16; ++i)
            v[i] = __uint_as_float(static_cast<u32>(reinterpret_cast<const u16*>(from)[i]) << 16);
        return;
    }
    const u8* from = start + row * row_stride(R) + lane * (R == 288 ? 8 : 16);
    float scale;
    if (R == 288) {
        const u32 pair = e4m3_to_f16(start[row * 288 + 256 + lane], false);
        asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;}" : "=f"(scale) : "r"(pair));
    } else {
        const u32 code = R == 584 ? start[static_cast<u64>(pool.page_size) * 576 + row * 8 + (lane >> 2)]
                                  : start[row * 528 + 512 + (lane >> 1)];
        scale = ue8m0(code);
    }
    u32 pairs[2][4];
    if (R == 288) {
        e2m1_to_f16(reinterpret_cast<const u32*>(from)[0], pairs[0]);
        e2m1_to_f16(reinterpret_cast<const u32*>(from)[1], pairs[1]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = e4m3_to_f16(reinterpret_cast<const u16*>(from)[i], false);
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}"
            : "=f"(v[i]), "=f"(v[i + 1]) : "r"(pairs[i / 8][i / 2 % 4]));
        v[i] *= scale, v[i + 1] *= scale;
    }
}

// A unit in f32, a head per warp at a time: for numbers that f16 does not hold.
__device__ __forceinline__ void attend_slowly(const Params& p, int number, int warp, int lane) {
    const Unit unit(p, number);
    for (int head = unit.first_head + warp; head < min(p.num_heads, unit.first_head + HEADS); head += VALUE_WARPS) {
        float q[16], acc[16], peak = NO_PEAK, total = 0.f;
        const u16* query = p.q + unit.token * p.q_token_stride + head * p.q_head_stride + lane * 16;
#pragma unroll
        for (int i = 0; i < 16; ++i) q[i] = __uint_as_float(static_cast<u32>(query[i]) << 16), acc[i] = 0.f;
#pragma unroll 1
        for (int i = 0; i < unit.swa_len + unit.topk_len; ++i) {
            const bool in_swa = i < unit.swa_len;
            const Pool& pool = in_swa ? p.swa : p.topk;
            const u32 slot = pool.indices[unit.token * pool.indices_stride + (in_swa ? i : i - unit.swa_len)];
            if (slot >= pool.num_slots) continue;
            float v[16], s = 0.f;
            if (RECORD == 0 || in_swa) read_row<SWA_RECORD>(pool, slot, lane, v);
            else read_row<TOPK_RECORD>(pool, slot, lane, v);
#pragma unroll
            for (int j = 0; j < 16; ++j) s += q[j] * v[j];
#pragma unroll
            for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
            s *= p.scale_log2;
            const float next = fmaxf(peak, s), fade = exp2_fast(peak - next), weight = exp2_fast(s - next);
            peak = next, total = total * fade + weight;
#pragma unroll
            for (int j = 0; j < 16; ++j) acc[j] = acc[j] * fade + weight * v[j];
        }
        float sum = total;
        if (p.sink != nullptr) sum += exp2_fast(p.sink[head] * LOG2E - peak);
        const float factor = total == 0.f ? 0.f : 1.f / sum;
        const float2 turn = load_turn(p, unit.token, lane);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            // Lanes 28 to 31 have the last 64 columns, a pair of them per step.
            const int pair = ((lane & 3) << 3) + j / 2;
            float2 turns = make_float2(__shfl_sync(~0u, turn.x, pair), __shfl_sync(~0u, turn.y, pair));
            if (lane < 28) turns = NO_TURN;
            turn_back(turns, acc[j], acc[j + 1]);
        }
        u32* to = reinterpret_cast<u32*>(p.out + unit.token * p.out_token_stride + head * p.out_head_stride + lane * 16);
#pragma unroll
        for (int j = 0; j < 16; j += 2) to[j / 2] = to_bf16x2(acc[j] * factor, acc[j + 1] * factor);
        if (lane == 0)
            p.lse[unit.token * p.lse_token_stride + head * p.lse_head_stride] =
                total == 0.f ? -INF : (peak + log2_fast(total)) * LN2;
    }
}

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
    int count = 0, nth = 0, busy = 0;
    for (int number = blockIdx.x; number < p.num_units; number += gridDim.x, ++nth) {
        const Unit unit(p, number);
        const int heads_left = p.num_heads - unit.first_head;
        float acc[2][64];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 64; ++i) acc[h][i] = 0.f;
#pragma unroll 1
        for (int block = 0; block < unit.num_blocks; ++block, ++count) {
            const int stage = count % STAGES;
            wait_barrier(sh.rows_full[stage], count / STAGES & 1);
            wait_barrier(sh.weights_full, count & 1);
            if (block > 0 && sh.rescale == count + 1) {
                const float fade[2] = {sh.fade[head], sh.fade[head + 8]};
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 0; i < 64; ++i) acc[h][i] *= fade[i >> 1 & 1];
            }
            const u32 rows = smem_address(sh.rows[stage]) + group * 4 * 8192;
            const u32 weights = smem_address(sh.weights);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    wgmma_values(acc[h], descriptor(weights + k * 32, 16),
                                 descriptor(rows + h * 2 * 8192 + k * 2048, 8192));
            wgmma_commit();
            wgmma_wait();
            __syncwarp();
            arrive(sh.rows_empty[stage], lane), arrive(sh.weights_empty, lane);
        }
        wait_barrier(sh.unit_done, nth & 1);
        const int slot = busy % BUSY;
        busy += unit.num_blocks > 0;
        const bool unfit = unit.num_blocks > 0 && sh.unfit[slot] != 0;
        const float factor[2] = {sh.factor[head], sh.factor[head + 8]};
        const int q = lane & 3;
        if (p.positions != nullptr && group == 1) {
#pragma unroll
            for (int j = 8; j < 16; ++j) {  // the last 64 columns
                const float2 turn = sh.turn[(j - 8) * 4 + q];
                turn_back(turn, acc[1][j * 4], acc[1][j * 4 + 1]);
                turn_back(turn, acc[1][j * 4 + 2], acc[1][j * 4 + 3]);
            }
        }
        if (unfit) {
            value_sync();
            if (warp == 0 && lane == 0) sh.unfit[slot] = 0;
            value_sync();
        }
        __syncwarp();
        arrive(sh.unit_taken, lane);
        if (unfit) {
            attend_slowly(p, number, warp, lane);
            continue;
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

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_decode(const __grid_constant__ Params p) {
    extern __shared__ Shared shared[];
    Shared& sh = shared[0];
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i)
            init_barrier(sh.rows_full[i], PRODUCER_WARPS), init_barrier(sh.rows_empty[i], VALUE_WARPS);
        init_barrier(sh.weights_full, SCORE_WARPS), init_barrier(sh.weights_empty, VALUE_WARPS);
        sh.rescale = 0;
        for (int i = 0; i < BUSY; ++i) sh.unfit[i] = 0;
        init_barrier(sh.unit_done, SCORE_WARPS), init_barrier(sh.unit_taken, VALUE_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    follow_launch(true);
    if (warp < VALUE_WARPS) {
        raise_registers<VALUE_REGISTERS>();
        weigh(sh, p, warp, lane);
    } else if (warp < VALUE_WARPS + SCORE_WARPS) {
        lower_registers<SCORE_REGISTERS>();
        score(sh, p, warp - VALUE_WARPS, lane);
    } else {
        lower_registers<PRODUCER_REGISTERS>();
        produce(sh, p, warp - VALUE_WARPS - SCORE_WARPS, lane);
    }
}
