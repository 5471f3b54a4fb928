// Sessions with ten thousand loads, and readers that die, come back, or are late. In virtual time;
// nothing moves but by turn().
#include <malloc.h>

#include "tests/kvtransfer/session_sides.h"
#include "tests/manual_clock.h"
#include "tests/sanitized.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

constexpr Time kMinute = std::chrono::seconds(60);

// How a load gets its blocks.
enum Way : uint64_t { kRead, kPush, kHears, kWays };

class SessionManyTest : public ::testing::Test {
 protected:
  template <typename... Memory>
  SessionEnd* add(const std::string& name, Memory... given) {
    return ends_
        .emplace_back(
            std::make_unique<SessionEnd>(name, clock_, kMinute, false, std::move(given)...))
        .get();
  }
  void remove(SessionEnd* end) {
    std::erase_if(ends_, [end](const auto& each) { return each.get() == end; });
  }
  void turn() {
    for (const auto& end : ends_) {
      end->session->turn();
      while (const auto loaded = end->session->next_loaded()) loaded_[loaded->id] = loaded->status;
      for (const uint64_t send : end->session->released())
        EXPECT_TRUE(released_.insert(send).second);
    }
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    baton::until(
        fact, [this] { turn(); },
        [this] {
          return absl::StrCat(loaded_.size(), " loads over, ", released_.size(), " sends released");
        },
        from);
  }
  // Turns while the clock goes on by `time`, in steps in which leases can be renewed.
  void pass(Time time, Time step = std::chrono::milliseconds(300)) {
    for (Time over{}; over < time; over += step) {
      clock_.advance(step);
      for (int i = 0; i < 20; ++i) turn();
    }
  }
  static void load(SessionEnd& end, const KvTransfer& from, KvRequestId id, Way way,
                   std::vector<uint32_t> blocks = {1}, Time timeout = std::chrono::seconds(30)) {
    KvOrder order{.id = id, .from = from, .timeout = timeout};
    order.push = way == kPush;
    if (way == kHears) {
      order.loads = 1;
      order.from.workers = {{absl::StrCat(from.agent, "/0"), from.address}};
    }
    const size_t tokens = 16 * blocks.size();
    order.runs.push_back({0, std::move(blocks), {0, tokens}});
    EXPECT_TRUE(end.session->load(std::move(order)).ok());
  }
  KvTransfer at(const SessionEnd& prefill, const std::string& transfer) {
    KvTransfer from = prefill.session->params_of(transfer);
    from.agent = "prefill";
    return from;
  }

  ManualClock clock_;
  std::vector<std::unique_ptr<SessionEnd>> ends_;
  std::map<KvRequestId, absl::Status> loaded_;
  std::set<uint64_t> released_;
};

// Promise(vllm): 10,000 loads at once whose prompts never come end with their time, and leave
//   nothing behind | half of them ended by the engine at once
TEST_F(SessionManyTest, TenThousandNamesThatNeverCome) {
  const size_t count = static_cast<size_t>(rounds_of(10000, 1000));
  SessionEnd& prefill = *add("prefill/0");
  SessionEnd& decode = *add("decode/0");
  size_t before = 0;
  for (const size_t loads : {count / 10, count}) {  // the first time buffers and tables grow
    loaded_.clear();
    size_t ended = 0;
    for (size_t i = 1; i <= loads; ++i) {
      KvTransfer from = at(prefill, absl::StrCat("never-", i));
      from.finished = false;  // so that prefill waits for its request
      load(decode, from, i, Way(i % kWays));
      if (i % 2 == 0) ended += decode.session->end_load(i) ? 1 : 0;
    }
    EXPECT_EQ(ended, loads / 2);  // nothing was asked yet
    turn();
    pass(std::chrono::seconds(2), std::chrono::seconds(1));
    EXPECT_TRUE(loaded_.empty());
    pass(std::chrono::seconds(40), std::chrono::seconds(10));
    until([&] { return loaded_.size() == loads - loads / 2; });
    for (const auto& [id, status] : loaded_) {
      ASSERT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << id;
    }
    pass(3 * kMinute, kMinute);
    until([&] { return !prefill.session->turn() && !decode.session->turn(); });
    if (before == 0) before = mallinfo2().uordblks;
  }
  loaded_.clear();
  EXPECT_LT(static_cast<double>(mallinfo2().uordblks), static_cast<double>(before) + (16 << 20));
}

