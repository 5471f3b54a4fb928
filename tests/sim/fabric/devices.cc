// The lanes of simulated devices, and what copies over them.
#include "tests/sim/fabric/devices.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "tests/sim/fabric/network.h"

namespace baton::sim {
namespace {

// How many copies of a ring are on their way in each direction: an engine is blind to what is
// urgent, so the others wait where urgent ones can pass them.
constexpr size_t kAhead = 2;
// Who asks so often without letting time pass wants to wait, as for a driver's synchronise.
constexpr int kImpatience = 1 << 16;

absl::Status no_device(int device, int count) {
  return absl::NotFoundError(
      absl::StrFormat("there is no simulated device %d: there are %d, from 0 on", device, count));
}

}  // namespace

// Its memory, and copies in virtual time.
class SimRing final : public internal::StagingRing {
 public:
  SimRing(const SimDevices& devices, int device, size_t bytes, bool kernels)
      : devices_(devices), device_(device), kernels_(kernels), memory_(bytes) {}
  ~SimRing() override { *alive_ = false; }
  SimRing(const SimRing&) = delete;
  SimRing& operator=(const SimRing&) = delete;

  absl::Span<std::byte> memory() const override {
    return {const_cast<std::byte*>(memory_.data()), memory_.size()};
  }
  int fd() const override { return -1; }

  void copy(internal::CopyDirection direction, uint64_t cookie, bool urgent,
            absl::Span<const internal::CopyRun> runs) override {
    Queue& queue = queues_[static_cast<size_t>(direction)];
    auto& waiting = urgent ? queue.urgent : queue.bulk;
    waiting.push_back({cookie, direction, {runs.begin(), runs.end()}});
    begin(queue);
  }

  void drop(uint64_t cookie) override {
    for (Queue& queue : queues_) {
      for (auto* waiting : {&queue.urgent, &queue.bulk}) {
        const auto found = std::find_if(waiting->begin(), waiting->end(),
                                        [&](const Copy& copy) { return copy.cookie == cookie; });
        if (found == waiting->end()) continue;
        ended_.emplace_back(cookie, absl::CancelledError("dropped"));
        waiting->erase(found);
      }
    }
  }

  bool progress(const Ended& ended) override {
    if (ended_.empty() && busy() && ++asked_ > kImpatience) finish();
    if (ended_.empty()) return false;
    asked_ = 0;
    for (Queue& queue : queues_) begin(queue);
    // It may ask for more.
    const auto over = std::exchange(ended_, {});
    for (const auto& [cookie, status] : over) ended(cookie, status);
    return true;
  }

  bool busy() const override {
    return !ended_.empty() || std::any_of(queues_.begin(), queues_.end(), [](const Queue& queue) {
      return !queue.under_way.empty() || !queue.urgent.empty() || !queue.bulk.empty();
    });
  }
  std::string explain() const override { return "simulated"; }
  absl::Status alive() const override { return absl::OkStatus(); }

 private:
  struct Copy {
    uint64_t cookie = 0;
    internal::CopyDirection direction{};
    std::vector<internal::CopyRun> runs;
  };
  struct Queue {
    std::deque<Copy> urgent, bulk;
    std::deque<std::pair<Time, Copy>> under_way;  // and when each ends
  };

  // Neighbours on both sides count as one.
  static size_t pieces(const Copy& copy) {
    size_t count = 0;
    const internal::CopyRun* last = nullptr;
    for (const internal::CopyRun& run : copy.runs) {
      const bool goes_on = last != nullptr && last->device + last->bytes == run.device &&
                           last->host + last->bytes == run.host;
      if (!goes_on) ++count;
      last = &run;
    }
    return count;
  }

  Time end_of(const Copy& copy) const {
    const bool to_host = copy.direction == internal::CopyDirection::kToHost;
    const SimLane lane = to_host ? SimLane::kToHost : SimLane::kToDevice;
    size_t bytes = 0;
    for (const internal::CopyRun& run : copy.runs) bytes += run.bytes;
    const size_t count = pieces(copy);
    const Time now = devices_.now();
    Time done{};
    if (!kernels_ || count < 2 || bytes / count >= devices_.options_.packed_below) {
      done = devices_.occupy(device_, {lane, bytes, count}, now);
    } else if (to_host) {
      const Time packed = devices_.occupy(device_, {SimLane::kKernels, bytes, 1}, now);
      done = devices_.occupy(device_, {lane, bytes, 1}, packed);
    } else {
      const Time there = devices_.occupy(device_, {lane, bytes, 1}, now);
      done = devices_.occupy(device_, {SimLane::kKernels, bytes, 1}, there);
    }
    return done + devices_.options_.latency;
  }

  void begin(Queue& queue) {
    while (queue.under_way.size() < kAhead && !(queue.urgent.empty() && queue.bulk.empty())) {
      auto& from = queue.urgent.empty() ? queue.bulk : queue.urgent;
      const Time end = end_of(from.front());
      queue.under_way.emplace_back(end, std::move(from.front()));
      from.pop_front();
      devices_.network_.at(end, [this, &queue, alive = alive_] {
        if (*alive) end_due(queue);
      });
    }
  }

