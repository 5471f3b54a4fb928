// The kernels for GPUs: a block of threads as CUDA has it, and the entry points of the image.
#include "gpudirect/kernels/attention-inl.h"
#include "gpudirect/kernels/copy_pieces-inl.h"
#include "gpudirect/kernels/elementwise-inl.h"
#include "gpudirect/kernels/gemm-inl.h"
#include "gpudirect/kernels/gemm_exact-inl.h"
#include "gpudirect/kernels/pages-inl.h"
#include "gpudirect/kernels/reduce_sum-inl.h"
#include "gpudirect/kernels/sample-inl.h"
#include "gpudirect/kernels/train-inl.h"
#include "gpudirect/kernels/words-inl.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BATON_BULK_COPIES 1
#else
#define BATON_BULK_COPIES 0
#endif

namespace baton::gpudirect::kernels {
namespace {

// A variable of every thread: here each has its own.
template <class T>
struct PerThread {
  T value;
  __device__ T& operator[](uint32_t) { return value; }
};

// What EmulatedBlock (tests/gpudirect/kernels/emulation.h) is to the host.
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
  // Of T of[], whose elements have float of[].
  template <class T>
  __device__ __forceinline__ void swap_neighbours(PerThread<T>& values) const {
    BATON_UNROLL
    for (auto& row : values.value.of) {
      BATON_UNROLL
      for (float& value : row.of) value = __shfl_xor_sync(0xffffffffu, value, 1);
    }
  }
  // Multiplies, in each warp, all fragments of a with all of b: two mma.sync of 16 k each, far
  // apart, because the second waits for the first.
  template <class Left, class Right, class Sums>
  __device__ __forceinline__ void multiply_fragments(PerThread<Left>& a, PerThread<Right>& b,
                                                     PerThread<Sums>& sums) const {
    constexpr uint32_t kLeft = sizeof(Left) / sizeof(FragmentA);
    constexpr uint32_t kRight = sizeof(Right) / sizeof(FragmentB);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
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
  }
  // Four words of each thread's fragments, the number'th: of row lane / 4, those that lane % 4 has,
  // of each of four matrices of eight rows of 16 bytes, whose places in shared memory place(thread)
  // names, eight lanes for each.
  template <class Fragments, class Place>
  __device__ __forceinline__ void load_fragments(PerThread<Fragments>& to, uint32_t number,
                                                 const Place& place) const {
    auto* const word = reinterpret_cast<uint32_t*>(&to.value) + number * 4;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place(threadIdx.x))))
                 : "memory");
  }
  // 16 bytes, or 4, to shared memory, past the registers, the first `there` of them, and zeros
  // behind; in groups that this thread ends, and waits for but for the last kOutstanding. A barrier
  // behind that shows them to the others.
  __device__ __forceinline__ void copy_16(void* to, const void* from, uint32_t there = 16) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there)
                 : "memory");
  }
  // The same, and L2 gets all of the 128 bytes there.
  __device__ __forceinline__ void copy_16_of_line(void* to, const void* from) const {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
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
  // Runs of bytes to shared memory, at most one of each thread of a warp, all of which call this:
  // multiples of 16 bytes, aligned to so many; null: none. They are one use of an arrival, of `all`
  // bytes. With bulk copies no registers and few instructions have to do with
  // it.
  __device__ __forceinline__ void make_arrival(uint64_t* arrival) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrival)),
                 "n"(BATON_BULK_COPIES != 0 ? 1 : 32)
                 : "memory");
#if BATON_BULK_COPIES
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void copy_runs(uint64_t* arrival, uint32_t all, void* to,
                                            const void* from, uint32_t bytes) const {
    const uint32_t at = shared_address(arrival), shared_to = shared_address(to);
#if BATON_BULK_COPIES
    if (threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(all)
                   : "memory");
    }
    __syncwarp();
    if (from != nullptr) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared_to),
          "l"(from), "r"(bytes), "r"(at)
          : "memory");
    }
#else
    for (uint32_t left = __ballot_sync(0xffffffffu, from != nullptr); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const auto* const run = reinterpret_cast<const std::byte*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(from), lane));
      const uint32_t run_to = __shfl_sync(0xffffffffu, shared_to, lane);
      for (uint32_t i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(run_to + i),
                     "l"(run + i)
                     : "memory");
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
#endif
  }
  // All threads of the block wait until the number'th use, from 0 on, has arrived: the last one.
  __device__ __forceinline__ void await_arrival(uint64_t* arrival, uint32_t number) const {
    const uint32_t at = shared_address(arrival);
    uint32_t there = 0;
    do {
#if BATON_BULK_COPIES
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(there)
          : "r"(at), "r"(number % 2)
          : "memory");
#else
      asm volatile(
          "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
          "p; }"
          : "=r"(there)
          : "r"(at), "r"(number % 2)
          : "memory");
#endif
    } while (there == 0);
  }
  template <class T>
  __device__ void add(T* to, T value) const {
    atomicAdd(to, value);
  }
  template <class T>
  __device__ __forceinline__ T get(const T* from) const {
    return *from;
  }
  template <class T>
  __device__ __forceinline__ void put(T* to, const T& value) const {
    *to = value;
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

 private:
  __device__ __forceinline__ static uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
  }
};

}  // namespace

// How many blocks of a kernel a multiprocessor holds at least: what bounds a thread's registers.
template <class Arguments, uint32_t kThreads>
inline constexpr uint32_t kResidentBlocks = 1;
template <>
inline constexpr uint32_t kResidentBlocks<ReduceSum, 256> = 2;
template <>
inline constexpr uint32_t kResidentBlocks<RmsNorm, 256> = 4;
template <>
inline constexpr uint32_t kResidentBlocks<AdamW, 256> = 5;
template <>
inline constexpr uint32_t kResidentBlocks<Classifier, 256> = 4;
template <>
inline constexpr uint32_t kResidentBlocks<Gemm, 256> = 2;
template <>
inline constexpr uint32_t kResidentBlocks<GemmF32, 256> = 2;
template <>
inline constexpr uint32_t kResidentBlocks<SplitAttention, 64> = 8;
template <>
inline constexpr uint32_t kResidentBlocks<PageAttention, 128> = 4;

#define BATON_ENTRY(kernel, Arguments, kThreads)                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, (kResidentBlocks<Arguments, kThreads>)) \
      baton_##kernel(const __grid_constant__ Arguments arguments) {                              \
    CudaBlock<kThreads> block;                                                                   \
    kernel(block, arguments);                                                                    \
  }
BATON_KERNELS(BATON_ENTRY)

}  // namespace baton::gpudirect::kernels
