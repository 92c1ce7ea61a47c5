// What the kernels of sparse MLA decode share: parameters, instructions, constants.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

// One lane arrives at a barrier for its warp, after __syncwarp. Racecheck does not follow both
// steps, so for it all do.
#ifndef LANES_THAT_ARRIVE
#define LANES_THAT_ARRIVE 1
#endif

constexpr float LN2 = 0.6931471805599453f;
constexpr float LOG2E = 1.4426950408889634f;
#define INF __int_as_float(0x7f800000)
constexpr float NO_PEAK = -1e30f;  // finite, so that exp2(-inf - peak) is 0

struct Pool {
    const u8* bytes;
    const int* indices;  // [T, width]
    const int* lens;     // [T]
    i64 page_stride;     // bytes
    i64 indices_stride;  // elements
    u32 page_size;
    u32 num_slots;
    u32 page_magic;      // slot / page_size = slot * magic >> shift
    int page_shift;
    int width;
    int unused;
};

struct Params {
    const u16* q;        // bf16 [T, H, 512]
    i64 q_token_stride, q_head_stride;
    Pool swa, topk;
    const float* sink;   // [H] or null
    u16* out;            // bf16 [T, H, 512]
    i64 out_token_stride, out_head_stride;
    float* lse;          // [T, H]
    i64 lse_token_stride, lse_head_stride;
    const void* positions;  // [T] or null: the output is not rotated
    const float* cos_sin;   // [num_positions, 64]: 32 cosines, 32 sines
    i64 cos_sin_stride;     // elements
    int num_positions;
    int wide_positions;     // 64 bits, not 32
    int num_heads;
    int head_groups;     // of a token: units of work
    float scale_log2;    // softmax_scale * log2(e)
    int num_units;       // tokens * head_groups
};

// Both caches have one kind of record, or there is no compressed cache; and the compressed one's.
constexpr bool ONE_RECORD = RECORD == 0 || RECORD == SWA_RECORD;
constexpr int TOPK_RECORD = RECORD ? RECORD : SWA_RECORD;
// Rows that tensor cores take as they are.
#define BF16_ROWS (SWA_RECORD == 1024)
static_assert(ONE_RECORD || !BF16_ROWS && RECORD != 1024, "records");

__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

// Bytes from one row to the next inside a page.
__device__ constexpr int row_stride(int record) { return record == 584 ? 576 : record; }

// Where a slot lies, in 16 bytes: the unit of strides and alignment.
struct Place {
    u32 page_start, row, row_start;
};
template <int R> __device__ __forceinline__ Place locate(const Pool& pool, u32 slot) {
    Place at;
    const u32 page = static_cast<u32>(static_cast<u64>(slot) * pool.page_magic >> pool.page_shift);
    at.row = slot - page * pool.page_size;
    at.page_start = page * static_cast<u32>(pool.page_stride >> 4);
    at.row_start = at.page_start + at.row * (row_stride(R) / 16);
    return at;
}

// Lets the next launch take its place on SMs that are free. CTAs that are half an SM do not: beside them it would
// take more of some SMs than of others.
__device__ __forceinline__ void let_next_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
// For the launch before this one, whose results nothing may read, or overwrite, earlier.
__device__ __forceinline__ void wait_for_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The inverse rotation of a token's output: lane i's pair of the last 64 columns, (cosine, sine).
#define NO_TURN make_float2(1.f, -0.f)
__device__ __forceinline__ float2 load_turn(const Params& p, i64 token, int lane) {
    if (p.positions == nullptr) return NO_TURN;
    const i64 position = p.wide_positions ? static_cast<const i64*>(p.positions)[token]
                                          : static_cast<const int*>(p.positions)[token];
    if (static_cast<u64>(position) >= static_cast<u64>(p.num_positions)) return NO_TURN;
    const float* row = p.cos_sin + position * p.cos_sin_stride;
    return make_float2(row[lane], row[lane + 32]);
}
__device__ __forceinline__ void turn_back(float2 turn, float& even, float& odd) {
    if (turn.x == 1.f && __float_as_uint(turn.y) == 0x80000000u) return;
    const float x = even, y = odd;
    even = x * turn.x + y * turn.y + 0.f, odd = y * turn.x - x * turn.y + 0.f;  // 0, never -0
}

__device__ __forceinline__ u32 smem_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}
// Keeps a pointer whole, so that an offset is added to it in one instruction, not to its parts.
__device__ __forceinline__ void hold(const u8*& pointer) { asm("" : "+l"(pointer)); }

// Copies that fill with zeros what is not valid.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
}
template <int BYTES> __device__ __forceinline__ void copy_few(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? BYTES : 0), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Two e4m3, of either half of a word, to two f16.
__device__ __forceinline__ u32 e4m3_to_f16(u32 word, bool high) {
    u32 d;
    if (high) asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(d) : "r"(word));
    else asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(d) : "r"(word));
    return d;
}
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ u32 to_f16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// lse from what is summed up in powers of 2 over a peak.
__device__ __forceinline__ float log_sum(float peak, float sum) {
    return sum == 0.f ? -INF : (peak + log2_fast(sum)) * LN2;
}
__device__ __forceinline__ float ue8m0(u32 code) {
    return __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7fffffffu : code << 23);
}
// Before the tensor cores or a bulk copy read what this thread has written to shared memory.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier that so many warps arrive at, once per phase, and single lanes.
__device__ __forceinline__ void init_barrier(u64& barrier, u32 warps, u32 lanes = 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&barrier)),
                 "r"(warps * LANES_THAT_ARRIVE + lanes) : "memory");
}
__device__ __forceinline__ void arrive(u64& barrier, int lane) {
    if (lane < LANES_THAT_ARRIVE)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier)) : "memory");
}
// A barrier that one thread arrives at, and so many bytes.
__device__ __forceinline__ void init_bytes_barrier(u64& barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_address(&barrier)) : "memory");
}
__device__ __forceinline__ void expect_bytes(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_barrier(u64& barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(smem_address(&barrier)), "r"(parity) : "memory");
}
