// One store of many: calls go to all ranks, answers are what all of them say.
#include "engine/shard/tier_ranks.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine::shard {
namespace {

using kvtransfer::tiers::TierFound;
using kvtransfer::tiers::TierKey;
using kvtransfer::tiers::TierLoadId;
using kvtransfer::tiers::TierSave;
using kvtransfer::tiers::TierStats;
using kvtransfer::tiers::TierStore;

constexpr Time kAskForLoads = std::chrono::microseconds(500);
constexpr Time kAskForSaves = std::chrono::milliseconds(5);
constexpr Time kTierTick = std::chrono::milliseconds(1);
// What the others have said is asked for again after this: they may have evicted it.
constexpr Time kAnswersLast = std::chrono::seconds(1);

}  // namespace

absl::StatusOr<std::unique_ptr<TierStore>> open_tiers(kvtransfer::tiers::TierStoreOptions options,
                                                      const KvCache& cache) {
  const KvGeometry& geometry = cache.geometry();
  options.cache = {.base = cache.base(),
                   .layers = static_cast<uint32_t>(geometry.layers),
                   .blocks = static_cast<uint32_t>(cache.num_blocks()),
                   .block_bytes = geometry.block_bytes()};
  options.pinned_blocks = most_pinned(cache.num_blocks());
  return TierStore::open(options);
}

RanksTierStore::RanksTierStore(Leader& leader, std::unique_ptr<TierStore> own,
                               const ModelShard& shard, uint32_t layers, const Clock& clock)
    : leader_(leader),
      own_(std::move(own)),
      followers_(leader.about_followers().size()),
      names_(shard),
      layers_(layers),
      clock_(clock),
      loads_(leader, *own_),
      reported_(followers_) {
  leader_.join(this);
}

RanksTierStore::~RanksTierStore() { leader_.leave(this); }

Time RanksTierStore::patience() const {
  if (!loads_.empty() || (question_.id != 0 && question_.answers < followers_)) return kAskForLoads;
  return saves_.empty() ? kNever : kAskForSaves;
}

void RanksTierStore::hear(size_t follower, const Report& report) {
  {
    const std::lock_guard lock(stats_mutex_);
    reported_[follower] = report.tiers;
  }
  for (const Event& event : report.tier_events) {
    loads_.hear(follower, event);
    if (event.kind == EventKind::kUnpinned) unpin(event.id);
    if (event.kind != EventKind::kFound || event.id != question_.id) continue;
    question_.found.push_back(event.found);
    question_.answered_at = clock_.now();
    ++question_.answers;
  }
}

// --- finding -------------------------------------------------------------------------------------

bool RanksTierStore::is_asked(std::span<const TierKey> keys, size_t own_blocks) const {
  if (question_.id == 0 || question_.keys.size() < keys.size()) return false;
  if (!std::equal(keys.begin(), keys.end(), question_.keys.begin())) return false;
  if (question_.answers < followers_) return true;
  // What has been saved since may be at all ranks.
  return own_blocks <= question_.own_blocks && clock_.now() < question_.answered_at + kAnswersLast;
}

void RanksTierStore::ask(std::span<const TierKey> keys, size_t own_blocks) {
  question_ = {.id = next_id_++,
               .keys = {keys.begin(), keys.end()},
               .own_blocks = own_blocks,
               .answers = 0,
               .found = {},
               .answered_at = {}};
  leader_.call({.kind = TierCallKind::kFind, .id = question_.id, .keys = question_.keys}, true);
}

TierFound RanksTierStore::find(std::span<const TierKey> keys) {
  if (!leader_.status().ok()) return {};
  TierFound found = own_->find(names_.of(keys));
  if (found.blocks == 0 && !found.pending) return found;
  const size_t own_blocks = found.pending ? keys.size() : found.blocks;
  if (!is_asked(keys, own_blocks)) ask(keys, own_blocks);
  if (found.pending || question_.answers < followers_) return {.pending = true};
  return at_all_ranks(found);
}

