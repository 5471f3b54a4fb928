// Commands and reports as bytes: what is written is read, and nothing else is.
#include "engine/shard/commands.h"

#include "tests/random_fields.h"
#include "tests/test.h"

namespace baton::engine::shard {
namespace {

using std::chrono::seconds;
using testing::_;
using testing::ElementsAre;
using testing::FieldsAre;
using testing::IsEmpty;
using testing::SizeIs;

template <typename Message>
std::string bytes_of(const Message& message) {
  std::string bytes;
  base::write_fields(message, bytes);
  return bytes;
}

template <typename Message>
Message through(const Message& message) {
  return *base::read_fields<Message>(bytes_of(message), "it");
}

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

// Members that fields() leaves out would be lost on the way: each is written once. With a member
// more FieldsAre() does not compile. Whether it must reach the other rank is said here then.
TEST(ShardMessages, KeepTheirFields) {
  KvCall call{
      .kind = KvCallKind::kStartLoad,
      .id = 7,
      .transfer = {.transfer = "t", .agent = "a", .address = "h:1", .finished = true, .ranks = 2},
      .workers = {{"a/0", "baton1:a"}, {"a/1", "baton1:b"}},
      .tokens = 48,
      .first_token = 16,
      .blocks = {4, 9},
      .timeout = seconds(3),
      .silence = seconds(2),
      .push = true};
  EXPECT_THAT(
      through(call),
      FieldsAre(KvCallKind::kStartLoad, 7u, FieldsAre("t", "a", "h:1", true, 2u, IsEmpty()),
                ElementsAre(FieldsAre("a/0", "baton1:a"), FieldsAre("a/1", "baton1:b")), 48u, 16u,
                ElementsAre(4u, 9u), seconds(3), seconds(2), true, absl::OkStatus()));
  call.kind = KvCallKind::kOpen;
  EXPECT_EQ(through(call).transfer.transfer, "t");
  EXPECT_EQ(through(call).tokens, 48u);
  call = {.kind = KvCallKind::kFail, .why = absl::AbortedError("no")};
  EXPECT_EQ(through(call).why, absl::AbortedError("no"));

  const TierCall load{.kind = TierCallKind::kLoad,
                      .id = 9,
                      .keys = {{.bytes = {4}}, {.bytes = {5}}},
                      .blocks = {7, 8},
                      .timeout = seconds(6)};
  EXPECT_THAT(through(load),
              FieldsAre(TierCallKind::kLoad, 9u, load.keys, ElementsAre(7u, 8u), seconds(6)));

  const Command::Chunk chunk{{1, 2}, 16, {7}, true, false};
  EXPECT_THAT(through(chunk), FieldsAre(ElementsAre(1, 2), 16, ElementsAre(7u), true, false));
  const Command step = through(Command{.kind = CommandKind::kStep,
                                       .calls = {call},
                                       .tier_calls = {load},
                                       .chunks = {chunk, chunk},
                                       .sends = {{.id = 3, .tokens = 17, .chunk = 1}}});
  EXPECT_THAT(step, FieldsAre(CommandKind::kStep, SizeIs(1), SizeIs(1), SizeIs(2),
                              ElementsAre(FieldsAre(3u, 17u, 1u))));
}

TEST(ShardMessages, EventsAndReportsKeepEachMember) {
  for (int kind = 1; kind <= int(EventKind::kUnpinned); ++kind) {
    SCOPED_TRACE(kind);
    const Event event{EventKind(kind), 7, absl::AbortedError("w"), {5, 4, true}};
    const bool failed = event.kind == EventKind::kLoadFailed;
    // Where blocks were found matters to the follower alone, and it answers when it knows.
    EXPECT_THAT(through(event),
                FieldsAre(event.kind, 7u, failed ? event.why : absl::OkStatus(),
                          FieldsAre(event.kind == EventKind::kFound ? 5u : 0u, 0u, false)));
  }
  Report report{.more = true, .tiers = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}};
  report.kv_events = {{EventKind::kReleased, 8}};
  report.tier_events = {{EventKind::kUnpinned, 9}};
  // Rank 0 counts the rest for all.
  const auto tiers = FieldsAre(0u, 2u, 0u, 0u, 5u, 0u, 0u, 0u, 0u, 0u, 11u, 12u, 13u);
  EXPECT_THAT(through(report),
              FieldsAre(true, tiers, ElementsAre(FieldsAre(EventKind::kReleased, 8u, _, _)),
                        ElementsAre(FieldsAre(EventKind::kUnpinned, 9u, _, _))));
}

// Of no kind that there is, or without what its kind is about.
TEST(ShardMessages, ThatMakeNoSenseAreRefused) {
  const auto read = [](const TierCall& call) {
    return base::read_fields<TierCall>(bytes_of(call), "a call").status();
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

TEST(Reports, SayEverythingInOrderHoweverManyItTakes) {
  RandomFields random(1);
  std::deque<Event> left(200);
  for (Event& event : left) random(event);
  std::deque<Event> tiers_left = left;
  const auto written = [](const auto& events) {
    std::string bytes;
    for (const Event& event : events) bytes += bytes_of(event);
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
    const auto read = must(base::read_fields<Report>(bytes, "a report"));
    EXPECT_EQ(bytes_of(read), bytes);
    EXPECT_EQ(read.tiers.corrupt, 3u);
    heard += written(read.kv_events);
    tiers_heard += written(read.tier_events);
    more = read.more;
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
  const auto read = must(base::read_fields<Report>(bytes_of(report), "a report"));
  ASSERT_EQ(read.kv_events.size(), 1u);
  EXPECT_EQ(read.kv_events[0].why, absl::InternalError(std::string(512, 'x')));
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
