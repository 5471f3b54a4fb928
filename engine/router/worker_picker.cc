// Compares workers by what they have cached and what they have to do.
#include "engine/router/worker_picker.h"

#include <algorithm>
#include <utility>

#include "engine/kernels/kv_cache.h"

namespace baton::engine::router {

using serve::BlockHash;

PromptKey text_key(std::string_view prompt) {
  constexpr size_t kPiece = 256;
  constexpr size_t kPieces = 64;
  PromptKey key;
  for (size_t at = 0; at + kPiece <= prompt.size() && key.chain.size() < kPieces; at += kPiece) {
    key.chain.push_back(serve::chain_hash(key.chain.empty() ? BlockHash{} : key.chain.back(),
                                          prompt.substr(at, kPiece)));
  }
  return key;
}

PromptKey token_key(std::span<const int32_t> tokens, std::span<const BlockHash> models) {
  PromptKey key{.chain = {}, .tokens = tokens.size(), .root = {}, .others = {}};
  if (tokens.empty()) return key;
  const std::span<const int32_t> shared = tokens.first(tokens.size() - 1);
  if (!models.empty()) key.root = models.front();
  serve::extend_chain(shared, kBlockTokens, key.root, &key.chain);
  for (size_t i = 1; i < models.size(); ++i) {
    key.others.emplace_back(models[i], PromptKey::Chain{});
    serve::extend_chain(shared, kBlockTokens, models[i], &key.others.back().second);
  }
  return key;
}

const PromptKey::Chain& PromptKey::under(const BlockHash& model) const {
  static const Chain kNone;
  if (model == root) return chain;
  for (const auto& [other, its_chain] : others) {
    if (other == model) return its_chain;
  }
  return kNone;
}

size_t WorkerPicker::held(const Worker& worker, const PromptKey& key) const {
  if (key.tokens == 0) return 0;
  const PromptKey::Chain& chain = chain_at(worker, key);
  size_t blocks = 0;
  while (blocks < chain.size() &&
         (worker.cached.contains(chain[blocks]) || worker.promised.contains(chain[blocks]))) {
    ++blocks;
  }
  return blocks * kBlockTokens;
}

size_t WorkerPicker::cost(const Worker& worker, const PromptKey& key) const {
  // Into a cache that is full of what others may ask for again, no more of that should go.
  size_t least = kept(worker);
  for (const Worker& other : workers_) {
    if (!other.gone && other.up && other.stats.cache_known) least = std::min(least, kept(other));
  }
  return worker.stats.computing + key.tokens - held(worker, key) +
         kRequestTokens * worker.stats.in_flight + (kept(worker) - least) / kKeptPart;
}

void WorkerPicker::note_again(Worker& worker, const PromptKey& key, size_t hit) {
  const PromptKey::Chain& chain = chain_at(worker, key);
  for (size_t i = 0; i < hit / kBlockTokens; ++i) {
    if (worker.cached.contains(chain[i])) worker.again.insert(chain[i]);
  }
}

void WorkerPicker::forget(Worker& worker) {
  worker.cached = {};
  worker.again = {};
  worker.stats.cache_known = false;
  worker.stats.cached_blocks = 0;
}

bool WorkerPicker::any_known() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
    return !worker.gone && worker.up && worker.stats.cache_known;
  });
}

std::vector<size_t> WorkerPicker::usable(std::span<const size_t> avoid, const Model& model,
                                         bool resume) const {
  std::vector<size_t> best;
  int rank = 0;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].gone || !fits(workers_[i], model)) continue;
    if (resume && !workers_[i].resumes) continue;
    const bool shunned = std::find(avoid.begin(), avoid.end(), i) != avoid.end();
    const int own = 1 + (workers_[i].up ? 2 : 0) + (shunned ? 0 : 1);
    if (own > rank) best.clear();
    rank = std::max(rank, own);
    if (own == rank) best.push_back(i);
  }
  return best;
}

size_t WorkerPicker::by_cache(const PromptKey& key, std::span<const size_t> candidates) const {
  // At equal cost, prefer the worker that had less to do so far: its cache has more room.
  return *std::min_element(candidates.begin(), candidates.end(), [&](size_t a, size_t b) {
    return std::pair(cost(workers_[a], key), workers_[a].given) <
           std::pair(cost(workers_[b], key), workers_[b].given);
  });
}

size_t WorkerPicker::by_guess(const PromptKey& key, std::span<const size_t> candidates) {
  size_t best = *std::min_element(candidates.begin(), candidates.end(), [&](size_t a, size_t b) {
    return std::pair(workers_[a].stats.in_flight, workers_[a].given) <
           std::pair(workers_[b].stats.in_flight, workers_[b].given);
  });
  for (size_t i = key.chain.size(); i-- > 0;) {
    const auto it = prefixes_.find(key.chain[i]);
    if (it == prefixes_.end()) continue;
    if (std::find(candidates.begin(), candidates.end(), it->second) != candidates.end() &&
        workers_[it->second].stats.in_flight <= workers_[best].stats.in_flight + kSlack) {
      best = it->second;
    }
    break;
  }
  if (prefixes_.size() > kMaxPrefixes) prefixes_.clear();
  for (const BlockHash& hash : key.chain) prefixes_[hash] = best;
  return best;
}

