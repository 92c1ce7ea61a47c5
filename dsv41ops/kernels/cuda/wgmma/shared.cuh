// What the roles of the wgmma kernel share: sizes, memory, units of work.
#pragma once

#include "../cluster.cuh"
#include "../common.cuh"

constexpr int BLOCK = 64;               // rows
constexpr int STAGES = BF16_ROWS && HEADS == 16 ? 3 : 2;  // as many as there is room for
constexpr int BUSY = 8;                 // more than the units that any roles are apart, empty ones aside
__device__ constexpr int by_heads(int of_64, int of_32, int of_16) {
    return HEADS == 64 ? of_64 : HEADS == 32 ? of_32 : of_16;
}
static_assert(HEADS == 64 || HEADS == 32 || HEADS == 16, "heads");
constexpr bool FEW_HEADS = HEADS != 64;
// If heads are few: their groups of eight, of each of which a lane has numbers of two.
constexpr int EIGHTS = HEADS == 16 ? 2 : 4, LANE_HEADS = 2 * EIGHTS;
// CTAs of a cluster that have a share of a token's rows each; and that have them all, each with a share to convert.
constexpr int SPLITS = FEW_HEADS ? RANKS : 1, SHARERS = FEW_HEADS ? 1 : RANKS;
static_assert(SPLITS <= 8 && SHARERS <= (BF16_ROWS ? 1 : 2), "CTAs of a cluster");
// Warps by role, in this order. Half the heads leave registers for twice the producers.
constexpr int VALUE_WARPS = by_heads(8, 4, 4), SCORE_WARPS = 4, PRODUCER_WARPS = by_heads(4, 8, 16);
constexpr int THREADS = 32 * (VALUE_WARPS + SCORE_WARPS + PRODUCER_WARPS);
// Registers per thread, 64 Ki in all.
constexpr int VALUE_REGISTERS = by_heads(160, 168, 112), SCORE_REGISTERS = by_heads(80, 88, 80);
constexpr int PRODUCER_REGISTERS = by_heads(112, 128, 72);
// Probabilities may reach 2^PEAK_SLACK before a rescale. As bf16 the largest is 1, which is exact: one that
// outweighs all others must not be off by 2^-8.
constexpr float PEAK_SLACK = BF16_ROWS ? 0.f : 8.f;
constexpr float QUERY_SCALE = BF16_ROWS ? 1.f : 8.f;  // small queries keep their bits in f16, large ones fit

// A producer warp's rows of a block come in batches, a cp.async group each, through a ring of its own.
constexpr int WARP_ROWS = BLOCK / SHARERS / PRODUCER_WARPS;
constexpr int BATCH = 4;                // rows
constexpr int WARP_BATCHES = WARP_ROWS / BATCH;
constexpr int BATCHES = by_heads(2, 3, 2);  // of a ring
constexpr int RING_PITCH = BF16_ROWS ? 16 : max_of(SWA_RECORD, RECORD) == 584 ? 592 : max_of(SWA_RECORD, RECORD);

// Who publishes a stage's rows to the tensor cores: who begins copies cannot, and few heads' producers have less time.
constexpr bool READERS_PUBLISH = BF16_ROWS || FEW_HEADS;
// In a stage: bytes of a row, and from 64 columns of eight rows to their next 64.
constexpr int ROW_BYTES = 1024, COLUMNS_APART = 8 * 128;

struct Shared {
    alignas(1024) u8 rows[STAGES][BLOCK / 8][8][COLUMNS_APART];  // by eight rows, by 64 columns, swizzled
    alignas(1024) u8 query[8][HEADS * 128];
    alignas(1024) u8 weights[HEADS * 128];          // probabilities [head, row]
    alignas(16) u8 ring[PRODUCER_WARPS][BATCHES][BATCH][RING_PITCH];
    alignas(16) float fade[HEADS];                  // what older blocks are multiplied by
    alignas(16) float factor[SPLITS][HEADS];        // of the finished output: of every CTA's part
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
    alignas(16) float2 stats[SPLITS][HEADS];
    u64 stats_here, parts_here, peers_ready;
    u32 unfit_somewhere;
    // Of a value warp with all heads: 16 columns of the output on their way. A cluster's last queries leave
    // room for that.
    alignas(16) u8 finished[FEW_HEADS && SPLITS == 1 ? VALUE_WARPS : 1][FEW_HEADS && SPLITS == 1 ? HEADS * 32 : 16];
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

// Who arrives at rows_full lane by lane: copies of bf16 rows; who expects the other CTA's.
constexpr int ROWS_FULL_LANES = BF16_ROWS ? 32 * PRODUCER_WARPS : SHARERS - 1;

// Where in a stage a row lies, its first 64 columns.
__device__ constexpr u32 row_offset(int row) { return (row >> 3) * 8 * ROW_BYTES + (row & 7) * 128; }

// By those who multiply the rows of a block.
__device__ __forceinline__ void wait_rows(Shared& sh, int count) {
    wait_barrier(sh.rows_full[count % STAGES], count / STAGES & 1);
    if (READERS_PUBLISH) publish();
}
// By those who produce them: nobody multiplies the stage's rows before.
__device__ __forceinline__ void wait_empty(Shared& sh, int count) {
    wait_barrier(sh.rows_empty[count % STAGES], (count / STAGES - 1) & 1);
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

// A cluster that splits rows has one unit; any other CTA has several, one after another.
__device__ __forceinline__ int first_unit() { return blockIdx.x / SPLITS; }
__device__ __forceinline__ int units_apart() { return gridDim.x / SPLITS; }
__device__ __forceinline__ int own_rank() { return SPLITS == 1 ? 0 : cluster_rank(); }

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
        first_block = all * rank / SPLITS;
        num_blocks = all * (rank + 1) / SPLITS - first_block;
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