TierFound RanksTierStore::find_known(std::span<const TierKey> keys) {
  if (!leader_.status().ok()) return {};
  const TierFound found = own_->find_known(names_.of(keys));
  if (found.blocks == 0 || !is_asked(keys, found.blocks) || question_.answers < followers_) {
    return {};
  }
  return at_all_ranks(found);
}

TierFound RanksTierStore::at_all_ranks(TierFound found) const {
  for (const TierFound& other : question_.found) {
    found.blocks = std::min(found.blocks, other.blocks);
  }
  return found;
}

// --- saving --------------------------------------------------------------------------------------

size_t RanksTierStore::save(std::span<const TierSave> saves) {
  size_t taken = 0;
  for (const TierSave& save : saves) {
    if (!leader_.status().ok()) {  // no rank will ask for it
      free_.push_back(save.block);
      ++taken;
      continue;
    }
    const TierSave own{names_.of(save.key), save.block};
    if (own_->save(std::span(&own, 1)) == 0) break;
    const uint64_t id = next_id_++;
    saves_[id].block = save.block;
    own_saves_[save.block].push_back(id);
    leader_.call(
        {.kind = TierCallKind::kSave, .id = id, .keys = {save.key}, .blocks = {save.block}}, false);
    ++taken;
  }
  return taken;
}

void RanksTierStore::unpin(uint64_t save) {
  const auto it = saves_.find(save);
  if (it == saves_.end() || ++it->second.ranks <= followers_) return;
  free_.push_back(it->second.block);
  saves_.erase(it);
}

void RanksTierStore::follow_own_saves() {
  for (const uint32_t block : own_->unpinned()) {
    std::deque<uint64_t>& saves = own_saves_[block];
    if (!leader_.status().ok()) saves_[saves.front()].ranks = followers_;
    unpin(saves.front());
    saves.pop_front();
    if (saves.empty()) own_saves_.erase(block);
  }
}

std::vector<uint32_t> RanksTierStore::unpinned() {
  follow_own_saves();
  if (!leader_.status().ok()) {
    absl::erase_if(saves_, [this](const auto& entry) {
      const uint32_t block = entry.second.block;
      if (own_saves_.contains(block)) return false;
      free_.push_back(block);
      return true;
    });
  }
  return std::exchange(free_, {});
}

void RanksTierStore::flush() {
  own_->flush();
  follow_own_saves();
  leader_.call({.kind = TierCallKind::kFlush, .id = next_id_++}, true);
  leader_.ask().IgnoreError();  // the leader has noted it
}

// --- loading -------------------------------------------------------------------------------------

TierLoadId RanksTierStore::load(std::span<const TierKey> keys, std::span<const uint32_t> blocks,
                                Time timeout) {
  const TierLoadId id = next_id_++;
  loads_.start(id, own_->load(names_.of(keys), blocks, timeout));
  leader_.call({.kind = TierCallKind::kLoad,
                .id = id,
                .keys = {keys.begin(), keys.end()},
                .blocks = {blocks.begin(), blocks.end()},
                .timeout = timeout},
               true);
  question_ = {};
  return id;
}

bool RanksTierStore::end_load(TierLoadId id) {
  return loads_.end(id, [&] { leader_.call({.kind = TierCallKind::kEndLoad, .id = id}, true); });
}

// --- looking on ----------------------------------------------------------------------------------

void RanksTierStore::wait(Time timeout, int fd) {
  own_->wait(patience() == kNever ? timeout : std::min(timeout, kTierTick), fd);
  leader_.progress();
}

TierStats RanksTierStore::stats() const {
  TierStats sum = own_->stats();
  const std::lock_guard lock(stats_mutex_);
  for (const TierStats& each : reported_) {
    sum.host_bytes += each.host_bytes;
    sum.dropped += each.dropped;
    sum.silences += each.silences;
    sum.missed += each.missed;
    sum.corrupt += each.corrupt;
  }
  return sum;
}

std::string RanksTierStore::explain() const {
  return absl::StrCat("at each of ", followers_ + 1, " ranks: ", own_->explain());
}

}  // namespace baton::engine::shard
