// Plans: what they move, for random pairs of layouts, against a walk over every element; what they
// refuse; how far they coalesce; and that both ends take the same checksums.
// tests/python/kv_plan_test.py does the first again, against numpy.
#include "kvtransfer/kv_plan.h"

#include "kvtransfer/kv_checksums.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Order = KvLayout::Order;
using Pair = KvLayout::Pair;

KvShape shape_of(uint32_t block_tokens, uint32_t first_head = 0, uint32_t heads = 8) {
  return {.layers = 3,
          .blocks = 12,
          .block_tokens = block_tokens,
          .total_heads = 8,
          .first_head = first_head,
          .heads = heads,
          .head_size = 16};
}

// The moves of all parts for tokens [0, length), pages in order.
std::vector<KvMove> moves_of(const KvPlan& plan, uint64_t length,
                             const std::vector<uint32_t>& pages) {
  std::vector<KvMove> moves;
  for (size_t part = 0; part < plan.parts().size(); ++part) {
    const absl::Status status = plan.for_each_move(part, {0, length}, {0, pages}, {0, pages},
                                                   KvPlan::kAllLayers, [&](const KvMove& move) {
                                                     moves.push_back(move);
                                                     return absl::OkStatus();
                                                   });
    EXPECT_TRUE(status.ok()) << status;
  }
  return moves;
}

size_t pieces_of(const KvMove& move) {
  TransferCursor cursor(move.source, move.target, 0, move.source.bytes());
  size_t pieces = 0;
  for (Piece piece; cursor.next(piece);) ++pieces;
  return pieces;
}

const std::vector<uint32_t> kPages = {3, 1, 7, 5, 9, 0, 11, 2};

TEST(KvPlan, EqualLayoutsMoveWholeBlocks) {
  // K and V of a block lie together: 8 blocks x 3 layers are as many pieces, of one transfer.
  for (const KvLayout& layout :
       {KvLayout::transposed_keys(shape_of(16)), KvLayout::dense(3, 12, 16, 8, 99, "x"),
        KvLayout::paged(shape_of(16), Order::kNhd, Pair::kInBlock, false),
        KvLayout::paged(shape_of(16), Order::kHnd, Pair::kJoined, false)}) {
    const auto plan = must(KvPlan::make(layout, layout));
    EXPECT_TRUE(plan.complete());
    const std::vector<KvMove> moves = moves_of(plan, 128, kPages);
    ASSERT_EQ(moves.size(), 1u);
    EXPECT_EQ(moves[0].layers, 3u);
    EXPECT_EQ(pieces_of(moves[0]), 24u);
    EXPECT_EQ(moves[0].source.bytes(), layout.bytes() / 12 * 8);
  }
  // A tensor for each layer: a transfer for each, K and V in one where they share it.
  const auto stacked = KvLayout::paged(shape_of(16), Order::kNhd, Pair::kInBlock, true);
  EXPECT_EQ(moves_of(*KvPlan::make(stacked, stacked), 128, kPages).size(), 3u);
  const auto split = KvLayout::paged(shape_of(16), Order::kNhd, Pair::kSplit, true);
  EXPECT_EQ(moves_of(*KvPlan::make(split, split), 128, kPages).size(), 6u);
}

TEST(KvPlan, OneHeadOfAShardIsOneRunPerBlock) {
  const auto whole = KvLayout::paged(shape_of(16), Order::kHnd, Pair::kJoined, false);
  const auto shard = KvLayout::paged(shape_of(16, 3, 2), Order::kHnd, Pair::kJoined, false);
  const std::vector<KvMove> moves = moves_of(*KvPlan::make(whole, shard), 128, kPages);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(pieces_of(moves[0]), 24u);
  EXPECT_EQ(moves[0].source.bytes(), 2u * 2 * 16 * 2 * 128 * 3);
}

TEST(KvPlan, LayersInsideABlockJoinIt) {
  KvLayout layout = KvLayout::dense(4, 10, 16, 2, 64, "x");
  KvField& field = layout.groups[0].fields[0];
  field.block_stride = 4 * 128;
  for (uint32_t i = 0; i < 4; ++i) field.places[i].offset = i * 128;
  layout.fit_buffers();
  ASSERT_TRUE(layout.check().ok()) << layout.check();
  const std::vector<uint32_t> pages = {2, 5, 3};
  const std::vector<KvMove> moves = moves_of(*KvPlan::make(layout, layout), 48, pages);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(pieces_of(moves[0]), 2u + 1 - 0);  // each block with all its layers
}

