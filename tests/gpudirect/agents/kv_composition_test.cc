// Every pair of what composes when KV goes from one engine to another: pushed or pulled; between
// connectors, whose layouts are Baton's, or sessions, whose caches are said in JSON as vLLM's are;
// from one rank or two; in memory of the host or of a device. All end in the same bytes.
#include <nlohmann/json.hpp>

#include "kvtransfer/baton_connector.h"
#include "kvtransfer/session/direct_mover.h"
#include "tests/gpudirect/agents/device_agents.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

using nlohmann::json;

constexpr uint32_t kLayers = 2, kBlocks = 6, kHeads = 4, kHeadSize = 8, kTokens = 40;
constexpr uint32_t kPrefillBlock = 16, kDecodeBlock = 8;

struct Case {
  bool push = false, ours = false;
  uint32_t ranks = 1;
  bool device = false;
};

// Each block has K and then V, [token][head][element], in bf16.
KvLayout layout_of(uint32_t block_tokens, uint32_t first_head, uint32_t heads, bool device) {
  const KvShape shape{.layers = kLayers,
                      .blocks = kBlocks,
                      .block_tokens = block_tokens,
                      .total_heads = kHeads,
                      .first_head = first_head,
                      .heads = heads,
                      .head_size = kHeadSize};
  KvLayout layout = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kInBlock, true);
  layout.model.weights = "a model";
  for (KvBuffer& buffer : layout.buffers) {
    buffer.device = device ? KvDevice::kCuda : KvDevice::kHost;
  }
  return layout;
}

// A worker: its cache, and a connector or a session over it.
struct Side {
  Side(InstalledFake& driver, const Case& what, const std::string& name, uint32_t block_tokens,
       uint32_t rank, uint32_t ranks)
      : fake(driver.fake()),
        tokens(block_tokens),
        heads(kHeads / ranks),
        first_head(rank * heads),
        layout(layout_of(block_tokens, first_head, heads, what.device)) {
    for (const KvBuffer& buffer : layout.buffers) {
      if (what.device) {
        memory.push_back(reinterpret_cast<void*>(fake.allocate(64 << 10, 0)));
        views.push_back(fake.view(reinterpret_cast<uint64_t>(memory.back()), buffer.bytes));
      } else {
        host.emplace_back(buffer.bytes);
        memory.push_back(views.emplace_back(host.back().data()));
      }
      std::memset(views.back(), 0, buffer.bytes);
    }
    what.ours ? connect(name) : open(name, rank, ranks, what.device);
  }
  ~Side() {
    connector.reset();
    if (session != nullptr) session->close();
    session.reset();
    agent.reset();
    for (void* each : memory) {
      if (host.empty()) fake.free(reinterpret_cast<uint64_t>(each));
    }
  }
  static WorkerOptions worker() {
    WorkerOptions options;
    options.key = *ClusterKey::from_bytes("a secret for these tests, 32 bytes long");
    options.providers = {"tcp"};
    return options;
  }
  void connect(const std::string& name) {
    BatonConnectorOptions options;
    options.worker = worker();
    options.worker.name = name;
    options.allow_pull = true;
    connector = *make_baton_connector(options);
    EXPECT_TRUE(connector->register_cache(layout, memory).ok());
  }
  void open(const std::string& name, uint32_t rank, uint32_t ranks, bool device) {
    AgentOptions options;
    options.name = absl::StrCat(name, "/", rank);
    options.worker = worker();
    options.serve_metadata = true;
    agent = *Agent::create(std::move(options));
    const uint64_t bytes = 2ULL * tokens * heads * kHeadSize * 2, numbers = heads * kHeadSize;
    const json axes = {{"heads", {{heads, kHeadSize}}},
                       {"tokens", {{tokens, numbers}}},
                       {"elements", {{kHeadSize, 1}}}};
    json key = axes, value = axes, rows = json::array();
    key["start"] = 0;
    value["start"] = tokens * numbers;
    for (size_t i = 0; i < memory.size(); ++i) {
      const auto address = reinterpret_cast<uint64_t>(memory[i]);
      const Descriptor range{address, layout.buffers[i].bytes, 0};
      EXPECT_TRUE(agent
                      ->register_memory(absl::MakeConstSpan(&range, 1),
                                        device ? MemoryKind::kVram : MemoryKind::kDram)
                      .ok());
      rows.push_back({address, bytes, 0, bytes, kBlocks});
    }
    const json cache = {{"identity", "a model"},
                        {"device", device},
                        {"rows", rows},
                        {"layers", {0, 0}},
                        {"kinds",
                         {{{"block_tokens", tokens},
                           {"bytes", bytes},
                           {"dtype", "bfloat16"},
                           {"head_size", kHeadSize},
                           {"heads", heads},
                           {"total_heads", kHeads},
                           {"first_head", first_head},
                           {"key", key},
                           {"value", value}}}},
                        {"rank", rank},
                        {"ranks", ranks},
                        {"heads", kHeads}};
    KvSessionOptions session_options;
    session_options.agent = agent.get();
    auto made = session::make_direct_session(cache.dump(), std::move(session_options));
    ASSERT_TRUE(made.ok()) << made.status();
    session = *std::move(made);
  }

