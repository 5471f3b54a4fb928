// The forward pass: against a plain transformer, and the same bits however work is cut up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "engine/model/aligned.h"
#include "engine/model/checkpoint.h"
#include "engine/model/elementwise.h"
#include "engine/model/model.h"
#include "engine/model/test_model.h"
#include "engine/model/tokenizer.h"

namespace {
std::atomic<size_t> allocations{0};
}  // namespace

// Counts every allocation of the process, so that a test can show that there are none. Not inlined:
// GCC would warn of malloc and delete, seeing only half of the pair.
[[gnu::noinline]] void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace baton {
namespace {

using ::testing::HasSubstr;
using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

Tokens random_tokens(int count, int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  Tokens tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % uint32_t(vocab));
  return tokens;
}

// A model with a cache of its own, whose free slots hold NaN.
struct Rig {
  explicit Rig(const Checkpoint& checkpoint, int threads = 1, size_t blocks = 80)
      : model(*Model::create(checkpoint)),
        pool(threads),
        memory(model.kv_geometry().cache_bytes(blocks) / 2),
        cache(model.kv_geometry(), memory.data(), blocks),
        workspace(*model.make_workspace({.max_tokens = 256, .max_chunks = 8}, pool)) {
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = 0x7fc0;
  }
  // Some blocks for `tokens` tokens, not in order; each call gives others.
  std::vector<uint32_t> take(size_t tokens) {
    std::vector<uint32_t> table(model.kv_geometry().blocks_for(tokens));
    for (uint32_t& block : table) block = uint32_t((next_block++ * 7) % cache.num_blocks());
    return table;
  }
  Logits run(std::vector<SequenceChunk> chunks) {
    const size_t vocab = size_t(model.config().vocab_size);
    Logits logits(chunks.size() * vocab, -1.0f);
    LayerHook hook;
    const absl::Status status = model.forward(chunks, cache, hook, workspace, logits.data());
    EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
  // Logits of the last token, the prompt cut into pieces of `piece` tokens.
  Logits prompt(const Tokens& tokens, const std::vector<uint32_t>& table, size_t piece) {
    Logits logits;
    for (size_t at = 0; at < tokens.size(); at += piece) {
      const size_t count = std::min(piece, tokens.size() - at);
      logits = run({{std::span(tokens).subspan(at, count), int32_t(at), table, true}});
    }
    return logits;
  }

  Model model;
  ComputePool pool;
  AlignedArray<uint16_t> memory;
  KvCache cache;
  Workspace workspace;
  size_t next_block = 1;
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// A transformer as one would write it on a blackboard, in double, over the whole sequence.
class Blackboard {
 public:
  explicit Blackboard(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::vector<double> logits(const Tokens& tokens) const {
    const ModelConfig& c = checkpoint_.config;
    Matrix x;
    for (const int32_t token : tokens) {
      std::vector<double> row;
      for (int i = 0; i < c.hidden_size; ++i) row.push_back(at(checkpoint_.embedding(), token, i));
      x.push_back(row);
    }
    for (int l = 0; l < c.num_layers; ++l) {
      attention(x, l);
      for (auto& row : x) {
        const auto h = norm(row, checkpoint_.layer(l, kPostNorm));
        auto gate = times(checkpoint_.layer(l, kGate), h);
        const auto up = times(checkpoint_.layer(l, kUp), h);
        for (size_t i = 0; i < gate.size(); ++i)
          gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        add(row, times(checkpoint_.layer(l, kDown), gate));
      }
    }
    return times(checkpoint_.lm_head(), norm(x.back(), checkpoint_.final_norm()));
  }

 private:
  using Matrix = std::vector<std::vector<double>>;
  static double at(const Weight& w, int row, int col) {
    return float_from_bf16(w.data[size_t(row) * size_t(w.cols) + size_t(col)]);
  }
  static void add(std::vector<double>& a, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  }
  static std::vector<double> times(const Weight& w, const std::vector<double>& x) {
    std::vector<double> y(size_t(w.rows), 0.0);
    for (int r = 0; r < w.rows; ++r) {
      for (int i = 0; i < w.cols; ++i) y[size_t(r)] += at(w, r, i) * x[size_t(i)];
    }
    return y;
  }
  std::vector<double> norm(const std::vector<double>& x, const Weight& w) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double f = 1 / std::sqrt(squares / double(x.size()) + checkpoint_.config.rms_norm_eps);
    std::vector<double> y;
    for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] * f * at(w, 0, int(i)));
    return y;
  }
  void rotate(std::vector<double>& x, size_t position) const {
    const int dims = checkpoint_.config.head_dim;
    const std::vector<double> frequencies = rope_frequencies(checkpoint_.config);
    for (size_t head = 0; head < x.size(); head += size_t(dims)) {
      for (int i = 0; i < dims / 2; ++i) {
        const double angle = double(position) * frequencies[size_t(i)];
        double& a = x[head + size_t(i)];
        double& b = x[head + size_t(i + dims / 2)];
        const double rotated = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + a * std::sin(angle);
        a = rotated;
      }
    }
  }
  void attention(Matrix& x, int l) const {
    const ModelConfig& c = checkpoint_.config;
    Matrix q, k, v;
    for (size_t t = 0; t < x.size(); ++t) {
      const auto h = norm(x[t], checkpoint_.layer(l, kInputNorm));
      q.push_back(times(checkpoint_.layer(l, kQuery), h));
      k.push_back(times(checkpoint_.layer(l, kKey), h));
      v.push_back(times(checkpoint_.layer(l, kValue), h));
      rotate(q.back(), t);
      rotate(k.back(), t);
    }
    for (size_t t = 0; t < x.size(); ++t) {
      std::vector<double> mixed(q[t].size());
      for (int head = 0; head < c.num_heads; ++head) {
        const size_t qo = size_t(head) * size_t(c.head_dim);
        const size_t ko = size_t(head / (c.num_heads / c.num_kv_heads)) * size_t(c.head_dim);
        std::vector<double> p;
        double sum = 0;
        for (size_t s = 0; s <= t; ++s) {
          double dot = 0;
          for (size_t i = 0; i < size_t(c.head_dim); ++i) dot += q[t][qo + i] * k[s][ko + i];
          p.push_back(std::exp(dot / std::sqrt(double(c.head_dim))));
          sum += p.back();
        }
        for (size_t s = 0; s <= t; ++s) {
          for (size_t i = 0; i < size_t(c.head_dim); ++i)
            mixed[qo + i] += p[s] / sum * v[s][ko + i];
        }
      }
      add(x[t], times(checkpoint_.layer(l, kOutput), mixed));
    }
  }

  const Checkpoint& checkpoint_;
};

ModelConfig odd_config() {
  ModelConfig config = tiny_model_config();
  config.hidden_size = 48;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.num_layers = 3;
  config.intermediate_size = 80;
  config.vocab_size = 301;
  config.tie_word_embeddings = false;
  return config;
}

TEST(Forward, MatchesAPlainTransformer) {
  for (const ModelConfig& config : {tiny_model_config(), odd_config()}) {
    // Small weights: bf16 KV is then the only rounding that counts.
    Checkpoint checkpoint = make_test_checkpoint(config, 5);
    for (Weight& weight : checkpoint.weights) {
      if (weight.is_vector) continue;
      for (uint16_t& bits : weight.data) bits = bf16_from_float(float_from_bf16(bits) * 0.5f);
    }
    Rig rig(checkpoint);
    const Tokens tokens = random_tokens(37, config.vocab_size, 1);
    const auto table = rig.take(tokens.size());
    const Logits actual = rig.prompt(tokens, table, tokens.size());
    const std::vector<double> expected = Blackboard(checkpoint).logits(tokens);
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], 0.02 * largest) << "logit " << i;
    }
  }
}

