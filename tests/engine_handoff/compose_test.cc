// Every pair of caches: ours and one that is laid out as vLLM's are, of one rank or two, in memory
// of the host or of a device, read or written. What arrives is what was there, to the bit.
#include "kvtransfer/session/direct_mover.h"
#include "tests/engine_handoff/bare_hand_off.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

constexpr int kLayers = 2, kHeads = 4, kSize = 8;
constexpr size_t kTokens = 64;
constexpr uint32_t kTheirTokens = 32;  // of a block

// Number e of K or V of a token and a head; every one of its own.
uint16_t number(int layer, int head, size_t token, int element, bool value) {
  const size_t n =
      (((static_cast<size_t>(layer) * kHeads + static_cast<size_t>(head)) * kTokens + token) *
           kSize +
       static_cast<size_t>(element)) *
          2 +
      (value ? 1 : 0);
  return static_cast<uint16_t>(n + 1);
}

// A rank of an engine, with a cache. The sequence lies in the blocks that blocks() says.
class Side {
 public:
  virtual ~Side() {
    if (fake_ != nullptr) fake_->free(address_);
  }
  virtual kvtransfer::KvSession& session() = 0;
  virtual std::string address() = 0;
  virtual uint16_t& at(int layer, int head, size_t token, int element, bool value) = 0;
  virtual uint32_t tokens_of_block() const = 0;

  std::vector<uint32_t> blocks() const {
    std::vector<uint32_t> out;
    for (size_t i = 0; i < kTokens / tokens_of_block(); ++i) {
      out.push_back(static_cast<uint32_t>(2 * i + 1));
    }
    return out;
  }
  template <typename Visit>
  void each(Visit visit) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = first_; head < first_ + heads_; ++head) {
        for (size_t token = 0; token < kTokens; ++token) {
          for (int i = 0; i < kSize; ++i) {
            for (const bool value : {false, true}) {
              visit(at(layer, head, token, i, value), number(layer, head, token, i, value));
            }
          }
        }
      }
    }
  }

 protected:
  // `fake`: a device, which has the cache; null: the host.
  Side(gpudirect::FakeDriver* fake, uint32_t ranks, uint32_t rank, size_t bytes_of_head)
      : heads_(kHeads / static_cast<int>(ranks)),
        first_(heads_ * static_cast<int>(rank)),
        bytes_(bytes_of_head * static_cast<size_t>(heads_)),
        fake_(fake) {
    if (fake_ == nullptr) {
      host_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes_ + 4095) / 4096 * 4096)));
      view_ = host_.get();
      address_ = reinterpret_cast<uint64_t>(view_);
    } else {
      address_ = fake_->allocate(bytes_, 0);
      view_ = fake_->view(address_, bytes_);
    }
    std::memset(view_, 0, bytes_);
  }
  const int heads_, first_;
  const size_t bytes_;
  uint64_t address_ = 0;  // of the cache, as its engine knows it
  std::byte* view_ = nullptr;
  gpudirect::FakeDriver* const fake_;

 private:
  std::unique_ptr<std::byte, void (*)(void*)> host_{nullptr, std::free};
};

class Ours : public Side {
 public:
  Ours(gpudirect::FakeDriver* fake, const std::string& name, uint32_t ranks, uint32_t rank)
      : Side(fake, ranks, rank,
             KvGeometry{.layers = kLayers, .kv_heads = 1, .head_dim = kSize}.cache_bytes(kBlocks)),
        geometry_{.layers = kLayers, .kv_heads = heads_, .head_dim = kSize} {
    HandOffOptions options;
    options.name = name;
    options.shard = {.rank = rank, .ranks = ranks, .heads = kHeads};
    options.model = "a checkpoint";
    options.fingerprint = "an arithmetic";
    options.staging_bytes = 1 << 20;
    options.worker = bare_worker();
    session_ = *HandOff::create(std::move(options));
    const KvCache there(geometry_, reinterpret_cast<void*>(address_), kBlocks);
    const auto device = fake == nullptr ? std::nullopt : std::optional(0);
    EXPECT_TRUE(session_->use_cache(there, device).ok());
  }
  ~Ours() override { session_->close(); }
  kvtransfer::KvSession& session() override { return *session_; }
  std::string address() override { return session_->agent()->address(); }
  uint32_t tokens_of_block() const override { return kBlockTokens; }
  uint16_t& at(int layer, int head, size_t token, int element, bool value) override {
    const uint32_t block = blocks()[token / kBlockTokens];
    const size_t slot = token % kBlockTokens;
    return value ? cache().value(layer, block,
                                 head - first_)[slot * kSize + static_cast<size_t>(element)]
                 : cache().key(layer, block,
                               head - first_)[static_cast<size_t>(element) * kBlockTokens + slot];
  }

