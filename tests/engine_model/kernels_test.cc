// The fast kernels against their plain references.
#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "engine/kernels/elementwise.h"
#include "engine/kernels/gemm.h"
#include "engine/model/rope.h"
#include "tests/engine_model/reference_kernels.h"
#include "tests/engine_model/same_bits.h"
#include "tests/engine_model/vector_widths.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

std::vector<float> random_floats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random() % 20001) * 1e-4f - 1.0f;
  return values;
}

class GemmTest : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(GemmTest, EveryLayoutAndThreadCountGivesTheReferenceChains) {
  const auto [m, n, k] = GetParam();
  const std::vector<float> a = random_floats(size_t(m) * k, 1);
  const std::vector<float> b = random_floats(size_t(k) * n, 2);
  const std::vector<float> start = random_floats(size_t(m) * n, 3);
  for (const bool accumulate : {false, true}) {
    for (const bool transposed : {false, true}) {
      // The same numbers, read as rows or as columns.
      const MatrixView view_a =
          transposed ? MatrixView{a.data(), 1, size_t(m)} : MatrixView{a.data(), size_t(k), 1};
      const MatrixView view_b =
          transposed ? MatrixView{b.data(), 1, size_t(k)} : MatrixView{b.data(), size_t(n), 1};
      std::vector<float> expected = start;
      reference_gemm(m, n, k, view_a, view_b, expected.data(), size_t(n), accumulate);
      AlignedArray<float> packed(packed_elements(k, n));
      pack_b_serial(k, n, view_b, packed.data());
      for_every_width([&, m = m, n = n, k = k] {
        for (const int threads : {1, 3}) {
          ComputePool pool(threads);
          GemmScratch scratch(threads);
          std::vector<float> c = start;
          gemm(pool, scratch, m, view_a, {k, n, packed.data(), nullptr, size_t(k)}, c.data(),
               size_t(n), accumulate);
          EXPECT_TRUE(same_bits(c, expected))
              << "threads " << threads << " accumulate " << accumulate << " columns " << transposed;
        }
      });
    }
  }
}

