// What a peer or an application may say of a cache that makes no sense: rows of tiles, counts
// beyond reason, plans between layouts that differ in one thing, ranks that there are not.
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_checksums.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_plan.h"
#include "tests/fails_with.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

constexpr KvShape kSmall{.layers = 2,
                         .blocks = 4,
                         .block_tokens = 16,
                         .total_heads = 2,
                         .heads = 2,
                         .head_size = 8,
                         .dtype = KvDtype::kBfloat16};

KvLayout small_layout() {
  return KvLayout::paged(kSmall, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
}

TEST(KvBadInput, RowsOfTilesThatMakeNoSense) {
  // Rows of 4 tokens, each in 2 runs of 16 elements.
  const auto packed = [](auto change) {
    KvLayout layout = small_layout();
    for (KvField& field : layout.groups[0].fields) {
      field.row_tokens = 4;
      field.width = 16;
      field.runs = 2;
      field.element_stride = 2;
      field.run_stride = 32;
      field.head_stride = 64;
      field.token_stride = 128;
      field.block_stride = 512;
      field.order = "tiles";
    }
    change(layout.groups[0], layout.groups[0].fields[0]);
    return std::string(layout.check().message());
  };
  using G = KvGroup;
  using F = KvField;
  EXPECT_EQ(packed([](G&, F&) {}), "");
  EXPECT_THAT(packed([](G&, F& f) { f.order = std::string(KvLayout::kMaxOrder + 1, 'x'); }),
              HasSubstr("is described in 129 bytes"));
  EXPECT_THAT(packed([](G&, F& f) { f.row_tokens = 0; }), HasSubstr("a row of 0 tokens"));
  EXPECT_THAT(packed([](G&, F& f) { f.row_tokens = 3; }), HasSubstr("in a block of 16"));
  EXPECT_THAT(packed([](G&, F& f) { f.row_tokens = 32; }), HasSubstr("in a block of 16"));
  EXPECT_THAT(packed([](G&, F& f) { f.per_block = true; }), HasSubstr("a row of 4 tokens"));
  EXPECT_THAT(packed([](G&, F& f) { f.runs = 0; }), HasSubstr("in 0 runs"));
  EXPECT_THAT(packed([](G&, F& f) { f.runs = UINT32_MAX; }), HasSubstr("in 4294967295 runs"));
  EXPECT_THAT(packed([](G&, F& f) { f.width = 15; }), HasSubstr("in 2 runs of 15"));
  EXPECT_THAT(packed([](G&, F& f) { f.element_stride = 4; }), HasSubstr("has gaps"));
  EXPECT_THAT(packed([](G& g, F&) { g.fields.clear(); }), HasSubstr("at least one"));
}

TEST(KvBadInput, MoreBuffersGroupsAndInterleavedLayersThanThereMayBe) {
  KvLayout layout = small_layout();
  layout.buffers.resize(KvLayout::kMaxBuffers);
  EXPECT_TRUE(layout.check().ok()) << layout.check();
  layout.buffers.emplace_back();
  EXPECT_THAT(layout.check().message(), HasSubstr("2049 buffers"));
  layout = small_layout();
  layout.groups.clear();
  EXPECT_THAT(layout.check().message(), HasSubstr("0 groups"));
  layout.groups.resize(KvLayout::kMaxGroups + 1);
  EXPECT_THAT(layout.check().message(), HasSubstr("65 groups"));
  // [block][layer][K or V]: each pair of fields has to be looked at, and that has an end.
  const auto interleaved = [](uint32_t layers) {
    KvShape shape = kSmall;
    shape.layers = layers;
    shape.blocks = 2;
    KvLayout made = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, false);
    made.buffers.resize(1);
    KvGroup& group = made.groups[0];
    const uint64_t bytes = uint64_t{16} * 2 * 8 * 2;  // of K of a block
    for (size_t f = 0; f < 2; ++f) {
      group.fields[f].block_stride = 2 * layers * bytes;
      for (uint32_t i = 0; i < layers; ++i) {
        group.fields[f].places[i] = {0, (2 * i + f) * bytes};
      }
    }
    made.fit_buffers();
    return made.check();
  };
  EXPECT_TRUE(interleaved(300).ok()) << interleaved(300);
  EXPECT_THAT(interleaved(1000).message(), HasSubstr("too many layers lie interleaved"));
}

