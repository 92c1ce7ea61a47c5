// What the CTAs of a cluster tell each other.
#pragma once

#include "common.cuh"

// All CTAs of a cluster: before one writes to another, and before one leaves.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The last thing that a CTA does to which others may still arrive.
__device__ __forceinline__ void cluster_leave() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    cluster_wait();
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 n;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(n));
    return n;
}
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
    u32 d;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
    return d;
}
// The same place in the other of two CTAs.
__device__ __forceinline__ u32 others(u32 address) { return remote(address, cluster_rank() ^ 1); }
// Copies to another CTA; the bytes count at its barrier.
__device__ __forceinline__ void send(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Before anything that this thread sends or arrives at later.
__device__ __forceinline__ void store_remote(u32 to, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;\nfence.acq_rel.cluster;" ::"r"(to), "r"(value) : "memory");
}
// At a barrier of another CTA, after all that this thread, and those it has met, did; and the wait for that.
__device__ __forceinline__ void arrive_at(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same, by a thread that has read all it wants and written nothing: a release would wait for all memory.
__device__ __forceinline__ void arrive_with_nothing(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(u64& barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(smem_address(&barrier)), "r"(parity) : "memory");
}
