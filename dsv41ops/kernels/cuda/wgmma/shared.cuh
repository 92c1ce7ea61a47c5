// What the roles of the wgmma kernel share: sizes, memory, units of work.
#pragma once

#include "../cluster.cuh"
#include "../common.cuh"

constexpr int BLOCK = 64;               // rows
constexpr int STAGES = 2;
constexpr int BUSY = 8;                 // more than the units that any roles are apart, empty ones aside
constexpr bool FEW_HEADS = HEADS == 32;
static_assert(HEADS == 64 && RANKS == 1 || FEW_HEADS && RANKS <= 8, "heads, CTAs of a cluster");
// Warps by role, in this order. Half the heads leave registers for twice the producers.
constexpr int VALUE_WARPS = FEW_HEADS ? 4 : 8, SCORE_WARPS = 4, PRODUCER_WARPS = FEW_HEADS ? 8 : 4;
constexpr int THREADS = 32 * (VALUE_WARPS + SCORE_WARPS + PRODUCER_WARPS);
// Registers per thread, 64 Ki in all.
constexpr int VALUE_REGISTERS = FEW_HEADS ? 168 : 160, SCORE_REGISTERS = FEW_HEADS ? 88 : 80;
constexpr int PRODUCER_REGISTERS = FEW_HEADS ? 128 : 112;
constexpr float PEAK_SLACK = 8.f;       // probabilities may reach 2^PEAK_SLACK before a rescale
constexpr float QUERY_SCALE = BF16_ROWS ? 1.f : 8.f;  // small queries keep their bits in f16, large ones fit

// A producer warp's rows of a block come in batches, a cp.async group each, through a ring of its own.
constexpr int WARP_ROWS = BLOCK / PRODUCER_WARPS;
constexpr int BATCH = 4;                // rows
constexpr int WARP_BATCHES = WARP_ROWS / BATCH;
constexpr int BATCHES = FEW_HEADS ? 3 : 2;  // of a ring
constexpr int RING_PITCH = BF16_ROWS ? 16 : max_of(SWA_RECORD, RECORD) == 584 ? 592 : max_of(SWA_RECORD, RECORD);

struct Shared {
    alignas(1024) u8 rows[STAGES][8][BLOCK * 128];  // columns 64 c .. 64 c + 63 of all rows, swizzled
    alignas(1024) u8 query[8][HEADS * 128];
    alignas(1024) u8 weights[HEADS * 128];          // probabilities [head, row]
    alignas(16) u8 ring[PRODUCER_WARPS][BATCHES][BATCH][RING_PITCH];
    alignas(16) float fade[HEADS];                  // what older blocks are multiplied by
    alignas(16) float factor[RANKS][HEADS];         // of the finished output: of every CTA's part
    alignas(16) float2 turn[32];                    // and its rotation
    alignas(16) u8 row_mask[STAGES][BLOCK / 4];     // rows that exist, four in a byte
    u32 rescale;                                    // the last block that older ones fade for
    u32 unfit[BUSY];                                // f16 does not hold a number of that unit
    u64 query_full;
    u64 rows_full[STAGES], rows_empty[STAGES], weights_full, weights_empty;
    u64 unit_done, unit_taken;
    // What score warps that share heads tell each other.
    alignas(16) float tops[FEW_HEADS ? SCORE_WARPS : 1][HEADS];
    alignas(16) float sums[FEW_HEADS ? SCORE_WARPS : 1][HEADS];
    alignas(16) float peaks[HEADS];
    // What the CTAs of a cluster tell each other: peak and sum of heads, NaN where f16 does not hold a number.
    alignas(16) float2 stats[RANKS][HEADS];
    u64 stats_here, parts_here, peers_ready;
    u32 unfit_somewhere;
    // Of a value warp with all heads: 16 columns of the output on their way. A cluster's last queries leave
    // room for that.
    alignas(16) u8 finished[FEW_HEADS && RANKS == 1 ? VALUE_WARPS : 1][FEW_HEADS && RANKS == 1 ? HEADS * 32 : 16];
};

extern "C" {
extern __shared__ __align__(1024) u8 dynamic_shared[];
}
// Where shared memory begins, for descriptors: the compiler keeps this address and what is added to it in
// uniform registers, where wgmma takes them; one that it has in others it would move for every wgmma.
__device__ __forceinline__ u32 shared_base() {
    u32 address;
    asm volatile("mov.u32 %0, dynamic_shared;" : "=r"(address));
    return address;
}
static_assert(__INTADDR__(&static_cast<Shared*>(nullptr)->query) == STAGES * sizeof(Shared::rows[0]), "stages, queries");
__device__ __forceinline__ u32 stage_address(int stage) { return shared_base() + stage * static_cast<u32>(sizeof(Shared::rows[0])); }
__device__ __forceinline__ u32 query_address() { return stage_address(STAGES); }

// By those who multiply the rows of a block. Copies are not published by who begins them.
__device__ __forceinline__ void wait_rows(Shared& sh, int count) {
    wait_barrier(sh.rows_full[count % STAGES], count / STAGES & 1);
    if (BF16_ROWS) publish();
}

// A unit's numbers of rows, as they stand in memory.
struct Lens {
    int swa, topk;
};
__device__ __forceinline__ Lens load_lens(const Params& p, int number) {
    if (number >= p.num_units) return {0, 0};
    const int token = number / p.head_groups;
    return {p.swa.lens[token], RECORD ? p.topk.lens[token] : 0};
}

// A cluster has one unit; a CTA by itself has several, one after another.
__device__ __forceinline__ int first_unit() { return blockIdx.x / RANKS; }
__device__ __forceinline__ int units_apart() { return gridDim.x / RANKS; }
__device__ __forceinline__ int own_rank() { return RANKS == 1 ? 0 : cluster_rank(); }

// The rows of a unit in blocks: the window's, then the selection's; and which are this CTA's.
struct Unit {
    i64 token;
    int first_head, swa_len, topk_len, swa_blocks, first_block, num_blocks;
    __device__ __forceinline__ Unit(const Params& p, int number, Lens lens) {
        token = number / p.head_groups;
        first_head = number % p.head_groups * HEADS;
        swa_len = clamp(lens.swa, 0, p.swa.width);
        topk_len = RECORD ? clamp(lens.topk, 0, p.topk.width) : 0;
        swa_blocks = (swa_len + BLOCK - 1) / BLOCK;
        const int all = swa_blocks + (topk_len + BLOCK - 1) / BLOCK, rank = own_rank();
        first_block = all * rank / RANKS;
        num_blocks = all * (rank + 1) / RANKS - first_block;
    }
    __device__ __forceinline__ Unit(const Params& p, int number) : Unit(p, number, load_lens(p, number)) {}
};

__device__ __forceinline__ float load_sink(const Params& p, int head) {
    return p.sink != nullptr && head < p.num_heads ? p.sink[head] : -INF;
}
// What a head's finished sums are multiplied by.
__device__ __forceinline__ float output_factor(float peak, float sum, float sink) {
    return sum == 0.f ? 0.f : reciprocal(sum + exp2_fast(sink * LOG2E - peak));
}
