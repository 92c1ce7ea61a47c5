// Sparse MLA decode on Hopper with wgmma, for many tokens: persistent CTAs, each with a queue of
// (token, HEADS heads), in three roles that overlap across blocks of 64 rows and across tokens.
//
// Producer warps copy rows as bytes into a small ring of their own by cp.async and from there write
// them as f16 into a stage of shared memory: e4m3 and e2m1 times their scales are exact there for
// the scales that real caches have. Rows of bf16 go straight into a stage. Score warps multiply
// queries by a stage and turn scores into probabilities. Value warps add up the stage's rows by
// probability. A token with a scale or a number that f16 does not hold is computed again, slowly, by
// the value warps in f32.
//
// wgmma has at least 64 rows of a matrix: 64 heads are such rows; of 32 or 16, which are columns, the
// cache's rows and the output's columns are.
//
// CTAs of a cluster reach each other through distributed shared memory. With few heads they are for
// few tokens: each has a share of one token's rows, and they join their results. With 64 heads two
// have all heads of a token and all its rows, of which each converts half for both.
//
// Compile-time: HEADS (64, 32 or 16), RANKS (CTAs of a cluster), SWA_RECORD and RECORD (row bytes; RECORD
// 0: no compressed cache).

#include "wgmma/produce.cuh"
#include "wgmma/produce_bf16.cuh"
#include "wgmma/score.cuh"
#include "wgmma/score_few.cuh"
#include "wgmma/weigh.cuh"
#include "wgmma/weigh_few.cuh"

__device__ unsigned shared_bytes = sizeof(Shared);
static_assert(sizeof(Shared) <= 232448, "shared memory of an SM");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_decode(const __grid_constant__ Params p) {
    Shared& sh = *reinterpret_cast<Shared*>(dynamic_shared);
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        init_barrier(sh.query_full, 0, 32 * SCORE_WARPS);
        for (int i = 0; i < STAGES; ++i)
            init_barrier(sh.rows_full[i], PRODUCER_WARPS, ROWS_FULL_LANES),
            init_barrier(sh.rows_empty[i], VALUE_WARPS, (SHARERS - 1) * VALUE_WARPS);
        init_barrier(sh.weights_full, SCORE_WARPS), init_barrier(sh.weights_empty, VALUE_WARPS);
        init_barrier(sh.unit_done, SCORE_WARPS), init_barrier(sh.unit_taken, VALUE_WARPS);
        if (SPLITS > 1) {
            init_bytes_barrier(sh.stats_here), init_bytes_barrier(sh.parts_here);
            init_barrier(sh.peers_ready, 0, SPLITS - 1);
        }
        sh.rescale = 0;
        for (int i = 0; i < BUSY; ++i) sh.unfit[i] = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (SPLITS > 1) {
            const int chunks = first_chunk(own_rank() + 1) - first_chunk(own_rank());
            expect_bytes(sh.stats_here, (SPLITS - 1) * sizeof(sh.stats[0]));
            expect_bytes(sh.parts_here, (SPLITS - 1) * chunks * CHUNK_BYTES);
        }
    }
    __syncthreads();
    if (RANKS > 1) cluster_arrive();
    let_next_launch();
    wait_for_launch();
    if (warp < VALUE_WARPS) {
        raise_registers<VALUE_REGISTERS>();
        if constexpr (FEW_HEADS) weigh_few(sh, p, warp, lane);
        else weigh(sh, p, warp, lane);
    } else if (warp < VALUE_WARPS + SCORE_WARPS) {
        lower_registers<SCORE_REGISTERS>();
        if constexpr (FEW_HEADS) score_few(sh, p, warp - VALUE_WARPS, lane);
        else score(sh, p, warp - VALUE_WARPS, lane);
    } else {
        lower_registers<PRODUCER_REGISTERS>();
        if constexpr (BF16_ROWS) produce_bf16(sh, p, warp - VALUE_WARPS - SCORE_WARPS, lane);
        else produce(sh, p, warp - VALUE_WARPS - SCORE_WARPS, lane);
    }
    if (SHARERS > 1) cluster_leave();
}
