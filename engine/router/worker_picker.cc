// Picks the worker that knows a request's prefix, or the least loaded one.
#include "engine/router/worker_picker.h"

#include <algorithm>

namespace baton::engine::router {

std::vector<serve::BlockHash> prompt_chain(std::string_view prompt) {
  constexpr size_t kPiece = 256;
  constexpr size_t kPieces = 64;
  std::vector<serve::BlockHash> chain;
  for (size_t at = 0; at + kPiece <= prompt.size() && chain.size() < kPieces; at += kPiece) {
    chain.push_back(serve::chain_hash(chain.empty() ? serve::BlockHash{} : chain.back(),
                                      prompt.substr(at, kPiece)));
  }
  return chain;
}

std::optional<size_t> WorkerPicker::pick(std::span<const serve::BlockHash> chain,
                                         std::span<const size_t> avoid) {
  const std::lock_guard lock(mutex_);
  if (workers_.empty()) return std::nullopt;
  const auto shunned = [&](size_t worker) {
    return std::find(avoid.begin(), avoid.end(), worker) != avoid.end();
  };
  // Ordered by: usable, not to be avoided, least loaded, first.
  const auto worse = [&](size_t a, size_t b) {
    if (workers_[a].up != workers_[b].up) return !workers_[a].up;
    if (shunned(a) != shunned(b)) return shunned(a);
    return workers_[a].in_flight > workers_[b].in_flight;
  };
  size_t best = 0;
  for (size_t i = 1; i < workers_.size(); ++i) {
    if (worse(best, i)) best = i;
  }
  for (size_t i = chain.size(); i-- > 0;) {
    const auto it = prefixes_.find(chain[i]);
    if (it == prefixes_.end()) continue;
    const Worker& worker = workers_[it->second];
    if (worker.up && !shunned(it->second) &&
        worker.in_flight <= workers_[best].in_flight + kSlack) {
      best = it->second;
    }
    break;
  }
  if (prefixes_.size() > kMaxPrefixes) prefixes_.clear();
  for (const serve::BlockHash& hash : chain) prefixes_[hash] = best;
  ++workers_[best].in_flight;
  return best;
}

void WorkerPicker::release(size_t worker) {
  const std::lock_guard lock(mutex_);
  --workers_[worker].in_flight;
}

void WorkerPicker::set_up(size_t worker, bool up) {
  const std::lock_guard lock(mutex_);
  workers_[worker].up = up;
}

bool WorkerPicker::is_up(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].up;
}

size_t WorkerPicker::in_flight(size_t worker) const {
  const std::lock_guard lock(mutex_);
  return workers_[worker].in_flight;
}

}  // namespace baton::engine::router
