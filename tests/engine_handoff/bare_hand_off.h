// A hand-off without an engine, over a cache of a test's own, and a stranger who says what a test
// wants said. Nothing moves but by turn().
#pragma once

#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "engine/handoff/foreign_layout.h"
#include "engine/handoff/hand_off.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/agent.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::engine::handoff {

inline constexpr KvGeometry kBareGeometry{.layers = 3, .kv_heads = 2, .head_dim = 8};
inline constexpr size_t kBareBlocks = 64;

inline WorkerOptions bare_worker() {
  WorkerOptions options;
  options.key = *ClusterKey::from_bytes("a secret for these tests, 32 bytes long");
  options.providers = {"tcp"};
  return options;
}

// Blocks like ours with a hole behind each, so that they are converted.
inline nlohmann::json padded_layout(const KvGeometry& geometry) {
  ForeignLayout layout = ForeignLayout::own(geometry);
  layout.bytes *= 2;
  return layout.say();
}

// Nothing of it moves but by turn(), unless it has a `thread`.
inline std::unique_ptr<HandOff> test_hand_off(const std::string& name, const Clock& clock,
                                              HandOffOptions options, bool thread = false) {
  options.name = name;
  if (options.model.empty()) options.model = "a checkpoint";
  if (options.fingerprint.empty()) options.fingerprint = "an arithmetic";
  options.lease = std::chrono::seconds(30);
  options.worker.key = bare_worker().key;
  options.worker.providers = bare_worker().providers;
  options.clock = &clock;
  options.start_thread = thread;
  return *HandOff::create(std::move(options));
}

class Bare {
 public:
  Bare(const std::string& name, const Clock& clock, HandOffOptions options = {},
       bool thread = false)
      : memory_(kBareGeometry.cache_bytes(kBareBlocks) + kAlignment),
        hand_off_(test_hand_off(name, clock, std::move(options), thread)) {
    EXPECT_TRUE(hand_off_->use_cache(cache()).ok());
  }
  ~Bare() { hand_off_->close(); }
  Bare(const Bare&) = delete;

  KvCache cache() {
    auto base = reinterpret_cast<uintptr_t>(memory_.data());
    base = (base + kAlignment - 1) / kAlignment * kAlignment;
    return {kBareGeometry, reinterpret_cast<void*>(base), kBareBlocks};
  }
  void fill(uint32_t block, int value) {
    for (int layer = 0; layer < kBareGeometry.layers; ++layer) {
      std::memset(cache().block(layer, block).data(), value + layer, kBareGeometry.block_bytes());
    }
  }
  bool holds(uint32_t block, int value) {
    for (int layer = 0; layer < kBareGeometry.layers; ++layer) {
      for (const std::byte byte : cache().block(layer, block)) {
        if (byte != static_cast<std::byte>(value + layer)) return false;
      }
    }
    return true;
  }
  // All of a request whose prompt fills these blocks is computed. Its number.
  uint64_t save(const std::string& transfer, const std::vector<uint32_t>& blocks) {
    const uint64_t send = hand_off_->open(transfer, blocks.size() * kBlockTokens);
    compute(send, blocks);
    return send;
  }
  void compute(uint64_t send, const std::vector<uint32_t>& blocks) {
    for (uint32_t layer = 0; layer < uint32_t{kBareGeometry.layers}; ++layer) {
      hand_off_->computed(send, layer, blocks.size() * kBlockTokens, blocks);
    }
  }
  static kvtransfer::KvLoad order(uint64_t id, const std::vector<uint32_t>& blocks) {
    kvtransfer::KvLoad load;
    load.id = id;
    load.tokens.assign(blocks.size() * kBlockTokens, 1);
    load.blocks = blocks;
    load.timeout = std::chrono::seconds(20);
    load.silence = std::chrono::seconds(1);
    return load;
  }
  absl::Status load(uint64_t id, const kvtransfer::KvTransfer& from,
                    const std::vector<uint32_t>& blocks) {
    kvtransfer::KvLoad load = order(id, blocks);
    load.transfer = from;
    return hand_off_->start_load(std::move(load));
  }
  kvtransfer::KvTransfer at(const std::string& transfer, bool finished = false) const {
    kvtransfer::KvTransfer from = hand_off_->params_of(transfer);
    from.finished = finished;
    return from;
  }
  bool complete(uint64_t id) {
    return hand_off_->layers_loaded(id) == uint32_t{kBareGeometry.layers};
  }
  // All is here, or will not come.
  bool ended(uint64_t id) { return complete(id) || !hand_off_->load_status(id).ok(); }
  std::string why(uint64_t id) { return std::string(hand_off_->load_status(id).message()); }
  void turn() { hand_off_->turn(); }
  // How the first loads stand.
  std::string state(const std::string& name) {
    std::string out = name + ":";
    for (uint64_t id = 1; id <= 3; ++id) {
      const absl::Status status = hand_off_->load_status(id);
      if (absl::IsNotFound(status)) continue;
      absl::StrAppend(&out, " load ", id, " has ", hand_off_->layers_loaded(id), " layers, ",
                      status.ToString(), ";");
    }
    return out + " ";
  }
  HandOff& operator*() { return *hand_off_; }
  HandOff* operator->() { return hand_off_.get(); }

 private:
  static constexpr size_t kAlignment = 64;

  std::vector<std::byte> memory_;
  std::unique_ptr<HandOff> hand_off_;
};

// Speaks the messages of a prefill or a decode by hand. Takes nothing while nobody calls it.
class Stranger {
 public:
  explicit Stranger(const std::string& name, bool serves = false) {
    kvtransfer::AgentOptions options;
    options.name = name;
    options.worker = bare_worker();
    options.worker.listen_port = 0;
    options.progress_thread = false;
    options.serve_metadata = serves;
    agent_ = *kvtransfer::Agent::create(std::move(options));
  }

  // How many messages of a kind came since forget(), about one transfer or any.
  size_t count(const std::string& kind, const std::string& transfer = "") {
    agent_->progress();
    for (const kvtransfer::AgentMessage& message : agent_->messages()) {
      said_.push_back(nlohmann::json::parse(message.payload));
    }
    return static_cast<size_t>(
        std::count_if(said_.begin(), said_.end(), [&](const nlohmann::json& message) {
          return message["kind"] == kind && (transfer.empty() || message["transfer"] == transfer);
        }));
  }
  // All that it was told.
  std::string state() const { return "the stranger was told " + nlohmann::json(said_).dump(); }
  const nlohmann::json& last() const { return said_.back(); }
  void forget() { said_.clear(); }
  void say(const std::string& whom, const nlohmann::json& message) {
    say_text(whom, message.dump());
  }
  void say_text(const std::string& whom, const std::string& text) {
    absl::Status status = agent_->notify(whom, text);
    for (; absl::IsResourceExhausted(status); status = agent_->notify(whom, text)) {
      agent_->progress();
    }
    ASSERT_TRUE(status.ok()) << status;
  }
  nlohmann::json want(const std::string& transfer, bool first,
                      const KvGeometry& geometry = kBareGeometry) const {
    return {{"kind", "want"},
            {"transfer", transfer},
            {"first", first},
            {"sure", false},
            {"metadata", absl::BytesToHexString(*agent_->metadata())},
            {"model", "a checkpoint"},
            {"kv", padded_layout(geometry)}};
  }
  kvtransfer::Agent& agent() { return *agent_; }

 private:
  std::unique_ptr<kvtransfer::Agent> agent_;
  std::vector<nlohmann::json> said_;
};

}  // namespace baton::engine::handoff
