// The kernels for GPUs: a block of threads as CUDA has it, and the entry points of the image.
#include "gpudirect/kernels/attention-inl.h"
#include "gpudirect/kernels/copy_pieces-inl.h"
#include "gpudirect/kernels/elementwise-inl.h"
#include "gpudirect/kernels/gemm-inl.h"
#include "gpudirect/kernels/gemm_exact-inl.h"
#include "gpudirect/kernels/gemm_f32-inl.h"
#include "gpudirect/kernels/pages-inl.h"
#include "gpudirect/kernels/reduce_sum-inl.h"
#include "gpudirect/kernels/reshard-inl.h"
#include "gpudirect/kernels/sample-inl.h"
#include "gpudirect/kernels/train-inl.h"
#include "gpudirect/kernels/trigger-inl.h"

namespace baton::gpudirect::kernels {
namespace {

// A variable of every thread: here each has its own.
template <class T>
struct PerThread {
  T value;
  __device__ T& operator[](uint32_t) { return value; }
};

// What EmulatedBlock in emulation.h is to the host.
template <uint32_t kThreads>
struct CudaBlock {
  __device__ uint32_t index() const { return blockIdx.x; }
  __device__ uint32_t blocks() const { return gridDim.x; }
  __device__ constexpr uint32_t threads() const { return kThreads; }
  template <class Function>
  __device__ __forceinline__ void each(const Function& function) {
    function(threadIdx.x);
    __syncthreads();
  }
  template <class Function>
  __device__ __forceinline__ void each_warp(const Function& function) {
    function(threadIdx.x);
    __syncwarp();
  }
  template <class Function>
  __device__ __forceinline__ void each_free(const Function& function) {
    function(threadIdx.x);
  }
  template <class T>
  __device__ PerThread<T> per_thread() const {
    return {};
  }
  template <class T, uint32_t kCount>
  __device__ T* shared() {
    __shared__ T array[kCount];
    return array;
  }
  __device__ std::byte* large_shared() const {
    extern __shared__ Vector16 memory[];
    return reinterpret_cast<std::byte*>(memory);
  }
  __device__ void warp_max(PerThread<uint32_t>& value) const {
    value.value = __reduce_max_sync(0xffffffffu, value.value);
  }
  // Of each warp, all fragments of a with all of b: one half of their k, then the other. As
  // mma.sync has it.
  template <class Left, class Right, class Sums>
  __device__ __forceinline__ void multiply_half(PerThread<Left>& a, PerThread<Right>& b,
                                                PerThread<Sums>& sums, uint32_t half) const {
    constexpr uint32_t kLeft = sizeof(Left) / sizeof(FragmentA);
    constexpr uint32_t kRight = sizeof(Right) / sizeof(FragmentB);
#pragma unroll
    for (uint32_t tile = 0; tile < kLeft * kRight; ++tile) {
      const uint32_t* const left = a.value.of[tile / kRight].word + half * 4;
      const uint32_t* const right = b.value.of[tile % kRight].word + half * 2;
      float* const c = sums.value.of[tile].value;
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
    }
  }
  // Four words of each thread's fragments, of each pair the second behind the first and the pairs
  // so far apart: of row lane / 4, those that lane % 4 has, of four matrices of eight rows of 16
  // bytes, whose places in shared memory place(thread) names, eight lanes for each matrix.
  template <class Fragments, class Place>
  __device__ __forceinline__ void load_fragments(PerThread<Fragments>& to, uint32_t word,
                                                 uint32_t apart, const Place& place) const {
    auto* const words = reinterpret_cast<uint32_t*>(&to.value) + word;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[apart]), "=r"(words[apart + 1])
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place(threadIdx.x))))
                 : "memory");
  }
  // 16 bytes, or 4, to shared memory, by nobody's registers, the first `there` of them, and zeros
  // behind; in groups that this thread ends, and waits for but for the last kOutstanding. A barrier
  // behind that shows them to the others.
  __device__ __forceinline__ void copy_16(void* to, const void* from, uint32_t there = 16) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there)
                 : "memory");
  }
  __device__ __forceinline__ void copy_4(void* to, const void* from, uint32_t there = 4) const {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there)
                 : "memory");
  }
  __device__ __forceinline__ void end_copies() const {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <uint32_t kOutstanding>
  __device__ __forceinline__ void wait_copies() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kOutstanding) : "memory");
  }
  template <class T>
  __device__ void add(T* to, T value) const {
    atomicAdd(to, value);
  }
  template <class T>
  __device__ __forceinline__ T load(const T* from) {
    return *from;
  }
  template <class T>
  __device__ __forceinline__ void store(T* to, T value) {
    *to = value;
  }
  __device__ uint64_t nanoseconds() const {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  __device__ uint64_t load_acquire(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
  __device__ void store_release(uint64_t* to, uint64_t value) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }
  __device__ bool exchange(uint64_t* at, uint64_t expected, uint64_t wanted) {
    return atomicCAS(reinterpret_cast<unsigned long long*>(at), expected, wanted) == expected;
  }
};

}  // namespace

// Blocks that shall fit on a multiprocessor at once, by the registers that they take.
constexpr int blocks_at_once(std::string_view kernel) {
  return kernel == "gemm" || kernel == "gemm_f32" ? 2 : 1;
}

#define BATON_ENTRY(kernel, Arguments, kThreads)                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks_at_once(#kernel)) \
      baton_##kernel(const __grid_constant__ Arguments arguments) {               \
    CudaBlock<kThreads> block;                                                    \
    kernel(block, arguments);                                                     \
  }
BATON_KERNELS(BATON_ENTRY)

}  // namespace baton::gpudirect::kernels