TEST(Forward, ChunksAndThreadsDoNotChangeABit) {
  for (const ModelConfig& config : {tiny_model_config(), odd_config()}) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 7);
    const Tokens tokens = random_tokens(150, config.vocab_size, 2);
    Logits first;
    for (const int threads : {1, 3}) {
      for (const size_t piece : {size_t{150}, size_t{64}, size_t{16}, size_t{7}, size_t{1}}) {
        Rig rig(checkpoint, threads);
        const auto table = rig.take(tokens.size());
        const Logits logits = rig.prompt(tokens, table, piece);
        if (first.empty()) first = logits;
        ASSERT_TRUE(same_bits(logits, first)) << threads << " threads, pieces of " << piece;
        ASSERT_FALSE(std::isnan(logits[0]));
      }
    }
  }
}

TEST(Forward, TheKvThatIsStoredDoesNotDependOnChunks) {
  const Checkpoint checkpoint = make_test_checkpoint(odd_config(), 7);
  const Tokens tokens = random_tokens(100, 301, 2);
  Rig whole(checkpoint), single(checkpoint);
  whole.prompt(tokens, whole.take(tokens.size()), 100);
  single.prompt(tokens, single.take(tokens.size()), 1);
  EXPECT_EQ(std::memcmp(whole.memory.data(), single.memory.data(), whole.memory.size() * 2), 0);
}

