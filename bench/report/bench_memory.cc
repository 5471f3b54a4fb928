// Allocating the memory of a benchmark, and copying between a device's and its image.
#include "bench/report/bench_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/splitmix.h"

namespace baton::bench {

absl::StatusOr<std::optional<int>> parse_memory_kind(const std::string& text) {
  if (text == "host") return std::nullopt;
  if (text == "cuda") return std::optional<int>(0);
  constexpr std::string_view kPrefix = "cuda:";
  int device = -1;
  if (text.compare(0, kPrefix.size(), kPrefix) == 0 &&
      absl::SimpleAtoi(text.substr(kPrefix.size()), &device) && device >= 0) {
    return std::optional<int>(device);
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("--memory %s: write host, cuda or cuda:N", text));
}

std::string memory_kind(std::optional<int> device) {
  return device ? absl::StrCat("cuda:", *device) : "host";
}

absl::Status device_is_there(std::optional<int> device) {
  if (!device) return absl::OkStatus();
  if (internal::device_memory() == nullptr) {
    return absl::UnimplementedError("this program was built without memory of CUDA devices");
  }
  const absl::StatusOr<int> count = internal::device_memory()->count();
  if (!count.ok() || *device < *count) return count.status();
  return absl::NotFoundError(
      absl::StrFormat("there is no CUDA device %d: this process sees %d, from 0 on "
                      "(CUDA_VISIBLE_DEVICES)",
                      *device, *count));
}

absl::StatusOr<std::unique_ptr<BenchMemory>> BenchMemory::make(Worker& worker, size_t bytes,
                                                               std::optional<int> device) {
  std::unique_ptr<BenchMemory> memory(new BenchMemory(worker));
  memory->size_ = bytes;
  if (!device) {
    auto pool = MemoryPool::create(worker, {.slab_bytes = bytes});
    if (!pool.ok()) return pool.status();
    auto block = (*pool)->allocate(bytes);
    if (!block.ok()) return block.status();
    memory->pool_ = *std::move(pool);
    memory->region_ = block->region;
    memory->offset_ = block->offset;
    memory->host_ = block->data;
    memory->backing_ = memory->pool_->backing();
    return memory;
  }
  if (absl::Status there = device_is_there(device); !there.ok()) return there;
  auto buffer = internal::device_memory()->allocate(*device, bytes);
  if (!buffer.ok()) return buffer.status();
  memory->device_ = *std::move(buffer);
  auto region = worker.register_memory(memory->device_->data(), bytes);
  if (!region.ok()) return region.status();
  memory->region_ = *region;
  memory->registered_ = true;
  memory->image_.resize(bytes);
  memory->host_ = memory->image_.data();
  memory->backing_ = absl::StrCat("CUDA device ", *device);
  return memory;
}

BenchMemory::~BenchMemory() {
  if (registered_) worker_.deregister_memory(region_).IgnoreError();
}

absl::Status BenchMemory::load() {
  return on_device() ? device_->put(0, absl::MakeConstSpan(image_)) : absl::OkStatus();
}

absl::Status BenchMemory::fetch() {
  return on_device() ? device_->get(0, absl::MakeSpan(image_)) : absl::OkStatus();
}

namespace {

constexpr auto kPoison = std::byte{0xa5};

// Eight bytes of pattern (splitmix64).
uint64_t word_at(uint64_t seed, uint64_t index) {
  return base::splitmix_hash(seed + (index + 1) * base::kSplitmixStep);
}

std::byte byte_at(uint64_t seed, size_t position) {
  return static_cast<std::byte>(word_at(seed, position / 8) >> (8 * (position % 8)));
}

void write_run(std::byte* at, size_t position, size_t bytes, uint64_t seed) {
  size_t i = 0;
  for (; i < bytes && (position + i) % 8 != 0; ++i) at[i] = byte_at(seed, position + i);
  for (; i + 8 <= bytes; i += 8) {
    const uint64_t word = word_at(seed, (position + i) / 8);
    std::memcpy(at + i, &word, 8);
  }
  for (; i < bytes; ++i) at[i] = byte_at(seed, position + i);
}

// Calls `visit(offset, position, bytes)` for every contiguous run of the layout, in order.
template <typename Visit>
void for_each_run(const Layout& layout, Visit visit) {
  const size_t total = layout.bytes();
  LayoutWalker walker(layout, 0);
  for (size_t position = 0; position < total;) {
    const size_t bytes = walker.run();
    if (!visit(walker.offset(), position, bytes)) return;
    position += bytes;
    if (position < total) walker.advance(bytes);
  }
}

}  // namespace

void fill(std::byte* base, const Layout& layout, uint64_t seed) {
  for_each_run(layout, [&](size_t offset, size_t position, size_t bytes) {
    write_run(base + offset, position, bytes, seed);
    return true;
  });
}

void poison(std::byte* base, size_t size) { std::fill_n(base, size, kPoison); }

absl::Status check(std::byte* base, size_t size, const Layout& layout, uint64_t seed) {
  absl::Status status;
  std::array<std::byte, 4096> want;
  for_each_run(layout, [&](size_t offset, size_t position, size_t bytes) {
    for (size_t done = 0; done < bytes && status.ok();) {
      const size_t n = std::min(bytes - done, want.size());
      write_run(want.data(), position + done, n, seed);
      const std::byte* have = base + offset + done;
      const auto wrong = std::mismatch(have, have + n, want.data()).first;
      if (wrong != have + n) {
        status = absl::DataLossError(absl::StrFormat(
            "byte %u of the transfer (offset %u of the region) is %02x and should be %02x%s",
            position + done + static_cast<size_t>(wrong - have), static_cast<size_t>(wrong - base),
            static_cast<int>(*wrong), static_cast<int>(want[static_cast<size_t>(wrong - have)]),
            *wrong == kPoison ? ": it never arrived" : ""));
      }
      done += n;
    }
    std::fill_n(base + offset, bytes, kPoison);
    return status.ok();
  });
  if (!status.ok()) return status;
  const auto stray = std::find_if(base, base + size, [](std::byte b) { return b != kPoison; });
  if (stray == base + size) return status;
  return absl::DataLossError(absl::StrFormat(
      "offset %u of the region was written to, but is not part of the transfer", stray - base));
}

}  // namespace baton::bench
