// Tells a worker what lies where: what register_memory() asks about every address.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "gpudirect/contract/ipc_handles.h"
#include "gpudirect/contract/staging.h"
#include "gpudirect/copies/planner.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/kernels/image.h"
#include "gpudirect/launcher.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// Registers itself with the contract where baton_gpudirect is linked. Opens a device when memory of
// it is first registered. Without a CUDA driver in the process all memory is the host's, and
// nothing is loaded to find that out.
class CudaMemory final : public internal::DeviceMemory {
 public:
  // Null: there is no driver in the process (yet).
  using FindDriver = std::function<const Driver*()>;
  struct Options {
    absl::Span<const std::byte> kernels = gpudirect::kernels::image();
    std::optional<CopyTable> table;  // what copies cost; measured where there is none
    std::optional<SumCosts> sums;    // and sums
    std::string root;                // where sysfs is: below it, for tests
  };
  explicit CudaMemory(FindDriver find, Options options)
      : find_(std::move(find)), options_(std::move(options)) {}
  explicit CudaMemory(FindDriver find) : CudaMemory(std::move(find), Options{}) {}
  ~CudaMemory() override;

  absl::StatusOr<int> count() const override;
  absl::StatusOr<MemoryPlace> place(const void* data, size_t size) const override;
  // A dma-buf of the whole pages (of the host's page size) around the range.
  absl::StatusOr<BackingFile> dma_buf(const void* data, size_t size) const override;
  // With the kernel module that adapters find device memory by.
  absl::Status by_address(const void* data, bool now) const override;
  absl::Status look(const void* data, absl::Span<std::byte> to) const override;
  std::string pci_address(int device) const override;
  absl::StatusOr<bool> wants_flush(int device) const override;
  // OK for a device that is lost: nothing reads its memory any more.
  absl::Status flush(int device) const override;
  absl::StatusOr<std::unique_ptr<internal::StagingRing>> staging_ring(
      int device, size_t bytes, bool kernels = true) const override;
  // By a descriptor: memory of virtual memory management that was made to be shared, as our slabs
  // are. By a handle: memory of cudaMalloc.
  absl::StatusOr<DeviceExport> share(const void* data, size_t size) const override;
  absl::Status may_map(const DeviceExport& memory) const override;
  absl::StatusOr<std::unique_ptr<internal::PeerMapping>> map(
      const DeviceExport& memory) const override;
  absl::StatusOr<std::unique_ptr<internal::DeviceCopies>> copies(int device,
                                                                 bool kernels) const override;
  void wait_for_copies() const override;
  absl::StatusOr<std::unique_ptr<internal::TransferGates>> gates(int device,
                                                                 size_t count) const override;
  absl::StatusOr<std::unique_ptr<internal::VectorSums>> sums(int device) const override;
  absl::StatusOr<std::unique_ptr<internal::DeviceBuffer>> allocate(int device,
                                                                   size_t bytes) const override;

 private:
  absl::StatusOr<const Driver*> loaded() const;  // also where no call had loaded it
  // The device that has the address, and with `facts` what is there. `lacking`: how the error
  // begins where there is no driver.
  absl::StatusOr<const Device*> owner_of(const void* data, const char* lacking,
                                         PointerFacts* facts = nullptr) const;
  // A device whose memory is only shared by peers, and not used here, needs no kernels.
  enum class Kernels : uint8_t { kLoaded, kNotNeeded };
  absl::StatusOr<const Device*> device_of(const Driver& driver, int ordinal,
                                          Kernels kernels = Kernels::kLoaded) const;
  void open_behind(const Driver& driver, int ordinal) const;
  CopyMeans means_of(const Device& device) const;
  // Unimplemented, with the reason, where there are none for it.
  absl::StatusOr<const Launcher*> kernels_of(int device) const;

  struct Opened {
    std::unique_ptr<Device> device;
    // Loaded with the device: later it might wait for kernels, and make others' copies wait.
    std::unique_ptr<Launcher> launcher;
    std::optional<CopyTable> table;
    std::optional<absl::Status> no_kernels;  // why there is no launcher; nothing: not asked yet
    std::optional<SumCosts> sums;
    std::thread opener;   // for peers' memory
    bool behind = false;  // it has been opened so, or could not be
  };
  void take(Opened& opened, std::unique_ptr<Device> device) const;

  const FindDriver find_;
  const Options options_;
  mutable std::mutex mutex_;
  mutable std::map<int, Opened> devices_;
  mutable IpcHandles handles_;  // ends before the devices
};

// A slab of a device as a buffer that the host fills and looks at: benchmarks and tests of programs
// that have no framework.

// Not thread-safe. The device outlives it.
class SlabBuffer final : public internal::DeviceBuffer {
 public:
  // InvalidArgument for no bytes; ResourceExhausted, or the driver's words, where there is no such
  // memory. Pins up to 8 MiB of the host's memory for the copies.
  static absl::StatusOr<std::unique_ptr<SlabBuffer>> create(const Device& device, size_t bytes);

  std::byte* data() const override;
  size_t size() const override { return slab_->span().size; }
  absl::Status put(size_t offset, absl::Span<const std::byte> bytes) override;
  absl::Status get(size_t offset, absl::Span<std::byte> bytes) override;

 private:
  SlabBuffer(std::unique_ptr<DeviceSlab> slab, std::unique_ptr<internal::StagingRing> ring)
      : slab_(std::move(slab)), ring_(std::move(ring)) {}
  absl::Status check(size_t offset, size_t bytes) const;
  absl::Status copy(internal::CopyDirection direction, size_t offset, size_t bytes);

  std::unique_ptr<DeviceSlab> slab_;
  std::unique_ptr<internal::StagingRing> ring_;
};

}  // namespace baton::gpudirect