TEST(Forward, TheBatchDoesNotChangeABit) {
  const ModelConfig config = odd_config();
  const Checkpoint checkpoint = make_test_checkpoint(config, 9);
  const size_t vocab = size_t(config.vocab_size);
  const Tokens a = random_tokens(90, config.vocab_size, 3),
               b = random_tokens(33, config.vocab_size, 4);
  const Tokens c = random_tokens(20, config.vocab_size, 5);
  Rig alone(checkpoint);
  const Logits a_alone = alone.prompt(a, alone.take(90), 90);
  const Logits b_alone = alone.prompt(b, alone.take(33), 33);
  const Logits c_alone = alone.prompt(c, alone.take(20), 20);

  Rig rig(checkpoint, 2);
  const auto ta = rig.take(90), tb = rig.take(33), tc = rig.take(20);
  const std::span<const int32_t> sa(a), sb(b), sc(c);
  rig.run({{sa.first(50), 0, ta, false}, {sb.first(32), 0, tb, false}, {sc.first(1), 0, tc, true}});
  const Logits mixed = rig.run({{sb.subspan(32), 32, tb, true},
                                {sa.subspan(50), 50, ta, true},
                                {sc.subspan(1), 1, tc, true}});
  EXPECT_TRUE(same_bits(std::span(mixed).first(vocab), b_alone));
  EXPECT_TRUE(same_bits(std::span(mixed).subspan(vocab, vocab), a_alone));
  EXPECT_TRUE(same_bits(std::span(mixed).subspan(2 * vocab, vocab), c_alone));
}

TEST(Forward, BlocksOfAnotherCacheGiveTheSameText) {
  // What a decode worker does: the prompt's blocks are copied, layer by layer, to other places.
  const Checkpoint checkpoint = make_test_checkpoint(odd_config(), 11);
  const Tokens tokens = random_tokens(61, 301, 6);
  Rig prefill(checkpoint), decode(checkpoint);
  const auto from = prefill.take(tokens.size() + 1);
  decode.next_block = 33;
  const auto to = decode.take(tokens.size() + 1);
  prefill.prompt(tokens, from, tokens.size());
  for (int layer = 0; layer < 3; ++layer) {
    for (size_t i = 0; i < from.size(); ++i) {
      const auto source = prefill.cache.block(layer, from[i]);
      std::memcpy(decode.cache.block(layer, to[i]).data(), source.data(), source.size());
    }
  }
  const Tokens next = {17};
  EXPECT_TRUE(same_bits(decode.run({{next, 61, to, true}}), prefill.run({{next, 61, from, true}})));
}

