// Normalisation, rotary embedding, activation and the optimizer, to the bit as the
// engine's and the trainer's.
#include "engine/kernels/elementwise.h"
#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "engine/train/data_parallel/optimizer.h"
#include "tests/engine_model/reference_kernels.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

// Where a CPU has no fused multiply-add, the engine's own sums are rounded twice.
bool fuses() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma") > 0;
#else
  return true;
#endif
}

TEST(RmsNorm, IsTheEngines) {
  // The last of them is longer than a block reads at once, and one is not aligned to 16 bytes.
  for (const uint32_t size : {16u, 64u, 576u, 592u, 4096u, kHeldRow, kHeldRow + 16}) {
    constexpr uint32_t kRows = 37;
    const uint32_t skip = size == 592 ? 1 : 0;
    std::vector<float> x = normal(kRows * size, size), weight = normal(size, size + 1);
    std::vector<float> y(x.size() + skip), engine(size), plain(size);
    x.insert(x.begin(), skip, 0.0f);
    EmulatedMemory memory;
    const RmsNorm arguments{
        memory.read(x) + skip, memory.read(weight), memory.write(y) + skip, kRows, size, 1e-5f};
    ASSERT_EQ(run_kernel("baton_rms_norm", arguments, 2, memory, size), std::nullopt);
    for (uint32_t row = 0; row < kRows; ++row) {
      const float* const from = x.data() + skip + size_t{row} * size;
      const float* const ours = y.data() + skip + size_t{row} * size;
      const auto n = static_cast<int>(size);
      engine::rms_norm(from, weight.data(), engine.data(), n, 1e-5f);
      engine::reference_rms_norm(from, weight.data(), plain.data(), n, 1e-5f);
      for (uint32_t i = 0; i < size; ++i) {
        if (fuses()) {
          ASSERT_EQ(ours[i], engine[i]) << row << " " << i;
        }
        ASSERT_NEAR(ours[i], plain[i], 1e-5f * (1 + std::fabs(plain[i])));
      }
    }
  }
}

TEST(RmsNorm, ABlockOfAllRowsAtOnceIsEnough) {
  EXPECT_EQ(rms_norm_rows(128), 16u);
  EXPECT_EQ(rms_norm_rows(4096), 2u);
  EXPECT_EQ(rms_norm_rows(kHeldRow), 1u);
  EXPECT_EQ(rms_norm_blocks(33, 4096), 17u);
  EXPECT_EQ(rms_norm_blocks(33, kHeldRow + 16), 33u);
}

// The angles by position, and q scaled once it is rotated, as the model does.
TEST(RopeStore, IsTheEnginesRopeAndStore) {
  constexpr int kTokens = 37, kHeads = 6, kKvHeads = 2, kDim = 48, kPosition = 11;
  const engine::KvGeometry geometry{.layers = 1, .kv_heads = kKvHeads, .head_dim = kDim};
  const std::vector<uint32_t> table = {3, 0, 5};
  std::vector<uint16_t> theirs(geometry.cache_bytes(6) / 2, 0xabcd), ours = theirs;
  std::vector<float> q = normal(kTokens * kHeads * kDim, 1),
                     k = normal(kTokens * kKvHeads * kDim, 2);
  const std::vector<float> v = normal(k.size(), 3);
  const std::vector<float> cosines = normal((kPosition + kTokens) * kDim / 2, 4),
                           sines = normal(cosines.size(), 5);
  std::vector<float> q_wanted = q, k_wanted = k;
  std::vector<uint32_t> slots, positions;
  for (int t = 0; t < kTokens; ++t) {
    const int at = kPosition + t;
    slots.push_back(table[static_cast<size_t>(at / 16)] * 16 + static_cast<uint32_t>(at % 16));
    positions.push_back(static_cast<uint32_t>(at));
    const float* const c = cosines.data() + at * kDim / 2;
    const float* const s = sines.data() + at * kDim / 2;
    for (int h = 0; h < kHeads; ++h) {
      float* const head = &q_wanted[(t * kHeads + h) * kDim];
      engine::rope(head, c, s, kDim);
      engine::scale(head, 0.3f, kDim);
    }
    for (int h = 0; h < kKvHeads; ++h) {
      engine::rope(&k_wanted[(t * kKvHeads + h) * kDim], c, s, kDim);
    }
  }
  engine::store_kv(engine::KvCache(geometry, theirs.data(), 6), 0, table, kPosition, kTokens,
                   k_wanted.data(), v.data(), kKvHeads * kDim);
  EmulatedMemory memory;
  for (auto* written : {&q, &k}) memory.allow(*written, true);
  for (const auto* read : {&v, &cosines, &sines}) memory.allow(*read);
  const RopeStore arguments{.q = q.data(),
                            .k = k.data(),
                            .v = v.data(),
                            .cos = cosines.data(),
                            .sin = sines.data(),
                            .slots = memory.read(slots),
                            .cache = {memory.write(ours), kKvHeads, kDim},
                            .tokens = kTokens,
                            .heads = kHeads,
                            .positions = memory.read(positions),
                            .q_scale = 0.3f};
  ASSERT_EQ(run_kernel("baton_rope_store", arguments, 5, memory), std::nullopt);
  EXPECT_EQ(q, q_wanted);
  EXPECT_EQ(k, k_wanted);
  EXPECT_EQ(ours, theirs);
}

