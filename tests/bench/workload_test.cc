// Workloads: the layouts that both sides derive, and the pattern that proves their bytes.
#include "bench/kv/workload.h"

#include "bench/report/bench_memory.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

std::unique_ptr<Workload> made(const WorkloadSpec& spec) { return must(Workload::make(spec)); }

// Does by hand what a transfer does.
void transfer(const Workload& workload, const std::byte* from, std::byte* to) {
  TransferCursor cursor(workload.source(), workload.target(), 0, workload.bytes());
  for (Piece piece; cursor.next(piece);) {
    std::memcpy(to + piece.remote_offset, from + piece.local_offset, piece.bytes);
  }
}

TEST(Workload, ScatteredPagesAreDistinctAndInside) {
  const auto workload = made({.pages = 100, .page_bytes = 64});
  EXPECT_EQ(workload->bytes(), 6400u);
  EXPECT_EQ(workload->pieces(), 100u);
  EXPECT_EQ(workload->piece_bytes(), 64u);
  for (const Layout* layout : {&workload->source(), &workload->target()}) {
    EXPECT_TRUE(layout->check(workload->source_bytes(), "test").ok());
    const Dim& pages = layout->dims()[0];
    const std::set<uint32_t> distinct(pages.index, pages.index + pages.count);
    EXPECT_EQ(distinct.size(), 100u);
  }
  const Dim& source = workload->source().dims()[0];
  const Dim& target = workload->target().dims()[0];
  EXPECT_NE(std::memcmp(source.index, target.index, 400), 0);
}

TEST(Workload, BothSidesDeriveTheSameOne) {
  for (const WorkloadSpec& spec :
       {WorkloadSpec{.pages = 50, .page_bytes = 8},
        WorkloadSpec{.pages = 1, .page_bytes = 999, .scattered = false},
        WorkloadSpec{.model = "kjv", .tokens = 70, .tp_source = 3, .tp_target = 1}}) {
    const auto told = must(WorkloadSpec::from_json(Json::parse(spec.to_json().dump())));
    const auto mine = made(spec), theirs = made(told);
    EXPECT_EQ(mine->bytes(), theirs->bytes());
    std::vector<std::byte> from(mine->source_bytes()), to(mine->target_bytes());
    poison(to.data(), to.size());
    fill(from.data(), mine->source(), 5);
    transfer(*theirs, from.data(), to.data());
    EXPECT_TRUE(check(to.data(), to.size(), mine->target(), 5).ok());
  }
}

TEST(Workload, AModelMovesTheHeadsThatBothShardsHold) {
  const KvModel model = *find_kv_model("llama3-8b");
  const auto whole = made({.model = "llama3-8b", .tokens = 16});
  EXPECT_EQ(whole->bytes(), 16 * model.token_bytes());
  EXPECT_EQ(whole->pieces(), model.layers);
  const auto shard = made({.model = "llama3-8b", .tokens = 32, .tp_source = 2, .tp_target = 8});
  EXPECT_EQ(shard->bytes(), 32 * model.token_bytes() / 8);
  EXPECT_EQ(shard->source_bytes(), 4 * shard->target_bytes());
}

TEST(Workload, HostileDescriptionsAreErrors) {
  for (const char* text :
       {"null", "[]", "{}", R"({"layout":"scattered"})", R"({"layout":1,"pages":1,"page_bytes":1})",
        R"({"layout":"scattered","pages":-1,"page_bytes":1})",
        R"({"layout":"scattered","pages":"1","page_bytes":1})",
        R"({"layout":"scattered","model":"kjv","tokens":1,"block_tokens":4294967297,"tp":"1:1"})",
        R"({"layout":"scattered","model":"kjv","tokens":1,"block_tokens":16,"tp":"x"})"}) {
    EXPECT_FALSE(WorkloadSpec::from_json(Json::parse(text)).ok()) << text;
  }
}

TEST(Pattern, FindsAWrongAMissingAndAStrayByte) {
  const std::vector<uint32_t> pages = {4, 1, 2};
  const Layout layout = Layout::paged(0, pages, 13, 13);  // pieces that are no multiple of a word
  std::vector<std::byte> memory(5 * 13);
  const auto reset = [&] {
    poison(memory.data(), memory.size());
    fill(memory.data(), layout, 9);
  };
  const auto verdict = [&](uint64_t seed) {
    return std::string(check(memory.data(), memory.size(), layout, seed).message());
  };
  reset();
  EXPECT_EQ(verdict(9), "");
  EXPECT_THAT(verdict(9), testing::HasSubstr("never arrived"));  // checking poisons
  reset();
  EXPECT_THAT(verdict(10), testing::HasSubstr("should be"));
  reset();
  memory[13] ^= std::byte{1};
  EXPECT_THAT(verdict(9), testing::HasSubstr("byte 13 of the transfer (offset 13 "));
  reset();
  memory[3 * 13] = std::byte{0};
  EXPECT_THAT(verdict(9), testing::HasSubstr("offset 39 of the region was written to"));
}

}  // namespace
}  // namespace baton::bench
