// An engine that publishes as vLLM does, in one thread: a cache of random prompts, batches with
// numbers, a buffer for replays; and the way of its messages, which loses some.
#pragma once

#include "absl/strings/str_cat.h"
#include "engine/kv_events/batch.h"
#include "engine/kv_events/event_order.h"
#include "engine/kv_events/token_index.h"
#include "engine/serve/cache/cache_events.h"
#include "tests/std.h"
#include "tests/until.h"

namespace baton::engine::kv_events {

using Random = std::mt19937_64;

// What is in its cache, and what it tells of that.
class FakeEngine {
 public:
  FakeEngine(Random& random, size_t room, size_t buffer_size)
      : random_(random), room_(room), buffer_size_(buffer_size) {}

  // Computes a prompt, or drops blocks, or now and then all: one batch. Returns its events.
  size_t step() {
    EventBatch batch{.time = static_cast<double>(++clock_), .events = {}, .rank = 0};
    if (random_() % 20'000 == 0) {
      cache_.clear();
      truth.clear();
      batch.events.emplace_back(AllBlocksCleared());
    } else {
      compute(&batch);
      while (cache_.size() > room_) evict(&batch);
    }
    if (batch.events.empty()) return 0;
    const Message message{next_++, encode_batch(batch)};
    buffer.push_back(message);
    if (buffer.size() > buffer_size_) buffer.pop_front();
    sent.push_back(message);
    return batch.events.size();
  }

  // Another process: it has nothing, and counts from the beginning.
  void restart() {
    ++epoch_;
    next_ = 0;
    cache_.clear();
    truth.clear();
    buffer.clear();
    sent.clear();
  }

  struct Message {
    uint64_t sequence = 0;
    std::string payload;
  };
  std::deque<Message> sent;     // on the wire
  std::deque<Message> buffer;   // that a replay has
  std::set<std::string> truth;  // names of what is cached

 private:
  // A block is the path to it: each step one of four continuations.
  using Path = std::vector<int32_t>;
  struct Cached {
    SentHash hash;
    std::string name;
  };

  static std::vector<int32_t> tokens_of(int32_t step, size_t depth) {
    return std::vector<int32_t>(16, static_cast<int32_t>(100 * depth) + step);
  }
  SentHash hash_of(const Path& path) const {
    std::string text = absl::StrCat("process ", epoch_);
    for (const int32_t step : path) absl::StrAppend(&text, ".", step);
    // Of 32 bytes, as vLLM's.
    const serve::BlockHash one = serve::chain_hash({}, text);
    const serve::BlockHash two = serve::chain_hash(one, text);
    return std::string(reinterpret_cast<const char*>(&one), sizeof(one)) +
           std::string(reinterpret_cast<const char*>(&two), sizeof(two));
  }

  void compute(EventBatch* batch) {
    Path path;
    std::vector<int32_t> prompt;
    std::optional<SentHash> parent;
    const size_t depth = 1 + random_() % 8;
    while (path.size() < depth) {
      path.push_back(static_cast<int32_t>(random_() % 4));
      const std::vector<int32_t> tokens = tokens_of(path.back(), path.size());
      prompt.insert(prompt.end(), tokens.begin(), tokens.end());
      const SentHash hash = hash_of(path);
      if (!cache_.contains(path)) {
        store(batch, hash, parent, tokens);
        std::vector<serve::BlockHash> chain;
        serve::extend_chain(prompt, 16, tokens_root(), &chain);
        const std::string name = serve::block_name(chain.back());
        cache_[path] = {hash, name};
        truth.insert(name);
      }
      parent = hash;
    }
  }
  static void store(EventBatch* batch, const SentHash& hash, const std::optional<SentHash>& parent,
                    const std::vector<int32_t>& tokens) {
    auto* last = batch->events.empty() ? nullptr : std::get_if<BlockStored>(&batch->events.back());
    if (last == nullptr || !parent.has_value() || last->hashes.back() != *parent) {
      last = &std::get<BlockStored>(
          batch->events.emplace_back(BlockStored{.parent = parent, .block_size = 16}));
      last->medium = "GPU";
    }
    last->hashes.push_back(hash);
    last->tokens.insert(last->tokens.end(), tokens.begin(), tokens.end());
  }
  // Any block, not only those that nothing follows.
  void evict(EventBatch* batch) {
    Path from(1 + random_() % 8);
    for (int32_t& step : from) step = static_cast<int32_t>(random_() % 4);
    auto it = cache_.lower_bound(from);
    if (it == cache_.end()) it = cache_.begin();
    truth.erase(it->second.name);
    batch->events.emplace_back(BlockRemoved{.hashes = {it->second.hash}, .medium = "GPU"});
    cache_.erase(it);
  }