TEST(Forward, LogitsDependOnEveryTokenBefore) {
  const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 13);
  Tokens tokens = random_tokens(80, 272, 7);
  Rig rig(checkpoint, 1, 200);
  const Logits before = rig.prompt(tokens, rig.take(80), 80);
  for (const size_t changed : {size_t{0}, size_t{40}, size_t{79}}) {
    Tokens other = tokens;
    other[changed] = (other[changed] + 1) % 272;
    EXPECT_FALSE(same_bits(rig.prompt(other, rig.take(80), 80), before)) << changed;
  }
}

TEST(Forward, RowsThatWantNoLogitsAreNotTouched) {
  Rig rig(make_test_checkpoint(tiny_model_config(), 1));
  const Tokens tokens = {1, 2, 3};
  const auto ta = rig.take(3), tb = rig.take(3);
  const Logits logits = rig.run({{tokens, 0, ta, false}, {tokens, 0, tb, true}});
  EXPECT_TRUE(std::all_of(logits.begin(), logits.begin() + 272, [](float x) { return x == -1; }));
  EXPECT_NE(logits[272], -1.0f);
}

// Records the calls, and what the layer's K holds when they come.
class Recorder : public LayerHook {
 public:
  Recorder(const KvCache& cache, uint32_t block) : cache_(cache), block_(block) {}
  absl::Status before_layer(int layer) override {
    calls.push_back("before " + std::to_string(layer) + (stored(layer) ? " stored" : " empty"));
    return layer == fail_at ? absl::UnavailableError("the layer did not arrive") : absl::OkStatus();
  }
  void kv_written(int layer) override {
    calls.push_back("written " + std::to_string(layer) + (stored(layer) ? " stored" : " empty"));
  }
  std::vector<std::string> calls;
  int fail_at = -1;

 private:
  bool stored(int layer) const { return *cache_.value(layer, block_, 0) != 0x7fc0; }
  const KvCache& cache_;
  uint32_t block_;
};

TEST(Forward, TellsTheHookAroundEachLayersStores) {
  Rig rig(make_test_checkpoint(tiny_model_config(), 1));
  const auto table = rig.take(2);
  const Tokens tokens = {5, 6};
  Logits logits(272);
  Recorder hook(rig.cache, table[0]);
  const SequenceChunk chunk{tokens, 0, table, true};
  ASSERT_TRUE(rig.model.forward({&chunk, 1}, rig.cache, hook, rig.workspace, logits.data()).ok());
  EXPECT_THAT(hook.calls, ::testing::ElementsAre("before 0 empty", "written 0 stored",
                                                 "before 1 empty", "written 1 stored"));
}

TEST(Forward, EndsWithTheHooksError) {
  Rig rig(make_test_checkpoint(tiny_model_config(), 1));
  const auto table = rig.take(2);
  const Tokens tokens = {5, 6};
  Logits logits(272, -1.0f);
  Recorder hook(rig.cache, table[0]);
  hook.fail_at = 1;
  const SequenceChunk chunk{tokens, 0, table, true};
  const absl::Status status =
      rig.model.forward({&chunk, 1}, rig.cache, hook, rig.workspace, logits.data());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(hook.calls.back(), "before 1 empty");
  EXPECT_EQ(logits[0], -1.0f);
}

TEST(Forward, AllocatesNothing) {
  Rig rig(make_test_checkpoint(odd_config(), 1), 2);
  const Tokens tokens = random_tokens(200, 301, 1);
  const auto ta = rig.take(200), tb = rig.take(30);
  const SequenceChunk chunks[] = {{tokens, 0, ta, true},
                                  {std::span(tokens).first(30), 0, tb, true}};
  Logits logits(2 * 301);
  LayerHook hook;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const size_t before = allocations.load();
    const absl::Status status =
        rig.model.forward(chunks, rig.cache, hook, rig.workspace, logits.data());
    const size_t after = allocations.load();
    ASSERT_TRUE(status.ok());
    EXPECT_EQ(after - before, 0u);
  }
}

