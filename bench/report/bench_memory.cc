// Allocating the memory of a benchmark, and copying between a device's and its image.
#include "bench/report/bench_memory.h"

#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

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

}  // namespace baton::bench
