// Which of several equal workers a request goes to: one that knows its prefix, if it is not much
// busier than the others, else the least loaded.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/serve/cache/block_hash.h"

namespace baton::engine::router {

// Hashes of the first pieces of a prompt (256 bytes each, at most 64), chained: what requests that
// share a beginning have in common.
std::vector<serve::BlockHash> prompt_chain(std::string_view prompt);

// Thread-safe.
class WorkerPicker {
 public:
  explicit WorkerPicker(size_t workers) : workers_(workers) {}

  // Counts one more request for the worker until release(). Workers in `avoid` and those that are
  // down are taken only if there is no other; nothing if there are no workers at all.
  std::optional<size_t> pick(std::span<const serve::BlockHash> chain,
                             std::span<const size_t> avoid = {});
  void release(size_t worker);

  void set_up(size_t worker, bool up);
  bool is_up(size_t worker) const;
  size_t in_flight(size_t worker) const;

 private:
  static constexpr size_t kSlack = 2;  // requests that a prefix hit is worth
  static constexpr size_t kMaxPrefixes = 1 << 16;

  struct Worker {
    bool up = true;
    size_t in_flight = 0;
  };
  mutable std::mutex mutex_;
  std::vector<Worker> workers_;
  absl::flat_hash_map<serve::BlockHash, size_t> prefixes_;
};

}  // namespace baton::engine::router
