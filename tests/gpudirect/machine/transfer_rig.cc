// Rates of transfers, and what they wait for.
#include "tests/gpudirect/machine/transfer_rig.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/registered_pages.h"
#include "tests/gpudirect/machine/waiting.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kCopy = 4 << 20;
constexpr size_t kUrgent = 64 << 10;

double part_of(std::vector<double> all, double part) {
  std::sort(all.begin(), all.end());
  return all[std::min(all.size() - 1, static_cast<size_t>(part * static_cast<double>(all.size())))];
}

// Queues a copy in pieces that leave room for others.
absl::Status queue_copy(const Device& device, DevicePointer to, DevicePointer from, size_t bytes,
                        Stream stream) {
  const Device::Current current(device);
  absl::Status status = current.status();
  for (size_t at = 0; status.ok() && at < bytes; at += kCopy) {
    status = device.check(
        device.driver().cuMemcpyAsync(to + at, from + at, std::min(kCopy, bytes - at), stream),
        "copying");
  }
  return status;
}

class TransferRig {
 public:
  static absl::StatusOr<std::unique_ptr<TransferRig>> make(const Device& device, bool shareable,
                                                           bool kernels, size_t bytes) {
    std::unique_ptr<TransferRig> rig(new TransferRig(device, bytes));
    if (absl::Status status = rig->start(shareable, kernels); !status.ok()) return status;
    return rig;
  }
  ~TransferRig() {
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
  Worker& worker() { return *workers_[0]; }
  PeerId peer() const { return peer_; }
  // Fills the source with another pattern; whether the target has it.
  absl::Status fill(size_t bytes, uint32_t seed) {
    auto* const words = pages_->as<uint32_t>();
    for (size_t i = 0; i < std::min(bytes, kCopy) / 4; ++i) {
      words[i] = static_cast<uint32_t>(i) * 2654435761u + seed;
    }
    const Stream stream = device_.stream(Direction::kToDevice);
    for (size_t at = 0; at < bytes; at += kCopy) {
      absl::Status status = queue_copy(device_, slabs_[0]->span().data + at, pages_->address(),
                                       std::min(kCopy, bytes - at), stream);
      if (!status.ok()) return status;
    }
    return wait_for(device_, stream);
  }
  absl::Status compare(size_t bytes) {
    const DevicePointer back = pages_->address() + kCopy;
    for (size_t at = 0; at < bytes; at += kCopy) {
      const size_t part = std::min(kCopy, bytes - at);
      const Stream stream = device_.stream(Direction::kToHost);
      absl::Status status = queue_copy(device_, back, slabs_[1]->span().data + at, part, stream);
      if (status.ok()) status = wait_for(device_, stream);
      if (!status.ok()) return status;
      const auto* const bytes_of = pages_->as<const std::byte>();
      if (std::memcmp(bytes_of, bytes_of + kCopy, part) != 0) {
        return absl::DataLossError(absl::StrFormat("other bytes than were sent, from %u on", at));
      }
    }
    return absl::OkStatus();
  }
  // Seconds of copies of `bytes` in both directions at once; of a copy on the device.
  absl::StatusOr<double> both_ways(size_t bytes) {
    const double begin = rig_now();
    for (size_t at = 0; at < bytes; at += kCopy) {
      const size_t part = std::min(kCopy, bytes - at);
      absl::Status status = queue_copy(device_, pages_->address(), slabs_[0]->span().data + at,
                                       part, device_.stream(Direction::kToHost));
      if (status.ok()) {
        status = queue_copy(device_, slabs_[1]->span().data + at, pages_->address() + kCopy, part,
                            device_.stream(Direction::kToDevice));
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
  TransferRig(const Device& device, size_t bytes) : device_(device), bytes_(bytes) {}
  absl::Status start(bool shareable, bool kernels) {
    auto pages = RegisteredPages::make(device_, 2 * kCopy);
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

// The rate of transfers over that of `reference`, taken in turns.
absl::StatusOr<Figure> rate_beside(TransferRig& rig, const TransferSizes& sizes, std::string name,
                                   const char* beside, double goal,
                                   absl::StatusOr<double> (TransferRig::*reference)(size_t)) {
  std::vector<double> ours, theirs;
  for (int round = 0; round < sizes.rounds; ++round) {
    const auto seed = static_cast<uint32_t>(round);
    if (absl::Status s = rig.fill(sizes.transfer, seed); !s.ok()) return s;
    const double begin = rig_now();
    if (absl::Status s = rig.run(sizes.transfer); !s.ok()) return s;
    ours.push_back(rig_now() - begin);
    if (absl::Status s = rig.compare(sizes.transfer); !s.ok()) return s;
    const auto took = (rig.*reference)(sizes.transfer);
    if (!took.ok()) return took.status();
    theirs.push_back(*took);
  }
  const double took = part_of(ours, 0.5);
  return Figure{std::move(name),
                absl::StrFormat("%u bytes, %.1f GB/s; %s %.1f GB/s", sizes.transfer,
                                static_cast<double>(sizes.transfer) / took / 1e9, beside,
                                static_cast<double>(sizes.transfer) / part_of(theirs, 0.5) / 1e9),
                part_of(theirs, 0.5) / took, "of it", goal};
}

// One urgent transfer after the other, with bulk always under way.
absl::StatusOr<std::vector<Figure>> urgent_behind_bulk(TransferRig& rig,
                                                       const TransferSizes& sizes) {
  std::vector<double> waits;
  TransferId bulk;
  for (int i = 0; i < sizes.urgent; ++i) {
    if (bulk.generation == 0 || ended(rig.worker().state(bulk).value_or(TransferState::kDone))) {
      rig.worker().release(bulk).IgnoreError();
      const auto id = rig.worker().submit(rig.request(kUrgent, sizes.bulk - kUrgent));
      if (!id.ok()) return id.status();
      bulk = *id;
    }
    const double begin = rig_now();
    if (absl::Status s = rig.run(kUrgent); !s.ok()) return s;
    waits.push_back((rig_now() - begin) * 1e6);
  }
  if (absl::Status s = rig.worker().wait(bulk); !s.ok()) return s;
  const std::string shape = absl::StrFormat("%u bytes behind %u", kUrgent, sizes.bulk);
  return std::vector<Figure>{{"urgent, p50", shape, part_of(waits, 0.5), "us", std::nullopt, true},
                             {"urgent, p99", shape, part_of(waits, 0.99), "us", 250, true}};
}

// Bytes move while a kernel has every multiprocessor, which ends when it is told to.
absl::StatusOr<Figure> while_a_kernel_runs(const Device& device, const Launcher& launcher,
                                           const TransferSizes& sizes) {
  auto rig = TransferRig::make(device, false, false, sizes.transfer);
  if (!rig.ok()) return rig.status();
  // All that has to be loaded and made is, before.
  if (absl::Status s = (*rig)->run(sizes.transfer); !s.ok()) return s;
  if (absl::Status s = (*rig)->fill(sizes.transfer, 99); !s.ok()) return s;
  auto words = RegisteredPages::make(device, sizeof(uint64_t));
  auto reached = DeviceSlab::create(device, 1 << 20, {.rdma = false, .shareable = false});
  if (!words.ok()) return words.status();
  if (!reached.ok()) return reached.status();
  const Stream stream = device.stream(Direction::kBetween);  // staging needs the two others
  const kernels::WaitWord hold{(*words)->as<const uint64_t>(), 1, sizes.hold_nanoseconds,
                               pointer_of<uint32_t>((*reached)->span().data)};
  {
    const Device::Current current(device);
    if (absl::Status s = launcher.wait_word(hold, UINT32_MAX, stream); !s.ok()) return s;
  }
  const double begin = rig_now();
  absl::Status moved = (*rig)->run(sizes.transfer);
  const double took = rig_now() - begin;
  bool still_running = false;
  {
    const Device::Current current(device);
    still_running = device.driver().cuStreamQuery(stream) == kNotReady;
  }
  std::atomic_ref(*(*words)->as<uint64_t>()).store(1, std::memory_order_release);
  if (absl::Status s = wait_for(device, stream); !s.ok()) return s;
  if (moved.ok()) moved = (*rig)->compare(sizes.transfer);
  if (!moved.ok()) return moved;
  return Figure{"bytes arrive while a kernel holds the device",
                absl::StrFormat("%u bytes in %.0f us", sizes.transfer, took * 1e6),
                still_running ? 1.0 : 0.0, "(1: yes)", 1};
}

}  // namespace

std::string json_of(const Figure& figure) {
  return absl::StrFormat(
      R"({"name": "%s", "shape": "%s", "value": %s, "unit": "%s", "goal": %s, "met": %s})",
      figure.name, figure.shape,
      std::isnan(figure.value) ? "null" : absl::StrFormat("%.4g", figure.value), figure.unit,
      figure.goal.has_value()
          ? absl::StrFormat("\"%s %g\"", figure.at_most ? "<=" : ">=", *figure.goal)
          : "null",
      figure.met() ? "true" : "false");
}

absl::StatusOr<std::vector<Figure>> take_transfer_figures(const Device& device,
                                                          const Launcher& launcher,
                                                          const TransferSizes& sizes) {
  std::vector<Figure> figures;
  {
    auto rig = TransferRig::make(device, false, true, std::max(sizes.bulk, sizes.transfer));
    if (!rig.ok()) return rig.status();
    auto staged = rate_beside(**rig, sizes, "device, shm, device: staged", "both copies at once",
                              0.90, &TransferRig::both_ways);
    if (!staged.ok()) return staged.status();
    figures.push_back(*std::move(staged));
    auto urgent = urgent_behind_bulk(**rig, sizes);
    if (!urgent.ok()) return urgent.status();
    for (Figure& figure : *urgent) figures.push_back(std::move(figure));
  }
  {
    auto rig = TransferRig::make(device, true, true, sizes.transfer);
    if (!rig.ok()) return rig.status();
    if ((*rig)->worker().explain((*rig)->peer()).find("CUDA IPC") == std::string::npos) {
      figures.push_back({"device to device by a mapping", "not mapped here", 0, "of it", 0.90});
    } else {
      auto mapped = rate_beside(**rig, sizes, "device to device by a mapping", "a plain copy", 0.90,
                                &TransferRig::on_device);
      if (!mapped.ok()) return mapped.status();
      figures.push_back(*std::move(mapped));
    }
  }
  auto held = while_a_kernel_runs(device, launcher, sizes);
  if (!held.ok()) return held.status();
  figures.push_back(*std::move(held));
  return figures;
}

}  // namespace baton::gpudirect