// Before memory is made for it: check() would say something else of each.
TEST(KvBadInput, BytesThatSayMoreThanThereMayBe) {
  const KvLayout good = small_layout();
  const auto refused = [](const std::string& bytes) {
    EXPECT_THAT(KvLayout::decode(bytes).status().message(), HasSubstr("of another release"));
  };
  const auto changed = [&](auto change) {
    KvLayout layout = good;
    change(layout);
    refused(layout.encode());
  };
  ASSERT_TRUE(KvLayout::decode(good.encode()).ok());
  std::string newer = good.encode();
  newer[0] = 9;
  refused(newer);
  changed([](KvLayout& l) { l.buffers.resize(KvLayout::kMaxBuffers + 1); });
  changed([](KvLayout& l) { l.groups.resize(KvLayout::kMaxGroups + 1); });
  changed([](KvLayout& l) { l.groups[0].fields.resize(KvLayout::kMaxFields + 1); });
  changed([](KvLayout& l) { l.groups[0].layers.resize(KvLayout::kMaxLayers + 1, 1); });
  changed([](KvLayout& l) { l.groups[0].fields[0].places.resize(3); });
  changed([](KvLayout& l) { l.format = std::string(KvLayout::kMaxFormat + 1, 'x'); });
  changed([](KvLayout& l) { l.model.rope = std::string(KvLayout::kMaxModel + 1, 'x'); });
  // Behind a good group, too, whose layers count.
  changed([](KvLayout& l) {
    l.groups.push_back(l.groups[0]);
    l.groups[1].layers.assign(KvLayout::kMaxLayers - 1, 7);
  });
  // The byte that says whether a row is one per block.
  KvLayout other = good;
  other.groups[0].fields[0].per_block = true;
  const std::string with = other.encode();
  std::string odd = good.encode();
  for (size_t i = 0; i < odd.size(); ++i) {
    if (odd[i] != with[i]) odd[i] = 2;
  }
  refused(odd);
}

TEST(KvBadInput, InvalidOrDifferentLayouts) {
  const KvLayout good = small_layout();
  KvLayout broken = good;
  broken.groups[0].heads = 0;
  for (const auto& [from, to] :
       {std::pair<const KvLayout*, const KvLayout*>(&good, &broken), {&broken, &good}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(KvPlan::make(*from, *to).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(KvChecksums::make(*from, *to).status()));
  }
  const auto refused = [&](auto change) {
    KvLayout other = good;
    for (KvField& field : other.groups[0].fields) change(field);
    other.fit_buffers();
    EXPECT_TRUE(other.check().ok()) << other.check();
    const absl::Status status = KvPlan::make(good, other).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused([](KvField& f) { f.order = "another"; }), HasSubstr("packed as \"another\""));
  EXPECT_THAT(refused([](KvField& f) {
                f.width = 4;
                f.runs = 2;
                f.run_stride = 8;
              }),
              HasSubstr("2 runs"));
  EXPECT_THAT(refused([](KvField& f) {
                f.row_tokens = 2;
                f.width = 8;
              }),
              HasSubstr("2 tokens"));
  EXPECT_THAT(refused([](KvField& f) { f.per_block = true; }), HasSubstr("one per block"));
}

TEST(KvBadInput, ChecksumsOfWhatIsNotInThisMemory) {
  KvLayout layout = small_layout();
  const auto sums = must(KvChecksums::make(layout, layout));
  const std::vector<uint32_t> pages{0};
  std::vector<uint32_t> out;
  const auto add = [&](const KvChecksums& of, const std::vector<uint64_t>& addresses) {
    return of.add(KvChecksums::Side::kSource, addresses, {0, 16}, {0, pages}, 0, out);
  };
  EXPECT_TRUE(absl::IsInvalidArgument(add(sums, {})));
  EXPECT_TRUE(absl::IsInvalidArgument(add(sums, std::vector<uint64_t>(layout.buffers.size() + 1))));
  KvLayout two = layout;
  two.groups.push_back(two.groups[0]);
  two.groups[1].layers = {7, 8};
  EXPECT_TRUE(absl::IsInvalidArgument(KvChecksums::make(two, layout).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(KvChecksums::make(layout, two).status()));
  for (KvBuffer& buffer : layout.buffers) buffer.device = KvDevice::kCuda;
  const auto of_device = must(KvChecksums::make(layout, layout));
  EXPECT_THAT(add(of_device, std::vector<uint64_t>(layout.buffers.size())),
              fails_with(Code::kInvalidArgument, {"device memory"}));
  EXPECT_TRUE(out.empty());
}

TEST(KvBadInput, RanksAndPlacesThatThereAreNot) {
  EXPECT_TRUE(ranks_heard(0, 2, 2, 0).empty());
  EXPECT_TRUE(ranks_heard(8, 2, 2, 2).empty());
  EXPECT_TRUE(ranks_heard(8, 2, 2, UINT32_MAX).empty());
  EXPECT_TRUE(share_of_rank(8, 2, 0, {4, 8}, 0).empty());
  const KvLayout layout = small_layout();
  const auto plan = must(KvPlan::make(layout, layout));
  uint32_t index = 0;
  EXPECT_EQ(plan.find_layer(2, &index), nullptr);
  EXPECT_EQ(plan.find_layer(UINT32_MAX, &index), nullptr);
  std::vector<Descriptor> where;
  for (const KvBuffer& buffer : layout.buffers) {
    where.push_back({uint64_t{1} << (32 + where.size()), buffer.bytes, 0});
  }
  ASSERT_TRUE(KvPlacement::of(layout, where).ok());
  where[0].device = uint64_t{1} << 32;
  EXPECT_THAT(KvPlacement::of(layout, where).status().message(), HasSubstr("no device 4294967296"));
}

}  // namespace
}  // namespace baton::kvtransfer
