// Pinned memory, and copies on a stream for each direction.
#include "gpudirect/contract/staging.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "absl/strings/str_format.h"
#include "gpudirect/registered_pages.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"

namespace baton::gpudirect {
namespace {

DevicePointer address(const std::byte* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedRing>> PinnedRing::create(const Device& device, size_t bytes,
                                                               const CopyMeans& means) {
  std::unique_ptr<PinnedRing> ring(new PinnedRing(device));
  absl::Status status = ring->map(bytes);
  if (status.ok()) status = ring->pin();
  if (status.ok()) status = ring->open_copiers(means);
  if (!status.ok()) return status;
  return ring;
}

absl::Status PinnedRing::map(size_t bytes) {
  if (absl::Status fits = base::memory_fits("a staging ring (staging.ring_mib)", bytes); !fits.ok())
    return fits;
  absl::StatusOr<base::UniqueFd> file = base::make_memory_file("baton staging", bytes);
  // Without one it is of use here, and peers do not map it.
  fd_ = file.ok() ? file->release() : -1;
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        fd_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd_, 0);
  if (at == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        base::refusal(absl::StrFormat("a staging ring of %u bytes", bytes), errno));
  }
  base_ = static_cast<std::byte*>(at);
  size_ = bytes;
  place_near(device_, base_, size_);
  return absl::OkStatus();
}

absl::Status PinnedRing::pin() {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  absl::Status status = device_.check(
      device_.driver().cuMemHostRegister(base_, size_, kHostPortable | kHostDeviceMap),
      absl::StrFormat("pinning a staging ring of %u bytes (staging.ring_mib, ulimit -l)", size_));
  pinned_ = status.ok();
  for (Lane& lane : lanes_) {
    for (size_t i = 0; status.ok() && i < kQueuedAhead; ++i) {
      Event event = nullptr;
      status = device_.check(device_.driver().cuEventCreate(&event, kEventDisableTiming),
                             "making an event for copies");
      if (!status.ok()) break;
      made_.push_back(event);
      lane.events.push_back(event);
    }
  }
  return status;
}

absl::StatusOr<std::shared_ptr<void>> pin_host(const Device& device, absl::Span<std::byte> memory) {
  static std::mutex mutex;
  static std::map<std::byte*, size_t>& users = *new std::map<std::byte*, size_t>;
  std::byte* const at = memory.data();
  const std::lock_guard lock(mutex);
  if (!users.contains(at)) {
    const Device::Current current(device);
    if (!current.status().ok()) return current.status();
    const auto facts = query_pointer(device.driver(), address(at));
    if (!facts.ok()) return facts.status();
    if (facts->pinned) return std::shared_ptr<void>(at, [](void*) {});  // by the application
    const absl::Status status = device.check(
        device.driver().cuMemHostRegister(at, memory.size(), kHostPortable | kHostDeviceMap),
        absl::StrFormat("pinning %u bytes of the host", memory.size()));
    if (!status.ok()) return status;
  }
  ++users[at];
  return std::shared_ptr<void>(at, [&device, at](void*) {
    const std::lock_guard last(mutex);
    if (--users[at] > 0) return;
    users.erase(at);
    device.give_back([&] { device.driver().cuMemHostUnregister(at); });
  });
}

absl::Status PinnedRing::open_copiers(const CopyMeans& means) {
  for (Lane& lane : lanes_) {
    auto copier = Copier::open(device_, means.launcher, stream(lane));
    // A device without room for packing is copied to and from all the same.
    if (!copier.ok() && means.launcher != nullptr) {
      copier = Copier::open(device_, nullptr, stream(lane));
    }
    if (!copier.ok()) return copier.status();
    lane.copier = *std::move(copier);
    lane.copier->set_table(means.table);
  }
  return absl::OkStatus();
}

PinnedRing::~PinnedRing() {
  for (Lane& lane : lanes_) {
    lane.urgent.clear();
    lane.bulk.clear();
  }
  while (busy()) {
    progress([](uint64_t, const absl::Status&) {});
  }
  for (Lane& lane : lanes_) lane.copier.reset();
  device_.give_back([&] {
    for (const Event event : made_) device_.driver().cuEventDestroy(event);
    if (pinned_) device_.driver().cuMemHostUnregister(base_);
  });
  if (base_ != nullptr) munmap(base_, size_);
  if (fd_ >= 0) close(fd_);
}

Stream PinnedRing::stream(const Lane& lane) const {
  return device_.stream(&lane == lanes_.data() ? Direction::kToHost : Direction::kToDevice);
}

CopyRoute PinnedRing::route(const Lane& lane) const {
  return &lane == lanes_.data() ? CopyRoute::kToHost : CopyRoute::kToDevice;
}

void PinnedRing::copy(internal::CopyDirection direction, uint64_t cookie, bool urgent,
                      absl::Span<const internal::CopyRun> runs) {
  Copy copy{.cookie = cookie};
  if (!spare_.empty()) {
    copy.runs = std::move(spare_.back());
    spare_.pop_back();
  }
  copy.runs.assign(runs.begin(), runs.end());
  Lane& lane = lanes_[static_cast<size_t>(direction)];
  if (urgent) lane.short_left = kShortFor;
  (urgent ? lane.urgent : lane.bulk).push_back(std::move(copy));
}

void PinnedRing::drop(uint64_t cookie) {
  for (Lane& lane : lanes_) {
    for (std::deque<Copy>* queue : {&lane.urgent, &lane.bulk}) {
      const auto found = std::find_if(queue->begin(), queue->end(), [&](const Copy& waiting) {
        return waiting.cookie == cookie;
      });
      if (found == queue->end()) continue;
      if (found->begun()) return end_dropped(lane);
      ended_.emplace_back(cookie, absl::CancelledError("dropped before it had begun"));
      spare_.push_back(std::move(found->runs));
      queue->erase(found);
      return;
    }
  }
}

// Dropped bulk begins no further parts: it ends when the parts that have begun end.
void PinnedRing::end_dropped(Lane& lane) {
  Copy copy = std::move(lane.bulk.front());
  lane.bulk.pop_front();
  copy.status.Update(absl::CancelledError("dropped before all of it had begun"));
  const auto part = std::find_if(lane.flying.rbegin(), lane.flying.rend(), [&](const Flight& each) {
    return each.copy.cookie == copy.cookie;
  });
  if (part == lane.flying.rend()) {
    ended_.emplace_back(copy.cookie, std::move(copy.status));
    spare_.push_back(std::move(copy.runs));
  } else {
    part->copy.status.Update(copy.status);
    part->last = true;
  }
}

bool PinnedRing::busy() const {
  return !ended_.empty() || std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return !lane.flying.empty() || !lane.urgent.empty() || !lane.bulk.empty();
  });
}