TEST_P(GemmTest, Bf16WeightsGiveTheChainsOfTheirValues) {
  const auto [m, n, k] = GetParam();
  const std::vector<float> a = random_floats(size_t(m) * k, 1);
  std::vector<float> w = random_floats(size_t(n) * k, 2);
  std::vector<uint16_t> weight(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    weight[i] = bf16_from_float(w[i]);
    w[i] = float_from_bf16(weight[i]);
  }
  AlignedArray<uint16_t> packed(packed_elements(k, n));
  pack_weight(k, n, weight.data(), packed.data());
  std::vector<float> expected(size_t(m) * n);
  reference_gemm(m, n, k, {a.data(), size_t(k), 1}, {w.data(), 1, size_t(k)}, expected.data(),
                 size_t(n), false);
  ComputePool pool(2);
  GemmScratch scratch(2);
  for_every_width([&, m = m, n = n, k = k] {
    std::vector<float> c(expected.size());
    gemm(pool, scratch, m, {a.data(), size_t(k), 1}, {k, n, nullptr, packed.data(), size_t(k)},
         c.data(), size_t(n), false);
    EXPECT_TRUE(same_bits(c, expected));
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         ::testing::Values(std::tuple{1, 1, 1}, std::tuple{1, 272, 32},
                                           std::tuple{1, 130, 400}, std::tuple{2, 33, 17},
                                           std::tuple{5, 64, 96}, std::tuple{14, 32, 385},
                                           std::tuple{15, 31, 3}, std::tuple{29, 200, 64},
                                           std::tuple{28, 200, 500}, std::tuple{120, 96, 770},
                                           std::tuple{300, 40, 50}, std::tuple{600, 200, 100}));

// Where C is larger than the caches k is cut otherwise, and rows of A are.
TEST(Gemm, ARowOfALargeProductIsThatOfASmallOne) {
  constexpr int kM = 300, kN = 1760;
  static_assert(size_t{kM} * kN * sizeof(float) > size_t{2} << 20);
  for (const int k : {390, 576, 577, 1153}) {
    const std::vector<float> a = random_floats(size_t(kM) * k, 1);
    const std::vector<float> b = random_floats(size_t(k) * kN, 2);
    AlignedArray<float> packed(packed_elements(k, kN));
    pack_b_serial(k, kN, {b.data(), kN, 1}, packed.data());
    ComputePool pool(1);
    GemmScratch scratch(1);
    for_every_width([&] {
      std::vector<float> all(size_t{kM} * kN), few(size_t{2} * kN);
      const auto multiply = [&](int first, int rows, std::vector<float>* c) {
        gemm(pool, scratch, rows, {a.data() + size_t(first) * k, size_t(k), 1},
             {k, kN, packed.data(), nullptr, size_t(k)}, c->data(), kN, false);
      };
      multiply(0, kM, &all);
      for (const int first : {0, 166, 298}) {
        multiply(first, 2, &few);
        const auto begin = all.begin() + ptrdiff_t{first} * kN;
        EXPECT_TRUE(same_bits(few, std::vector<float>(begin, begin + ptrdiff_t{2} * kN)))
            << "k " << k << " row " << first;
      }
    });
  }
}

struct Paged {
  Paged(KvGeometry g, int tokens)
      : geometry(g),
        count(g.blocks_for(size_t(tokens)) + 3),
        memory(g.cache_bytes(count) / 2),
        cache(g, memory.data(), count),
        table(g.blocks_for(size_t(tokens))) {
    // Slots that no token uses hold NaN: one that takes part in a sum shows.
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = 0x7fc0;
    for (size_t i = 0; i < table.size(); ++i) table[i] = uint32_t(count - 1 - i);
  }
  KvGeometry geometry;
  size_t count;
  AlignedArray<uint16_t> memory;
  KvCache cache;
  std::vector<uint32_t> table;
};

// A context whose K and V are stored in the last layer, and queries for each of its tokens.
struct Context : Paged {
  Context(KvGeometry g, int count_of_tokens, int queries, int tokens_seen)
      : Paged(g, count_of_tokens),
        group(queries),
        window(tokens_seen),
        q_width(size_t(g.kv_heads) * g.head_dim * queries),
        q(random_floats(count_of_tokens * q_width, 3)) {
    const size_t width = size_t(g.kv_heads) * g.head_dim;
    const std::vector<float> k = random_floats(count_of_tokens * width, 1);
    const std::vector<float> v = random_floats(count_of_tokens * width, 2);
    store_kv(cache, g.layers - 1, table, 0, count_of_tokens, k.data(), v.data(), width);
  }
  // A KV head's queries of some tokens; `out` has a place for each query.
  AttentionCall call(int head, int position, int tokens, std::vector<float>& out) const {
    const size_t at = position * q_width + size_t(head) * group * geometry.head_dim;
    return {.cache = &cache,
            .layer = geometry.layers - 1,
            .kv_head = head,
            .block_table = table,
            .position = position,
            .tokens = tokens,
            .window = window,
            .group = group,
            .q = q.data() + at,
            .q_stride = q_width,
            .out = out.data() + at,
            .out_stride = q_width};
  }
  int group, window;
  size_t q_width;
  std::vector<float> q;
};

// Dimensions of a head, query heads to a KV head, and the window.
class AttentionTest : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(AttentionTest, MatchesTheReferenceForPromptsAndSingleTokens) {
  const auto [head_dim, group, window] = GetParam();
  constexpr int kTokens = 53, kHeads = 2;
  Context context({.layers = 2, .kv_heads = kHeads, .head_dim = head_dim}, kTokens, group, window);
  std::vector<float> scratch(kAttentionScratch);
  std::vector<float> all(context.q.size()), expected(all), single(all);
  for (int head = 0; head < kHeads; ++head) {
    paged_attention(context.call(head, 0, kTokens, all), scratch.data());
    reference_attention(context.call(head, 0, kTokens, expected));
    for (int t = 0; t < kTokens; ++t) {
      paged_attention(context.call(head, t, 1, single), scratch.data());
    }
  }
  for (size_t i = 0; i < all.size(); ++i) ASSERT_NEAR(all[i], expected[i], 4e-6) << i;
  EXPECT_TRUE(same_bits(all, single)) << "a token's result depends on the tokens beside it";
  for_every_width([&] {
    std::vector<float> again(all.size());
    for (int head = 0; head < kHeads; ++head) {
      paged_attention(context.call(head, 0, kTokens, again), scratch.data());
    }
    EXPECT_TRUE(same_bits(again, all));
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest,
                         ::testing::Values(std::tuple{16, 1, 0}, std::tuple{32, 2, 0},
                                           std::tuple{48, 3, 0}, std::tuple{64, 4, 0},
                                           std::tuple{128, 8, 0}, std::tuple{80, 12, 0},
                                           std::tuple{64, 5, 0}, std::tuple{112, 6, 19},
                                           std::tuple{96, 7, 0}, std::tuple{256, 2, 0},
                                           std::tuple{16, 1, 1}, std::tuple{32, 3, 16},
                                           std::tuple{64, 4, 21}, std::tuple{48, 1, 100}));

// Over several splits: near the reference, and the same bits in every width, with a window and
// without, also where a window or a tile of queries begins or ends at a split.
TEST(Attention, AddsSplitsInOrder) {
  constexpr int kTokens = 540;
  std::vector<float> scratch(kAttentionScratch);
  for (const int window : {0, 1, 255, 256, 300}) {
    Context context({.layers = 1, .kv_heads = 1, .head_dim = 32}, kTokens, 3, window);
    std::vector<float> first, expected(context.q.size()), single(expected);
    reference_attention(context.call(0, 0, kTokens, expected));
    for_every_width([&, window = window] {
      std::vector<float> out(context.q.size());
      paged_attention(context.call(0, 0, kTokens, out), scratch.data());
      if (first.empty()) first = out;
      EXPECT_TRUE(same_bits(out, first)) << window;
    });
    for (size_t i = 0; i < first.size(); ++i) ASSERT_NEAR(first[i], expected[i], 4e-6) << i;
    for (const int position : {0, 255, 256, 257, 511, 512, 539}) {
      paged_attention(context.call(0, position, 1, single), scratch.data());
      const size_t row = static_cast<size_t>(position) * context.q_width;
      EXPECT_TRUE(same_bits(std::span(single).subspan(row, context.q_width),
                            std::span(first).subspan(row, context.q_width)))
          << position << ", window " << window;
    }
  }
}

TEST(StoreKv, PutsEveryElementWhereTheLayoutSays) {
  // Heads with and without a tail of a vector; from the middle of a block, within one, over three.
  for (const auto& [dims, position, tokens] :
       {std::tuple{16, 0, 20}, {16, 5, 1}, {20, 3, 13}, {48, 14, 30}, {64, 16, 48}}) {
    const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = dims};
    const size_t width = size_t(2 * dims);
    Paged paged(geometry, position + tokens);
    std::vector<float> k = random_floats(size_t(tokens) * width, 1);
    const std::vector<float> v = random_floats(k.size(), 2);
    k[0] = 1.00390625f;  // a tie
    k[1] = NAN;
    auto* base = reinterpret_cast<uint16_t*>(paged.cache.base());
    const std::vector<uint16_t> before(
        base, base + paged.cache.num_blocks() * geometry.block_bytes() / 2);
    std::vector<uint16_t> want = before;
    for (int token = 0; token < tokens; ++token) {
      const int at = position + token, slot = at % 16;
      for (int head = 0; head < 2; ++head) {
        const size_t block = paged.table[size_t(at / 16)] * geometry.block_bytes() / 2;
        const size_t from = block + size_t(head) * 2 * 16 * size_t(dims);
        for (int d = 0; d < dims; ++d) {
          const size_t element = size_t(token) * width + size_t(head * dims + d);
          want[from + size_t(d * 16 + slot)] = bf16_from_float(k[element]);
          want[from + size_t(16 * dims + slot * dims + d)] = bf16_from_float(v[element]);
        }
      }
    }
    const int size = dims, first = position, count = tokens;
    for_every_width([&] {
      std::copy(before.begin(), before.end(), base);
      store_kv(paged.cache, 0, paged.table, first, count, k.data(), v.data(), width);
      EXPECT_TRUE(std::equal(want.begin(), want.end(), base))
          << size << " dims, " << count << " tokens from " << first;
    });
  }
}

TEST(Elementwise, NormAndActivationMatchTheirReferences) {
  for (const int size : {16, 48, 192, 1024}) {
    std::vector<float> x = random_floats(size_t(size), 1), w = random_floats(size_t(size), 2);
    for (float& value : x) value *= 8;
    std::vector<float> y(x.size()), expected(x.size());
    rms_norm(x.data(), w.data(), y.data(), size, 1e-5f);
    reference_rms_norm(x.data(), w.data(), expected.data(), size, 1e-5f);
    for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], 1e-5);
    swiglu(x.data(), w.data(), y.data(), size);
    reference_swiglu(x.data(), w.data(), expected.data(), size);
    for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], 1e-5);
  }
}