 private:
  static constexpr size_t kBlocks = 16;
  KvCache cache() { return {geometry_, view_, kBlocks}; }
  const KvGeometry geometry_;
  std::unique_ptr<HandOff> session_;
};

// Blocks of [token][K of all heads, V of all heads].
class Theirs : public Side {
 public:
  Theirs(gpudirect::FakeDriver* fake, const std::string& name, uint32_t ranks, uint32_t rank)
      : Side(fake, ranks, rank, kLayers * kBlocks * size_t{kTheirTokens} * 2 * kSize * 2) {
    kvtransfer::AgentOptions agent;
    agent.name = absl::StrCat(name, "/", rank);
    agent.worker = bare_worker();
    agent.serve_metadata = true;
    agent_ = *kvtransfer::Agent::create(std::move(agent));
    const size_t bytes = 2 * block_numbers();
    const uint64_t base = address_;
    const kvtransfer::Descriptor all{base, bytes_, 0};
    const auto kind =
        fake == nullptr ? kvtransfer::MemoryKind::kDram : kvtransfer::MemoryKind::kVram;
    EXPECT_TRUE(agent_->register_memory(absl::MakeConstSpan(&all, 1), kind).ok());
    const int token = 2 * heads_ * kSize;
    nlohmann::json packing = {{"block_tokens", kTheirTokens},
                              {"bytes", bytes},
                              {"dtype", "bfloat16"},
                              {"head_size", kSize},
                              {"heads", heads_}};
    for (const auto& [name_of, start] : {std::pair{"key", 0}, {"value", heads_ * kSize}}) {
      packing[name_of] = {{"start", start},
                          {"tokens", {{kTheirTokens, token}}},
                          {"heads", {{heads_, kSize}}},
                          {"elements", {{kSize, 1}}}};
    }
    nlohmann::json said = {{"identity", "theirs"},
                           {"model", "a checkpoint"},
                           {"ranks", ranks},
                           {"rank", rank},
                           {"heads", kHeads},
                           {"layers", std::vector<int>(kLayers)},
                           {"device", fake != nullptr},
                           {"rows", nlohmann::json::array()}};
    said["kv"] = packing;
    said["kv"]["layers"] = {0, 1};
    packing["total_heads"] = kHeads;
    packing["first_head"] = first_;
    said["kinds"] = nlohmann::json::array({packing});
    for (int layer = 0; layer < kLayers; ++layer) {
      said["rows"].push_back(
          {base + static_cast<size_t>(layer) * kBlocks * bytes, bytes, 0, bytes, kBlocks});
    }
    kvtransfer::KvSessionOptions options;
    options.agent = agent_.get();
    options.name = name;
    session_ = *kvtransfer::session::make_direct_session(said.dump(), options);
  }
  ~Theirs() override { session_->close(); }
  kvtransfer::KvSession& session() override { return *session_; }
  std::string address() override { return agent_->address(); }
  uint32_t tokens_of_block() const override { return kTheirTokens; }
  uint16_t& at(int layer, int head, size_t token, int element, bool value) override {
    const size_t block = blocks()[token / kTheirTokens];
    const size_t slot = (token % kTheirTokens) * 2 + (value ? 1 : 0);
    return reinterpret_cast<uint16_t*>(
        view_)[(static_cast<size_t>(layer) * kBlocks + block) * block_numbers() +
               (slot * static_cast<size_t>(heads_) + static_cast<size_t>(head - first_)) * kSize +
               static_cast<size_t>(element)];
  }

