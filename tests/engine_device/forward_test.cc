// A forward pass on a device: the CPU's logits and KV, to the bit, and its contract.
#include "engine/kernels/aligned.h"
#include "engine/model/model.h"
#include "engine/serve/requests/sampling.h"
#include "tests/engine_device/device_rig.h"
#include "tests/test.h"

namespace baton::engine::device {
namespace {

using gpudirect::FakeDriver;

constexpr size_t kBlocks = 32;
const WorkspaceLimits kLimits{.max_tokens = 64, .max_chunks = 4, .max_context = 400};

// Of a step that waits for nobody, as most of decoding.
class Calm : public LayerHook {
 public:
  explicit Calm(bool hears) : hears_(hears) {}
  bool waits() const override { return false; }
  bool hears_layers() const override { return hears_; }
  void kv_written(int layer) override { written.push_back(layer); }
  std::vector<int> written;

 private:
  const bool hears_;
};

// What a hook heard, in order: "before 0", "written 0", ...
class Listening : public LayerHook {
 public:
  absl::Status before_layer(int layer) override {
    heard.push_back("before " + std::to_string(layer));
    return layer == fail_at ? absl::AbortedError("not here yet") : absl::OkStatus();
  }
  void kv_written(int layer) override {
    heard.push_back("written " + std::to_string(layer));
    if (on_written) on_written(layer);
  }
  void token_logits(size_t chunk, size_t token, std::span<const float> logits) override {
    rated[{chunk, token}].assign(logits.begin(), logits.end());
  }
  std::vector<std::string> heard;
  std::map<std::pair<size_t, size_t>, std::vector<float>> rated;
  std::function<void(int)> on_written;
  int fail_at = -1;
};

// The same steps on both: whole prompts, pieces of them, single tokens, many at once.
struct Pair {
  explicit Pair(const ModelConfig& config, Arithmetic arithmetic = Arithmetic::kFp32,
                gpudirect::Attributes attributes = gpudirect::h100())
      : fake({.attributes = std::move(attributes)}),
        checkpoint(make_test_checkpoint(config, 1)),
        model(*Model::create(checkpoint, arithmetic)),
        workspace(*model.make_workspace(kLimits, pool)),
        geometry(model.kv_geometry()),
        memory(geometry.cache_bytes(kBlocks)),
        cache(geometry, memory.data(), kBlocks) {
    auto made = on_fake(checkpoint, arithmetic);
    EXPECT_TRUE(made.ok()) << made.status();
    device = *std::move(made);
    EXPECT_TRUE(device->prepare(kLimits).ok());
    there.emplace(geometry, *device->allocate_cache(memory.size()), kBlocks);
    ours.resize(kLimits.max_chunks * static_cast<size_t>(config.vocab_size));
    wanted = ours;
    std::mt19937_64 random(3);
    text.resize(420);
    for (int32_t& token : text) token = static_cast<int32_t>(random() % 256);
  }
  ~Pair() {
    device = nullptr;
    EXPECT_THAT(fake.finish(), testing::IsEmpty());
  }
  SequenceChunk chunk(size_t sequence, int position, size_t count, bool wants_logits = true) {
    return {.tokens = std::span(text).subspan(static_cast<size_t>(position) + 7 * sequence, count),
            .position = position,
            .block_table = tables[sequence],
            .wants_logits = wants_logits};
  }
  void step(std::vector<SequenceChunk> chunks) {
    LayerHook none;
    step(std::move(chunks), none);
  }
  void step(std::vector<SequenceChunk> chunks, LayerHook& hook) {
    LayerHook none;
    ASSERT_TRUE(model.forward(chunks, cache, none, workspace, wanted.data()).ok());
    const absl::Status status = device->forward(chunks, *there, hook, ours.data());
    ASSERT_TRUE(status.ok()) << status;
    const size_t vocab = static_cast<size_t>(model.config().vocab_size);
    for (size_t c = 0; c < chunks.size(); ++c) {
      for (size_t i = c * vocab; chunks[c].wants_logits && i < (c + 1) * vocab; ++i) {
        ASSERT_EQ(ours[i], wanted[i]) << "chunk " << c << ", token " << i % vocab;
      }
    }
  }
  std::string bytes_there() {
    return fake.read(
        static_cast<gpudirect::DevicePointer>(reinterpret_cast<uintptr_t>(there->base())),
        memory.size());
  }
  // Where tokens of this sequence are stored.
  void expect_same_kv(size_t sequence, int tokens) {
    const std::string bytes = bytes_there();
    std::vector<std::byte> copy(bytes.size());
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    const KvCache read(geometry, copy.data(), kBlocks);
    const auto dim = static_cast<size_t>(geometry.head_dim);
    for (int l = 0; l < geometry.layers; ++l) {
      for (int at = 0; at < tokens; ++at) {
        const uint32_t block = tables[sequence][static_cast<size_t>(at / 16)];
        const auto slot = static_cast<size_t>(at % 16);
        for (int h = 0; h < geometry.kv_heads; ++h) {
          for (size_t d = 0; d < dim; ++d) {
            ASSERT_EQ(read.key(l, block, h)[d * 16 + slot], cache.key(l, block, h)[d * 16 + slot]);
            ASSERT_EQ(read.value(l, block, h)[slot * dim + d],
                      cache.value(l, block, h)[slot * dim + d]);
          }
        }
      }
    }
  }

