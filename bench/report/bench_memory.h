// The memory of one side of a benchmark: a pool's, or a CUDA device's, which the host looks at in
// an image of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/internal/device_memory.h"
#include "transport/layout.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton::bench {

// "host", "cuda" and "cuda:N" into no device, device 0 and device N. InvalidArgument otherwise.
absl::StatusOr<std::optional<int>> parse_memory_kind(const std::string& text);
// "host" or "cuda:N".
std::string memory_kind(std::optional<int> device);
// OK for no device, and for one that is there: for servers, before they wait for a client.
absl::Status device_is_there(std::optional<int> device);

// Not thread-safe. The worker outlives it. No transfer of it is open when it ends.
class BenchMemory {
 public:
  // On the device, or in a pool of the worker's.
  static absl::StatusOr<std::unique_ptr<BenchMemory>> make(Worker& worker, size_t bytes,
                                                           std::optional<int> device);
  ~BenchMemory();
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;

  const MemoryRegion& region() const { return region_; }
  size_t offset() const { return offset_; }  // of the memory in its region
  size_t size() const { return size_; }
  // What the host reads and writes: the memory itself, or the image of a device's.
  std::byte* host() const { return host_; }
  bool on_device() const { return device_ != nullptr; }
  // The image to the device, and the device's bytes into the image. Nothing to do on the host.
  absl::Status load();
  absl::Status fetch();
  // "memfd, 2 MiB pages", "CUDA device 0".
  const std::string& backing() const { return backing_; }

 private:
  explicit BenchMemory(Worker& worker) : worker_(worker) {}

  Worker& worker_;
  std::unique_ptr<MemoryPool> pool_;
  std::unique_ptr<internal::DeviceBuffer> device_;
  std::vector<std::byte> image_;
  MemoryRegion region_;
  bool registered_ = false;  // by us: a device's
  size_t offset_ = 0;
  size_t size_ = 0;
  std::byte* host_ = nullptr;
  std::string backing_;
};

// Bytes that can be checked: a pattern that depends on a seed and on the position in the transfer.

// Writes the pattern into the layout: byte i of the transfer gets the same value wherever it lies.
void fill(std::byte* base, const Layout& layout, uint64_t seed);

// Makes every byte of the memory wrong.
void poison(std::byte* base, size_t size);

// Checks every byte of [base, base + size): those of the layout hold the pattern, and the others
// are as poison() left them. DataLoss names the first byte that is wrong. Poisons what it checked.
absl::Status check(std::byte* base, size_t size, const Layout& layout, uint64_t seed);

}  // namespace baton::bench