  // A number of K or V, by what it is of.
  uint16_t& at(uint32_t layer, uint32_t block, uint32_t value, uint32_t token, uint32_t head,
               uint32_t element) {
    const size_t place =
        (((block * 2 + value) * tokens + token) * heads + head) * kHeadSize + element;
    return reinterpret_cast<uint16_t*>(views[layer])[place];
  }
  template <typename Visit>
  void for_each(const std::vector<uint32_t>& blocks, const Visit& visit) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t i = 0; i < kTokens * 2 * heads * kHeadSize; ++i) {
        const uint32_t element = i % kHeadSize, head = i / kHeadSize % heads;
        const uint32_t value = i / kHeadSize / heads % 2, token = i / kHeadSize / heads / 2;
        const auto number = static_cast<uint16_t>(1 + layer * 7919 + value * 104729 + token * 131 +
                                                  (first_head + head) * 17 + element);
        visit(at(layer, blocks[token / tokens], value, token % tokens, head, element), number);
      }
    }
  }

  FakeDriver& fake;
  const uint32_t tokens, heads, first_head;
  const KvLayout layout;
  std::list<std::vector<std::byte>> host;
  std::vector<void*> memory;
  std::vector<std::byte*> views;
  std::unique_ptr<Agent> agent;
  std::unique_ptr<KvSession> session;
  std::unique_ptr<KvConnector> connector;
};

class KvComposition : public testing::TestWithParam<std::tuple<bool, bool, uint32_t, bool>> {
 protected:
  KvComposition() {
    std::tie(what_.push, what_.ours, what_.ranks, what_.device) = GetParam();
    for (uint32_t rank = 0; rank < what_.ranks; ++rank) {
      prefill_.push_back(
          std::make_unique<Side>(driver_, what_, "prefill", kPrefillBlock, rank, what_.ranks));
      prefill_.back()->for_each(kHere, [](uint16_t& at, uint16_t number) { at = number; });
    }
    decode_ = std::make_unique<Side>(driver_, what_, "decode", kDecodeBlock, 0, 1);
  }
  void expect_here() {
    size_t wrong = 0;
    decode_->for_each(kThere,
                      [&](uint16_t& at, uint16_t number) { wrong += at == number ? 0 : 1; });
    EXPECT_EQ(wrong, 0U);
  }
  void turn() { driver_.fake().run_all(); }
  void load_by_connector();
  void load_by_session();

  const std::vector<uint32_t> kHere = {4, 1, 2}, kThere = {5, 0, 3, 1, 2};
  Case what_;
  InstalledFake driver_{[] {
    gpudirect::FakeOptions options;
    options.attributes.erase(gpudirect::kDmaBufSupported);
    return options;
  }()};
  std::vector<std::unique_ptr<Side>> prefill_;
  std::unique_ptr<Side> decode_;
};

