// Devices (GPUs) in virtual time, for workers on a simulated fabric: memory that the processor
// cannot touch, and lanes that copies of it take. The staging above runs unchanged.
//
//   SimDevices devices(fabric, {.to_host = 25e9});
//   auto block = devices.allocate(/*device=*/0, 8 << 20);
//   auto region = worker.register_memory((*block)->data(), 8 << 20);
//   devices.launch(0, 2ms);                     // a kernel of the model's: packing waits behind it
//
// The model: each device has four lanes, for copies to the host, copies to the device, copies
// between devices, and kernels. A lane does one thing after the other, in the order in which it was
// asked; lanes do not hold each other up. A copy of B bytes in p pieces (neighbours count as one)
// takes its lane for B / rate + p * per_piece, and has ended `latency` after that; its bytes move
// then. With one copy engine both directions to and from the host share a lane. Small pieces are
// packed by a kernel where staging may use kernels: the kernels' lane first, then one piece, or the
// other way round.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "tests/sim/fabric/fabric.h"
#include "transport/internal/device_memory.h"

namespace baton::sim {

enum class SimLane : uint8_t { kToHost, kToDevice, kBetween, kKernels };
inline constexpr size_t kSimLanes = 4;

struct SimDeviceOptions {
  int devices = 1;        // of all nodes together: each worker may use any
  double to_host = 50e9;  // bytes per second of each lane
  double to_device = 50e9;
  double between = 1e12;
  double kernels = 1e12;  // packing
  Time per_piece = std::chrono::nanoseconds(500);
  Time latency = std::chrono::microseconds(4);
  int copy_engines = 2;
  size_t packed_below = 28 << 10;  // bytes of a piece, on the average
};

struct SimLaneStats {
  uint64_t operations = 0;
  uint64_t bytes = 0;
  Time busy{};
};

// The devices of this process from here on, one at a time; before the fabric and after all workers
// it ends.
class SimDevices final : public internal::DeviceMemory {
 public:
  SimDevices(SimFabric& fabric, const SimDeviceOptions& options);
  ~SimDevices() override;
  SimDevices(const SimDevices&) = delete;
  SimDevices& operator=(const SimDevices&) = delete;

  // Takes the kernels' lane for so long. When that ends.
  Time launch(int device, Time span);
  SimLaneStats lane(int device, SimLane lane) const;
  // The bytes of device memory, for the test; null: it is none.
  std::byte* view(const void* at, size_t bytes) const;

  absl::StatusOr<int> count() const override { return options_.devices; }
  absl::StatusOr<MemoryPlace> place(const void* data, size_t size) const override;
  absl::StatusOr<BackingFile> dma_buf(const void* data, size_t size) const override;
  absl::Status by_address(const void*, bool) const override { return absl::UnimplementedError(""); }
  absl::StatusOr<std::unique_ptr<internal::StagingRing>> staging_ring(int device, size_t bytes,
                                                                      bool kernels) const override;
  absl::StatusOr<std::unique_ptr<internal::DeviceCopies>> copies(int device,
                                                                 bool kernels) const override;
  absl::StatusOr<std::unique_ptr<internal::DeviceBuffer>> allocate(int device,
                                                                   size_t bytes) const override;

 private:
  friend class SimRing;
  friend class SimCopies;
  friend class SimBuffer;
  struct Lane {
    Time free_at{};
    SimLaneStats stats;
  };
  struct Allocation {
    size_t bytes = 0;
    int device = 0;
    std::byte* view = nullptr;
  };
  struct Work {
    SimLane lane;
    size_t bytes = 0;
    size_t pieces = 0;
  };

  // Takes the lane from `ready` or from when it is free; when it is done with it.
  Time occupy(int device, const Work& work, Time ready) const;
  Lane& lane_of(int device, SimLane lane) const;
  double rate(SimLane lane) const;
  Time now() const;
  void free(std::byte* data) const;

  SimNetwork& network_;
  const SimDeviceOptions options_;
  const internal::DeviceMemory* const before_;
  mutable std::vector<std::array<Lane, kSimLanes>> lanes_;  // by device
  mutable std::map<uintptr_t, Allocation> allocations_;
};

}  // namespace baton::sim