TEST(Forward, RefusesMalformedChunksAndWritesNothing) {
  Rig rig(make_test_checkpoint(tiny_model_config(), 1));
  const Tokens three = {1, 2, 3}, wild = {1, 272}, negative = {-1};
  const Tokens many(257, 1);
  const std::vector<uint32_t> one = {0}, outside = {80}, plenty(40, 1);
  Logits logits(8 * 272);
  LayerHook hook;
  const auto error = [&](SequenceChunk chunk, float* to) {
    const absl::Status status = rig.model.forward({&chunk, 1}, rig.cache, hook, rig.workspace, to);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error({{}, 0, one, true}, logits.data()), HasSubstr("no tokens"));
  EXPECT_THAT(error({wild, 0, one, true}, logits.data()), HasSubstr("272"));
  EXPECT_THAT(error({negative, 0, one, true}, logits.data()), HasSubstr("-1"));
  EXPECT_THAT(error({three, 15, one, true}, logits.data()), HasSubstr("1 blocks"));
  EXPECT_THAT(error({three, 0, outside, true}, logits.data()), HasSubstr("block 80"));
  EXPECT_THAT(error({three, -1, one, true}, logits.data()), HasSubstr("-1"));
  EXPECT_THAT(error({three, 510, plenty, true}, logits.data()), HasSubstr("512"));
  EXPECT_THAT(error({three, INT32_MAX, plenty, true}, logits.data()), HasSubstr("512"));
  EXPECT_THAT(error({many, 0, plenty, true}, logits.data()), HasSubstr("257 tokens"));
  EXPECT_THAT(error({three, 0, one, true}, nullptr), HasSubstr("logits"));
  for (size_t i = 0; i < rig.memory.size(); ++i) ASSERT_EQ(rig.memory[i], 0x7fc0);

  const std::vector<SequenceChunk> nine(9, {three, 0, one, true});
  EXPECT_TRUE(absl::IsInvalidArgument(
      rig.model.forward(nine, rig.cache, hook, rig.workspace, logits.data())));
  KvGeometry other = rig.model.kv_geometry();
  other.layers = 1;
  KvCache wrong(other, rig.memory.data(), 10);
  EXPECT_TRUE(
      absl::IsInvalidArgument(rig.model.forward({}, wrong, hook, rig.workspace, logits.data())));
}

TEST(Workspace, RefusesImpossibleLimits) {
  Rig rig(make_test_checkpoint(tiny_model_config(), 1));
  for (const WorkspaceLimits& limits : {WorkspaceLimits{0, 1, 1}, WorkspaceLimits{1, 0, 1},
                                        WorkspaceLimits{1, 1, 513}, WorkspaceLimits{1, 1, -1}}) {
    EXPECT_FALSE(rig.model.make_workspace(limits, rig.pool).ok());
  }
  EXPECT_EQ(rig.workspace.limits().max_context, 512);
  EXPECT_GT(rig.workspace.bytes(), 100'000u);
}

TEST(CommittedModel, LoadsIsSmallAndContinuesScripture) {
  const std::string directory = BATON_MODELS "/kjv-1.8m";
  EXPECT_LT(std::filesystem::file_size(directory + "/model.safetensors"), 4'000'000u);
  auto checkpoint = load_checkpoint(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  auto tokenizer = Tokenizer::load(directory + "/tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->vocab_size(), checkpoint->config.vocab_size);
  Rig rig(*checkpoint);
  Tokens tokens = tokenizer->encode("  3 And God said, Let there be light: and there was");
  const auto table = rig.take(tokens.size() + 1);
  const Logits logits = rig.prompt(tokens, table, tokens.size());
  const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  EXPECT_FALSE(tokenizer->token_bytes(int32_t(best)).empty());
  // Far more likely than chance: the words of the text cost less than 3 nats each on average.
  double nats = 0;
  for (size_t i = 8; i + 1 < tokens.size(); ++i) {
    const Logits row = rig.prompt({tokens.begin(), tokens.begin() + long(i)}, table, 64);
    double sum = 0;
    for (const float value : row) sum += std::exp(double(value));
    nats += std::log(sum) - row[size_t(tokens[i])];
  }
  EXPECT_LT(nats / double(tokens.size() - 9), 3.0);
}

}  // namespace
}  // namespace baton
