// The tier store: its tiers and threads; finding and saving blocks.
#include "kvtransfer/tiers/tier_store.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/tiers/staged_tiers.h"
#include "kvtransfer/tiers/tier_store_impl.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/log.h"

namespace baton::kvtransfer::tiers {

absl::Status Store::start() {
  if (!event_.status().ok()) return event_.status();
  if (options_.host_bytes > 0) {
    absl::Status fits =
        base::memory_fits("a KV tier in host memory (--kv-host-mib)", options_.host_bytes);
    if (!fits.ok()) return fits;
  }
  if (options_.host_bytes > 0) memory_ = std::make_unique<MemoryTier>(options_.host_bytes);
  if (!options_.disk.empty()) {
    auto disk =
        DiskTier::open({.directory = options_.disk, .bytes = options_.disk_bytes, .shape = shape_});
    if (disk.ok()) {
      disk_ = *std::move(disk);
    } else {
      base::log_event(base::LogLevel::kWarning, "no KV tier on disk: %s", disk.status().message());
    }
  }
  if (options_.peer != nullptr) {
    auto peer = options_.peer(shape_, [this] { notify(); });
    if (peer.ok()) {
      peer_ = *std::move(peer);
    } else if (absl::IsInvalidArgument(peer.status())) {
      return peer.status();
    } else {
      base::log_event(base::LogLevel::kWarning, "no KV tier in another process: %s",
                      peer.status().message());
    }
  }
  if (!is_on()) return absl::OkStatus();
  // Newer than what an earlier process left on disk.
  sequence_ = disk_ != nullptr ? disk_->last_sequence() : 0;
  saver_ = std::thread([this] { save_loop(); });
  loader_ = std::thread([this] { load_loop(false); });
  if (peer_ != nullptr) peer_loader_ = std::thread([this] { load_loop(true); });
  return absl::OkStatus();
}

Store::~Store() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (saver_.joinable()) saver_.join();
  if (loader_.joinable()) loader_.join();
  if (peer_loader_.joinable()) peer_loader_.join();
}

void Store::notify() { event_.ring(); }

TierFound Store::find(std::span<const TierKey> keys) {
  bool pending = false;
  if (peer_ != nullptr) {
    std::vector<TierKey> elsewhere;
    for (const TierKey& key : keys) {
      if (!is_near(key)) elsewhere.push_back(key);
    }
    pending = !elsewhere.empty() && !peer_->lookup(elsewhere);
  }
  TierFound found = find_known(keys);
  found.pending = pending;
  return found;
}

TierFound Store::find_known(std::span<const TierKey> keys) {
  TierFound found;
  for (const TierKey& key : keys) {
    if (memory_ == nullptr || !memory_->contains(key)) {
      const bool disk = disk_ != nullptr && disk_->contains(key);
      if (!disk && (peer_ == nullptr || !peer_->contains(key))) break;
      found.peer += !disk;
    }
    ++found.blocks;
  }
  return found;
}

// --- saving --------------------------------------------------------------------------------------

size_t Store::save(std::span<const TierSave> saves) {
  const std::lock_guard lock(mutex_);
  if (!is_on()) return 0;
  size_t taken = 0;
  for (const TierSave& save : saves) {
    if (has(save.key)) {
      unpinned_.push_back(save.block);
    } else if (saves_.size() + saving_ < options_.pinned_blocks) {
      saves_.push_back(save);
      ++pinned_;
    } else {
      break;
    }
    ++taken;
  }
  changed_.notify_all();
  return taken;
}

std::vector<uint32_t> Store::unpinned() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unpinned_, {});
}

bool Store::has_pinned() const {
  const std::lock_guard lock(mutex_);
  return pinned_ > 0 || !unpinned_.empty();
}