  void end_due(Queue& queue) {
    while (!queue.under_way.empty() && queue.under_way.front().first <= devices_.now()) end(queue);
  }

  void end(Queue& queue) {
    const Copy& copy = queue.under_way.front().second;
    for (const internal::CopyRun& run : copy.runs) {
      std::byte* const there = devices_.view(run.device, run.bytes);
      const bool to_host = copy.direction == internal::CopyDirection::kToHost;
      std::memcpy(to_host ? run.host : there, to_host ? there : run.host, run.bytes);
    }
    ended_.emplace_back(copy.cookie, absl::OkStatus());
    queue.under_way.pop_front();
  }

  void finish() {
    for (Queue& queue : queues_) {
      while (!queue.under_way.empty()) end(queue);
    }
  }

  const SimDevices& devices_;
  const int device_;
  const bool kernels_;
  std::vector<std::byte> memory_;
  std::array<Queue, 2> queues_;
  std::vector<std::pair<uint64_t, absl::Status>> ended_;
  int asked_ = 0;
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

// Copies on the lane between devices.
class SimCopies final : public internal::DeviceCopies {
 public:
  SimCopies(const SimDevices& devices, int device) : devices_(devices), device_(device) {}
  ~SimCopies() override {
    for (std::optional<Copy>& copy : slots_) {
      if (copy.has_value()) move(*copy);
    }
  }
  SimCopies(const SimCopies&) = delete;
  SimCopies& operator=(const SimCopies&) = delete;

  absl::Status begin(size_t slot, absl::Span<const internal::DeviceRun> runs,
                     bool /*kernels*/) override {
    size_t bytes = 0;
    for (const internal::DeviceRun& run : runs) {
      if (devices_.view(run.to, run.bytes) == nullptr ||
          devices_.view(run.from, run.bytes) == nullptr) {
        return absl::InvalidArgumentError(
            "a copy between devices of memory that belongs to no device");
      }
      bytes += run.bytes;
    }
    const Time done =
        devices_.occupy(device_, {SimLane::kBetween, bytes, runs.size()}, devices_.now());
    slots_[slot] = Copy{done + devices_.options_.latency, {runs.begin(), runs.end()}};
    devices_.network_.at(slots_[slot]->end, [] {});  // there is news then
    return absl::OkStatus();
  }

  std::optional<absl::Status> ended(size_t slot) override {
    std::optional<Copy>& copy = slots_[slot];
    if (!copy.has_value()) return absl::OkStatus();
    if (copy->end > devices_.now()) return std::nullopt;
    move(*copy);
    copy.reset();
    return absl::OkStatus();
  }

 private:
  struct Copy {
    Time end{};
    std::vector<internal::DeviceRun> runs;
  };
  void move(const Copy& copy) const {
    for (const internal::DeviceRun& run : copy.runs) {
      std::memmove(devices_.view(run.to, run.bytes), devices_.view(run.from, run.bytes), run.bytes);
    }
  }

  const SimDevices& devices_;
  const int device_;
  std::array<std::optional<Copy>, kSlots> slots_;
};

class SimBuffer final : public internal::DeviceBuffer {
 public:
  SimBuffer(const SimDevices& devices, std::byte* data, size_t bytes)
      : devices_(devices), data_(data), bytes_(bytes) {}
  ~SimBuffer() override { devices_.free(data_); }
  SimBuffer(const SimBuffer&) = delete;
  SimBuffer& operator=(const SimBuffer&) = delete;

  std::byte* data() const override { return data_; }
  size_t size() const override { return bytes_; }
  absl::Status put(size_t offset, absl::Span<const std::byte> bytes) override {
    if (absl::Status status = check(offset, bytes.size()); !status.ok()) return status;
    std::copy(bytes.begin(), bytes.end(), devices_.view(data_, bytes_) + offset);
    return absl::OkStatus();
  }
  absl::Status get(size_t offset, absl::Span<std::byte> bytes) override {
    if (absl::Status status = check(offset, bytes.size()); !status.ok()) return status;
    std::copy_n(devices_.view(data_, bytes_) + offset, bytes.size(), bytes.data());
    return absl::OkStatus();
  }

 private:
  absl::Status check(size_t offset, size_t bytes) const {
    if (offset <= bytes_ && bytes <= bytes_ - offset) return absl::OkStatus();
    return absl::OutOfRangeError(absl::StrFormat(
        "%u bytes from %u on: a buffer on a simulated device has %u", bytes, offset, bytes_));
  }

