// The emulated kernels by name, and how their blocks and threads take turns.
#include "tests/gpudirect/kernels/emulation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_format.h"
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

namespace baton::gpudirect::kernels {
namespace {

float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
float half_of(uint32_t word, uint32_t k) {
  return flushed(from_bf16(word >> k % 2 * 16 & 0xffffu));
}

bool tensor_core_sums = false;

// Towards zero, at a multiple of 2^place.
double cut(double x, int place) { return std::ldexp(std::trunc(std::ldexp(x, -place)), place); }

// `sum` and 16 products.
float add_as_tensor_cores(const double* products, float sum) {
  int largest = std::ilogb(std::max(std::fabs(double{sum}), 0x1p-126));
  for (int i = 0; i < 16; ++i) {
    if (products[i] != 0) largest = std::max(largest, std::ilogb(products[i]));
  }
  double total = cut(sum, largest - 24);
  for (int i = 0; i < 16; ++i) total += cut(products[i], largest - 24);
  if (total == 0) return 0;
  return static_cast<float>(cut(total, std::ilogb(total) - 23));
}

}  // namespace

void use_tensor_core_sums(bool on) { tensor_core_sums = on; }

float EmulatedBlock::add_products(const FragmentA* a, const FragmentB* b, uint32_t row,
                                  uint32_t column, float sum) {
  float parts[2] = {0.0f, 0.0f};
  double products[kFragmentK];
  for (uint32_t k = 0; k < kFragmentK; ++k) {
    const uint32_t half = k / 16, upper = k % 16 / 8, lane = k % 8 / 2;
    const uint32_t left = a[row % 8 * 4 + lane].word[half * 4 + upper * 2 + row / 8];
    const uint32_t right = b[column * 4 + lane].word[half * 2 + upper];
    products[k] = double{half_of(left, k)} * half_of(right, k);
    parts[k % 2] = flushed(std::fma(half_of(left, k), half_of(right, k), parts[k % 2]));
  }
  if (tensor_core_sums) {
    return add_as_tensor_cores(products + 16, add_as_tensor_cores(products, sum));
  }
  return flushed(flushed(sum) + flushed(parts[0] + parts[1]));
}

EmulatedBlock::EmulatedBlock(MemoryView& memory, const Launch& launch, uint32_t index)
    : memory_(memory),
      launch_(launch),
      index_(index),
      random_(launch.seed + index),
      order_(launch.threads) {
  std::iota(order_.begin(), order_.end(), 0u);
}

void EmulatedBlock::shuffle() { std::shuffle(order_.begin(), order_.end(), random_); }

std::byte* EmulatedBlock::shared_array(const void* name, size_t bytes, bool variable) {
  const auto [at, made] = shared_.try_emplace(name);
  SharedArray& array = at->second;
  if (made) {
    array = {std::vector(bytes, std::byte{0xa5}), std::vector<SharedWord>((bytes + 3) / 4),
             variable};
  }
  return array.bytes.data();
}

EmulatedBlock::SharedArray* EmulatedBlock::array_around(const void* at, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  for (auto& [name, array] : shared_) {
    const auto begin = reinterpret_cast<uintptr_t>(array.bytes.data());
    if (address >= begin && address + bytes <= begin + array.bytes.size()) return &array;
  }
  return nullptr;
}

bool EmulatedBlock::too_close(const Touch& before) const {
  if (before.interval != interval_) return false;
  if (before.other_warps || before.thread / 32 != running_ / 32) return true;
  return before.step == step_ && (before.other_threads || before.thread != running_);
}

void EmulatedBlock::touch(const void* at, size_t bytes, size_t alignment, Access access) {
  SharedArray* const array = array_around(at, bytes);
  const auto fault = [&](const char* what) {
    throw KernelFault{absl::StrFormat("thread %u %s %u bytes of %s", running_,
                                      access == Access::kRead ? "reads" : "writes", bytes, what)};
  };
  if (array == nullptr) return fault("memory that is not a shared array");
  const auto place = static_cast<size_t>(static_cast<const std::byte*>(at) - array->bytes.data());
  if (place % alignment != 0) fault("a shared array that are not aligned");
  for (size_t word = place / 4; word < (place + bytes + 3) / 4; ++word) {
    auto& [reads, writes, adds] = array->words[word].of;
    const bool race = too_close(writes) || (access != Access::kAdd && too_close(adds)) ||
                      (access != Access::kRead && too_close(reads));
    if (race) fault("a shared array that another thread touches before the next barrier");
    const Touch& opposite = access == Access::kRead ? writes : reads;
    if (array->variable && opposite.interval == interval_) {
      fault("a variable that is both read and written before the next barrier");
    }
    Touch& own = array->words[word].of[static_cast<size_t>(access)];
    const bool before = own.interval == interval_;
    own.other_warps = before && (own.other_warps || own.thread / 32 != running_ / 32);
    own.other_threads =
        before && own.step == step_ && (own.other_threads || own.thread != running_);
    own.interval = interval_;
    own.step = step_;
    own.thread = running_;
  }
}

std::deque<std::vector<EmulatedBlock::Copy>>& EmulatedBlock::copies_of_running() {
  copies_.resize(launch_.threads);
  return copies_[running_];
}

void EmulatedBlock::copy(void* to, const void* from, size_t size, size_t there) {
  auto& groups = copies_of_running();
  if (groups.empty()) groups.emplace_back();
  touch(to, size, size, Access::kWrite);
  Copy& copy = groups.back().emplace_back(Copy{static_cast<std::byte*>(to), size});
  if (there == 0) return;
  if (reinterpret_cast<uintptr_t>(from) % size != 0) {
    throw KernelFault{"an asynchronous copy from an address that is not aligned to its size"};
  }
  std::memcpy(copy.bytes, reach(from, there, 4, false), there);
}

void EmulatedBlock::end_copies() {
  auto& groups = copies_of_running();
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

void EmulatedBlock::wait_copies(size_t outstanding) {
  auto& groups = copies_of_running();
  while (groups.size() > outstanding + 1) {  // the last one has not been ended
    for (const Copy& copy : groups.front()) {
      touch(copy.to, copy.size, copy.size, Access::kWrite);
      std::memcpy(copy.to, copy.bytes, copy.size);
    }
    groups.pop_front();
  }
}

void EmulatedBlock::make_arrival(uint64_t* arrival) {
  touch(arrival, sizeof *arrival, alignof(uint64_t), Access::kWrite);
  arrivals_[arrival] = {};
}

void EmulatedBlock::copy_runs(uint64_t* arrival, uint32_t all, void* to, const void* from,
                              uint32_t bytes) {
  touch(arrival, sizeof *arrival, alignof(uint64_t), Access::kRead);
  const auto found = arrivals_.find(arrival);
  if (found == arrivals_.end()) throw KernelFault{"copies whose arrival has not been made"};
  Arrival& use = found->second;
  if (running_ % 32 == 0) {
    if (use.bytes != 0) throw KernelFault{"copies whose arrival's last use is not over"};
    if (use.awaited == interval_) {
      throw KernelFault{"copies into memory that threads still read: no barrier after their wait"};
    }
    ++use.uses;
    use.bytes = all;
  }
  if (from == nullptr) return;
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0) {
    throw KernelFault{"a bulk copy that is not aligned to 16 bytes"};
  }
  if (array_around(to, bytes) == nullptr) {
    throw KernelFault{"a copy in bulk to memory that is not a shared array"};
  }
  const std::byte* const source = reach(from, bytes, 16, false);
  use.runs.emplace_back(static_cast<std::byte*>(to), std::vector(source, source + bytes));
  std::memset(to, 0xff, bytes);
}

void EmulatedBlock::await_arrival(uint64_t* arrival, uint32_t number) {
  Arrival& use = arrivals_[arrival];
  size_t bytes = 0;
  for (const auto& [to, run] : use.runs) {
    std::memcpy(to, run.data(), run.size());
    bytes += run.size();
  }
  if (use.uses != number + 1 || bytes == 0 || bytes != use.bytes) {
    throw KernelFault{"a wait for copies that are not begun, or not so many"};
  }
  use.bytes = 0;
  use.awaited = interval_;
  use.runs.clear();
}

bool EmulatedBlock::copies_wait() const {
  for (const auto& [at, arrival] : arrivals_) {
    if (!arrival.runs.empty()) return true;
  }
  return std::any_of(copies_.begin(), copies_.end(), [](const auto& groups) {
    return std::any_of(groups.begin(), groups.end(),
                       [](const auto& group) { return !group.empty(); });
  });
}

void EmulatedBlock::warp_max(std::vector<uint32_t>& values) const {
  for (size_t warp = 0; warp < values.size(); warp += 32) {
    const auto begin = values.begin() + static_cast<ptrdiff_t>(warp);
    const auto end = begin + std::min<ptrdiff_t>(32, values.end() - begin);
    std::fill(begin, end, *std::max_element(begin, end));
  }
}

std::byte* EmulatedBlock::reach(const void* at, size_t bytes, size_t alignment, bool write) {
  const auto address = reinterpret_cast<uint64_t>(at);
  const auto fault = [&](const char* why) {
    throw KernelFault{absl::StrFormat("a %s of %u bytes at %#x, which %s", write ? "store" : "load",
                                      bytes, address, why)};
  };
  if (address % alignment != 0) fault("is not aligned to them");
  std::byte* const found = memory_.find(address, bytes, write);
  if (found == nullptr) fault("is not memory of the device, nor registered memory of the host");
  return found;
}

std::optional<EmulatedKernel> emulated_kernel(std::string_view name) {
#define BATON_EMULATE(kernel, Arguments, threads)                               \
  if (name == "baton_" #kernel) {                                               \
    return EmulatedKernel{sizeof(Arguments), threads, large_shared_of(#kernel), \
                          [](EmulatedBlock& block, const void* arguments) {     \
                            Arguments copy;                                     \
                            std::memcpy(&copy, arguments, sizeof copy);         \
                            kernel(block, copy);                                \
                          }};                                                   \
  }
  BATON_KERNELS(BATON_EMULATE)
#undef BATON_EMULATE
  return std::nullopt;
}

std::optional<std::string> emulate(std::string_view name, const EmulatedKernel& kernel,
                                   const Launch& launch, const void* arguments,
                                   MemoryView& memory) {
  Launch with_memory = launch;
  with_memory.large_shared = kernel.large_shared;
  std::vector<uint32_t> order(launch.blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(launch.seed);
  std::shuffle(order.begin(), order.end(), random);
  for (const uint32_t index : order) {
    EmulatedBlock block(memory, with_memory, index);
    try {
      kernel.run_block(block, arguments);
      if (block.copies_wait()) throw KernelFault{"an asynchronous copy that no thread waits for"};
    } catch (const KernelFault& fault) {
      return absl::StrFormat("%s, block %u: %s", name, index, fault.what);
    }
  }
  return std::nullopt;
}

}  // namespace baton::gpudirect::kernels