TEST_F(SessionManyTest, ManyPrefillsThatAreNotThere) {
  constexpr size_t count = 500;
  SessionEnd& decode = *add("decode/0");
  for (size_t i = 1; i <= count; ++i) {
    load(decode, {.transfer = "t", .agent = absl::StrCat("none-", i), .address = "127.0.0.1:1"}, i,
         Way(i % kWays));
  }
  turn();
  pass(std::chrono::seconds(40), std::chrono::seconds(10));
  until([&] { return loaded_.size() == count; });
  for (const auto& [id, status] : loaded_) ASSERT_FALSE(status.ok()) << id;
  until([&] { return !decode.session->turn(); });
}

TEST_F(SessionManyTest, APrefillThatIsClosedWithManyReaders) {
  constexpr size_t kEach = 25;
  SessionEnd& prefill = *add("prefill/0");
  for (size_t reader = 0; reader < 4; ++reader) add(absl::StrCat("decode-", reader, "/0"));
  std::set<uint64_t> sends;
  for (size_t i = 1; i <= 4 * kEach; ++i) {
    const std::string name = absl::StrCat("t-", i);
    const uint64_t send = prefill.session->open(name, 32);
    ASSERT_TRUE(prefill.session->save(send, 0, 1, {2}).ok());  // its first block never comes
    if (i % 2 == 0) prefill.session->hold(send), sends.insert(send);
    load(*ends_[1 + i % 4], at(prefill, name), i, Way(i % kWays), {static_cast<uint32_t>(i % 8)});
  }
  pass(std::chrono::seconds(1));
  prefill.session->close();
  for (const uint64_t send : prefill.session->released()) released_.insert(send);
  EXPECT_EQ(released_, sends);
  remove(&prefill);
  clock_.advance(std::chrono::minutes(1));
  until([&] { return loaded_.size() == 4 * kEach; });
  for (const auto& [id, status] : loaded_) EXPECT_FALSE(status.ok()) << id;
}

struct SessionWays : SessionManyTest, ::testing::WithParamInterface<uint64_t> {
  SessionWays() : prefill(*add("prefill/0")), decode(add("decode/0")) {
    std::memset(prefill.block(5), 42, kBytes);
    send = prefill.session->open("t", 32);
    EXPECT_TRUE(prefill.session->save(send, 0, 0, {5}).ok());
  }
  // The half that is computed is on its way.
  void half(Way way, KvRequestId id = 1) {
    load(*decode, at(prefill, "t"), id, way, {3, 4}, std::chrono::minutes(10));
    until([&] { return *decode->block(3) == std::byte{42}; });
  }
  void other_half() {
    std::memset(prefill.block(6), 43, kBytes);
    EXPECT_TRUE(prefill.session->save(send, 0, 0, {5, 6}).ok());
    prefill.session->hold(send);
  }
  Way way() const { return Way(GetParam()); }
  SessionEnd& prefill;
  SessionEnd* decode;
  uint64_t send = 0;
};
std::string name_of(const ::testing::TestParamInfo<uint64_t>& way) {
  return way.param == kRead ? "Read" : way.param == kPush ? "Push" : "Hears";
}
INSTANTIATE_TEST_SUITE_P(Ways, SessionWays, ::testing::Values(kRead, kPush, kHears), name_of);