  const SimDevices& devices_;
  std::byte* const data_;
  const size_t bytes_;
};

SimDevices::SimDevices(SimFabric& fabric, const SimDeviceOptions& options)
    : network_(fabric.network()),
      options_(options),
      before_(internal::device_memory()),
      lanes_(static_cast<size_t>(options.devices)) {
  internal::use_device_memory(this);
}

SimDevices::~SimDevices() {
  internal::use_device_memory(before_);
  while (!allocations_.empty()) {
    free(reinterpret_cast<std::byte*>(allocations_.begin()->first));
  }
}

Time SimDevices::now() const { return network_.now(); }

double SimDevices::rate(SimLane lane) const {
  switch (lane) {
    case SimLane::kToHost:
      return options_.to_host;
    case SimLane::kToDevice:
      return options_.to_device;
    case SimLane::kBetween:
      return options_.between;
    case SimLane::kKernels:
      break;
  }
  return options_.kernels;
}

SimDevices::Lane& SimDevices::lane_of(int device, SimLane lane) const {
  const bool shared = options_.copy_engines < 2 && lane == SimLane::kToDevice;
  return lanes_[static_cast<size_t>(device)][static_cast<size_t>(shared ? SimLane::kToHost : lane)];
}

Time SimDevices::occupy(int device, const Work& work, Time ready) const {
  Lane& lane = lane_of(device, work.lane);
  const Time span = std::chrono::duration_cast<Time>(std::chrono::duration<double>(
                        static_cast<double>(work.bytes) / rate(work.lane))) +
                    options_.per_piece * static_cast<int64_t>(work.pieces);
  lane.free_at = std::max(lane.free_at, ready) + span;
  ++lane.stats.operations;
  lane.stats.bytes += work.bytes;
  lane.stats.busy += span;
  return lane.free_at;
}

Time SimDevices::launch(int device, Time span) {
  Lane& lane = lane_of(device, SimLane::kKernels);
  lane.free_at = std::max(lane.free_at, now()) + span;
  ++lane.stats.operations;
  lane.stats.busy += span;
  return lane.free_at;
}

SimLaneStats SimDevices::lane(int device, SimLane lane) const {
  return lane_of(device, lane).stats;
}

std::byte* SimDevices::view(const void* at, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(at);
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return nullptr;
  --found;
  const size_t offset = address - found->first;
  if (offset >= found->second.bytes || bytes > found->second.bytes - offset) return nullptr;
  return found->second.view + offset;
}

absl::StatusOr<MemoryPlace> SimDevices::place(const void* data, size_t size) const {
  if (size == 0 || view(data, 1) == nullptr) return MemoryPlace{};
  if (view(data, size) == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "registering %u bytes at %p: the allocation of the simulated device is shorter", size,
        data));
  }
  const auto found = std::prev(allocations_.upper_bound(reinterpret_cast<uintptr_t>(data)));
  return MemoryPlace{MemoryKind::kDevice, found->second.device};
}

absl::StatusOr<BackingFile> SimDevices::dma_buf(const void*, size_t) const {
  return absl::UnimplementedError("no dma-buf: simulated adapters take host memory only");
}

absl::StatusOr<std::unique_ptr<internal::StagingRing>> SimDevices::staging_ring(
    int device, size_t bytes, bool kernels) const {
  if (device < 0 || device >= options_.devices) return no_device(device, options_.devices);
  return std::make_unique<SimRing>(*this, device, bytes, kernels);
}

absl::StatusOr<std::unique_ptr<internal::DeviceCopies>> SimDevices::copies(int device, bool) const {
  if (device < 0 || device >= options_.devices) return no_device(device, options_.devices);
  return std::make_unique<SimCopies>(*this, device);
}

// Two mappings of the same bytes: one that no thread may touch, and one for who plays the device.
absl::StatusOr<std::unique_ptr<internal::DeviceBuffer>> SimDevices::allocate(int device,
                                                                             size_t bytes) const {
  if (device < 0 || device >= options_.devices) return no_device(device, options_.devices);
  if (bytes == 0) return absl::InvalidArgumentError("a buffer of 0 bytes on a simulated device");
  const int fd = memfd_create("baton-sim-device", MFD_CLOEXEC);
  void* address = MAP_FAILED;
  void* view = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    address = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (fd >= 0) close(fd);
  if (address == MAP_FAILED || view == MAP_FAILED) {
    if (address != MAP_FAILED) munmap(address, bytes);
    if (view != MAP_FAILED) munmap(view, bytes);
    return absl::ResourceExhaustedError(
        absl::StrFormat("no memory for %u bytes of a simulated device", bytes));
  }
  allocations_[reinterpret_cast<uintptr_t>(address)] = {bytes, device,
                                                        static_cast<std::byte*>(view)};
  return std::make_unique<SimBuffer>(*this, static_cast<std::byte*>(address), bytes);
}

void SimDevices::free(std::byte* data) const {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(data));
  if (found == allocations_.end()) return;
  munmap(found->second.view, found->second.bytes);
  munmap(data, found->second.bytes);
  allocations_.erase(found);
}

}  // namespace baton::sim
