// Instructions of the wgmma kernel.
#pragma once

#include "../common.cuh"

// What is multiplied: rows, queries and probabilities.
#if BF16_ROWS
#define OPERANDS "bf16.bf16"
#else
#define OPERANDS "f16.f16"
#endif
__device__ __forceinline__ u32 to_operands(float low, float high) {
    return BF16_ROWS ? to_bf16x2(low, high) : to_f16x2(low, high);
}

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

// The copies that this lane has begun arrive at a barrier when they have come.
__device__ __forceinline__ void arrive_with_copies(u64& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(&barrier)) : "memory");
}
// Two f16 with the larger magnitudes, or NaN.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 d;
    asm("{.reg .b32 x;\nabs.f16x2 x, %2;\nmax.NaN.f16x2 %0, %1, x;}" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ bool is_finite(u32 pair) { return (pair & 0x7c00u) != 0x7c00u && (pair & 0x7c000000u) != 0x7c000000u; }
// A matrix in shared memory: the low half of its descriptor. `lead`: bytes between 64-wide pieces of a
// dimension that lies in memory order. `bytes` further, `offset(bytes)` is added.
__device__ __forceinline__ u32 descriptor(u32 address, u32 lead) { return (address & 0x3ffff) >> 4 | lead >> 4 << 16; }
__device__ constexpr u32 offset(u32 bytes) { return bytes >> 4; }
// The high half: from 8 rows of the other dimension to the next it is 1024 bytes, in a stage 8192; swizzled by 128.
#define MATRIX "0x40000040"
#define STAGE "0x40000200"
#define DESCRIPTORS(A, A_HIGH, B, B_HIGH) \
    "{\n.reg .b64 a, b;\nmov.b64 a, {" A ", " A_HIGH "};\nmov.b64 b, {" B ", " B_HIGH "};\n"

// scores [64 heads, 64 rows] (+)= queries [64, 16] · rows [64, 16]^T
__device__ __forceinline__ void wgmma_scores(float (&d)[32], u32 a, u32 b, int accumulate) {
    asm volatile(DESCRIPTORS("%32", MATRIX, "%33", STAGE) ".reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERANDS " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, a, b, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a), "r"(b), "r"(accumulate));
}
// out [64 heads, 128 columns] += weights [64, 16] · rows [16, 128]
__device__ __forceinline__ void wgmma_values(float (&d)[64], u32 a, u32 b) {
    asm volatile(DESCRIPTORS("%64", MATRIX, "%65", STAGE) "wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, a, b, 1, 1, 1, 0, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a), "r"(b));
}
// With few heads, 32 or 16, rows are the 64 of the matrix and heads its columns:
// TRANSPOSED 0: scores [64 rows, heads] (+)= rows [64, 16] · queries [heads, 16]^T
// TRANSPOSED 1: out [64 columns, heads] (+)= rows [16, 64]^T · weights [heads, 16]^T
template <int TRANSPOSED>
__device__ __forceinline__ void wgmma_few(float (&d)[16], u32 a, u32 b, int accumulate) {
    asm volatile(DESCRIPTORS("%16", STAGE, "%17", MATRIX) ".reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." OPERANDS " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, a, b, p, 1, 1, %19, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a), "r"(b), "r"(accumulate), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void wgmma_few(float (&d)[8], u32 a, u32 b, int accumulate) {
    asm volatile(DESCRIPTORS("%8", STAGE, "%9", MATRIX) ".reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." OPERANDS " {%0,%1,%2,%3,%4,%5,%6,%7}, a, b, p, 1, 1, %11, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a), "r"(b), "r"(accumulate), "n"(TRANSPOSED));
}
// Four 8x8 matrices of 16 bits from mma fragments to rows in shared memory, one row per lane.
__device__ __forceinline__ void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void store_transposed(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}
// Eight e2m1 to f16, in order. The upper byte of their f16 is looked up by the magnitude, the lower
// one is 0.
__device__ __forceinline__ void e2m1_to_f16(u32 word, u32* to) {
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
// Two bf16 to two f16; a number too large becomes infinite.
__device__ __forceinline__ u32 bf16_to_f16(u32 word) {
    return to_f16x2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
