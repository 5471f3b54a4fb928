// Blocks between a device and the host's memory, on their way to tiers and back.
#include "kvtransfer/tiers/staged_tiers.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::kvtransfer::tiers {
namespace {

constexpr size_t kMostStaging = size_t{256} << 20;
constexpr Time kTick = std::chrono::microseconds(200);  // copies have no descriptor to wait for

}  // namespace

absl::StatusOr<std::unique_ptr<TierStore>> StagedTiers::open(const TierStoreOptions& options,
                                                             const internal::DeviceMemory& memory,
                                                             int device) {
  const size_t each = options.cache.block_bytes * options.cache.layers;
  const size_t saves = std::max<size_t>(1, options.pinned_blocks);
  // Twice as many for loads, of which a prompt waits; at least one of each.
  const size_t places = std::max<size_t>(2, std::min(3 * saves, kMostStaging / each));
  auto ring = memory.staging_ring(device, places * each);
  if (!ring.ok()) {
    return absl::Status(ring.status().code(),
                        absl::StrCat("KV tiers below a device's cache need ", places * each >> 20,
                                     " MiB of pinned memory: ", ring.status().message()));
  }
  const Clock& clock = options.clock != nullptr ? *options.clock : Clock::steady();
  std::unique_ptr<StagedTiers> tiers(new StagedTiers(options, *std::move(ring), clock));
  tiers->for_saves_.count = static_cast<uint32_t>(std::max<size_t>(1, places / 3));
  tiers->for_loads_.count = static_cast<uint32_t>(places) - tiers->for_saves_.count;
  tiers->for_saves_.free.resize(tiers->for_saves_.count);
  std::iota(tiers->for_saves_.free.begin(), tiers->for_saves_.free.end(), 0u);
  tiers->for_loads_.free.resize(tiers->for_loads_.count);
  std::iota(tiers->for_loads_.free.begin(), tiers->for_loads_.free.end(), tiers->for_saves_.count);
  TierStoreOptions below = options;
  below.cache = tiers->staging();
  below.pinned_blocks = tiers->for_saves_.count;
  auto store = TierStore::open(below);
  if (!store.ok()) return store.status();
  tiers->store_ = *std::move(store);
  return tiers;
}

TierCache StagedTiers::staging() const {
  return {.base = ring_->memory().data(),
          .layers = cache_.layers,
          .blocks = for_saves_.count + for_loads_.count,
          .block_bytes = cache_.block_bytes};
}

// ---- saving -------------------------------------------------------------------------------------

size_t StagedTiers::save(std::span<const TierSave> saves) {
  progress();
  size_t taken = 0;
  for (const TierSave& save : saves) {
    if (!is_on()) break;
    const TierFound found = store_->find_known(std::span(&save.key, 1));
    if (found.blocks == 1 && found.peer == 0) {  // it is here already
      unpinned_.push_back(save.block);
      ++taken;
      continue;
    }
    if (for_saves_.free.empty()) break;
    const uint32_t place = for_saves_.free.back();
    for_saves_.free.pop_back();
    std::vector<internal::CopyRun> all;
    for (uint32_t layer = 0; layer < cache_.layers; ++layer) {
      const std::span<std::byte> from = cache_.at(layer, save.block);
      all.push_back({from.data(), staging().at(layer, place).data(), from.size()});
    }
    const uint64_t copy = next_++;
    copying_[copy] = {save, place};
    ring_->copy(internal::CopyDirection::kToHost, copy, false, all);
    ++taken;
  }
  progress();
  return taken;
}

void StagedTiers::hand_over_saves() {
  while (!copied_.empty()) {
    const Save& next = copied_.front();
    const TierSave save{next.of.key, next.place};
    if (store_->save(std::span(&save, 1)) == 0) {
      if (is_on()) return;  // it is busy
      for_saves_.free.push_back(next.place);
    }
    copied_.pop_front();
  }
}

std::vector<uint32_t> StagedTiers::unpinned() {
  progress();
  return std::exchange(unpinned_, {});
}

bool StagedTiers::has_pinned() const { return !copying_.empty() || !unpinned_.empty(); }

void StagedTiers::flush() {
  while (!copying_.empty() || !copied_.empty()) {
    progress();
    if (!copying_.empty() || !copied_.empty()) store_->wait(kTick, -1);
  }
  store_->flush();
  progress();
}

// ---- copies -------------------------------------------------------------------------------------