  FakeDriver fake;
  ComputePool pool{1};
  Checkpoint checkpoint;
  Model model;
  Workspace workspace;
  KvGeometry geometry;
  AlignedArray<std::byte> memory;
  KvCache cache;
  std::unique_ptr<DeviceModel> device;
  std::optional<KvCache> there;
  std::vector<float> ours, wanted;
  std::vector<int32_t> text;
  std::vector<std::vector<uint32_t>> tables = {
      {7, 0, 3}, {5, 11}, {2, 8, 1, 4, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18}};
};

void expect_the_cpus(Pair&& pair) {
  pair.step({pair.chunk(0, 0, 20)});
  pair.step({pair.chunk(0, 20, 1), pair.chunk(1, 0, 9, false), pair.chunk(2, 0, 33)});
  pair.step({pair.chunk(2, 33, 1), pair.chunk(0, 21, 1), pair.chunk(1, 9, 3)});
  pair.step({pair.chunk(2, 34, 26)});
  pair.expect_same_kv(0, 22);
  pair.expect_same_kv(1, 12);
  pair.expect_same_kv(2, 60);
}

// Promise(engine): On a GPU in fp32 logits and KV are the CPU's bits | every kernel adds in the
//   CPU's order
TEST(DeviceForward, IsTheCpusToTheBit) { expect_the_cpus(Pair(tiny_model_config())); }

TEST(DeviceForward, IsTheCpusForEveryFamily) {
  ModelConfig config = tiny_model_config();
  config.num_heads = 6;  // three to a KV head
  config.num_kv_heads = 2;
  config.tie_word_embeddings = false;
  config.attention_bias = config.mlp_bias = true;
  expect_the_cpus(Pair(config));
  config = tiny_model_config();
  config.family = ModelFamily::kQwen3;  // norms of heads
  config.head_dim = 32;
  expect_the_cpus(Pair(config));
  config = tiny_model_config();
  config.family = ModelFamily::kMistral;
  config.sliding_window = 19;
  expect_the_cpus(Pair(config));
}

// The emulation adds as the CPU's bf16 arithmetic does; a GPU does not (docs/operations.md).
TEST(DeviceForward, IsTheCpusInBf16WhereItIsEmulated) {
  expect_the_cpus(Pair(tiny_model_config(), Arithmetic::kBf16));
}

// As tensor cores add: other logits, near ones, and the same likeliest tokens of these models.
TEST(DeviceForward, IsNearTheCpuInBf16AsTensorCoresAdd) {
  ModelConfig config = tiny_model_config();
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_heads = 4;
  config.num_layers = 3;
  gpudirect::kernels::use_tensor_core_sums(true);
  float most = 0, largest = 0;
  for (const ModelConfig& of : {tiny_model_config(), config}) {
    Pair pair(of, Arithmetic::kBf16);
    LayerHook none;
    for (const std::vector<SequenceChunk>& chunks :
         {std::vector{pair.chunk(0, 0, 20)}, std::vector{pair.chunk(2, 0, 33)},
          std::vector{pair.chunk(2, 33, 1), pair.chunk(0, 20, 5)}}) {
      ASSERT_TRUE(
          pair.model.forward(chunks, pair.cache, none, pair.workspace, pair.wanted.data()).ok());
      ASSERT_TRUE(pair.device->forward(chunks, *pair.there, none, pair.ours.data()).ok());
      const auto vocab = static_cast<ptrdiff_t>(of.vocab_size);
      for (ptrdiff_t c = 0; c < static_cast<ptrdiff_t>(chunks.size()); ++c) {
        const auto ours = pair.ours.begin() + c * vocab, wanted = pair.wanted.begin() + c * vocab;
        for (ptrdiff_t i = 0; i < vocab; ++i) {
          most = std::max(most, std::fabs(ours[i] - wanted[i]));
          largest = std::max(largest, std::fabs(wanted[i]));
        }
        EXPECT_EQ(std::max_element(ours, ours + vocab) - ours,
                  std::max_element(wanted, wanted + vocab) - wanted);
      }
    }
  }
  gpudirect::kernels::use_tensor_core_sums(false);
  EXPECT_GT(most, 0);
  EXPECT_LE(most, 0.03f * largest) << most << " of " << largest;
  RecordProperty("logits_differ_by", std::to_string(most / largest));
}

// A context of several splits, whose tokens are single ones, a few, or many, in any batch.
TEST(DeviceForward, IsTheCpusInALongContext) {
  ModelConfig config = tiny_model_config();
  config.num_heads = 3;
  for (const int window : {0, 200}) {
    if (window > 0) config.family = ModelFamily::kMistral;
    config.sliding_window = window;
    Pair pair(config);
    for (int at = 0; at < 252; at += 63) pair.step({pair.chunk(2, at, 63)});
    for (int at = 252; at < 260; ++at) pair.step({pair.chunk(2, at, 1)});
    pair.step({pair.chunk(2, 260, 1), pair.chunk(0, 0, 1), pair.chunk(1, 0, 12)});
    pair.step({pair.chunk(2, 261, 5)});
    pair.expect_same_kv(2, 266);
  }
}

// Graphs change no bit, whatever comes between; and what comes once has none.
TEST(DeviceForward, StepsThatComeAgainAreGraphs) {
  Pair pair(tiny_model_config());
  Calm calm(false), hears(true);
  for (int at = 0; at < 248; at += 62) pair.step({pair.chunk(2, at, 62)});
  pair.step({pair.chunk(0, 0, 9), pair.chunk(1, 0, 4)}, calm);
  EXPECT_EQ(pair.device->graphs_recorded(), 0u);
  int zero = 9, one = 4, two = 248;
  const auto decode = [&](LayerHook& hook, int steps) {  // of two sequences, then of three
    for (int i = 0; i < steps; ++i) {
      std::vector<SequenceChunk> chunks = {pair.chunk(2, two++, 1), pair.chunk(0, zero++, 1)};
      if (i % 2 != 0) chunks.push_back(pair.chunk(1, one++, 1));
      pair.step(chunks, hook);
    }
  };
  decode(calm, 4);
  EXPECT_EQ(pair.device->graphs_recorded(), 2u) << "when a batch of that size came again";
  const uint64_t launches = pair.fake.calls_of("cuLaunchKernel");
  decode(calm, 4);
  EXPECT_EQ(pair.fake.calls_of("cuLaunchKernel"), launches);
  EXPECT_EQ(pair.fake.calls_of("cuGraphLaunch"), 6u);
  decode(calm, 4);  // one of the contexts has two splits now
  EXPECT_EQ(pair.device->graphs_recorded(), 4u);
  hears.written.clear();
  decode(hears, 4);
  EXPECT_EQ(hears.written, (std::vector<int>{0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(pair.device->graphs_recorded(), 6u);
  LayerHook may_wait;
  decode(may_wait, 2);
  EXPECT_EQ(pair.device->graphs_recorded(), 6u);
  pair.expect_same_kv(2, two);
  pair.expect_same_kv(0, zero);
}

TEST(DeviceForward, WithoutGraphsNothingIsRecorded) {
  Pair pair(tiny_model_config());
  pair.device->use_graphs(false);
  Calm calm(false);
  for (int at = 0; at < 4; ++at) pair.step({pair.chunk(0, at, 1)}, calm);
  EXPECT_EQ(pair.device->graphs_recorded(), 0u);
  EXPECT_EQ(pair.fake.calls_of("cuStreamBeginCapture"), 0u);
}

TEST(DeviceForward, AFailingGraphFailsTheStepAndTheNextOneWorks) {
  Pair pair(tiny_model_config());
  Calm calm(true);
  pair.step({pair.chunk(0, 0, 3)}, calm);
  pair.step({pair.chunk(0, 3, 1)}, calm);
  const std::vector<SequenceChunk> chunks = {pair.chunk(0, 4, 1)};
  for (const char* call : {"cuStreamBeginCapture", "cuLaunchKernel", "cuStreamEndCapture",
                           "cuGraphInstantiateWithFlags", "cuGraphLaunch"}) {
    pair.fake.fail_next(call, gpudirect::kOutOfMemory);
    EXPECT_FALSE(pair.device->forward(chunks, *pair.there, calm, pair.ours.data()).ok()) << call;
    EXPECT_EQ(pair.fake.queued(), 0u) << call;
  }
  for (int at = 4; at < 7; ++at) pair.step({pair.chunk(0, at, 1)}, calm);
  EXPECT_EQ(pair.device->graphs_recorded(), 1u);
}

// A prompt's layer is told of, and may be sent, while later ones are still to be computed; at the
// end of the step by a device that has no tickets.
TEST(DeviceForward, TellsOfALayerBeforeTheNextOnesAreComputed) {
  for (const bool tickets : {true, false}) {
    gpudirect::Attributes attributes = gpudirect::h100();
    attributes[gpudirect::kCanUseHostPointerForRegisteredMemory] = tickets ? 1 : 0;
    ModelConfig config = tiny_model_config();
    config.num_layers = 4;
    Pair pair(config, Arithmetic::kFp32, attributes);
    Listening hook;
    std::vector<size_t> left;
    hook.on_written = [&](int layer) {
      ASSERT_EQ(left.size(), static_cast<size_t>(layer));
      left.push_back(pair.fake.queued());
    };
    pair.step({pair.chunk(2, 0, 40)}, hook);
    ASSERT_EQ(left.size(), 4u);
    // A layer is some 11 launches.
    for (size_t layer = 0; layer < 3; ++layer) {
      EXPECT_EQ(left[layer] > (3 - layer) * 8, tickets) << layer;
    }
    EXPECT_TRUE(tickets || left[0] == 0);
  }
}

TEST(DeviceForward, RatesEveryToken) {
  Pair pair(tiny_model_config());
  std::vector<SequenceChunk> chunks = {pair.chunk(0, 0, 3), pair.chunk(2, 0, 11)};
  chunks[1].wants_all_logits = true;
  Listening ours, wanted;
  ASSERT_TRUE(
      pair.model.forward(chunks, pair.cache, wanted, pair.workspace, pair.wanted.data()).ok());
  ASSERT_TRUE(pair.device->forward(chunks, *pair.there, ours, pair.ours.data()).ok());
  EXPECT_EQ(ours.rated.size(), 11u);
  EXPECT_EQ(ours.rated, wanted.rated);
}

// The Sampler's tokens, and no logits leave the device unless somebody wants them.
TEST(DeviceForward, DrawsTheTokensOfTheSampler) {
  Pair pair(tiny_model_config());
  serve::Sampler sampler;
  LayerHook none;
  std::mt19937_64 random(9);
  for (int round = 0; round < 12; ++round) {
    std::vector<serve::SamplingParams> params(3);
    std::vector<DrawRule> rules(3);
    for (size_t c = 0; c < 3; ++c) {
      params[c].temperature = round == 0 ? 0 : 0.2 * static_cast<double>(random() % 8);
      params[c].top_k = static_cast<int>(random() % 3 * 7);
      params[c].top_p = random() % 2 == 0 ? 1.0 : 0.8;
      params[c].seed = random();
      rules[c] = {params[c].temperature, params[c].top_p, serve::uniform_at(params[c].seed, 5),
                  static_cast<uint32_t>(params[c].top_k)};
    }
    std::vector<SequenceChunk> chunks = {pair.chunk(0, 0, 5), pair.chunk(1, 0, 9, false),
                                         pair.chunk(2, 0, 3)};
    const bool mixed = round % 3 == 2;  // one of them wants logits
    chunks[0].draw = &rules[0];
    if (!mixed) chunks[2].draw = &rules[2];
    ASSERT_TRUE(
        pair.model.forward(chunks, pair.cache, none, pair.workspace, pair.wanted.data()).ok());
    std::fill(pair.ours.begin(), pair.ours.end(), -7.0f);
    ASSERT_TRUE(pair.device->forward(chunks, *pair.there, none, pair.ours.data()).ok());
    const auto vocab = static_cast<size_t>(pair.model.config().vocab_size);
    for (const size_t c : {0u, 2u}) {
      const auto logits = std::span(pair.wanted).subspan(c * vocab, vocab);
      if (c == 2 && mixed) {
        EXPECT_EQ(pair.device->drawn(c), std::nullopt);
        EXPECT_TRUE(std::equal(logits.begin(), logits.end(), pair.ours.begin() + 2 * 272));
      } else {
        EXPECT_EQ(pair.device->drawn(c), sampler.choose(logits, params[c], 5).token) << round;
      }
    }
    EXPECT_EQ(pair.device->drawn(1), std::nullopt);
    EXPECT_EQ(pair.ours[0] == -7.0f, !mixed) << "logits were copied, or not";
  }
}

TEST(DeviceForward, WhatIsWrittenIsThereWhenTheHookHearsOfIt) {
  Pair pair(tiny_model_config());
  Listening hook;
  const std::vector<SequenceChunk> chunks = {pair.chunk(1, 0, 30)};
  LayerHook none;
  ASSERT_TRUE(
      pair.model.forward(chunks, pair.cache, none, pair.workspace, pair.wanted.data()).ok());
  hook.on_written = [&](int layer) {
    const std::string bytes = pair.bytes_there();
    const size_t at = pair.geometry.block_offset(layer, 5, kBlocks);
    EXPECT_EQ(bytes.substr(at, pair.geometry.block_bytes()),
              std::string(reinterpret_cast<const char*>(pair.memory.data()) + at,
                          pair.geometry.block_bytes()))
        << "layer " << layer;
  };
  ASSERT_TRUE(pair.device->forward(chunks, *pair.there, hook, pair.ours.data()).ok());
  std::vector<std::string> before, written;
  for (const std::string& call : hook.heard) {
    (call[0] == 'b' ? before : written).push_back(call);
  }
  EXPECT_EQ(before, (std::vector<std::string>{"before 0", "before 1"}));
  EXPECT_EQ(written, (std::vector<std::string>{"written 0", "written 1"}));
}

TEST(DeviceForward, AStepThatIsEndedByItsHookLeavesNothingRunning) {
  Pair pair(tiny_model_config());
  Listening hook;
  hook.fail_at = 1;
  const std::vector<SequenceChunk> chunks = {pair.chunk(0, 0, 20)};
  EXPECT_TRUE(absl::IsAborted(pair.device->forward(chunks, *pair.there, hook, pair.ours.data())));
  EXPECT_EQ(pair.fake.queued(), 0u);
  pair.step({pair.chunk(0, 0, 20)});
}

TEST(DeviceForward, RefusesWhatTheCpuRefuses) {
  Pair pair(tiny_model_config());
  LayerHook none;
  std::vector<SequenceChunk> chunks = {pair.chunk(0, 0, 20)};
  chunks[0].position = 390;
  EXPECT_TRUE(
      absl::IsInvalidArgument(pair.device->forward(chunks, *pair.there, none, pair.ours.data())));
  chunks = {pair.chunk(0, 0, 3)};
  EXPECT_TRUE(absl::IsInvalidArgument(pair.device->forward(chunks, *pair.there, none, nullptr)));
}

TEST(DeviceForward, AFailingCallFailsTheStepAndTheNextOneWorks) {
  Pair pair(tiny_model_config());
  LayerHook none;
  const std::vector<SequenceChunk> chunks = {pair.chunk(0, 0, 20)};
  for (const char* call : {"cuLaunchKernel", "cuMemcpyAsync", "cuStreamQuery"}) {
    pair.fake.fail_next(call, gpudirect::kOutOfMemory);
    const absl::Status status = pair.device->forward(chunks, *pair.there, none, pair.ours.data());
    EXPECT_FALSE(status.ok()) << call;
    EXPECT_EQ(pair.fake.queued(), 0u) << call;
    pair.step({pair.chunk(0, 0, 20)});
  }
}

// Every ninth call of the driver's, from opening the device on: an error, never a leak or a
// violation.
TEST(DeviceForward, EachCallMayFailAndNothingIsLeft) {
  const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 1);
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::vector<uint32_t> table = {0};
  const SequenceChunk chunk{.tokens = tokens, .block_table = table};
  const DrawRule greedy;
  const auto walk = [&](FakeDriver& fake) -> absl::Status {
    auto device = on_fake(checkpoint, Arithmetic::kBf16);
    if (!device.ok()) return device.status();
    if (absl::Status status = (*device)->prepare(kLimits); !status.ok()) return status;
    const KvGeometry geometry = tiny_model_config().kv_geometry();
    const auto memory = (*device)->allocate_cache(geometry.cache_bytes(kBlocks));
    if (!memory.ok()) return memory.status();
    KvCache cache(geometry, *memory, kBlocks);
    std::vector<float> logits(272);
    LayerHook none;
    SequenceChunk drawn = chunk;
    drawn.draw = &greedy;
    Calm calm(true);
    const SequenceChunk single{.tokens = std::span(tokens).first(1), .block_table = table};
    absl::Status status = (*device)->forward({&drawn, 1}, cache, none, logits.data());
    for (int i = 0; i < 3 && status.ok(); ++i) {  // the second one is recorded
      status = (*device)->forward({&single, 1}, cache, calm, logits.data());
    }
    if (status.ok()) status = (*device)->forward({&chunk, 1}, cache, none, logits.data());
    EXPECT_EQ(fake.queued(), 0u);
    return status;
  };
  uint64_t calls = 0;
  {
    gpudirect::CleanDriver fake;
    const absl::Status status = walk(fake);
    ASSERT_TRUE(status.ok()) << status;
    calls = fake.calls();
  }
  size_t failed = 0;
  for (uint64_t n = 1; n <= calls; n += 11) {
    FakeDriver fake;
    fake.fail_call_in(n, gpudirect::kOutOfMemory);
    failed += walk(fake).ok() ? 0 : 1;
    EXPECT_THAT(fake.finish(), testing::IsEmpty()) << "call " << n << " of " << calls;
  }
  EXPECT_GT(failed, calls / 20);
}

TEST(DeviceModel, SaysWhatItCannotDo) {
  gpudirect::CleanDriver fake;
  EXPECT_TRUE(
      absl::IsUnimplemented(on_fake(make_test_checkpoint(tiny_mixtral_config(), 1)).status()));
  const auto without = Gpu::open(FakeDriver::driver(), 0, {});
  EXPECT_TRUE(absl::IsUnimplemented(without.status()));
  EXPECT_THAT(std::string(without.status().message()), testing::HasSubstr("nvcc"));
  EXPECT_FALSE(Gpu::open(FakeDriver::driver(), 5, FakeDriver::image()).ok());
}

}  // namespace
}  // namespace baton::engine::device