 private:
  static constexpr size_t kBlocks = 8;
  size_t block_numbers() const {
    return size_t{kTheirTokens} * 2 * static_cast<size_t>(heads_) * kSize;
  }
  std::unique_ptr<kvtransfer::Agent> agent_;
  std::unique_ptr<kvtransfer::KvSession> session_;
};

// Who has ours: prefill, decode; ranks of each; whether prefill writes, and whether in devices.
using Case = std::tuple<std::pair<bool, bool>, uint32_t, uint32_t, bool, bool>;
class Pairs : public testing::TestWithParam<Case> {};

// Promise(kv): Caches of Baton and of vLLM's kind go together: of one rank or two at either end,
//   read or written, of the host or a device | what arrives is compared number by number
TEST_P(Pairs, WhatArrivesIsWhatWasThere) {
  const auto& [ours, from_ranks, to_ranks, push, device] = GetParam();
  gpudirect::FakeOptions without;
  without.attributes.erase(gpudirect::kDmaBufSupported);
  std::optional<gpudirect::InstalledFake> driver;
  if (device) driver.emplace(without);
  gpudirect::FakeDriver* const fake = device ? &driver->fake() : nullptr;
  const auto turn = [&] {
    if (fake != nullptr) fake->run_all();
  };
  const auto make = [&](bool is_ours, const std::string& name, uint32_t ranks) {
    std::vector<std::unique_ptr<Side>> sides;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (is_ours) {
        sides.push_back(std::make_unique<Ours>(fake, name, ranks, rank));
      } else {
        sides.push_back(std::make_unique<Theirs>(fake, name, ranks, rank));
      }
    }
    return sides;
  };
  const auto from = make(ours.first, "prefill", from_ranks);
  const auto to = make(ours.second, "decode", to_ranks);
  kvtransfer::KvTransfer transfer{.transfer = "t", .ranks = from_ranks};
  for (size_t i = 0; i < from.size(); ++i) {
    transfer.workers.push_back({absl::StrCat("prefill/", i), from[i]->address()});
    from[i]->each([](uint16_t& there, uint16_t want) { there = want; });
  }
  for (const auto& side : to) {
    kvtransfer::KvOrder order{.id = 1, .from = transfer};
    order.runs = {{.first_block = 0, .blocks = side->blocks(), .tokens = {0, kTokens}}};
    order.timeout = kNever;
    order.push = push;
    ASSERT_TRUE(side->session().load(std::move(order)).ok());
  }
  std::vector<uint64_t> sends;
  for (const auto& side : from) {
    kvtransfer::KvSession& session = side->session();
    sends.push_back(session.open("t", kTokens));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      if (ours.first) {
        session.computed(sends.back(), layer, kTokens, side->blocks());
      } else {
        ASSERT_TRUE(session.save(sends.back(), layer, 0, side->blocks()).ok());
      }
    }
    session.hold(sends.back());
  }
  for (const auto& side : to) {
    until(
        [&] {
          return !side->session().load_status(1).ok() ||
                 side->session().layers_loaded(1) == kLayers;
        },
        turn);
    ASSERT_TRUE(side->session().load_status(1).ok()) << side->session().load_status(1);
    size_t wrong = 0;
    side->each([&](uint16_t& there, uint16_t want) { wrong += there != want ? 1 : 0; });
    EXPECT_EQ(wrong, 0u);
  }
  // ... and prefill has its blocks back.
  for (const auto& side : from) until([&] { return !side->session().released().empty(); }, turn);
}

std::string name_of(const testing::TestParamInfo<Case>& test) {
  const auto& [ours, from_ranks, to_ranks, push, device] = test.param;
  return absl::StrCat(ours.first ? "Ours" : "Theirs", from_ranks, "To",
                      ours.second ? "Ours" : "Theirs", to_ranks, push ? "Pushed" : "Pulled",
                      device ? "OnDevices" : "OnHosts");
}

INSTANTIATE_TEST_SUITE_P(All, Pairs,
                         testing::Combine(testing::Values(std::pair(true, true),
                                                          std::pair(true, false),
                                                          std::pair(false, true)),
                                          testing::Values(1U, 2U), testing::Values(1U, 2U),
                                          testing::Bool(), testing::Bool()),
                         name_of);

}  // namespace
}  // namespace baton::engine::handoff
