// Picks one of several equal workers for a request.
//
// Where workers tell what they have cached (engine/router/cache_watch.h), the one that has the
// least to do until it is through with this prompt: the tokens that it does not have, those that
// earlier requests still wait for, a little for every request that it is writing an answer to, and
// a part of what its cache holds more than others' of what was asked for again: that stays as long
// as there is room, and new prompts go where most room is. Where none tells,
// one that was given the same beginning before, if it is not much busier than the others, else the
// least loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "engine/kernels/kv_cache.h"
#include "engine/serve/cache/cache_events.h"

namespace baton::engine::router {

// The part of a prompt that it may share with others.
struct PromptKey {
  using Chain = std::vector<serve::BlockHash>;
  Chain chain;            // of pieces that can be shared, from its beginning
  size_t tokens = 0;      // of the whole prompt; 0: the pieces are of text
  serve::BlockHash root;  // of the model by which `chain` names blocks
  std::vector<std::pair<serve::BlockHash, Chain>> others;  // the same, by other models

  // Empty for a model that was not known when the key was made.
  const Chain& under(const serve::BlockHash& model) const;
};
// The names of a text's first 64 pieces of 256 bytes.
PromptKey text_key(std::string_view prompt);
// The names of a prompt's blocks as workers see them, except the last token's, which is always
// computed; by each of these models.
PromptKey token_key(std::span<const int32_t> tokens, std::span<const serve::BlockHash> models = {});

struct PickStats {
  size_t in_flight = 0;
  size_t computing = 0;        // prompt tokens that it has still to compute for them
  bool cache_known = false;    // it tells what it has
  size_t cached_blocks = 0;    // so many
  uint64_t cache_changes = 0;  // CacheNews::changes of what it told last
  uint64_t prompt_tokens = 0;  // of all requests it was given
  uint64_t hit_tokens = 0;     // of these, expected in its cache
};

// Thread-safe.
class WorkerPicker {
 public:
  explicit WorkerPicker(size_t workers) : workers_(workers) {}

  struct Pick {
    uint64_t id = 0;
    size_t worker = 0;
    size_t missing = 0;  // of the prompt's tokens, in its cache; of a text's, 64 for each piece
  };
  // Counts one more request for the worker until release(). Workers in `avoid` and those that are
  // down are taken only if there is no other; nothing if there are no workers at all.
  // With `model`, the root of one, never a worker that is known to have another.
  using Model = std::optional<serve::BlockHash>;
  // `resume`: picks only workers that can continue an answer that has begun.
  std::optional<Pick> pick(std::shared_ptr<const PromptKey> key, std::span<const size_t> avoid = {},
                           const Model& model = std::nullopt, bool resume = false);
  // The prompt is computed: the first token is here.
  void computed(uint64_t id);
  void release(uint64_t id);

  // Adds a worker, which is down until set_up(); returns its index.
  size_t add();
  // The worker is taken no more; what it is doing goes on. Or it is again.
  void set_gone(size_t worker, bool gone);
  bool is_gone(size_t worker) const;
  // Workers that are not gone.
  size_t present() const;
  void set_up(size_t worker, bool up);
  bool is_up(size_t worker) const;
  // It takes no tokens that another one wrote, as vLLM does not. By default every worker does.
  void set_resumes(size_t worker, bool resumes);
  bool resumes(size_t worker) const;
  // The workers that pick() may choose, healthy or not.
  std::vector<size_t> fitting(const Model& model, bool resume) const;
  // True if pick() would find a healthy worker that is not in `avoid`.
  bool has_other(std::span<const size_t> avoid, const Model& model = std::nullopt) const;
  // The worker said which model it has: with another one than before, what was known of its cache
  // is not.
  void set_model(size_t worker, const serve::BlockHash& root);
  Model model(size_t worker) const;  // nothing while it has not said
  // By which models workers name their blocks: those of all of them, each once.
  std::vector<serve::BlockHash> models() const;

  // Takes a worker's report about its cache. False if the report is invalid (more blocks than
  // kMaxBlocks, changes without a snapshot, a count that decreases); the worker's cache then counts
  // as unknown.
  bool tell(size_t worker, const serve::CacheNews& news);
  // Nothing is known, until the next snapshot.
  void forget_cache(size_t worker);

  PickStats stats(size_t worker) const;

  static constexpr size_t kMaxBlocks = size_t{1} << 22;

 private:
  static constexpr size_t kSlack = 2;           // requests that a guessed hit is worth
  static constexpr size_t kRequestTokens = 64;  // to compute, that a request in flight weighs
  // What a cache keeps more than others' counts a part. Of 20 traces of tenants' documents,
  // simulated, a fifth found most (a tenth to a quarter within 3 %, a half 8 % less).
  static constexpr size_t kKeptPart = 5;
  static constexpr size_t kMaxPrefixes = 1 << 16;

  struct Worker {
    bool up = true;
    bool gone = false;
    bool resumes = true;
    Model model;
    size_t given = 0;  // tokens that it had to compute, ever
    PickStats stats;
    absl::flat_hash_set<serve::BlockHash> cached;
    absl::flat_hash_set<serve::BlockHash> again;  // of these, what a later prompt had too
    // Blocks of requests in flight: there, or soon.
    absl::flat_hash_map<serve::BlockHash, uint32_t> promised;
  };
  struct Open {
    size_t worker = 0;
    size_t computing = 0;
    std::shared_ptr<const PromptKey> key;
    const PromptKey::Chain* promised = nullptr;  // of the key; null: nothing
  };
  // In tokens.
  size_t held(const Worker& worker, const PromptKey& key) const;
  size_t cost(const Worker& worker, const PromptKey& key) const;
  // The part of its cache that was requested again.
  static size_t kept(const Worker& worker) { return worker.again.size() * kBlockTokens; }
  static void note_again(Worker& worker, const PromptKey& key, size_t hit);
  static void forget(Worker& worker);
  bool any_known() const;
  size_t by_cache(const PromptKey& key, std::span<const size_t> candidates) const;
  size_t by_guess(const PromptKey& key, std::span<const size_t> candidates);
  // The workers whose health is as good as the best one's.
  std::vector<size_t> usable(std::span<const size_t> avoid, const Model& model, bool resume) const;
  static bool fits(const Worker& worker, const Model& model) {
    return !model.has_value() || !worker.model.has_value() || *worker.model == *model;
  }
  void use_model(Worker& worker, const serve::BlockHash& root);
  static const PromptKey::Chain& chain_at(const Worker& worker, const PromptKey& key) {
    return key.under(worker.model.value_or(key.root));
  }

  mutable std::mutex mutex_;
  std::vector<Worker> workers_;
  absl::flat_hash_map<uint64_t, Open> open_;
  uint64_t next_id_ = 1;
  absl::flat_hash_map<serve::BlockHash, size_t> prefixes_;
};

}  // namespace baton::engine::router
