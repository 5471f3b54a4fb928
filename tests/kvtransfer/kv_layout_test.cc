// KV layouts: what is refused, what survives the wire, and the shapes that engines have.
#include "kvtransfer/kv_layout.h"

#include "kvtransfer/plans/kv_extents.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

KvLayout small() { return KvLayout::dense(3, 10, 16, 4, 96, "test"); }

constexpr KvShape kShape{.layers = 3,
                         .blocks = 10,
                         .block_tokens = 16,
                         .total_heads = 8,
                         .first_head = 2,
                         .heads = 4,
                         .head_size = 6};

std::vector<KvLayout> engine_layouts() {
  std::vector<KvLayout> all = {small(), KvLayout::transposed_keys(kShape),
                               KvLayout::latent(3, 10, 16, 576, KvDtype::kBfloat16)};
  for (auto order : {KvLayout::Order::kNhd, KvLayout::Order::kHnd}) {
    for (auto pair : {KvLayout::Pair::kSplit, KvLayout::Pair::kStacked, KvLayout::Pair::kInBlock,
                      KvLayout::Pair::kJoined}) {
      for (bool tensors : {false, true}) {
        all.push_back(KvLayout::paged(kShape, order, pair, tensors));
      }
    }
  }
  return all;
}

TEST(KvLayout, DenseIsDense) {
  const KvLayout layout = small();
  EXPECT_TRUE(layout.check().ok());
  EXPECT_EQ(layout.bytes(), 3u * 10 * 4 * 96);
  EXPECT_EQ(layout.layers(), 3u);
  EXPECT_EQ(layout.blocks_for(0), 0u);
  EXPECT_EQ(layout.blocks_for(16), 1u);
  EXPECT_EQ(layout.blocks_for(17), 2u);
  EXPECT_EQ(layout.blocks_for(UINT64_MAX), (uint64_t{1} << 60));
}

TEST(KvLayout, TheLayoutsOfEnginesHaveNoGapsAndNoOverlaps) {
  for (const KvLayout& layout : engine_layouts()) {
    EXPECT_TRUE(layout.check().ok()) << layout.check();
    // Every byte of every buffer belongs to one element.
    std::vector<std::vector<int>> used;
    for (const KvBuffer& buffer : layout.buffers) used.emplace_back(buffer.bytes, 0);
    const KvGroup& group = layout.groups[0];
    for (const KvField& field : group.fields) {
      for (const KvPlace& place : field.places) {
        for (uint32_t b = 0; b < group.blocks; ++b) {
          for (uint32_t t = 0; t < (field.per_block ? 1 : group.block_tokens); ++t) {
            for (uint32_t h = 0; h < group.heads; ++h) {
              for (uint32_t e = 0; e < field.width; ++e) {
                const uint64_t at = place.offset + b * field.block_stride + t * field.token_stride +
                                    h * field.head_stride + e * field.element_stride;
                for (uint32_t i = 0; i < bytes_of(field.dtype); ++i) ++used[place.buffer][at + i];
              }
            }
          }
        }
      }
    }
    for (const auto& bytes : used) {
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST(KvLayout, RefusesNonsense) {
  const auto broken = [](auto change) {
    KvLayout layout = KvLayout::paged(kShape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
    change(layout, layout.groups[0], layout.groups[0].fields[0]);
    return std::string(layout.check().message());
  };
  using L = KvLayout;
  using G = KvGroup;
  using F = KvField;
  EXPECT_EQ(broken([](L&, G&, F&) {}), "");
  EXPECT_FALSE(KvLayout().check().ok());
  EXPECT_THAT(broken([](L&, G& g, F&) { g.heads = 0; }), HasSubstr("at least one"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.blocks = 0; }), HasSubstr("at least one"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.block_tokens = 0; }), HasSubstr("at least one"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.layers.clear(); }), HasSubstr("at least one"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.first_head = 5; }), HasSubstr("not among"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.first_head = UINT32_MAX; }), HasSubstr("not among"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.layers[2] = 1; }), HasSubstr("ascending"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.layers[2] = L::kMaxLayers; }), HasSubstr("at most"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.groups.push_back(l.groups[0]); }),
              HasSubstr("in two groups"));
  EXPECT_THAT(broken([](L&, G& g, F& f) { g.fields.assign(9, F(f)); }), HasSubstr("9 fields"));
  EXPECT_THAT(broken([](L&, G& g, F&) { g.fields[1].role = KvRole::kKey; }),
              HasSubstr("two fields are the K"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.role = static_cast<KvRole>(99); }), HasSubstr("role"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.dtype = static_cast<KvDtype>(0); }), HasSubstr("type"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.width = 0; }), HasSubstr("0 elements"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.places.pop_back(); }), HasSubstr("2 places"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.places[1].buffer = 6; }), HasSubstr("buffer 6 of 6"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.places[1].offset = 1; }), HasSubstr("bytes into buffer"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.places[1].offset = UINT64_MAX; }),
              HasSubstr("bytes into"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.element_stride = 1; }), HasSubstr("element stride"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.head_stride -= 1; }), HasSubstr("head stride"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.token_stride = 0; }), HasSubstr("stride"));
  EXPECT_THAT(broken([](L&, G&, F& f) { f.block_stride = UINT64_MAX / 2; }), HasSubstr("2^60"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.buffers[0].bytes = UINT64_MAX; }), HasSubstr("2^60"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.buffers[5].bytes -= 1; }), HasSubstr("buffer 5"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.buffers.clear(); }), HasSubstr("0 buffers"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.format = std::string(200, 'x'); }), HasSubstr("format"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.model.rope = std::string(200, 'x'); }),
              HasSubstr("text about the model"));
  EXPECT_THAT(broken([](L& l, G&, F&) { l.buffers[0].device = static_cast<KvDevice>(7); }),
              HasSubstr("device"));
  // Two layers, and K and V, in the same place.
  EXPECT_THAT(broken([](L&, G&, F& f) { f.places[1] = f.places[0]; }),
              HasSubstr("layer 0's K and layer 1's K overlap"));
  EXPECT_THAT(broken([](L&, G& g, F& f) { g.fields[1].places[0] = f.places[0]; }),
              HasSubstr("overlap"));
}