void StagedTiers::ended(uint64_t cookie, const absl::Status& status) {
  if (const auto save = copying_.find(cookie); save != copying_.end()) {
    unpinned_.push_back(save->second.of.block);
    if (status.ok()) {
      copied_.push_back(save->second);
    } else {
      for_saves_.free.push_back(save->second.place);
    }
    copying_.erase(save);
    return;
  }
  const auto copy = copies_of_loads_.find(cookie);
  if (copy == copies_of_loads_.end()) return;
  const auto load = loads_.find(copy->second);
  copies_of_loads_.erase(copy);
  if (load == loads_.end()) return;
  --load->second.copies;
  if (status.ok()) {
    ++load->second.there;  // of one direction copies end in their order
  } else {
    load->second.status.Update(status);
  }
}

void StagedTiers::progress() {
  const auto look = [this](uint64_t cookie, const absl::Status& status) { ended(cookie, status); };
  ring_->progress(look);
  for (const uint32_t place : store_->unpinned()) for_saves_.free.push_back(place);
  hand_over_saves();
  for (auto& [id, load] : loads_) advance(id, load);
}

// ---- loading ------------------------------------------------------------------------------------

TierLoadId StagedTiers::load(std::span<const TierKey> keys, std::span<const uint32_t> blocks,
                             Time timeout) {
  const TierLoadId id = next_++;
  Load& load = loads_[id];
  load.keys.assign(keys.begin(), keys.end());
  load.blocks.assign(blocks.begin(), blocks.end());
  load.deadline = clock_.now() + timeout;
  progress();
  return id;
}

std::vector<internal::CopyRun> StagedTiers::runs(uint32_t layer, const Load& load) const {
  std::vector<internal::CopyRun> out;
  for (size_t i = 0; i < load.places.size(); ++i) {
    const std::span<std::byte> to = cache_.at(layer, load.blocks[load.first + i]);
    out.push_back({to.data(), staging().at(layer, load.places[i]).data(), to.size()});
  }
  return out;
}

bool StagedTiers::end_piece(Load& load) {
  if (load.copies > 0) return false;
  if (load.piece != 0 && !store_->end_load(load.piece)) return false;
  load.piece = 0;
  for (const uint32_t place : load.places) for_loads_.free.push_back(place);
  load.places.clear();
  return true;
}

void StagedTiers::advance(TierLoadId id, Load& load) {
  if (load.ending || !load.status.ok() || load.whole()) return;
  if (load.piece == 0) {
    const size_t some = std::min(load.blocks.size() - load.first, for_loads_.free.size());
    if (some == 0) {  // another load has them
      if (clock_.now() <= load.deadline) return;
      load.status = absl::DeadlineExceededError(
          "KV tiers: other loads held all of the pinned memory for too long");
      return;
    }
    load.places.assign(for_loads_.free.end() - static_cast<ptrdiff_t>(some), for_loads_.free.end());
    for_loads_.free.resize(for_loads_.free.size() - some);
    load.asked = load.there = 0;
    load.piece = store_->load(std::span(load.keys).subspan(load.first, some), load.places,
                              std::max(Time{}, load.deadline - clock_.now()));
  }
  load.status.Update(store_->load_status(load.piece));
  if (!load.status.ok()) return;
  for (const uint32_t here = store_->layers_loaded(load.piece); load.asked < here; ++load.asked) {
    const uint64_t copy = next_++;
    copies_of_loads_[copy] = id;
    ++load.copies;
    ring_->copy(internal::CopyDirection::kToDevice, copy, true, runs(load.asked, load));
  }
  if (load.there < cache_.layers) return;
  const size_t some = load.places.size();
  if (!end_piece(load)) return;
  load.first += some;
}

uint32_t StagedTiers::layers_loaded(TierLoadId id) {
  progress();
  const auto found = loads_.find(id);
  if (found == loads_.end()) return 0;
  const Load& load = found->second;
  if (load.whole()) return cache_.layers;
  const bool last = load.first + load.places.size() == load.blocks.size();
  return last && load.piece != 0 ? load.there : 0;
}

absl::Status StagedTiers::load_status(TierLoadId id) {
  progress();
  const auto found = loads_.find(id);
  return found == loads_.end() ? absl::NotFoundError("no such load") : found->second.status;
}

bool StagedTiers::end_load(TierLoadId id) {
  const auto found = loads_.find(id);
  if (found == loads_.end()) return true;
  if (!std::exchange(found->second.ending, true)) {
    for (const auto& [copy, load] : copies_of_loads_) {
      if (load == id) ring_->drop(copy);
    }
  }
  progress();
  if (!end_piece(loads_.at(id))) return false;
  loads_.erase(id);
  return true;
}

void StagedTiers::wait(Time timeout, int fd) {
  progress();
  store_->wait(ring_->busy() || !copied_.empty() ? std::min(timeout, kTick) : timeout, fd);
  progress();
}

std::string StagedTiers::explain() const {
  return absl::StrCat(store_->explain(), "; copied by way of ", ring_->memory().size() >> 20,
                      " MiB of pinned memory");
}

}  // namespace baton::kvtransfer::tiers