std::optional<WorkerPicker::Pick> WorkerPicker::pick(std::shared_ptr<const PromptKey> key,
                                                     std::span<const size_t> avoid,
                                                     const Model& model, bool resume) {
  const std::lock_guard lock(mutex_);
  const std::vector<size_t> candidates = usable(avoid, model, resume);
  if (candidates.empty()) return std::nullopt;
  const bool known = key->tokens > 0 && any_known();
  const size_t best = known ? by_cache(*key, candidates) : by_guess(*key, candidates);
  Worker& worker = workers_[best];
  const size_t hit = held(worker, *key);
  if (hit > 0) note_again(worker, *key, hit);
  const size_t computing = key->tokens - hit;
  // A text's length in tokens is not known: its pieces will do, as long as it is the same for all.
  worker.given += key->tokens > 0 ? computing : key->chain.size() + 1;
  ++worker.stats.in_flight;
  worker.stats.computing += computing;
  worker.stats.prompt_tokens += key->tokens;
  worker.stats.hit_tokens += hit;
  const PromptKey::Chain* promised = nullptr;
  if (key->tokens > 0) {
    promised = &chain_at(worker, *key);
    for (const BlockHash& hash : *promised) ++worker.promised[hash];
  }
  const size_t missing = key->tokens > 0 ? computing : kRequestTokens * (key->chain.size() + 1);
  const uint64_t id = next_id_++;
  open_[id] = {best, computing, std::move(key), promised};
  return Pick{id, best, missing};
}

void WorkerPicker::computed(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  workers_[it->second.worker].stats.computing -= std::exchange(it->second.computing, 0);
}

void WorkerPicker::release(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  const Open& open = it->second;
  Worker& worker = workers_[open.worker];
  --worker.stats.in_flight;
  worker.stats.computing -= open.computing;
  if (open.promised != nullptr) {
    for (const BlockHash& hash : *open.promised) {
      const auto promise = worker.promised.find(hash);
      if (--promise->second == 0) worker.promised.erase(promise);
    }
  }
  open_.erase(it);
}

size_t WorkerPicker::add() {
  const std::lock_guard lock(mutex_);
  workers_.emplace_back().up = false;
  return workers_.size() - 1;
}

void WorkerPicker::set_gone(size_t worker, bool gone) {
  const std::lock_guard lock(mutex_);
  workers_[worker].gone = gone;
}

bool WorkerPicker::is_gone(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].gone;
}

size_t WorkerPicker::present() const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::count_if(workers_.begin(), workers_.end(),
                                           [](const Worker& worker) { return !worker.gone; }));
}

void WorkerPicker::set_up(size_t worker, bool up) {
  const std::lock_guard lock(mutex_);
  if (up && !workers_[worker].up) {
    // It has missed what the others were given, and need not make up for it.
    size_t least = SIZE_MAX;
    for (const Worker& other : workers_) {
      if (!other.gone && other.up) least = std::min(least, other.given);
    }
    if (least != SIZE_MAX) workers_[worker].given = std::max(workers_[worker].given, least);
  }
  workers_[worker].up = up;
}

bool WorkerPicker::is_up(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].up;
}

void WorkerPicker::set_resumes(size_t worker, bool resumes) {
  const std::lock_guard lock(mutex_);
  workers_[worker].resumes = resumes;
}

bool WorkerPicker::resumes(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].resumes;
}

std::vector<size_t> WorkerPicker::fitting(const Model& model, bool resume) const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> found;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = workers_[i];
    if (!worker.gone && fits(worker, model) && (!resume || worker.resumes)) found.push_back(i);
  }
  return found;
}

bool WorkerPicker::has_other(std::span<const size_t> avoid, const Model& model) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = workers_[i];
    if (worker.gone || !worker.up || !fits(worker, model)) continue;
    if (std::find(avoid.begin(), avoid.end(), i) == avoid.end()) return true;
  }
  return false;
}

void WorkerPicker::use_model(Worker& worker, const BlockHash& root) {
  if (worker.model == root) return;
  worker.model = root;
  forget(worker);
}

void WorkerPicker::set_model(size_t worker, const BlockHash& root) {
  const std::lock_guard lock(mutex_);
  use_model(workers_[worker], root);
}

WorkerPicker::Model WorkerPicker::model(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].model;
}

std::vector<BlockHash> WorkerPicker::models() const {
  const std::lock_guard lock(mutex_);
  std::vector<BlockHash> all;
  for (const Worker& worker : workers_) {
    if (worker.gone || !worker.model.has_value()) continue;
    if (std::find(all.begin(), all.end(), *worker.model) == all.end()) {
      all.push_back(*worker.model);
    }
  }
  return all;
}

bool WorkerPicker::tell(size_t index, const serve::CacheNews& news) {
  const std::lock_guard lock(mutex_);
  Worker& worker = workers_[index];
  PickStats& stats = worker.stats;
  if (news.snapshot) use_model(worker, news.root);
  const bool follows = news.snapshot || (stats.cache_known && news.changes >= stats.cache_changes);
  if (news.snapshot) forget(worker);
  for (const BlockHash& hash : news.removed) {
    worker.cached.erase(hash);
    worker.again.erase(hash);
  }
  if (follows && worker.cached.size() + news.stored.size() <= kMaxBlocks) {
    worker.cached.insert(news.stored.begin(), news.stored.end());
    stats.cache_known = true;
    stats.cached_blocks = worker.cached.size();
    stats.cache_changes = news.changes;
    return true;
  }
  forget(worker);
  return false;
}

void WorkerPicker::forget_cache(size_t index) {
  const std::lock_guard lock(mutex_);
  forget(workers_[index]);
}

PickStats WorkerPicker::stats(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].stats;
}

}  // namespace baton::engine::router