TEST(SwiGlu, IsTheEngines) {
  constexpr uint32_t kRows = 7, kSize = 48;
  std::vector<float> gate_up = normal(kRows * 2 * kSize, 1);
  gate_up[0] = 100;
  gate_up[1] = -100;
  gate_up[2] = -87.5f;
  std::vector<float> out(kRows * kSize), wanted(out.size());
  for (uint32_t row = 0; row < kRows; ++row) {
    const float* const gate = gate_up.data() + row * 2 * kSize;
    engine::swiglu(gate, gate + kSize, wanted.data() + row * kSize, kSize);
  }
  EmulatedMemory memory;
  const SwiGlu arguments{memory.read(gate_up), memory.write(out), kRows, kSize};
  ASSERT_EQ(run_kernel("baton_swiglu", arguments, 2, memory), std::nullopt);
  EXPECT_EQ(out, wanted);
}

TEST(AdamW, IsTheTrainers) {
  engine::ModelConfig config;
  config.num_layers = 1;
  config.hidden_size = 32;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = 16;
  config.intermediate_size = 48;
  config.vocab_size = 50;
  const engine::train::ParameterMap map(config);
  const engine::train::OptimizerOptions options{.warmup_steps = 3, .steps = 20};
  engine::ComputePool pool(1);
  engine::train::AdamW trainer(map, options, {{0, map.size}}, pool);
  std::vector<float> wanted = normal(map.size, 1);
  std::vector<float> parameters = wanted, first(map.size), second(map.size), g(map.size);
  EmulatedMemory memory;
  for (auto* written : {&parameters, &first, &second, &g}) memory.allow(*written, true);
  constexpr float kDivisor = 3;
  for (int step = 0; step < 8; ++step) {
    const std::vector<float> gradients = normal(map.size, static_cast<uint64_t>(step) + 7);
    std::copy(gradients.begin(), gradients.end(), g.begin());
    const float norm = step % 2 == 0 ? 0.5f : 3.0f;
    trainer.update(0, step, norm, kDivisor, wanted.data(), gradients.data());
    const float rate = engine::train::learning_rate(options, step);
    for (const auto& range : map.ranges()) {
      const AdamW arguments{
          .parameters = parameters.data() + range.offset,
          .first = first.data() + range.offset,
          .second = second.data() + range.offset,
          .gradients = g.data() + range.offset,
          .count = range.size(),
          .divisor = kDivisor,
          .factor = norm > options.clip ? options.clip / norm : 1.0f,
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .correct1 = 1.0f - std::pow(options.beta1, static_cast<float>(step + 1)),
          .correct2 = 1.0f - std::pow(options.beta2, static_cast<float>(step + 1)),
          .epsilon = options.epsilon,
          .rate = rate,
          .decay = range.decays ? 1.0f - rate * options.weight_decay : 1.0f};
      // One range of each step begins where no other is aligned to it.
      AdamW moved = arguments;
      std::vector<float> lone(range.size() + 1);
      if (range.offset == map.ranges().back().offset) {
        std::copy_n(arguments.first, range.size(), lone.data() + 1);
        moved.first = lone.data() + 1;
        memory.allow(lone, true);
      }
      ASSERT_EQ(run_kernel("baton_adamw", moved, 2, memory), std::nullopt);
      if (moved.first != arguments.first) {
        std::copy_n(moved.first, range.size(), arguments.first);
      }
    }
    ASSERT_EQ(parameters, wanted) << "step " << step;
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