std::shared_ptr<TierRecord> Store::copy_out(const TierSave& save) {
  std::shared_ptr<TierRecord> record = TierRecord::make(shape_);
  if (record == nullptr) return nullptr;
  for (uint32_t part = 0; part < shape_.parts; ++part) {
    std::byte* to = record->part(part).data();
    for (uint32_t layer = part * layers_per_part_; layer < end_of_part(part); ++layer) {
      const std::span<const std::byte> from = options_.cache.at(layer, save.block);
      std::memcpy(to, from.data(), from.size());
      to += from.size();
    }
  }
  return record;
}

void Store::store(const std::shared_ptr<TierRecord>& record) {
  if (memory_ != nullptr) memory_->put(record);
  if (disk_ != nullptr) {
    if (absl::Status status = disk_->put(*record); !status.ok()) {
      base::log_event(base::LogLevel::kWarning, "%s", status.message());
    }
  }
  if (peer_ != nullptr) peer_->put(*record);
}

void Store::save_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !saves_.empty(); });
    if (stop_) return;
    const TierSave save = saves_.front();
    saves_.pop_front();
    saving_ = true;
    const uint64_t sequence = ++sequence_;
    lock.unlock();
    const std::shared_ptr<TierRecord> record = copy_out(save);
    lock.lock();
    unpinned_.push_back(save.block);
    --pinned_;
    ++(record != nullptr ? stats_.saved : stats_.dropped);
    lock.unlock();
    notify();
    if (record != nullptr) {
      record->seal(save.key, sequence);
      store(record);
    }
    lock.lock();
    saving_ = false;
    changed_.notify_all();
  }
}

void Store::flush() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !is_on() || (saves_.empty() && !saving_); });
  }
  if (peer_ != nullptr) peer_->flush();
}

// --- looking on ----------------------------------------------------------------------------------

void Store::wait(Time timeout, int fd) {
  pollfd entries[2] = {{event_.fd(), POLLIN, 0}, {fd, POLLIN, 0}};
  poll(entries, fd < 0 ? 1 : 2,
       static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(timeout).count()));
  event_.silence();
}

TierStats Store::stats() const {
  TierStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats = stats_;
  }
  if (memory_ != nullptr) {
    stats.host_records = memory_->records();
    stats.host_bytes = memory_->bytes();
    stats.evicted += memory_->evicted();
  }
  if (disk_ != nullptr) {
    stats.disk_records = disk_->records();
    stats.evicted += disk_->evicted();
    stats.corrupt += disk_->corrupt();
  }
  if (peer_ != nullptr) {
    stats.corrupt += peer_->corrupt();
    stats.silences = peer_->silences();
  }
  return stats;
}

std::string Store::explain() const {
  std::string text;
  if (memory_ != nullptr) absl::StrAppend(&text, options_.host_bytes >> 20, " MiB of host memory");
  if (disk_ != nullptr) absl::StrAppend(&text, text.empty() ? "" : "; ", disk_->explain());
  if (peer_ != nullptr) absl::StrAppend(&text, text.empty() ? "" : "; ", peer_->explain());
  return text.empty() ? "no tier" : text;
}

absl::StatusOr<std::unique_ptr<TierStore>> TierStore::open(const TierStoreOptions& options) {
  if (options.cache.layers == 0 || options.cache.block_bytes == 0 || options.cache.blocks == 0) {
    return absl::InvalidArgumentError("KV tiers need a cache with layers, blocks and bytes");
  }
  // What a device has is the device's to copy.
  const internal::DeviceMemory* const memory = internal::device_memory();
  if (memory != nullptr) {
    const size_t bytes = options.cache.block_bytes * options.cache.blocks * options.cache.layers;
    const absl::StatusOr<MemoryPlace> place = memory->place(options.cache.base, bytes);
    if (!place.ok()) return place.status();
    if (place->kind != MemoryKind::kHost) return StagedTiers::open(options, *memory, place->device);
  }
  auto store = std::make_unique<Store>(options);
  if (absl::Status status = store->start(); !status.ok()) return status;
  return store;
}

// Loads: the thread that reads tiers part by part, and what the engine asks of it.

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