TEST(KvPlan, BlocksOfDifferentSizesAreOneTransfer) {
  const auto small = KvLayout::paged(shape_of(8), Order::kNhd, Pair::kInBlock, false);
  const auto large = KvLayout::paged(shape_of(32), Order::kNhd, Pair::kInBlock, false);
  const auto plan = must(KvPlan::make(small, large));
  EXPECT_EQ(plan.parts()[0].unit, 8u);
  size_t moves = 0;
  const std::vector<uint32_t> there = {4, 6};
  ASSERT_TRUE(plan.for_each_move(0, {0, 64}, {0, kPages}, {0, there}, KvPlan::kAllLayers,
                                 [&](const KvMove& move) {
                                   ++moves;
                                   EXPECT_EQ(pieces_of(move), 8u * 3);
                                   return absl::OkStatus();
                                 })
                  .ok());
  EXPECT_EQ(moves, 2u);  // K and V
}

// Promise(kv): KV of different checkpoints is never mixed | layouts name their model by a hash
TEST(KvPlan, DifferencesAreRefusedWithTheRemedy) {
  const KvLayout good = KvLayout::transposed_keys(shape_of(16));
  const auto refused = [&](auto change) {
    KvLayout target = good;
    change(target);
    target.fit_buffers();
    const absl::Status status = KvPlan::make(good, target).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused([](KvLayout& l) { l.groups[0].total_heads = 16; }), HasSubstr("same model"));
  EXPECT_THAT(refused([](KvLayout& l) { l.groups[0].fields[1].width = 15; }),
              AllOf(HasSubstr("width of V"), HasSubstr("same KV data type")));
  EXPECT_THAT(refused([](KvLayout& l) { l.groups[0].fields[0].dtype = KvDtype::kFloat16; }),
              AllOf(HasSubstr("bf16"), HasSubstr("fp16"), HasSubstr("convert at the source")));
  EXPECT_THAT(refused([](KvLayout& l) { l.groups[0].fields.pop_back(); }),
              AllOf(HasSubstr("V is there"), HasSubstr("missing")));
  EXPECT_THAT(refused([](KvLayout& l) { l.format = "fp8"; }),
              AllOf(HasSubstr("\"\""), HasSubstr("\"fp8\"")));
  EXPECT_THAT(refused([](KvLayout& l) { l.model.weights = "another"; }),
              AllOf(HasSubstr("\"another\""), HasSubstr("same checkpoint")));
  EXPECT_THAT(refused([](KvLayout& l) { l.model.dtype = "fp16"; }),
              AllOf(HasSubstr("data type"), HasSubstr("same checkpoint")));
  EXPECT_THAT(refused([](KvLayout& l) { l.model.rope = "yarn"; }),
              AllOf(HasSubstr("rotary"), HasSubstr("same checkpoint")));
  KvLayout windowed = good;
  windowed.groups[0].window = 64;
  EXPECT_THAT(std::string(KvPlan::make(windowed, good).status().message()),
              AllOf(HasSubstr("the last 64 tokens"), HasSubstr("all tokens")));
  EXPECT_TRUE(KvPlan::make(good, windowed).ok());
  // What only its engine can cut.
  const absl::Status blocks =
      KvPlan::make(KvLayout::dense(3, 9, 16, 2, 64, "x"), KvLayout::dense(3, 9, 32, 2, 64, "x"))
          .status();
  EXPECT_THAT(std::string(blocks.message()),
              AllOf(HasSubstr("16"), HasSubstr("32"), HasSubstr("same block size")));
  const absl::Status bytes =
      KvPlan::make(KvLayout::dense(3, 9, 16, 2, 64, "x"), KvLayout::dense(3, 9, 16, 2, 65, "x"))
          .status();
  EXPECT_THAT(std::string(bytes.message()), HasSubstr("same KV data type"));
}

