// The forward pass: what it asks of its caller and promises in return.
#include <new>

#include "tests/engine_model/model_rig.h"
#include "tests/test.h"

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

namespace baton::engine {
namespace {

using ::testing::HasSubstr;

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

void expect_no_allocations(const ModelConfig& config) {
  Rig rig(make_test_checkpoint(config, 1), 2);
  const Tokens tokens = random_tokens(200, config.vocab_size, 1);
  const auto ta = rig.take(200), tb = rig.take(30);
  const SequenceChunk chunks[] = {{tokens, 0, ta, true},
                                  {std::span(tokens).first(30), 0, tb, true}};
  Logits logits(2 * size_t(config.vocab_size));
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

TEST(Forward, AllocatesNothing) {
  for (const ModelConfig& config : {odd_config(), tiny_qwen3_moe_config(), tiny_mixtral_config()}) {
    expect_no_allocations(config);
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

}  // namespace
}  // namespace baton::engine