// Begins at most `most` bytes of the rest.
void PinnedRing::begin(Lane& lane, Copy& copy, size_t most) {
  const bool to_host = route(lane) == CopyRoute::kToHost;
  pieces_.clear();
  size_t bytes = 0;
  while (!copy.all_begun() && bytes < most) {
    const internal::CopyRun& run = copy.runs[copy.run];
    const size_t part = std::min(run.bytes - copy.done, most - bytes);
    const DevicePointer there = address(run.device) + copy.done;
    const DevicePointer here = address(run.host) + copy.done;
    pieces_.push_back(to_host ? CopyPiece{there, here, part} : CopyPiece{here, there, part});
    bytes += part;
    copy.done += part;
    if (copy.done < run.bytes) break;
    ++copy.run;
    copy.done = 0;
  }
  Flight flight{.last = copy.all_begun(), .event = lane.events.back()};
  if (const absl::Status status = lane.copier->copy(route(lane), pieces_); !status.ok()) {
    copy.status.Update(absl::Status(
        status.code(),
        absl::StrFormat("copying %u bytes %s CUDA device %d: %s", bytes, to_host ? "from" : "to",
                        device_.ordinal(), status.message())));
    // The copy has failed, so its remaining pieces are left out.
    flight.last = true;
  }
  // Part of it may be on its way also after an error.
  const absl::Status recorded = device_.check(
      device_.driver().cuEventRecord(flight.event, stream(lane)), "waiting for a copy");
  if (recorded.ok()) {
    lane.events.pop_back();
  } else {
    flight.event = nullptr;
    copy.status.Update(recorded);
  }
  flight.copy.cookie = copy.cookie;
  if (flight.last) flight.copy = std::move(copy);
  lane.flying.push_back(std::move(flight));
}