TEST(KvPlan, PagesThatAreNotThereAreRefused) {
  const KvLayout layout = KvLayout::transposed_keys(shape_of(16));
  const auto plan = KvPlan::make(layout, layout);
  const auto moved = [&](KvTokens tokens, const KvPages& source, const KvPages& target) {
    return plan->for_each_move(0, tokens, source, target, KvPlan::kAllLayers,
                               [](const KvMove&) { return absl::OkStatus(); });
  };
  EXPECT_TRUE(moved({0, 128}, {0, kPages}, {0, kPages}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(moved({0, 129}, {0, kPages}, {0, kPages})));
  EXPECT_TRUE(absl::IsInvalidArgument(moved({0, 16}, {1, kPages}, {0, kPages})));
  EXPECT_TRUE(absl::IsInvalidArgument(moved({0, UINT64_MAX}, {0, kPages}, {0, kPages})));
  EXPECT_TRUE(absl::IsInvalidArgument(moved({0, 16}, {0, kPages}, {0, {}})));
  const std::vector<uint32_t> outside = {12};
  EXPECT_TRUE(absl::IsInvalidArgument(moved({0, 16}, {0, kPages}, {0, outside})));
  EXPECT_TRUE(absl::IsInvalidArgument(moved({0, 16}, {0, outside}, {0, kPages})));
  EXPECT_TRUE(absl::IsInvalidArgument(
      plan->for_each_move(1, {0, 16}, {0, kPages}, {0, kPages}, KvPlan::kAllLayers,
                          [](const KvMove&) { return absl::OkStatus(); })));
  // An error of the caller's ends the walk, and comes back.
  EXPECT_TRUE(absl::IsAborted(
      plan->for_each_move(0, {0, 16}, {0, kPages}, {0, kPages}, KvPlan::kAllLayers,
                          [](const KvMove&) { return absl::AbortedError("enough"); })));
}

TEST(KvPlan, ShardsWithoutCommonHeadsOweEachOtherNothing) {
  const auto plan = must(KvPlan::make(KvLayout::transposed_keys(shape_of(16, 0, 4)),
                                      KvLayout::transposed_keys(shape_of(16, 4, 4))));
  EXPECT_FALSE(plan.complete());
  EXPECT_TRUE(moves_of(plan, 128, kPages).empty());
  EXPECT_EQ(plan.parts()[0].bytes_per_token(), 0u);
}

TEST(KvPlan, EveryHeadIsSentByOneRankWhateverTheDegrees) {
  for (uint32_t total : {1u, 2u, 3u, 8u, 10u}) {
    for (uint32_t ranks = 1; ranks <= 17; ++ranks) {
      for (uint64_t turn = 0; turn < 5; ++turn) {
        std::vector<int> sent(total, 0);
        const KvHeads wanted{total / 3, std::max(total / 3 + 1, total - total / 4)};
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          const KvHeads held = shard_heads(total, ranks, rank);
          EXPECT_FALSE(held.empty());
          const KvHeads share = share_of_rank(total, ranks, rank, wanted, turn);
          for (uint32_t head = share.first; head < share.end; ++head) {
            ++sent[head];
            EXPECT_TRUE(head >= held.first && head < held.end);
          }
        }
        for (uint32_t head = 0; head < total; ++head) {
          EXPECT_EQ(sent[head], head >= wanted.first && head < wanted.end) << ranks;
        }
      }
    }
  }
  EXPECT_TRUE(shard_heads(8, 0, 0).empty());
  EXPECT_TRUE(shard_heads(8, 4, 4).empty());
}

// --- random pairs, element by element ------------------------------------------------------------

struct Rank {
  KvLayout layout;
  std::vector<std::vector<unsigned char>> buffers;
  std::vector<std::vector<uint32_t>> pages;  // by group
  std::vector<uint64_t> first_block;
};

// Where an element lies, straight from kv_layout.h.
uint64_t offset_of(const KvGroup& g, const KvField& f, size_t layer, uint64_t page, uint64_t token,
                   uint32_t head, uint32_t element) {
  return f.places[layer].offset + page * f.block_stride + token % g.block_tokens * f.token_stride +
         (head - g.first_head) * f.head_stride + element * f.element_stride;
}

