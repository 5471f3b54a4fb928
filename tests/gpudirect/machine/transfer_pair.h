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
inline void queue_copy(const Device& device, DevicePointer to, DevicePointer from, size_t bytes,
                       Stream stream) {
  const Device::Current current(device);
  must(current.status());
  for (size_t at = 0; at < bytes; at += kRigCopy) {
    must(device.check(
        device.driver().cuMemcpyAsync(to + at, from + at, std::min(kRigCopy, bytes - at), stream),
        "copying"));
  }
}

class TransferPair {
 public:
  TransferPair(const Device& device, bool shareable, bool kernels, size_t bytes)
      : device_(device), pages_(must(RegisteredPages::make(device, 2 * kRigCopy))) {
    for (int i = 0; i < 2; ++i) {
      workers_[i] =
          must(Worker::create({.name = i == 0 ? "from" : "to",
                               .providers = {"shm"},
                               .settings = {{"staging.kernels", kernels ? "on" : "off"}}}));
      slabs_[i] = must(DeviceSlab::create(device, bytes, {.rdma = false, .shareable = shareable}));
      const DeviceSpan span = slabs_[i]->span();
      regions_[i] = must(workers_[i]->register_memory(pointer_of<void>(span.data), span.size));
    }
    remote_ = must(workers_[1]->remote_region(regions_[1]));
    peer_ = must(workers_[0]->connect(workers_[1]->address()));
    for (int i = 0; i < 2; ++i) threads_[i] = std::make_unique<ProgressThread>(*workers_[i]);
    must(workers_[0]->wait_until(
        [this] { return workers_[0]->peer_state(peer_) == PeerState::kUp; }, kRigPatience));
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
  void run(const TransferRequest& request) { must(worker().wait(must(worker().submit(request)))); }
  void run(size_t bytes) { run(request(0, bytes)); }
  // The same bytes by transfers of `each`, kAtOnce of them under way.
  void run_parts(size_t bytes, size_t each) {
    static constexpr size_t kAtOnce = 4;
    std::deque<TransferId> ids;
    for (size_t at = 0; at < bytes || !ids.empty();) {
      if (at < bytes && ids.size() < kAtOnce) {
        const size_t part = std::min(each, bytes - at);
        ids.push_back(must(worker().submit(request(at, part))));
        at += part;
        continue;
      }
      must(worker().wait(ids.front()));
      ids.pop_front();
    }
  }
  // Until staged transfers go as they will from then on: each worker has the other's ring. Some
  // never do, and go all the same.
  void settle() {
    for (const double end = rig_now() + 1; rig_now() < end;) {
      TransferRequest small = request(0, 128 << 10);
      for (const Op op : {Op::kWrite, Op::kRead}) {
        small.op = op;
        run(small);
      }
      const std::string text = worker().explain(peer_);
      if (text.find("by the peer straight from ours") != std::string::npos &&
          text.find("straight from the peer's ring") != std::string::npos) {
        break;
      }
    }
  }
  Worker& worker() { return *workers_[0]; }
  PeerId peer() const { return peer_; }
  // Fills the source with another pattern; whether the target has it.
  void fill(size_t bytes, uint32_t seed) {
    auto* const words = pages_->as<uint32_t>();
    for (size_t i = 0; i < std::min(bytes, kRigCopy) / 4; ++i) {
      words[i] = static_cast<uint32_t>(i) * 2654435761u + seed;
    }
    const Stream stream = device_.stream(Direction::kToDevice);
    for (size_t at = 0; at < bytes; at += kRigCopy) {
      queue_copy(device_, slabs_[0]->span().data + at, pages_->address(),
                 std::min(kRigCopy, bytes - at), stream);
    }
    wait_for(device_, stream);
  }
  void compare(size_t bytes) {
    const DevicePointer back = pages_->address() + kRigCopy;
    for (size_t at = 0; at < bytes; at += kRigCopy) {
      const size_t part = std::min(kRigCopy, bytes - at);
      const Stream stream = device_.stream(Direction::kToHost);
      queue_copy(device_, back, slabs_[1]->span().data + at, part, stream);
      wait_for(device_, stream);
      const auto* const bytes_of = pages_->as<const std::byte>();
      if (std::memcmp(bytes_of, bytes_of + kRigCopy, part) != 0) {
        throw Failed(
            absl::DataLossError(absl::StrFormat("other bytes than were sent, from %u on", at)));
      }
    }
  }
  // Seconds of copies of `bytes` in both directions at once; of a copy on the device.
  double both_ways(size_t bytes) {
    const double begin = rig_now();
    for (size_t at = 0; at < bytes; at += kRigCopy) {
      const size_t part = std::min(kRigCopy, bytes - at);
      queue_copy(device_, pages_->address(), slabs_[0]->span().data + at, part,
                 device_.stream(Direction::kToHost));
      queue_copy(device_, slabs_[1]->span().data + at, pages_->address() + kRigCopy, part,
                 device_.stream(Direction::kToDevice));
    }
    for (const Direction direction : {Direction::kToHost, Direction::kToDevice}) {
      wait_for(device_, device_.stream(direction));
    }
    return rig_now() - begin;
  }
  double on_device(size_t bytes) {
    const double begin = rig_now();
    const Stream stream = device_.stream(Direction::kBetween);
    {
      const Device::Current current(device_);
      must(device_.check(device_.driver().cuMemcpyAsync(slabs_[1]->span().data,
                                                        slabs_[0]->span().data, bytes, stream),
                         "copying"));
    }
    wait_for(device_, stream);
    return rig_now() - begin;
  }

 private:
  const Device& device_;
  const std::unique_ptr<RegisteredPages> pages_;
  std::unique_ptr<DeviceSlab> slabs_[2];
  std::unique_ptr<Worker> workers_[2];
  std::unique_ptr<ProgressThread> threads_[2];
  MemoryRegion regions_[2];
  RemoteRegion remote_;
  PeerId peer_;
};

}  // namespace baton::gpudirect
