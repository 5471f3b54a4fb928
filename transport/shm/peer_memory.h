// The initiator's side: what a peer's memory looks like from here, and the check that comes before
// every byte.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/provider.h"
#include "transport/shm/cma.h"
#include "transport/shm/memory_file.h"

namespace baton::shm {

class PeerMemory {
 public:
  // `cma` is what the probe found. `out`, where there is one, is told which handles are open; it
  // outlives this.
  PeerMemory(MappedFile control, const CmaPeer& peer, absl::Status cma, Lane* out = nullptr)
      : control_(std::move(control)), peer_(peer), cma_(std::move(cma)), out_(out) {}

  // How the bytes of a region are reached.
  enum class Path : uint8_t {
    kMapped,  // at Target::mapped
    kCma,     // at Target::address in the peer
    kDevice,  // at Target::device, from Target::address on
    kNotYet,  // its file is still on its way to us
  };
  struct Target {
    Path path = Path::kNotYet;
    std::byte* mapped = nullptr;
    uint64_t file = 0;  // its number, where mapped
    uint64_t address = 0;
    std::shared_ptr<const internal::PeerMapping> device;
  };

  // Key, generation, rights and the bounds of the whole remote layout. The message of an error is
  // what the initiator of the transfer reads.
  absl::Status resolve(const TransferDescriptor& transfer, Target& target) const;

  // The region as it is mapped here. Unavailable while its file is on its way.
  absl::StatusOr<RemoteView> view(const RemoteRegion& region) const;

  // Whether the registration still lives. Ask with one's busy marker set.
  bool live(uint32_t index, uint32_t generation) const {
    return rows()[index].generation.load(std::memory_order_seq_cst) == generation;
  }

  // Whether a region can be reached at all; the reason and the remedy where it cannot.
  absl::Status reaches(const RemoteRegion& region) const;

  // A file that the peer sent. An error means that the peer does not keep to the rules.
  absl::Status add_file(uint64_t number, int fd, uint64_t bytes);
  absl::Status add_device_file(uint64_t number, base::UniqueFd fd, const DeviceExport& memory);
  // Whether copies on the stream of `device` reach the region, which is mapped if need be.
  // Unavailable: it is on its way.
  absl::Status maps(int device, const RemoteRegion& remote) const;
  // For explain(): nothing while there is nothing to say.
  std::string about_devices() const;
  void drop_file(uint64_t number) { files_.erase(number); }
  // Whether the peer waits for a handle to be closed; closes those that it waits for, and that no
  // slice has any more.
  bool asked_back() const;
  void give_back();
  bool has_handles() const;  // open ones

  // Faults in the next `bytes` bytes of what is mapped; false when there is nothing left to do.
  bool populate(size_t bytes);
  bool populating() const { return populating_ != 0; }

  // For copies by CMA, until one was not let through: `why`.
  CmaPeer& process() { return peer_; }
  void lose_cma(absl::string_view why) { cma_ = absl::FailedPreconditionError(why); }
  const absl::Status& cma() const { return cma_; }

 private:
  struct File {
    std::shared_ptr<MappedFile> mapping;  // null: could not be mapped
    absl::Status status;                  // why
    // Device memory is mapped on first use, since not every peer uses devices.
    bool on_device = false;
    base::UniqueFd fd;
    DeviceExport memory;
    std::shared_ptr<const internal::PeerMapping> device;
  };
  absl::Status map(uint64_t number, File& file, const RemoteRegion& remote) const;
  std::atomic<uint64_t>* free_mark() const;

  const SharedRegion* rows() const { return control_.as<const ControlSegment>()->regions; }
  absl::Status unreachable(const absl::Status& mapping) const;

  MappedFile control_;
  CmaPeer peer_;
  absl::Status cma_;
  Lane* out_;
  mutable absl::flat_hash_map<uint64_t, File> files_;
  uint64_t populating_ = 0;  // number of the file that is being faulted in, 0: none
};

}  // namespace baton::shm