  Random& random_;
  const size_t room_;
  const size_t buffer_size_;
  std::map<Path, Cached> cache_;
  uint64_t next_ = 0;
  int epoch_ = 0;
  int64_t clock_ = 0;
};

// Who follows it, over a way that loses messages, and what it makes of what it hears.
class FakeFollower {
 public:
  FakeFollower(Random& random, FakeEngine& engine, double loss)
      : order_(true, {.apply =
                          [this](std::string_view payload) {
                            const auto batch = parse_batch(payload);
                            if (batch.ok()) index_.apply(*batch);
                            return batch.status();
                          },
                      .doubt = [](const std::string&) {},
                      .forget = [this](const std::string&) { index_.clear(); },
                      .ask =
                          [this](uint64_t from) {
                            answer_.clear();
                            asked_ = from;
                          }}),
        random_(random),
        engine_(engine),
        loss_(loss) {
    order_.connected();
  }

  void connection_lost() {
    order_.disconnected();
    answer_.clear();
    asked_.reset();
    order_.connected();
  }
  // One message of those on the way, a question that arrives, or an answer.
  void step() {
    if (random_() % 2 == 0 && !engine_.sent.empty()) {
      const FakeEngine::Message message = std::move(engine_.sent.front());
      engine_.sent.pop_front();
      if (!lost(loss_)) order_.live(message.sequence, message.payload);
      return;
    }
    if (asked_.has_value() && random_() % 4 == 0) {
      for (const FakeEngine::Message& message : engine_.buffer) {
        if (message.sequence >= *asked_) answer_.push_back(message);
      }
      answer_.push_back({kEndOfReplay, ""});
      asked_.reset();
      return;
    }
    if (answer_.empty()) return;
    const FakeEngine::Message message = std::move(answer_.front());
    answer_.pop_front();
    if (message.sequence == kEndOfReplay) {
      lost(loss_ / 10) ? order_.replay_failed("it did not arrive") : order_.replay_ended();
    } else if (!lost(loss_ / 50)) {
      order_.replayed(message.sequence, message.payload);
    }
  }
  bool idle() const { return engine_.sent.empty() && !order_.replaying(); }
  // All that is on its way comes, and what got lost is looked for.
  void settle() {
    const double loss = std::exchange(loss_, 0);
    until([&] { return idle(); }, [&] { step(); });
    order_.check();
    until([&] { return idle(); }, [&] { step(); });
    loss_ = loss;
    tell();
  }
  // What whoever picks workers is told.
  void tell() {
    if (!index_.has_news()) return;
    const serve::CacheNews news = index_.news();
    if (news.snapshot) known.clear();
    for (const serve::BlockHash& hash : news.removed) known.erase(serve::block_name(hash));
    for (const serve::BlockHash& hash : news.stored) known.insert(serve::block_name(hash));
  }
  const EventOrderStats& stats() const { return order_.stats(); }

  std::set<std::string> known;
  uint64_t messages_lost = 0;

 private:
  bool lost(double chance) {
    const bool is = std::uniform_real_distribution<double>()(random_) < chance;
    messages_lost += is ? 1 : 0;
    return is;
  }

  TokenIndex index_;
  EventOrder order_;
  Random& random_;
  FakeEngine& engine_;
  double loss_;
  std::optional<uint64_t> asked_;  // on its way to the engine
  std::deque<FakeEngine::Message> answer_;
};

}  // namespace baton::engine::kv_events