TEST(KvLayout, CountsThatOverflowAreRefusedNotComputed) {
  for (uint32_t huge : {UINT32_MAX, UINT32_MAX / 2, 1u << 31}) {
    EXPECT_FALSE(KvLayout::dense(huge, huge, huge, huge, huge, "x").check().ok());
    EXPECT_FALSE(KvLayout::dense(3, huge, huge, huge, huge / 9, "x").check().ok());
    KvShape shape = kShape;
    shape.blocks = shape.block_tokens = huge;
    EXPECT_FALSE(KvLayout::transposed_keys(shape).check().ok());
    shape.head_size = huge;
    EXPECT_FALSE(
        KvLayout::paged(shape, KvLayout::Order::kHnd, KvLayout::Pair::kJoined, true).check().ok());
  }
}

// Whether two fields overlap, against a walk over every element of both.
TEST(KvLayout, OverlapsAreFoundExactlyWhereTheOuterDimensionsAreEqual) {
  std::mt19937 random(1);
  size_t found = 0;
  for (int round = 0; round < 3000; ++round) {
    KvGroup group;
    group.blocks = 1 + random() % 3;
    group.block_tokens = 1 + random() % 4;
    group.heads = 1 + random() % 3;
    KvField field;
    field.width = 1 + random() % 3;
    const auto gap = [&] { return random() % 3 == 0 ? random() % 9 : 0; };
    field.element_stride = 1 + gap();
    field.head_stride = field.width * field.element_stride + gap();
    field.token_stride = group.heads * field.head_stride + gap();
    field.block_stride = group.block_tokens * field.token_stride + gap();
    const KvSteps steps = steps_of(group, field);
    std::vector<uint64_t> offsets;
    for (uint64_t b = 0; b < group.blocks; ++b) {
      for (uint64_t t = 0; t < group.block_tokens; ++t) {
        for (uint64_t h = 0; h < group.heads; ++h) {
          for (uint64_t e = 0; e < field.width; ++e) {
            offsets.push_back(b * field.block_stride + t * field.token_stride +
                              h * field.head_stride + e * field.element_stride);
          }
        }
      }
    }
    const uint64_t distance = random() % (extent_of(steps) + 2);
    bool shares = false;
    for (uint64_t a : offsets) {
      shares |= std::find(offsets.begin(), offsets.end(), a - distance) != offsets.end();
    }
    EXPECT_EQ(shares_bytes(steps, steps, distance), shares) << round;
    found += shares;
  }
  EXPECT_GT(found, 300u);
}

TEST(KvLayout, SurvivesTheWireAndNothingElseDoes) {
  std::vector<KvLayout> layouts = engine_layouts();
  layouts[0].model = {"sha256:1", "bf16", "theta 10000"};
  KvLayout hybrid = KvLayout::paged(kShape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
  hybrid.groups.push_back(hybrid.groups[0]);  // shares memory with the first, as vLLM's do
  hybrid.groups[0].layers = {0, 4, 5};
  hybrid.groups[1].layers = {1, 3, 7};
  hybrid.groups[1].window = 128;
  hybrid.buffers[2] = {1 << 20, KvDevice::kCuda, 3};
  layouts.push_back(hybrid);
  for (const KvLayout& layout : layouts) {
    const std::string bytes = layout.encode();
    const auto again = must(KvLayout::decode(bytes));
    EXPECT_EQ(again, layout);
    for (size_t cut = 0; cut < bytes.size(); ++cut) {
      EXPECT_FALSE(KvLayout::decode(bytes.substr(0, cut)).ok()) << cut;
    }
    EXPECT_FALSE(KvLayout::decode(bytes + '\0').ok());
  }
  // Tensors of their own cost a request next to nothing.
  KvShape many = kShape;
  many.layers = 128;
  const KvLayout large = KvLayout::paged(many, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
  EXPECT_LT(large.encode().size(), 250u);
}

}  // namespace
}  // namespace baton::kvtransfer