TEST_P(SessionWays, AReaderThatDiesInTheMiddleLeavesTheBlocksToTheLease) {
  half(way());
  remove(decode);
  other_half();
  pass(2 * kMinute, std::chrono::seconds(10));
  until([&] { return released_.contains(send); });
  until([&] { return !prefill.session->turn(); });
}

TEST_P(SessionWays, AReaderThatComesBackUnderItsNameGetsAll) {
  half(way());
  remove(decode);
  decode = add("decode/0");
  half(way(), 2);
  other_half();
  pass(std::chrono::seconds(1));
  until([&] { return loaded_.contains(2); });
  EXPECT_TRUE(loaded_[2].ok()) << loaded_[2];
  EXPECT_EQ(*decode->block(4), std::byte{43});
  pass(2 * kMinute, std::chrono::seconds(10));
  until([&] { return released_.contains(send); });
}

// It describes its cache with the same words as before, but plans belong to the agent that it was.
TEST_P(SessionWays, APrefillThatComesBackAndAsksFirstIsPlannedAnew) {
  half(way());
  other_half();
  until([&] { return loaded_.contains(1); });
  std::vector<std::byte> memory = std::move(prefill.memory);
  remove(&prefill);
  SessionEnd& again = *add("prefill/0", std::move(memory));
  const uint64_t other = decode->session->open("u", 16);
  EXPECT_TRUE(decode->session->save(other, 0, 0, {1}).ok());
  KvTransfer from = decode->session->params_of("u");
  from.agent = "decode";
  load(again, from, 2, kRead);
  until([&] { return loaded_.contains(2); });
  EXPECT_TRUE(loaded_[2].ok()) << loaded_[2];
  std::memset(again.block(5), 44, kBytes);
  send = again.session->open("v", 16);
  EXPECT_TRUE(again.session->save(send, 0, 0, {5}).ok());
  again.session->hold(send);
  load(*decode, at(again, "v"), 3, way(), {3});
  until([&] { return loaded_.contains(3); });
  EXPECT_TRUE(loaded_[3].ok()) << loaded_[3];
  EXPECT_EQ(*decode->block(3), std::byte{44});
}

// What came of it is right or has failed; the blocks are free in any case.
TEST_P(SessionWays, TwoDecodesWithOneName) {
  half(way());
  SessionEnd* const first = decode;
  decode = add("decode/0");
  load(*decode, at(prefill, "t"), 2, way(), {3});
  pass(std::chrono::seconds(2));
  other_half();
  pass(std::chrono::minutes(11), std::chrono::seconds(10));
  // Of pushes one may never hear prefill's last word: it cannot know that its blocks are free.
  until([&] { return loaded_.size() == 2 || (way() == kPush && loaded_.size() == 1); });
  if (loaded_.contains(1) && loaded_[1].ok()) {
    EXPECT_EQ(*first->block(4), std::byte{43});
  }
  if (loaded_.contains(2) && loaded_[2].ok()) {
    EXPECT_EQ(*decode->block(3), std::byte{42});
  }
  until([&] { return released_.contains(send); });
}

TEST_P(SessionWays, ALeaseThatEndsWhileBlocksAreRead) {
  half(way());
  other_half();
  // Decode stands still, prefill does not: the blocks are another prompt's.
  clock_.advance(2 * kMinute);
  for (int i = 0; i < 100 && !released_.contains(send); ++i) {
    prefill.session->turn();
    for (const uint64_t number : prefill.session->released()) released_.insert(number);
  }
  const bool lost = released_.contains(send);
  if (lost) std::memset(prefill.block(6), 99, kBytes);
  pass(std::chrono::seconds(1));
  until([&] { return loaded_.contains(1); });
  if (loaded_[1].ok()) {
    EXPECT_EQ(*decode->block(4), std::byte{43});
  }
  pass(2 * kMinute, std::chrono::seconds(10));
  until([&] { return released_.contains(send); });
}

}  // namespace
}  // namespace baton::kvtransfer