void KvComposition::load_by_connector() {
  KvLoad load;
  load.id = 1;
  load.pull = !what_.push;
  for (auto& each : prefill_) load.shards.push_back(each->connector->address());
  load.tokens.assign(kTokens, 3);
  load.blocks = kThere;
  ASSERT_TRUE(decode_->connector->start_load(load).ok());
  size_t computed = 0;
  std::vector<uint64_t> jobs(prefill_.size());
  until(
      [&] {
        for (size_t i = 0; i < prefill_.size(); ++i) {
          KvConnector& each = *prefill_[i]->connector;
          each.progress();
          const std::optional<KvJob> job = each.next_job();
          if (!job) continue;
          jobs[i] = job->job;
          for (uint32_t layer = 0; layer < kLayers; ++layer) {
            EXPECT_TRUE(each.save_layer(job->job, layer, 0, kHere).ok());
          }
          EXPECT_TRUE(each.give_payload(job->job, "a token").ok());
          each.finish_job(job->job, absl::OkStatus());
          ++computed;
        }
        decode_->connector->progress();
        return !decode_->connector->load_status(1).ok() ||
               (computed == prefill_.size() && decode_->connector->layers_loaded(1) == kLayers &&
                decode_->connector->load_payload(1).ok());
      },
      [&] { turn(); });
  EXPECT_TRUE(decode_->connector->load_status(1).ok()) << decode_->connector->load_status(1);
  expect_here();
  EXPECT_EQ(*decode_->connector->load_payload(1), "a token");
  until([&] { return decode_->connector->end_load(1); }, [&] { turn(); });
  for (size_t i = 0; i < prefill_.size(); ++i) {
    until([&] { return prefill_[i]->connector->is_saved(jobs[i]); }, [&] { turn(); });
  }
}

void KvComposition::load_by_session() {
  KvOrder order;
  order.id = 1;
  order.from = {.transfer = "t", .agent = "prefill", .finished = true, .ranks = what_.ranks};
  std::vector<uint64_t> sends;
  for (auto& each : prefill_) {
    absl::StrAppend(&order.from.address, order.from.address.empty() ? "" : ",",
                    each->agent->address());
    sends.push_back(each->session->open("t", kTokens));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(each->session->save(sends.back(), layer, 0, kHere).ok());
    }
    each->session->hold(sends.back());
  }
  order.runs.push_back({0, kThere, {0, kTokens}});
  order.timeout = until_gives_up();
  order.push = what_.push;
  ASSERT_TRUE(decode_->session->load(std::move(order)).ok());
  std::optional<KvLoaded> loaded;
  until([&] { return (loaded = decode_->session->next_loaded()).has_value(); }, [&] { turn(); });
  EXPECT_TRUE(loaded->status.ok()) << loaded->status;
  expect_here();
  for (size_t i = 0; i < prefill_.size(); ++i) {
    std::optional<uint64_t> free;
    until([&] { return (free = prefill_[i]->session->next_released()).has_value(); },
          [&] { turn(); });
    EXPECT_EQ(*free, sends[i]);
  }
}

TEST_P(KvComposition, EndsInTheSameBytes) { what_.ours ? load_by_connector() : load_by_session(); }

std::string name_of(const testing::TestParamInfo<KvComposition::ParamType>& param) {
  const auto& [push, ours, ranks, device] = param.param;
  return absl::StrCat(push ? "push" : "pull", ours ? "_ours" : "_vllm", "_ranks", ranks,
                      device ? "_device" : "_host");
}
INSTANTIATE_TEST_SUITE_P(All, KvComposition,
                         testing::Combine(testing::Bool(), testing::Bool(), testing::Values(1U, 2U),
                                          testing::Bool()),
                         name_of);

}  // namespace
}  // namespace baton::kvtransfer