TEST(Elementwise, EveryVectorWidthGivesTheSameBits) {
  constexpr int kSize = 208;
  std::vector<float> first;
  for_every_width([&] {
    std::vector<float> x = random_floats(kSize, 1), w = random_floats(kSize, 2), y(kSize), all;
    for (float& value : x) value *= 40;
    const auto keep = [&](const std::vector<float>& some) {
      all.insert(all.end(), some.begin(), some.end());
    };
    all.push_back(rms_norm(x.data(), w.data(), y.data(), kSize, 1e-5f));
    keep(y);
    swiglu(x.data(), w.data(), y.data(), kSize);
    keep(y);
    add_scaled(w.data(), 0.3f, y.data(), kSize);
    keep(y);
    scale(y.data(), 0.7f, kSize);
    keep(y);
    std::vector<float> cos(kSize / 2), sin(kSize / 2);
    for (int i = 0; i < kSize / 2; ++i) {
      cos[size_t(i)] = std::cos(0.1f * static_cast<float>(i));
      sin[size_t(i)] = std::sin(0.1f * static_cast<float>(i));
    }
    rope(y.data(), cos.data(), sin.data(), kSize);
    keep(y);
    softmax(x.data(), kSize);
    keep(x);
    if (first.empty()) first = all;
    EXPECT_TRUE(same_bits(all, first));
  });
}