std::string PinnedRing::explain() const {
  const auto way = [&](const Lane& lane) {
    const bool to_host = route(lane) == CopyRoute::kToHost;
    const CopyShape small_pages{.pieces = 256,
                                .bytes = 256 * 4096,
                                .largest = 4096,
                                .from_in_row = !to_host,
                                .to_in_row = to_host};
    return name_of(lane.copier->cheapest_way(route(lane), small_pages));
  };
  return absl::StrFormat("256 pages of 4 KiB go to the host by '%s', to the device by '%s'",
                         way(lanes_[0]), way(lanes_[1]));
}

// Whether the engine has let go of the copy's memory.
bool PinnedRing::over(Lane& lane, Flight& flight) {
  const Driver& driver = device_.driver();
  const Result result = flight.event != nullptr ? driver.cuEventQuery(flight.event)
                                                : driver.cuStreamQuery(stream(lane));
  if (result == kNotReady) {
    flight.poll_errors.succeeded();
    return false;
  }
  const absl::Status status = device_.check(result, "waiting for a copy");
  if (!status.ok()) flight.copy.status.Update(status);
  return status.ok() || !device_.alive().ok() || flight.poll_errors.reached();
}

// An error of a part is its copy's.
void PinnedRing::end(Lane& lane, Flight& flight) {
  if (flight.last) {
    ended_.emplace_back(flight.copy.cookie, std::move(flight.copy.status));
    spare_.push_back(std::move(flight.copy.runs));
    return;
  }
  for (Flight& later : lane.flying) {
    if (&later != &flight && later.copy.cookie == flight.copy.cookie && later.last) {
      return later.copy.status.Update(flight.copy.status);
    }
  }
  lane.bulk.front().status.Update(flight.copy.status);
}

void PinnedRing::work(Lane& lane) {
  while (!lane.flying.empty() && over(lane, lane.flying.front())) {
    Flight& done = lane.flying.front();
    if (done.event != nullptr) lane.events.push_back(done.event);
    end(lane, done);
    lane.flying.pop_front();
  }
  while (lane.flying.size() < kQueuedAhead && !(lane.urgent.empty() && lane.bulk.empty())) {
    if (!lane.urgent.empty()) {
      Copy next = std::move(lane.urgent.front());
      lane.urgent.pop_front();
      begin(lane, next, SIZE_MAX);
      continue;
    }
    const size_t most = lane.short_left > 0 ? kShortCopy : SIZE_MAX;
    lane.short_left -= std::min(lane.short_left, kShortCopy);
    begin(lane, lane.bulk.front(), most);
    if (lane.flying.back().last) lane.bulk.pop_front();
  }
}

bool PinnedRing::progress(const Ended& ended) {
  if (!busy()) return false;
  {
    const Device::Current current(device_);
    if (current.status().ok()) {
      making_current_.succeeded();
      for (Lane& lane : lanes_) work(lane);
    } else if (!device_.alive().ok() || making_current_.reached()) {
      // Nothing can be asked, and nothing moves any more.
      for (Lane& lane : lanes_) {
        for (Flight& flight : lane.flying) {
          if (flight.event != nullptr) lane.events.push_back(flight.event);
          if (flight.last) ended_.emplace_back(flight.copy.cookie, current.status());
        }
        lane.flying.clear();
        for (std::deque<Copy>* queue : {&lane.urgent, &lane.bulk}) {
          for (const Copy& copy : *queue) ended_.emplace_back(copy.cookie, current.status());
          queue->clear();
        }
      }
    }
  }
  announced_.clear();
  announced_.swap(ended_);
  for (auto& [cookie, status] : announced_) ended(cookie, std::move(status));
  return !announced_.empty();
}

}  // namespace baton::gpudirect
