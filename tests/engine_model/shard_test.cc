// Parts of a model on several ranks: the logits and the KV have the bits of the whole model's.
#include <barrier>

#include "tests/engine_model/model_rig.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

// Ranks that are threads of one process.
class Threads {
 public:
  explicit Threads(int ranks) : barrier_(ranks), parts_(static_cast<size_t>(ranks)) {}

  class Rank final : public ShardExchange {
   public:
    Rank(Threads& all, int rank) : all_(all), rank_(static_cast<size_t>(rank)) {}
    absl::StatusOr<float*> allocate(size_t floats) override {
      memory_.emplace_back(floats);
      return memory_.back().data();
    }
    absl::Status all_gather(float* all, size_t count) override {
      ++calls;
      all_.parts_[rank_] = all;
      all_.barrier_.arrive_and_wait();
      for (size_t r = 0; r < all_.parts_.size(); ++r) {
        if (r != rank_) std::copy_n(all_.parts_[r] + r * count, count, all + r * count);
      }
      all_.barrier_.arrive_and_wait();
      return calls == fail_at ? absl::UnavailableError("the link is gone") : absl::OkStatus();
    }
    int calls = 0;
    int fail_at = 0;

   private:
    Threads& all_;
    const size_t rank_;
    std::vector<AlignedArray<float>> memory_;
  };

 private:
  std::barrier<> barrier_;
  std::vector<float*> parts_;
};

// One rank's part of a model and its cache.
struct Part {
  Part(const Checkpoint& checkpoint, Arithmetic arithmetic, ModelShard shard, Threads& threads)
      : exchange(threads, shard.rank),
        model(*Model::create(checkpoint, arithmetic, shard)),
        memory(model.kv_geometry().cache_bytes(kBlocks) / 2),
        cache(model.kv_geometry(), memory.data(), kBlocks),
        workspace(*model.make_workspace({.max_tokens = 64, .max_chunks = 3}, pool, &exchange)) {}
  static constexpr size_t kBlocks = 16;
  Threads::Rank exchange;
  Model model;
  ComputePool pool;
  AlignedArray<uint16_t> memory;
  KvCache cache;
  Workspace workspace;
};

struct AllLogits : LayerHook {
  void token_logits(size_t, size_t, std::span<const float> logits) override {
    seen.insert(seen.end(), logits.begin(), logits.end());
  }
  Logits seen;
};

// A prompt in two pieces, then two sequences at once: the logits of every token, and of every step.
Logits walk(const Model& model, KvCache& cache, Workspace& workspace) {
  const int vocab = model.config().vocab_size;
  const Tokens first = random_tokens(50, vocab, 3), second = random_tokens(20, vocab, 4);
  const std::vector<uint32_t> table = {5, 1, 9, 3}, other = {2, 7};
  const std::vector<std::vector<SequenceChunk>> steps = {
      {{std::span(first).first(33), 0, table, false, true}},
      {{std::span(first).subspan(33, 16), 33, table, true}, {second, 0, other, true, true}},
      {{std::span(first).last(1), 49, table, true}}};
  AllLogits hook;
  for (const std::vector<SequenceChunk>& step : steps) {
    Logits logits(step.size() * size_t(vocab), 0.0f);
    const absl::Status status = model.forward(step, cache, hook, workspace, logits.data());
    EXPECT_TRUE(status.ok()) << status;
    hook.seen.insert(hook.seen.end(), logits.begin(), logits.end());
  }
  return hook.seen;
}

void expect_the_same_bits(const ModelConfig& config, Arithmetic arithmetic, int ranks) {
  const Checkpoint checkpoint = make_test_checkpoint(config, 11);
  Threads nobody(1);
  Part whole(checkpoint, arithmetic, {}, nobody);
  const Logits expected = walk(whole.model, whole.cache, whole.workspace);
  ASSERT_FALSE(std::isnan(expected[0]));

  Threads threads(ranks);
  std::vector<std::unique_ptr<Part>> parts;
  for (int r = 0; r < ranks; ++r) {
    parts.push_back(std::make_unique<Part>(checkpoint, arithmetic, ModelShard{r, ranks}, threads));
  }
  std::vector<Logits> logits(parts.size());
  std::vector<std::thread> running;
  for (size_t r = 0; r < parts.size(); ++r) {
    running.emplace_back(
        [&, r] { logits[r] = walk(parts[r]->model, parts[r]->cache, parts[r]->workspace); });
  }
  for (std::thread& thread : running) thread.join();
  const int own = config.num_kv_heads / ranks;
  const size_t head_bytes = size_t{2} * 2 * config.head_dim * kBlockTokens;
  for (size_t r = 0; r < parts.size(); ++r) {
    EXPECT_TRUE(same_bits(logits[r], expected)) << "rank " << r << " of " << ranks;
    EXPECT_EQ(parts[r]->model.fingerprint(), whole.model.fingerprint());
    ASSERT_EQ(parts[r]->cache.geometry().kv_heads, own);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      for (const size_t block :
           {5, 1, 2}) {  // full ones: the slots behind a sequence hold anything
        for (int h = 0; h < own; ++h) {
          EXPECT_EQ(std::memcmp(parts[r]->cache.key(layer, block, h),
                                whole.cache.key(layer, block, int(r) * own + h), head_bytes),
                    0)
              << "layer " << layer << " block " << block << " head " << h << " of rank " << r;
        }
      }
    }
  }
  // Each holds its share of the weights; embeddings are whole, and slices are of 16 columns.
  if (config.hidden_size >= 16 * 4 && ranks == 4) {
    EXPECT_LT(parts[0]->model.weight_bytes(), whole.model.weight_bytes() * 2 / 3);
  }
}

