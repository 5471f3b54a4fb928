// Loads: the thread that reads tiers part by part, and what the engine asks of it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/tiers/tier_store_impl.h"

namespace baton::kvtransfer::tiers {

TierLoadId Store::load(std::span<const TierKey> keys, std::span<const uint32_t> blocks,
                       Time timeout) {
  auto load = std::make_shared<Load>();
  load->keys.assign(keys.begin(), keys.end());
  load->blocks.assign(blocks.begin(), blocks.end());
  load->deadline = clock_.now() + timeout;
  const std::lock_guard lock(mutex_);
  loads_.emplace(next_load_, load);
  load->from_peer = peer_ != nullptr &&
                    !std::ranges::all_of(keys, [this](const auto& key) { return is_near(key); });
  (load->from_peer ? peer_queue_ : queue_).push_back(std::move(load));
  changed_.notify_all();
  return next_load_++;
}

void Store::end(Load& load, absl::Status status) {
  const std::lock_guard lock(mutex_);
  load.touching = false;
  if (load.status.ok()) load.status = std::move(status);
}

bool Store::find_sources(const Load& load, std::vector<Source>* sources) {
  for (const TierKey& key : load.keys) {
    Source source;
    if (memory_ != nullptr) source.record = memory_->get(key);
    if (source.record == nullptr && disk_ != nullptr) source.pin = disk_->pin(key);
    const bool near = source.record != nullptr || source.pin.has_value();
    if (!near && load.from_peer) source.peer = peer_->pin(key);
    if (!near && !source.peer.has_value()) return false;
    sources->push_back(std::move(source));
  }
  return true;
}

// False: the load has been ended, and its blocks are not its own any more.
bool Store::copy_in(Load& load, size_t number, uint32_t part, std::span<const std::byte> bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (load.ended) return false;
  }
  for (uint32_t layer = part * layers_per_part_; layer < end_of_part(part); ++layer) {
    const std::span<std::byte> to = options_.cache.at(layer, load.blocks[number]);
    std::memcpy(to.data(), bytes.data(), to.size());
    bytes = bytes.subspan(to.size());
  }
  return true;
}

// Returns how many blocks of the part did not come.
size_t Store::load_part(Load& load, std::vector<Source>& sources, uint32_t part) {
  size_t lost = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].record == nullptr) continue;
    const TierRecord& record = *sources[i].record;
    if (is_part(record.header(), part, record.part(part))) {
      lost += !copy_in(load, i, part, record.part(part));
    } else {
      memory_->erase(load.keys[i]);
      const std::lock_guard lock(mutex_);
      ++stats_.corrupt;
      ++lost;
    }
  }
  if (disk_ != nullptr) lost += read_disk(load, sources, part);
  return load.from_peer ? lost + read_peer(load, sources, part) : lost;
}

size_t Store::read_disk(Load& load, std::vector<Source>& sources, uint32_t part) {
  std::vector<DiskTier::Pin*> pins;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!sources[i].pin.has_value()) continue;
    pins.push_back(&*sources[i].pin);
    numbers.push_back(i);
  }
  if (pins.empty()) return 0;
  const std::lock_guard one_at_a_time(disk_reads_);
  std::atomic<size_t> lost_on_disk{0};
  disk_->read(pins, part, [&](size_t number, std::span<const std::byte> bytes) {
    if (bytes.empty() || !copy_in(load, numbers[number], part, bytes)) ++lost_on_disk;
  });
  return lost_on_disk;
}

size_t Store::read_peer(Load& load, std::vector<Source>& sources, uint32_t part) {
  std::vector<PeerTier::Pin*> pins;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!sources[i].peer.has_value()) continue;
    pins.push_back(&*sources[i].peer);
    numbers.push_back(i);
  }
  size_t lost = 0;
  peer_->read(pins, part, load.deadline - clock_.now(),
              [&](size_t number, std::span<const std::byte> bytes) {
                lost += bytes.empty() || !copy_in(load, numbers[number], part, bytes);
              });
  return lost;
}

void Store::run(Load& load) {
  std::vector<Source> sources;
  absl::Status status;
  if (!find_sources(load, &sources)) {
    status = absl::NotFoundError("KV blocks were evicted from the tiers meanwhile");
  }
  for (uint32_t part = 0; part < shape_.parts && status.ok(); ++part) {
    if (const size_t lost = load_part(load, sources, part); lost > 0) {
      status =
          absl::DataLossError(absl::StrCat(lost, " KV blocks could not be read from the tiers"));
      break;
    }
    {
      const std::lock_guard lock(mutex_);
      load.layers = end_of_part(part);
      if (load.ended) break;
    }
    notify();
  }
  size_t from_disk = 0;
  size_t from_peer = 0;
  for (const Source& source : sources) {
    from_peer += source.peer.has_value();
    if (!source.pin.has_value()) continue;
    disk_->unpin(*source.pin);
    ++from_disk;
  }
  {
    const std::lock_guard lock(mutex_);
    if (status.ok()) {
      stats_.loaded += sources.size();
      stats_.from_disk += from_disk;
      stats_.from_peer += from_peer;
      stats_.from_host += sources.size() - from_disk - from_peer;
    } else {
      stats_.missed += load.keys.size();
    }
  }
  end(load, std::move(status));
  notify();
}

void Store::load_loop(bool from_peer) {
  std::deque<std::shared_ptr<Load>>& queue = from_peer ? peer_queue_ : queue_;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue.empty(); });
    if (stop_) return;
    const std::shared_ptr<Load> load = std::move(queue.front());
    queue.pop_front();
    if (load->ended) continue;
    load->touching = true;
    lock.unlock();
    run(*load);
    lock.lock();
  }
}

uint32_t Store::layers_loaded(TierLoadId id) {
  const std::lock_guard lock(mutex_);
  const auto it = loads_.find(id);
  return it == loads_.end() ? 0 : it->second->layers;
}

absl::Status Store::load_status(TierLoadId id) {
  const std::lock_guard lock(mutex_);
  const auto it = loads_.find(id);
  if (it == loads_.end()) return absl::NotFoundError("no such load");
  Load& load = *it->second;
  if (load.status.ok() && load.layers < options_.cache.layers && clock_.now() >= load.deadline) {
    load.status = absl::DeadlineExceededError("the KV tiers did not answer in time");
  }
  return load.status;
}

bool Store::end_load(TierLoadId id) {
  const std::lock_guard lock(mutex_);
  const auto it = loads_.find(id);
  if (it == loads_.end()) return true;
  it->second->ended = true;
  if (it->second->touching) return false;
  loads_.erase(it);
  return true;
}

}  // namespace baton::kvtransfer::tiers
