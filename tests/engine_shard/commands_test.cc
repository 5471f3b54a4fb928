// Commands as bytes: what is encoded is decoded, and nothing else is.
#include "engine/shard/commands.h"
#include "tests/test.h"

namespace baton::engine::shard {
namespace {

std::string bytes_of(const Command& command) {
  std::string bytes = "what was here before";
  command.encode(bytes);
  return bytes;
}

std::vector<KvCall> calls_of_every_kind() {
  KvCall start{.kind = KvCallKind::kStartLoad, .id = 7};
  start.load = {.id = 7,
                .prefill = "",
                .shards = {"baton1:a", "baton1:b"},
                .key = "k-7",
                .loads_of_key = 2,
                .tokens = {1, 2, 3},
                .first_token = 16,
                .blocks = {4, 9},
                .timeout = std::chrono::seconds(3)};
  KvCall open{.kind = KvCallKind::kOpenJob, .id = 3};
  open.binding.key = "k-3";
  open.binding.tokens = 40;
  open.binding.loads = 2;
  KvCall renew{.kind = KvCallKind::kRenewJob, .id = 3};
  renew.binding.lease = std::chrono::seconds(4);
  KvCall save{.kind = KvCallKind::kSave, .id = 3};
  save.first_layer = 1;
  save.layers = 2;
  save.first_block = 5;
  save.blocks = {6, 7};
  return {start, {.kind = KvCallKind::kEndLoad, .id = 7},
          open,  renew,
          save,  {.kind = KvCallKind::kFinishJob, .id = 3, .outcome = absl::AbortedError("no")}};
}

kvtransfer::tiers::TierKey key_of(uint8_t number) {
  kvtransfer::tiers::TierKey key;
  key.bytes.fill(number);
  return key;
}

std::vector<TierCall> tier_calls_of_every_kind() {
  return {{.kind = TierCallKind::kFind, .id = 1, .keys = {key_of(1), key_of(2)}},
          {.kind = TierCallKind::kSave, .id = 2, .keys = {key_of(3)}, .blocks = {9}},
          {.kind = TierCallKind::kLoad,
           .id = 3,
           .keys = {key_of(4), key_of(5)},
           .blocks = {7, 8},
           .timeout = std::chrono::seconds(6)},
          {.kind = TierCallKind::kEndLoad, .id = 3},
          {.kind = TierCallKind::kFlush, .id = 4}};
}

Command a_step() {
  return {.kind = CommandKind::kStep,
          .calls = calls_of_every_kind(),
          .tier_calls = tier_calls_of_every_kind(),
          .chunks = {{{1, 2, 3}, 16, {7, 8}, true, false}, {{9}, 0, {0}, false, true}},
          .sends = {{3, 1, {7, 8}}, {4, 0, {}}}};
}

TEST(Commands, RoundTrip) {
  const Command sync{.kind = CommandKind::kSync,
                     .calls = calls_of_every_kind(),
                     .tier_calls = tier_calls_of_every_kind(),
                     .chunks = {},
                     .sends = {}};
  for (const Command& command :
       {Command{.kind = CommandKind::kStop}, Command{.kind = CommandKind::kStep}, sync, a_step()}) {
    const auto decoded = Command::decode(bytes_of(command));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->kind, command.kind);
    EXPECT_EQ(decoded->chunks, command.chunks);
    EXPECT_EQ(decoded->sends, command.sends);
    EXPECT_EQ(decoded->calls.size(), command.calls.size());
    EXPECT_EQ(decoded->tier_calls.size(), command.tier_calls.size());
    EXPECT_EQ(bytes_of(*decoded), bytes_of(command));
  }
}

TEST(Commands, CallsKeepTheirFields) {
  const std::vector<KvCall> calls = Command::decode(bytes_of(a_step()))->calls;
  ASSERT_EQ(calls.size(), 6u);
  EXPECT_EQ(calls[0].load.id, 7u);
  EXPECT_EQ(calls[0].load.shards, (std::vector<std::string>{"baton1:a", "baton1:b"}));
  EXPECT_EQ(calls[0].load.key, "k-7");
  EXPECT_EQ(calls[0].load.loads_of_key, 2u);
  EXPECT_EQ(calls[0].load.tokens, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(calls[0].load.first_token, 16u);
  EXPECT_EQ(calls[0].load.blocks, (std::vector<uint32_t>{4, 9}));
  EXPECT_EQ(calls[0].load.timeout, std::chrono::seconds(3));
  EXPECT_EQ(calls[2].binding.key, "k-3");
  EXPECT_EQ(calls[2].binding.tokens, 40u);
  EXPECT_EQ(calls[2].binding.loads, 2u);
  EXPECT_EQ(calls[3].binding.lease, std::chrono::seconds(4));
  EXPECT_EQ(calls[4].first_layer, 1u);
  EXPECT_EQ(calls[4].layers, 2u);
  EXPECT_EQ(calls[4].first_block, 5u);
  EXPECT_EQ(calls[4].blocks, (std::vector<uint32_t>{6, 7}));
  EXPECT_EQ(calls[5].outcome, absl::AbortedError("no"));
}

TEST(Commands, TierCallsKeepTheirFields) {
  const std::vector<TierCall> calls = Command::decode(bytes_of(a_step()))->tier_calls;
  const std::vector<TierCall> made = tier_calls_of_every_kind();
  ASSERT_EQ(calls.size(), made.size());
  for (size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(calls[i].kind, made[i].kind);
    EXPECT_EQ(calls[i].id, made[i].id);
    EXPECT_EQ(calls[i].keys, made[i].keys);
    EXPECT_EQ(calls[i].blocks, made[i].blocks);
    EXPECT_EQ(calls[i].timeout, made[i].timeout);
  }
}

// Of no kind that there is, or without what its kind is about.
TEST(Commands, TierCallsThatMakeNoSenseAreRefused) {
  const auto decode = [](TierCall call) {
    return Command::decode(bytes_of({.kind = CommandKind::kSync, .tier_calls = {std::move(call)}}));
  };
  EXPECT_TRUE(decode({.kind = TierCallKind::kSave, .keys = {key_of(1)}, .blocks = {1}}).ok());
  for (const TierCall& call : {TierCall{.kind = TierCallKind{0}},
                               {.kind = TierCallKind{6}},
                               {.kind = TierCallKind::kSave},
                               {.kind = TierCallKind::kSave, .keys = {key_of(1)}},
                               {.kind = TierCallKind::kLoad, .keys = {key_of(1)}, .blocks = {1, 2}},
                               {.kind = TierCallKind::kLoad, .blocks = {1}}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(decode(call).status())) << int(call.kind);
  }
}

TEST(Commands, CutOrLongerOnesAreRefused) {
  const std::string whole = bytes_of(a_step());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(Command::decode(std::string_view(whole).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(Command::decode(whole + '\0').ok());
}

TEST(Commands, UnknownOnesAreRefused) {
  for (const char kind : {'\0', '\x63', '\xff'}) {
    const auto decoded = Command::decode(std::string_view(&kind, 1));
    EXPECT_TRUE(absl::IsInvalidArgument(decoded.status())) << int(kind);
    // And a call of no kind that there is.
    std::string bytes =
        bytes_of({.kind = CommandKind::kSync, .calls = {{.kind = KvCallKind::kEndLoad, .id = 1}}});
    ASSERT_TRUE(Command::decode(bytes).ok());
    bytes[5] = kind;
    EXPECT_TRUE(absl::IsInvalidArgument(Command::decode(bytes).status())) << int(kind);
  }
}

// A count that the bytes cannot hold costs no memory.
TEST(Commands, LengthsAreNotBelieved) {
  std::string bytes = bytes_of({.kind = CommandKind::kStep});
  bytes.replace(1, 4, "\xff\xff\xff\xff");
  EXPECT_FALSE(Command::decode(bytes).ok());
  bytes = bytes_of({.kind = CommandKind::kStep, .chunks = a_step().chunks});
  bytes.replace(9, 4, "\xff\xff\xff\x7f");  // of the first chunk's tokens
  EXPECT_FALSE(Command::decode(bytes).ok());
}

// --- reports -------------------------------------------------------------------------------------

std::deque<KvEvent> some_events(uint64_t count) {
  std::deque<KvEvent> events;
  for (uint64_t id = 1; id <= count; ++id) {
    events.push_back({KvEventKind::kLoadFailed, id, absl::DataLossError("it is gone")});
    events.push_back({KvEventKind::kSaved, id, absl::OkStatus()});
  }
  return events;
}

TEST(Reports, SayEverythingInOrderHoweverManyItTakes) {
  std::deque<KvEvent> left = some_events(300);
  const std::deque<KvEvent> all = left;
  std::deque<KvEvent> heard;
  size_t reports = 0;
  for (bool more = true; more; ++reports) {
    const std::string bytes = KvReport::encode({.bytes_sent = 1, .bytes_loaded = 2}, left);
    EXPECT_EQ(bytes.size(), KvReport::kBytes);
    const auto report = KvReport::decode(bytes);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->stats.bytes_sent, 1u);
    EXPECT_EQ(report->stats.bytes_loaded, 2u);
    heard.insert(heard.end(), report->events.begin(), report->events.end());
    more = report->more;
    EXPECT_EQ(more, !left.empty());
  }
  EXPECT_EQ(heard, all);
  EXPECT_GT(reports, 2u);
}

TEST(Reports, LongReasonsAreCut) {
  std::deque<KvEvent> events = {
      {KvEventKind::kUnwanted, 5, absl::InternalError(std::string(100'000, 'x'))}};
  const auto report = KvReport::decode(KvReport::encode({}, events));
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->events.size(), 1u);
  EXPECT_EQ(report->events[0].why, absl::InternalError(std::string(512, 'x')));
  EXPECT_TRUE(events.empty());
}

TEST(Reports, NonsenseIsRefused) {
  std::deque<KvEvent> events = some_events(2);
  const std::string good = KvReport::encode({}, events);
  ASSERT_TRUE(KvReport::decode(good).ok());
  EXPECT_FALSE(KvReport::decode("").ok());
  EXPECT_FALSE(KvReport::decode(std::string_view(good).substr(1)).ok());
  std::string bytes = good;
  bytes[33] = bytes[34] = '\xff';  // how many events there are
  EXPECT_FALSE(KvReport::decode(bytes).ok());
  for (const char kind : {'\0', '\x63', '\xff'}) {
    bytes = good;
    bytes[35] = kind;
    EXPECT_FALSE(KvReport::decode(bytes).ok()) << int(kind);
  }
}

std::deque<TierEvent> tier_events(uint64_t count) {
  std::deque<TierEvent> events;
  for (uint64_t id = 1; id <= count; ++id) {
    events.push_back({.kind = TierEventKind::kFound,
                      .id = id,
                      .found = {.blocks = id, .disk = 2, .peer = 3, .near = 4}});
    events.push_back({.kind = TierEventKind::kUnpinned, .id = id});
    events.push_back({.kind = TierEventKind::kLoadFailed,
                      .id = id,
                      .found = {},
                      .why = absl::DataLossError("it is gone")});
  }
  return events;
}

TEST(TierReports, SayEverythingInOrderHoweverManyItTakes) {
  const std::deque<TierEvent> all = tier_events(100);
  std::deque<TierEvent> left = all;
  std::deque<TierEvent> heard;
  size_t reports = 0;
  for (bool more = true; more; ++reports) {
    const std::string bytes =
        TierReport::encode({.host_bytes = 1, .dropped = 2, .corrupt = 3}, left);
    const auto report = TierReport::decode(bytes);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->stats.host_bytes, 1u);
    EXPECT_EQ(report->stats.dropped, 2u);
    EXPECT_EQ(report->stats.corrupt, 3u);
    heard.insert(heard.end(), report->events.begin(), report->events.end());
    more = report->more;
    EXPECT_EQ(more, !left.empty());
  }
  EXPECT_GT(reports, 2u);
  ASSERT_EQ(heard.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(heard[i].kind, all[i].kind);
    EXPECT_EQ(heard[i].id, all[i].id);
    EXPECT_EQ(heard[i].found.blocks, all[i].found.blocks);
    EXPECT_EQ(heard[i].found.near, all[i].found.near);
    EXPECT_EQ(heard[i].why, all[i].why);
  }
}

TEST(TierReports, NonsenseIsRefused) {
  std::deque<TierEvent> events = tier_events(2);
  const std::string good = TierReport::encode({}, events);
  ASSERT_TRUE(TierReport::decode(good).ok());
  EXPECT_TRUE(TierReport::decode(std::string(TierReport::kBytes, '\0')).ok()) << "without tiers";
  EXPECT_FALSE(TierReport::decode("").ok());
  EXPECT_FALSE(TierReport::decode(std::string_view(good).substr(1)).ok());
  std::string bytes = good;
  bytes[41] = bytes[42] = '\xff';  // how many events there are
  EXPECT_FALSE(TierReport::decode(bytes).ok());
  for (const char kind : {'\0', '\x63', '\xff'}) {
    bytes = good;
    bytes[43] = kind;
    EXPECT_FALSE(TierReport::decode(bytes).ok()) << int(kind);
  }
}

}  // namespace
}  // namespace baton::engine::shard