// Kinds of models, cut so that slices are uneven and, of four ranks, some have none of a product.
std::vector<ModelConfig> configs(int ranks) {
  std::vector<ModelConfig> list = {odd_config()};
  if (ranks == 2) {
    for (const ModelConfig& config : family_configs()) list.push_back(config);
  }
  for (ModelConfig& config : list) {
    config.num_kv_heads = 4;
    config.num_heads = 8;
  }
  ModelConfig wide = odd_config();
  wide.hidden_size = 96;
  wide.intermediate_size = 208;
  wide.vocab_size = 1003;
  wide.num_heads = wide.num_kv_heads = 4;
  list.push_back(wide);
  ModelConfig experts = tiny_qwen3_moe_config();
  experts.hidden_size = 48;
  experts.num_heads = experts.num_kv_heads = 4;
  experts.num_experts = 9;
  experts.expert_size = 80;
  list.push_back(experts);
  return list;
}

class ShardForward : public testing::TestWithParam<std::tuple<int, Arithmetic>> {};

TEST_P(ShardForward, HasTheBitsOfOneRank) {
  const auto [ranks, arithmetic] = GetParam();
  for (const ModelConfig& config : configs(ranks)) {
    expect_the_same_bits(config, arithmetic, ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardForward,
                         testing::Combine(testing::Values(2, 4),
                                          testing::Values(Arithmetic::kFp32, Arithmetic::kBf16)),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) +
                                  arithmetic_name(std::get<1>(test.param));
                         });

TEST(ShardForward, ThreeRanksOfSixHeads) {
  ModelConfig config = odd_config();
  config.num_heads = 12;
  config.num_kv_heads = 6;
  expect_the_same_bits(config, Arithmetic::kFp32, 3);
}

TEST(Shard, SlicesCoverAllColumnsOnce) {
  for (const int columns : {1, 15, 16, 17, 48, 301, 1003, 32000, 151936}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      int next = 0;
      for (int r = 0; r < ranks; ++r) {
        const Slice slice = slice_of(columns, {r, ranks});
        EXPECT_EQ(slice.begin, std::min(next, columns));
        EXPECT_TRUE(slice.size() == 0 || slice.begin % 16 == 0);
        EXPECT_LE(slice.size(), ranks > 1 ? slice_width(columns, ranks) : columns);
        next = slice.end;
      }
      EXPECT_EQ(next, columns) << columns << " over " << ranks;
    }
  }
}

TEST(Shard, DegreesThatDoNotDivideTheHeadsAreRefused) {
  ModelConfig config = odd_config();  // 6 heads, 2 KV heads
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  for (const ModelShard shard : {ModelShard{0, 3}, {0, 4}, {2, 2}, {-1, 2}, {0, 0}}) {
    const auto model = Model::create(checkpoint, Arithmetic::kFp32, shard);
    EXPECT_TRUE(absl::IsInvalidArgument(model.status())) << shard.rank << " of " << shard.ranks;
  }
  const auto model = Model::create(checkpoint, Arithmetic::kFp32, {0, 3});
  EXPECT_NE(model.status().message().find("3 does not divide the model's 2 KV heads"),
            std::string::npos)
      << model.status();
}

TEST(Shard, APartAloneComputesNothing) {
  const Model model =
      *Model::create(make_test_checkpoint(odd_config(), 1), Arithmetic::kFp32, {1, 2});
  ComputePool pool;
  const auto workspace = model.make_workspace({.max_tokens = 4, .max_chunks = 1}, pool);
  EXPECT_TRUE(absl::IsInvalidArgument(workspace.status())) << workspace.status();
}

// Wherever in a pass the exchange fails, the pass ends with that error.
TEST(Shard, ErrorsOfTheExchangeEndThePass) {
  ModelConfig config = tiny_model_config();
  config.num_kv_heads = config.num_heads;
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  const Tokens tokens = random_tokens(5, config.vocab_size, 1);
  const std::vector<uint32_t> table = {0};
  int calls = 1;
  for (int fail_at = 0; fail_at <= calls; ++fail_at) {
    Threads threads(2);
    std::vector<std::unique_ptr<Part>> parts;
    for (int r = 0; r < 2; ++r) {
      parts.push_back(
          std::make_unique<Part>(checkpoint, Arithmetic::kFp32, ModelShard{r, 2}, threads));
      parts.back()->exchange.fail_at = fail_at;
    }
    const auto pass = [&](Part& part) {
      Logits logits(size_t(config.vocab_size));
      AllLogits hook;
      const SequenceChunk chunk{tokens, 0, table, true, true};
      return part.model.forward({&chunk, 1}, part.cache, hook, part.workspace, logits.data());
    };
    absl::Status other;
    std::thread thread([&] { other = pass(*parts[1]); });
    const absl::Status status = pass(*parts[0]);
    thread.join();
    EXPECT_EQ(status.ok(), fail_at == 0);
    EXPECT_EQ(other.ok(), fail_at == 0);
    if (fail_at == 0) {
      calls = parts[0]->exchange.calls;
      EXPECT_EQ(calls, 4 * config.num_layers + 1 + 2);  // logits of the last token, of 3 and of 2
    } else {
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_EQ(parts[0]->exchange.calls, fail_at);
    }
  }
}

}  // namespace
}  // namespace baton::engine
