// Reading /proc/meminfo and the files of memory cgroups.
#include "transport/base/limits/memory_left.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace baton::base {
namespace {

// Version 1 says "no limit" by a number near 2^63.
constexpr uint64_t kNoLimit = uint64_t{1} << 62;

struct Root {
  std::mutex mutex;
  std::string folder;
  static Root& get() {
    static Root root;
    return root;
  }
};

// The number that a file holds; none where there is no such file, or it says "max".
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// The sum of some rows of a file of names and numbers.
uint64_t sum_of(const std::string& path, const std::array<std::string_view, 3>& names) {
  std::ifstream file(path);
  uint64_t sum = 0;
  uint64_t number = 0;
  for (std::string name; file >> name >> number;) {
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += number;
  }
  return sum;
}

// How the two versions of cgroups name things.
struct Names {
  const char* limit;
  const char* used;
  std::array<std::string_view, 3> droppable;
};
constexpr Names kV2{.limit = "memory.max",
                    .used = "memory.current",
                    .droppable = {"inactive_file", "active_file", "slab_reclaimable"}};
constexpr Names kV1{.limit = "memory.limit_in_bytes",
                    .used = "memory.usage_in_bytes",
                    .droppable = {"total_inactive_file", "total_active_file", ""}};

void consider_group(const std::string& folder, const Names& names, MemoryLeft& least) {
  const auto limit = number_in(absl::StrCat(folder, "/", names.limit));
  const auto used = number_in(absl::StrCat(folder, "/", names.used));
  if (!limit || *limit >= kNoLimit || !used) return;
  const uint64_t kept =
      *used - std::min(*used, sum_of(absl::StrCat(folder, "/memory.stat"), names.droppable));
  const size_t left = *limit - std::min(*limit, kept);
  if (left >= least.bytes) return;
  least = {left, absl::StrCat("of the ", *limit, " bytes that the cgroup allows (", folder, "/",
                              names.limit, "; --memory of a container): raise it, or use less")};
}

// The group at `path` and all above it, up to the one that is mounted. In a container that sees the
// host's path, only the last of them is there, and it is the container's own.
void consider(const std::string& mount, std::string path, const Names& names, MemoryLeft& least) {
  while (true) {
    consider_group(mount + path, names, least);
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return;
    path.resize(slash);
  }
}

uint64_t available(const std::string& root) {
  std::ifstream info(root + "/proc/meminfo");
  for (std::string word; info >> word;) {
    uint64_t kilobytes = 0;
    if (word == "MemAvailable:" && info >> kilobytes) return kilobytes * 1024;
  }
  return SIZE_MAX;
}

// By promise_memory().
std::atomic<int64_t> promised{0};

}  // namespace

void promise_memory(int64_t more) { promised.fetch_add(more, std::memory_order_relaxed); }

void look_for_memory_below(std::string folder) {
  Root& root = Root::get();
  const std::lock_guard lock(root.mutex);
  root.folder = std::move(folder);
}

MemoryLeft memory_left() {
  std::string root;
  {
    const std::lock_guard lock(Root::get().mutex);
    root = Root::get().folder;
  }
  MemoryLeft least{available(root), "of the machine's memory: free some, or use less"};
  const std::string mounts = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  // "0::/path" is version 2's, "4:memory:/path" version 1's.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty()) {
      consider(mounts, path, kV2, least);
    } else if (absl::StrContains("," + controllers + ",", ",memory,")) {
      consider(mounts + "/memory", path, kV1, least);
    }
  }
  const int64_t theirs = promised.load(std::memory_order_relaxed);
  least.bytes -= std::min(least.bytes, static_cast<size_t>(std::max<int64_t>(theirs, 0)));
  return least;
}

absl::Status memory_fits(std::string_view what, size_t bytes) {
  const MemoryLeft left = memory_left();
  if (bytes <= left.bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("%s of %u bytes does not fit in the %u bytes that are left %s", what, bytes,
                      left.bytes, left.limit));
}

void need_memory(size_t bytes) {
  constexpr size_t kMany = 1 << 20;
  constexpr size_t kMore = 32 << 20;
  if (bytes < kMany) return;
  if (absl::Status fits = memory_fits("an array and what goes with it", bytes + kMore);
      !fits.ok()) {
    throw OutOfMemory(fits);
  }
}

void fault_in(std::byte* data, size_t bytes) {
  constexpr size_t kPage = 4096;
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return;
  for (size_t i = 0; i < bytes; i += kPage) const_cast<volatile std::byte*>(data)[i] = std::byte{0};
}

absl::Status fault_in(std::string_view what, std::byte* data, size_t bytes) {
  constexpr size_t kStep = 64 << 20;
  for (size_t done = 0; done < bytes; done += kStep) {
    if (absl::Status fits = memory_fits(what, bytes - done); !fits.ok()) return fits;
    fault_in(data + done, std::min(kStep, bytes - done));
  }
  return absl::OkStatus();
}

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