unsigned char content(uint32_t layer, KvRole role, uint64_t token, uint32_t head, uint32_t byte) {
  uint64_t x = layer * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(role) * 0xC2B2AE3D27D4EB4Fu +
               token * 0x165667B19E3779F9u + head * 0x27D4EB2F165667C5u + byte;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return static_cast<unsigned char>(x >> 40);
}

// Writes what tokens [begin, end) of the worker's heads hold.
void put(Rank& worker, size_t group, KvTokens tokens) {
  const KvGroup& g = worker.layout.groups[group];
  for (const KvField& f : g.fields) {
    for (size_t layer = 0; layer < g.layers.size(); ++layer) {
      for (uint64_t token = tokens.begin; token < tokens.end; ++token) {
        const uint64_t index = token / g.block_tokens - worker.first_block[group];
        for (uint32_t head = g.first_head; head < g.first_head + g.heads; ++head) {
          for (uint32_t e = 0; e < f.width; ++e) {
            const uint64_t at = offset_of(g, f, layer, worker.pages[group][index],
                                          f.per_block ? 0 : token, head, e);
            const uint64_t row = f.per_block ? token / g.block_tokens : token;
            for (uint32_t i = 0; i < bytes_of(f.dtype); ++i) {
              worker.buffers[f.places[layer].buffer][at + i] =
                  content(g.layers[layer], f.role, row, head, e * bytes_of(f.dtype) + i);
            }
          }
        }
      }
    }
  }
}

std::vector<uint32_t> sums_of(const KvChecksums& sums, KvChecksums::Side side, const Rank& rank,
                              KvTokens tokens, uint32_t layer) {
  std::vector<uint64_t> addresses;
  for (const auto& buffer : rank.buffers) {
    addresses.push_back(reinterpret_cast<uint64_t>(buffer.data()));
  }
  std::vector<uint32_t> out;
  EXPECT_EQ(sums.add(side, addresses, tokens, {rank.first_block[0], rank.pages[0]}, layer, out),
            absl::OkStatus());
  return out;
}

// What has moved has the same checksums at both ends; with one byte of it wrong it has not.
void check_sums(const Rank& source, Rank& target, const KvShare& share, KvTokens tokens,
                uint64_t wrong_byte) {
  const auto sums = must(KvChecksums::make(source.layout, target.layout, share));
  if (sums.unit() == 0) return;
  for (const uint32_t layer : target.layout.groups[0].layers) {
    const auto sent = sums_of(sums, KvChecksums::Side::kSource, source, tokens, layer);
    const auto here = [&] {
      return sums_of(sums, KvChecksums::Side::kTarget, target, tokens, layer);
    };
    EXPECT_FALSE(sent.empty());
    ASSERT_EQ(here(), sent);
    // The first head that moves, in its first token.
    const KvPart& part = sums.plan().parts()[0];
    const KvGroup& group = target.layout.groups[0];
    const KvField& field = group.fields[part.boxes[0].target_field];
    uint32_t index = 0;
    ASSERT_NE(sums.plan().find_layer(layer, &index), nullptr);
    const KvPlace& place = field.places[part.layers[index].target_index];
    const uint64_t at =
        offset_of(group, field, part.layers[index].target_index,
                  target.pages[0][tokens.begin / group.block_tokens - target.first_block[0]],
                  field.per_block ? 0 : tokens.begin, part.heads.first, 0) +
        wrong_byte % bytes_of(field.dtype);
    target.buffers[place.buffer][at] ^= 1;
    EXPECT_NE(here(), sent) << "byte " << at;
    target.buffers[place.buffer][at] ^= 1;
  }
}

class Case {
 public:
  explicit Case(uint32_t seed) : random_(seed) {
    layers_ = 1 + pick(4);
    heads_ = 1 + pick(8);
    length_ = 1 + pick(150);
    hybrid_ = layers_ > 1 && pick(3) == 0;
    window_ = pick(2) == 0 ? 1 + pick(60) : 0;
    latent_ = pick(5) == 0;
    opaque_ = !latent_ && pick(6) == 0;
    scales_ = !opaque_ && pick(3) == 0;
    if (latent_) heads_ = 1;
    block_ = 1u << pick(6);
    width_ = 1 + pick(9);
    const KvDtype dtypes[] = {KvDtype::kFloat8E4M3, KvDtype::kBfloat16, KvDtype::kFloat32};
    dtype_ = dtypes[pick(3)];
  }

