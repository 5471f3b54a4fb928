// Two workers of this process over shm, each with a thread of its own and memory of one device:
// what transfers between devices are measured with, and copies beside them.
#pragma once

#include "absl/strings/str_format.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/registered_pages.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/std.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton::gpudirect {

inline constexpr size_t kRigCopy = 4 << 20;

// Queues a copy in pieces that leave room for others.
inline absl::Status queue_copy(const Device& device, DevicePointer to, DevicePointer from,
                               size_t bytes, Stream stream) {
  const Device::Current current(device);
  absl::Status status = current.status();
  for (size_t at = 0; status.ok() && at < bytes; at += kRigCopy) {
    status = device.check(
        device.driver().cuMemcpyAsync(to + at, from + at, std::min(kRigCopy, bytes - at), stream),
        "copying");
  }
  return status;
}

class TransferPair {
 public:
  static absl::StatusOr<std::unique_ptr<TransferPair>> make(const Device& device, bool shareable,
                                                            bool kernels, size_t bytes) {
    std::unique_ptr<TransferPair> rig(new TransferPair(device, bytes));
    if (absl::Status status = rig->start(shareable, kernels); !status.ok()) return status;
    return rig;
  }
  ~TransferPair() {
    for (auto& thread : threads_) thread.reset();
    for (auto& worker : workers_) worker.reset();
  }

  TransferRequest request(size_t at, size_t bytes) const {
    return {.op = Op::kWrite,
            .peer = peer_,
            .local = regions_[0],
            .local_layout = Layout::contiguous(at, bytes),
            .remote = remote_,
            .remote_layout = Layout::contiguous(at, bytes),
            .timeout = kRigPatience};
  }
  absl::Status run(size_t bytes) {
    const auto id = worker().submit(request(0, bytes));
    return id.ok() ? worker().wait(*id) : id.status();
  }
  // The same bytes by transfers of `each`, kAtOnce of them under way.
  absl::Status run_parts(size_t bytes, size_t each) {
    static constexpr size_t kAtOnce = 4;
    absl::Status status;
    std::deque<TransferId> ids;
    for (size_t at = 0; status.ok() && (at < bytes || !ids.empty());) {
      if (at < bytes && ids.size() < kAtOnce) {
        const size_t part = std::min(each, bytes - at);
        const auto id = worker().submit(request(at, part));
        status = id.status();
        if (id.ok()) ids.push_back(*id);
        at += part;
        continue;
      }
      status = worker().wait(ids.front());
      ids.pop_front();
    }
    return status;
  }
  // Until staged transfers go as they will from then on: each worker has the other's ring. Some
  // never do, and go all the same.
  absl::Status settle() {
    absl::Status status;
    const double end = rig_now() + 1;
    while (status.ok() && rig_now() < end) {
      TransferRequest small = request(0, 128 << 10);
      for (const Op op : {Op::kWrite, Op::kRead}) {
        small.op = op;
        const auto id = worker().submit(small);
        status.Update(id.ok() ? worker().wait(*id) : id.status());
      }
      const std::string text = worker().explain(peer_);
      if (text.find("by the peer straight from ours") != std::string::npos &&
          text.find("straight from the peer's ring") != std::string::npos) {
        break;
      }
    }
    return status;
  }
  Worker& worker() { return *workers_[0]; }
  PeerId peer() const { return peer_; }
  // Fills the source with another pattern; whether the target has it.
  absl::Status fill(size_t bytes, uint32_t seed) {
    auto* const words = pages_->as<uint32_t>();
    for (size_t i = 0; i < std::min(bytes, kRigCopy) / 4; ++i) {
      words[i] = static_cast<uint32_t>(i) * 2654435761u + seed;
    }
    const Stream stream = device_.stream(Direction::kToDevice);
    for (size_t at = 0; at < bytes; at += kRigCopy) {
      absl::Status status = queue_copy(device_, slabs_[0]->span().data + at, pages_->address(),
                                       std::min(kRigCopy, bytes - at), stream);
      if (!status.ok()) return status;
    }
    return wait_for(device_, stream);
  }
  absl::Status compare(size_t bytes) {
    const DevicePointer back = pages_->address() + kRigCopy;
    for (size_t at = 0; at < bytes; at += kRigCopy) {
      const size_t part = std::min(kRigCopy, bytes - at);
      const Stream stream = device_.stream(Direction::kToHost);
      absl::Status status = queue_copy(device_, back, slabs_[1]->span().data + at, part, stream);
      if (status.ok()) status = wait_for(device_, stream);
      if (!status.ok()) return status;
      const auto* const bytes_of = pages_->as<const std::byte>();
      if (std::memcmp(bytes_of, bytes_of + kRigCopy, part) != 0) {
        return absl::DataLossError(absl::StrFormat("other bytes than were sent, from %u on", at));
      }
    }
    return absl::OkStatus();
  }
  // Seconds of copies of `bytes` in both directions at once; of a copy on the device.
  absl::StatusOr<double> both_ways(size_t bytes) {
    const double begin = rig_now();
    for (size_t at = 0; at < bytes; at += kRigCopy) {
      const size_t part = std::min(kRigCopy, bytes - at);
      absl::Status status = queue_copy(device_, pages_->address(), slabs_[0]->span().data + at,
                                       part, device_.stream(Direction::kToHost));
      if (status.ok()) {
        status = queue_copy(device_, slabs_[1]->span().data + at, pages_->address() + kRigCopy,
                            part, device_.stream(Direction::kToDevice));
      }
      if (!status.ok()) return status;
    }
    for (const Direction direction : {Direction::kToHost, Direction::kToDevice}) {
      if (absl::Status s = wait_for(device_, device_.stream(direction)); !s.ok()) return s;
    }
    return rig_now() - begin;
  }
  absl::StatusOr<double> on_device(size_t bytes) {
    const double begin = rig_now();
    const Stream stream = device_.stream(Direction::kBetween);
    {
      const Device::Current current(device_);
      absl::Status status =
          device_.check(device_.driver().cuMemcpyAsync(slabs_[1]->span().data,
                                                       slabs_[0]->span().data, bytes, stream),
                        "copying");
      if (!status.ok()) return status;
    }
    if (absl::Status status = wait_for(device_, stream); !status.ok()) return status;
    return rig_now() - begin;
  }

