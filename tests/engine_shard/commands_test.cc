// Commands and reports as bytes: what is written is read, and nothing else is.
#include "engine/shard/commands.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <deque>
#include <string>
#include <vector>
#include "tests/test.h"

#include "tests/random_fields.h"

namespace baton::engine::shard {
namespace {

long peak_kib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

template <typename Message>
class ShardWire : public testing::Test {};
using Messages = testing::Types<Command, Command::Chunk, Command::Send, KvCall, TierCall, Event>;
TYPED_TEST_SUITE(ShardWire, Messages);

TYPED_TEST(ShardWire, OneMessageForOneText) {
  const long before = peak_kib();
  for (uint32_t seed = 0; seed < 40; ++seed) {
    expect_wire_properties<TypeParam>(seed);
    if (this->HasFatalFailure()) return;
  }
  EXPECT_LT(peak_kib() - before, 1 << 20) << "a length that the bytes do not hold costs no memory";
}

// Members that fields() leaves out would be lost on the way: each is written once.
TEST(ShardMessages, KeepTheirFields) {
  {  // with a member more, these do not compile
    [[maybe_unused]] const auto [kind, id, transfer, workers, tokens, first_token, blocks, timeout,
                                 silence, push, why] = KvCall{};
    [[maybe_unused]] const auto [tier_kind, tier_id, keys, tier_blocks, tier_time] = TierCall{};
    [[maybe_unused]] const auto [command, calls, tier_calls, chunks, sends] = Command{};
  }
  const auto through = [](const auto& message) {
    using Message = std::decay_t<decltype(message)>;
    std::string bytes;
    base::write_fields(message, bytes);
    return *base::read_fields<Message>(bytes, "it");
  };
  KvCall call{
      .kind = KvCallKind::kStartLoad,
      .id = 7,
      .transfer = {.transfer = "t", .agent = "a", .address = "h:1", .finished = true, .ranks = 2},
      .workers = {{"a/0", "baton1:a"}, {"a/1", "baton1:b"}},
      .tokens = 48,
      .first_token = 16,
      .blocks = {4, 9},
      .timeout = std::chrono::seconds(3),
      .silence = std::chrono::seconds(2),
      .push = true};
  const KvCall start = through(call);
  EXPECT_EQ(start.id, 7u);
  EXPECT_EQ(start.transfer.transfer, "t");
  EXPECT_EQ(start.transfer.agent, "a");
  EXPECT_EQ(start.transfer.address, "h:1");
  EXPECT_TRUE(start.transfer.finished);
  EXPECT_EQ(start.transfer.ranks, 2u);
  ASSERT_EQ(start.workers.size(), 2u);
  EXPECT_EQ(start.workers[1].agent, "a/1");
  EXPECT_EQ(start.workers[1].address, "baton1:b");
  EXPECT_EQ(start.tokens, 48u);
  EXPECT_EQ(start.first_token, 16u);
  EXPECT_EQ(start.blocks, call.blocks);
  EXPECT_EQ(start.timeout, std::chrono::seconds(3));
  EXPECT_EQ(start.silence, std::chrono::seconds(2));
  EXPECT_TRUE(start.push);
  call.kind = KvCallKind::kOpen;
  EXPECT_EQ(through(call).transfer.transfer, "t");
  EXPECT_EQ(through(call).tokens, 48u);
  call = {.kind = KvCallKind::kFail, .why = absl::AbortedError("no")};
  EXPECT_EQ(through(call).why, absl::AbortedError("no"));

  const TierCall load{.kind = TierCallKind::kLoad,
                      .keys = {{.bytes = {4}}, {.bytes = {5}}},
                      .blocks = {7, 8},
                      .timeout = std::chrono::seconds(6)};
  EXPECT_EQ(through(load).keys, load.keys);
  EXPECT_EQ(through(load).blocks, load.blocks);
  EXPECT_EQ(through(load).timeout, load.timeout);

  const Command::Chunk chunk = through(Command::Chunk{{1, 2}, 16, {7}, true, false});
  EXPECT_EQ(chunk.tokens, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(chunk.position, 16);
  EXPECT_EQ(chunk.blocks, std::vector<uint32_t>{7});
  EXPECT_TRUE(chunk.wants_logits);
  EXPECT_FALSE(chunk.wants_all_logits);
  const Command step = through(Command{.kind = CommandKind::kStep,
                                       .calls = {call},
                                       .tier_calls = {load},
                                       .chunks = {chunk, chunk},
                                       .sends = {{.id = 3, .tokens = 17, .chunk = 1}}});
  EXPECT_EQ(step.calls.size(), 1u);
  EXPECT_EQ(step.tier_calls.size(), 1u);
  EXPECT_EQ(step.chunks.size(), 2u);
  ASSERT_EQ(step.sends.size(), 1u);
  EXPECT_EQ(step.sends[0].id, 3u);
  EXPECT_EQ(step.sends[0].tokens, 17u);
  EXPECT_EQ(step.sends[0].chunk, 1u);
}

// With a member more these do not compile. Whether it must reach the other rank is said below then.
TEST(ShardMessages, EventsAndReportsKeepEachMember) {
  const auto through = [](const auto& message) {
    std::string bytes;
    base::write_fields(message, bytes);
    return *base::read_fields<std::decay_t<decltype(message)>>(bytes, "it");
  };
  for (int kind = 1; kind <= int(EventKind::kUnpinned); ++kind) {
    SCOPED_TRACE(kind);
    const Event event{EventKind(kind), 7, absl::AbortedError("w"), {5, 4, true}};
    const auto [kind_read, id, why, found] = through(event);
    EXPECT_EQ(kind_read, event.kind);
    EXPECT_EQ(id, 7u);
    const bool has_reason = event.kind == EventKind::kLoadFailed;
    EXPECT_EQ(why, has_reason ? event.why : absl::OkStatus());
    const auto [blocks, peer, pending] = found;
    EXPECT_EQ(blocks, event.kind == EventKind::kFound ? 5u : 0u);
    EXPECT_EQ(peer, 0u) << "where they are matters to the follower alone";
    EXPECT_FALSE(pending) << "a follower answers when it knows";
  }
  Report report{.more = true, .tiers = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}};
  report.kv_events = {{EventKind::kReleased, 8}};
  report.tier_events = {{EventKind::kUnpinned, 9}};
  const auto [more, tiers, kv_events, tier_events] = through(report);
  EXPECT_TRUE(more);
  const auto [host_records, host_bytes, disk_records, saved, dropped, evicted, back, from_host,
              from_disk, from_peer, silences, missed, corrupt] = tiers;
  EXPECT_EQ((std::array{host_bytes, dropped, silences, missed, corrupt}),
            (std::array<uint64_t, 5>{2, 5, 11, 12, 13}));
  EXPECT_EQ(
      host_records + disk_records + saved + evicted + back + from_host + from_disk + from_peer, 0u)
      << "rank 0 counts these for all";
  ASSERT_EQ(kv_events.size(), 1u);
  EXPECT_EQ(kv_events[0].id, 8u);
  EXPECT_EQ(kv_events[0].kind, EventKind::kReleased);
  ASSERT_EQ(tier_events.size(), 1u);
  EXPECT_EQ(tier_events[0].id, 9u);
  EXPECT_EQ(tier_events[0].kind, EventKind::kUnpinned);
}

// Of no kind that there is, or without what its kind is about.
TEST(ShardMessages, ThatMakeNoSenseAreRefused) {
  const auto read = [](const TierCall& call) {
    std::string bytes;
    base::write_fields(call, bytes);
    return base::read_fields<TierCall>(bytes, "a call").status();
  };
  EXPECT_TRUE(read({.kind = TierCallKind::kSave, .keys = {{}}, .blocks = {1}}).ok());
  for (const TierCall& call : {TierCall{.kind = TierCallKind{0}},
                               {.kind = TierCallKind{6}},
                               {.kind = TierCallKind::kSave},
                               {.kind = TierCallKind::kSave, .keys = {{}}},
                               {.kind = TierCallKind::kFlush, .blocks = {1}},
                               {.kind = TierCallKind::kLoad, .keys = {{}}, .blocks = {1, 2}},
                               {.kind = TierCallKind::kLoad, .blocks = {1}}}) {
    EXPECT_TRUE(absl::IsInternal(read(call))) << int(call.kind);
  }
  EXPECT_EQ(base::read_fields<Command>("\x63", "a command of rank 0").status().message(),
            "a command of rank 0 (1 bytes) is wrong at byte 1: run the same release at both ends");
}

// --- reports -------------------------------------------------------------------------------------

std::string bytes_of(const Report& report) {
  std::string bytes;
  base::write_fields(report, bytes);
  return bytes;
}

TEST(Reports, SayEverythingInOrderHoweverManyItTakes) {
  RandomFields random(1);
  std::deque<Event> left(200);
  for (Event& event : left) random(event);
  std::deque<Event> tiers_left = left;
  const auto written = [](const auto& events) {
    std::string bytes;
    for (const Event& event : events) base::write_fields(event, bytes);
    return bytes;
  };
  const std::string all = written(left);
  std::string heard, tiers_heard;
  size_t reports = 0;
  for (bool more = true; more; ++reports) {
    Report report{.tiers = {.corrupt = 3}};
    report.take(left, report.kv_events);
    report.take(tiers_left, report.tier_events);
    const std::string bytes = bytes_of(report);
    ASSERT_EQ(bytes.size(), Report::kBytes);
    const auto read = base::read_fields<Report>(bytes, "a report");
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(bytes_of(*read), bytes);
    EXPECT_EQ(read->tiers.corrupt, 3u);
    heard += written(read->kv_events);
    tiers_heard += written(read->tier_events);
    more = read->more;
    EXPECT_EQ(more, !left.empty() || !tiers_left.empty());
  }
  EXPECT_EQ(heard, all);
  EXPECT_EQ(tiers_heard, all);
  EXPECT_GT(reports, 2u);
}

TEST(Reports, LongReasonsAreCut) {
  std::deque<Event> events = {
      {EventKind::kLoadFailed, 5, absl::InternalError(std::string(100'000, 'x'))}};
  Report report;
  report.take(events, report.kv_events);
  const auto read = base::read_fields<Report>(bytes_of(report), "a report");
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->kv_events.size(), 1u);
  EXPECT_EQ(read->kv_events[0].why, absl::InternalError(std::string(512, 'x')));
  EXPECT_TRUE(events.empty());
}

TEST(Reports, NonsenseIsRefused) {
  EXPECT_TRUE(base::read_fields<Report>(std::string(Report::kBytes, '\0'), "nothing to say").ok());
  EXPECT_FALSE(base::read_fields<Report>("", "none").ok());
  RandomFields random(2);
  Report report;
  std::deque<Event> events(20);
  for (Event& event : events) random(event);
  report.take(events, report.kv_events);
  const std::string good = bytes_of(report);
  ASSERT_TRUE(base::read_fields<Report>(good, "a report").ok());
  EXPECT_FALSE(base::read_fields<Report>(good.substr(1), "one cut").ok());
  for (size_t i = 0; i < good.size(); ++i) {
    std::string damaged = good;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << random.below(8)));
    ASSERT_TRUE(base::refused_or_same<Report>(damaged)) << i;
  }
}

}  // namespace
}  // namespace baton::engine::shard