  uint32_t pick(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  uint64_t length() const { return length_; }
  uint64_t turn() const { return length_; }

  std::vector<Rank> side(uint32_t ranks) {
    const bool per_layer = pick(2) == 0;
    const uint32_t block = opaque_ ? block_ : 1 + pick(40);
    const uint32_t order = pick(6);
    std::vector<Rank> workers(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      KvLayout& layout = workers[rank].layout;
      layout.groups.resize(hybrid_ ? 2 : 1);
      uint64_t offset = 0;
      for (size_t g = 0; g < layout.groups.size(); ++g) {
        KvGroup& group = layout.groups[g];
        for (uint32_t layer = 0; layer < layers_; ++layer) {
          if (!hybrid_ || layer % 2 == g) group.layers.push_back(layer);
        }
        group.block_tokens = g == 0 || opaque_ ? block : 1 + block / 2;
        group.window = g == 1 ? window_ : 0;
        group.total_heads = heads_;
        const KvHeads held = shard_heads(heads_, ranks, rank);
        group.first_head = held.first;
        group.heads = held.end - held.first;
        group.blocks = static_cast<uint32_t>(length_ / group.block_tokens + 1 + pick(4));
        add_fields(group);
        lay_out(group, order, per_layer, offset);
      }
      layout.fit_buffers();
      EXPECT_TRUE(layout.check().ok()) << layout.check();
      for (const KvBuffer& buffer : layout.buffers) {
        workers[rank].buffers.emplace_back(buffer.bytes, static_cast<unsigned char>(pick(256)));
      }
      for (const KvGroup& group : layout.groups) {
        const uint64_t window = group.window == 0 ? length_ : group.window;
        const uint64_t first = length_ > window ? (length_ - window) / group.block_tokens : 0;
        std::vector<uint32_t> pages(group.blocks);
        std::iota(pages.begin(), pages.end(), 0u);
        if (pick(3) != 0) std::shuffle(pages.begin(), pages.end(), random_);
        pages.resize((length_ - 1) / group.block_tokens + 1 - first);
        workers[rank].pages.push_back(std::move(pages));
        workers[rank].first_block.push_back(first);
      }
    }
    return workers;
  }

 private:
  void add_fields(KvGroup& group) {
    const auto add = [&](KvRole role, KvDtype dtype, uint32_t width, bool per_block) {
      KvField field;
      field.role = role;
      field.dtype = dtype;
      field.width = width;
      field.per_block = per_block;
      group.fields.push_back(field);
    };
    if (opaque_) return add(KvRole::kOpaque, KvDtype::kByte, width_, true);
    if (latent_) {
      add(KvRole::kLatent, dtype_, width_, false);
      if (scales_) add(KvRole::kLatentScale, KvDtype::kFloat32, 1, false);
      return;
    }
    add(KvRole::kKey, dtype_, width_, false);
    add(KvRole::kValue, dtype_, width_, false);
    if (scales_) add(KvRole::kKeyScale, KvDtype::kFloat32, 1, false);
    if (scales_) add(KvRole::kValueScale, KvDtype::kFloat32, 1, false);
  }

  // Strides in one of several orders, with gaps; layers and fields behind each other, or
  // interleaved.
  void lay_out(KvGroup& group, uint32_t order, bool per_layer, uint64_t& offset) {
    const bool joined = order == 0 && group.fields.size() > 1;  // rows of all fields together
    uint64_t row = 0;
    for (const KvField& field : group.fields) row += field.row_bytes();
    uint64_t inside = 0;
    for (KvField& field : group.fields) {
      const uint64_t tokens = field.per_block ? 1 : group.block_tokens;
      const uint64_t size = bytes_of(field.dtype);
      const uint64_t gap = !joined && pick(3) == 0 ? 4 * pick(4) : 0;
      field.element_stride = size;
      const uint64_t line = joined ? row : field.row_bytes() + gap;
      if (order <= 1) {  // NHD
        field.head_stride = line;
        field.token_stride = line * group.heads;
        field.block_stride = field.token_stride * tokens;
      } else if (order <= 3 || field.per_block) {  // HND
        field.token_stride = line;
        field.head_stride = line * tokens;
        field.block_stride = field.head_stride * group.heads;
      } else {  // elements outside tokens, as transposed keys
        field.token_stride = size;
        field.element_stride = size * tokens + gap / 4 * size;
        field.head_stride = field.element_stride * field.width;
        field.block_stride = field.head_stride * group.heads + gap;
      }
      const uint64_t layer_bytes = field.block_stride * group.blocks + gap;
      for (uint32_t i = 0; i < group.layers.size(); ++i) {
        KvPlace place{per_layer ? group.layers[i] : 0, 0};
        place.offset = per_layer ? offset + inside : offset + i * layer_bytes + inside;
        field.places.push_back(place);
      }
      if (joined) {
        inside += field.row_bytes();
      } else {
        offset += per_layer ? layer_bytes : layer_bytes * group.layers.size();
      }
    }
    if (joined) offset += group.fields[0].block_stride * group.blocks * (group.layers.size() + 1);
  }

  std::mt19937 random_;
  uint32_t layers_, heads_, block_, width_, window_;
  uint64_t length_;
  bool hybrid_, latent_, opaque_, scales_;
  KvDtype dtype_ = KvDtype::kByte;
};

// Promise(kv): Every byte arrives where it belongs between any two KV layouts, once | a plan is the
//   intersection of both layouts
TEST(KvPlan, EveryElementArrivesWhereItBelongsAndNothingElseChanges) {
  const auto seeds = static_cast<uint32_t>(rounds_of(600, 100));
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    Case test(seed);
    std::vector<Rank> sources = test.side(1 + test.pick(8));
    std::vector<Rank> targets = test.side(1 + test.pick(8));
    const uint32_t ranks = static_cast<uint32_t>(sources.size());
    for (Rank& source : sources) {
      for (size_t g = 0; g < source.layout.groups.size(); ++g) {
        const uint64_t size = source.layout.groups[g].block_tokens;
        put(source, g,
            {source.first_block[g] * size,
             (source.first_block[g] + source.pages[g].size()) * size});
      }
    }
    for (Rank& target : targets) {
      Rank expected = target;
      uint64_t counted = 0;
      uint64_t to_count = 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const Rank& source = sources[rank];
        const auto plan =
            must(KvPlan::make(source.layout, target.layout, {ranks, rank, test.turn()}));
        EXPECT_TRUE(plan.complete());
        for (size_t p = 0; p < plan.parts().size(); ++p) {
          const KvPart& part = plan.parts()[p];
          if (part.heads.empty()) continue;
          const size_t from = part.source_group;
          const size_t to = part.target_group;
          const KvTokens kept = part.kept({0, test.length()}, test.length());
          to_count += (kept.end - kept.begin) * part.bytes_per_token() * part.layers.size();
          const KvTokens rounded{kept.begin / part.unit * part.unit,
                                 (kept.end + part.unit - 1) / part.unit * part.unit};
          put(expected, to, rounded);
          const absl::Status status = plan.for_each_move(
              p, kept, {source.first_block[from], source.pages[from]},
              {target.first_block[to], target.pages[to]}, KvPlan::kAllLayers,
              [&](const KvMove& move) {
                counted += move.counted_bytes;
                const auto& read = source.buffers[move.source_buffer];
                auto& written = target.buffers[move.target_buffer];
                EXPECT_EQ(move.source.bytes(), move.target.bytes());
                EXPECT_TRUE(move.source.check(read.size(), "source").ok());
                EXPECT_TRUE(move.target.check(written.size(), "target").ok());
                TransferCursor cursor(move.source, move.target, 0, move.source.bytes());
                for (Piece piece; cursor.next(piece);) {
                  std::memcpy(&written[piece.remote_offset], &read[piece.local_offset],
                              piece.bytes);
                }
                return absl::OkStatus();
              });
          ASSERT_TRUE(status.ok()) << status;
          if (plan.source().groups.size() == 1) {
            check_sums(source, target, {ranks, rank, test.turn()}, kept, seed);
          }
        }
      }
      ASSERT_EQ(target.buffers, expected.buffers);
      EXPECT_EQ(counted, to_count);
      EXPECT_GT(counted, 0u);
    }
  }
}

}  // namespace
}  // namespace baton::kvtransfer