 private:
  TransferPair(const Device& device, size_t bytes) : device_(device), bytes_(bytes) {}
  absl::Status start(bool shareable, bool kernels) {
    auto pages = RegisteredPages::make(device_, 2 * kRigCopy);
    if (!pages.ok()) return pages.status();
    pages_ = *std::move(pages);
    for (int i = 0; i < 2; ++i) {
      WorkerOptions options{.name = i == 0 ? "from" : "to",
                            .providers = {"shm"},
                            .settings = {{"staging.kernels", kernels ? "on" : "off"}}};
      auto worker = Worker::create(std::move(options));
      if (!worker.ok()) return worker.status();
      workers_[i] = *std::move(worker);
      auto slab = DeviceSlab::create(device_, bytes_, {.rdma = false, .shareable = shareable});
      if (!slab.ok()) return slab.status();
      slabs_[i] = *std::move(slab);
      const auto region = workers_[i]->register_memory(
          reinterpret_cast<void*>(static_cast<uintptr_t>(slabs_[i]->span().data)),
          slabs_[i]->span().size);
      if (!region.ok()) return region.status();
      regions_[i] = *region;
    }
    const auto remote = workers_[1]->remote_region(regions_[1]);
    if (!remote.ok()) return remote.status();
    remote_ = *remote;
    const auto peer = workers_[0]->connect(workers_[1]->address());
    if (!peer.ok()) return peer.status();
    peer_ = *peer;
    for (int i = 0; i < 2; ++i) threads_[i] = std::make_unique<ProgressThread>(*workers_[i]);
    return workers_[0]->wait_until(
        [this] { return workers_[0]->peer_state(peer_) == PeerState::kUp; }, kRigPatience);
  }

  const Device& device_;
  const size_t bytes_;
  std::unique_ptr<RegisteredPages> pages_;
  std::unique_ptr<DeviceSlab> slabs_[2];
  std::unique_ptr<Worker> workers_[2];
  std::unique_ptr<ProgressThread> threads_[2];
  MemoryRegion regions_[2];
  RemoteRegion remote_;
  PeerId peer_;
};

}  // namespace baton::gpudirect
