// Mapping a cache's memory.
#include "transport/base/limits/cache_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"

namespace baton::base {
namespace {

constexpr const char* kWhat = "a KV cache";
constexpr size_t kWholePages = 4096;

}  // namespace

void CacheMemory::Unmap::operator()(std::byte* memory) const { munmap(memory, bytes); }

absl::StatusOr<CacheMemory> CacheMemory::make(const Wanted& wanted) {
  const size_t bytes = (wanted.bytes + kWholePages - 1) / kWholePages * kWholePages;
  if (absl::Status fits = memory_fits(kWhat, bytes); !fits.ok()) return fits;
  CacheMemory out;
  void* mapped = MAP_FAILED;
  if (wanted.mappable) {
    if (auto file = make_memory_file("baton-kv-cache", bytes); file.ok()) {
      mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file->get(), 0);
      if (mapped != MAP_FAILED) out.file_ = *std::move(file);
    }
  }
  if (mapped == MAP_FAILED) {
    mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (mapped == MAP_FAILED) return absl::ResourceExhaustedError(refusal(kWhat, ENOMEM));
  out.memory_ = {static_cast<std::byte*>(mapped), Unmap{bytes}};
  if (wanted.huge_pages) madvise(mapped, bytes, MADV_HUGEPAGE);
  if (absl::Status fits = fault_in(kWhat, out.data(), bytes); !fits.ok()) return fits;
  return out;
}

}  // namespace baton::base