TEST(Elementwise, ActivationIsFiniteAtTheExtremes) {
  std::vector<float> gate(16, -1e30f), up(16, 1.0f), out(16);
  gate[1] = 1e30f;
  gate[2] = -90.0f;
  gate[3] = 90.0f;
  swiglu(gate.data(), up.data(), out.data(), 16);
  EXPECT_EQ(out[1], 1e30f);
  EXPECT_NEAR(out[2], 0.0f, 1e-6);
  EXPECT_EQ(out[3], 90.0f);
}

TEST(Rope, RotatesPairsHalfAHeadApartAndBack) {
  ModelConfig config;
  config.head_dim = 32;
  const RopeTable table(config, 10);
  const std::vector<float> start = random_floats(32, 1);
  std::vector<float> head = start;
  rope(head.data(), table.cos(7), table.sin(7), 32);
  for (int i = 0; i < 16; ++i) {
    const double angle = 7 * std::pow(10000.0, -2.0 * i / 32);
    EXPECT_NEAR(head[i], start[i] * std::cos(angle) - start[i + 16] * std::sin(angle), 1e-6);
    EXPECT_NEAR(head[i + 16], start[i + 16] * std::cos(angle) + start[i] * std::sin(angle), 1e-6);
  }
  rope(head.data(), table.cos(7), table.sin(7), 32, -1.0f);
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(head[i], start[i], 1e-6);
}

TEST(Rope, RoundsProductsAndTheirSumsApartInHeadsOfEverySize) {
  for (const int half : {2, 8, 12, 16, 24, 52, 64}) {
    const std::vector<float> start = random_floats(size_t(2 * half), 1);
    const std::vector<float> cos = random_floats(size_t(half), 2),
                             sin = random_floats(size_t(half), 3);
    std::vector<float> want(start.size());
    for (size_t i = 0; i < cos.size(); ++i) {
      const size_t j = i + cos.size();
      // Volatile: no compiler makes one rounding of the two.
      const volatile float ac = start[i] * cos[i], bs = start[j] * sin[i];
      const volatile float bc = start[j] * cos[i], as = start[i] * sin[i];
      want[i] = ac - bs;
      want[j] = bc + as;
    }
    for_every_width([&] {
      std::vector<float> head = start;
      rope(head.data(), cos.data(), sin.data(), 2 * half);
      EXPECT_TRUE(same_bits(head, want)) << "of " << 2 * half;
    });
  }
}

TEST(Rope, Llama3ScalingKeepsShortWavesAndStretchesLongOnes) {
  ModelConfig config;
  config.head_dim = 128;
  config.rope_theta = 500000.0;
  const std::vector<double> plain = rope_frequencies(config);
  config.rope_scaling = {.kind = RopeScaling::Kind::kLlama3,
                         .factor = 8,
                         .low_freq_factor = 1,
                         .high_freq_factor = 4,
                         .original_max_position_embeddings = 8192};
  const std::vector<double> scaled = rope_frequencies(config);
  for (size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * M_PI / plain[i];
    if (wavelength < 8192.0 / 4) {
      EXPECT_EQ(scaled[i], plain[i]);
    } else if (wavelength > 8192.0) {
      EXPECT_DOUBLE_EQ(scaled[i], plain[i] / 8);
    } else {
      EXPECT_LT(scaled[i], plain[i]);
      EXPECT_GT(scaled[i], plain[i] / 8);
    }
  }
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(bf16_from_float(1.0f), 0x3f80);
  EXPECT_EQ(bf16_from_float(1.00390625f), 0x3f80);  // a tie, to even
  EXPECT_EQ(bf16_from_float(1.01171875f), 0x3f82);  // a tie, to even
  EXPECT_EQ(bf16_from_float(-1.005f), 0xbf81);
  EXPECT_TRUE(std::isnan(float_from_bf16(bf16_from_float(NAN))));
  EXPECT_TRUE(std::isinf(float_from_bf16(bf16_from_float(3.4e38f))));
}

}  // namespace
}  // namespace baton::engine
