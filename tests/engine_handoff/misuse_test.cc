// What engines, proxies and peers do wrong with hand-offs: orders that make no sense, names that
// are used twice, queues that are full, ends in the midst of it. Each load ends, each block is free
// again, and nobody gets another's KV.
#include <nlohmann/json.hpp>

#include "tests/engine_handoff/bare_hand_off.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Misuse : public testing::Test {
 protected:
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    turn_until(fact, true, true, from);
  }
  template <typename Fact>
  void decode_until(Fact fact, CallSite from = CallSite::here()) {
    turn_until(fact, false, true, from);
  }
  template <typename Fact>
  void prefill_until(Fact fact, CallSite from = CallSite::here()) {
    turn_until(fact, true, false, from);
  }
  // A stranger that prefill knows, and that it takes for a decode.
  void meet(Stranger& stranger, const std::string& transfer) {
    ASSERT_TRUE(stranger.agent().fetch_metadata("prefill/0", p_->at("").address).ok());
    prefill_until([&] { return stranger.agent().has_remote("prefill/0"); });
    stranger.say("prefill/0", stranger.want(transfer, true));
    prefill_until([&] { return stranger.count("alive") + stranger.count("gone") > 0; });
  }
  // A stranger that decode takes for a prefill; the load that it asks for is number 1.
  std::unique_ptr<Stranger> be_asked(const std::string& transfer) {
    auto stranger = std::make_unique<Stranger>("stranger/0", true);
    EXPECT_TRUE(d_->load(1, from(*stranger, transfer), {5}).ok());
    decode_until([&] { return stranger->count("want") > 0; });
    stranger->agent()
        .add_remote(absl::HexStringToBytes(stranger->last()["metadata"].get<std::string>()))
        .status()
        .IgnoreError();
    return stranger;
  }
  // Until decode has heard all that it has said, and it has heard decode. A load ends for whoever
  // asks for its end, heard or not: that it has failed is what says that decode heard "gone".
  void exchange(Stranger& stranger) {
    const uint64_t id = 1'000'000 + marks_++;
    const std::string mark = absl::StrCat("mark ", id);
    ASSERT_TRUE(d_->load(id, from(stranger, mark), {9}).ok());
    decode_until([&] { return stranger.count("want", mark) > 0; });
    stranger.say("decode/0", {{"kind", "gone"}, {"transfer", mark}});
    decode_until([&] {
      stranger.count("");
      return !(*d_)->load_status(id).ok() && (*d_)->end_load(id);
    });
  }
  static constexpr int kMany = 40;
  // It asks prefill for transfers 1 to kMany.
  void want_many(Stranger& stranger) {
    meet(stranger, "1");
    for (int i = 2; i <= kMany; ++i) {
      stranger.say("prefill/0", stranger.want(absl::StrCat(i), false));
      prefill_until([&] { return stranger.count("alive", absl::StrCat(i)) > 0; });
    }
  }
  // One that takes a few messages at a time.
  static HandOffOptions narrow() {
    HandOffOptions options;
    options.worker.max_transfers = 15;
    return options;
  }
  static kvtransfer::KvTransfer from(Stranger& stranger, const std::string& transfer) {
    return {.transfer = transfer,
            .agent = "stranger",
            .address = absl::StrCat("127.0.0.1:", stranger.agent().port()),
            .finished = false};
  }

  template <typename Fact>
  void turn_until(Fact fact, bool prefill, bool decode, CallSite from) {
    const auto turn = [&] {
      if (prefill) p_->turn();
      if (decode) d_->turn();
    };
    baton::until(
        fact, turn, [&] { return p_->state("prefill") + d_->state("decode"); }, from);
  }

  ManualClock clock_;
  uint64_t marks_ = 0;
  std::optional<Bare> p_{std::in_place, "prefill", clock_};
  std::optional<Bare> d_{std::in_place, "decode", clock_};
};

// --- decode

TEST_F(Misuse, WhatIsDeclinedWhileItIsLoadedIsStillWanted) {
  const auto stranger = be_asked("t");
  (*d_)->decline(from(*stranger, "t"));
  exchange(*stranger);
  EXPECT_EQ(stranger->count("done", "t"), 0U);
}

TEST_F(Misuse, AnOrderThatMakesNoSenseIsRefused) {
  const auto refused = [&](auto change) {
    kvtransfer::KvLoad load = Bare::order(1, {5, 6});
    load.transfer = p_->at("t");
    change(load);
    const absl::Status status = (*d_)->start_load(load);
    EXPECT_TRUE(absl::IsNotFound((*d_)->load_status(1)));
    return absl::IsInvalidArgument(status);
  };
  EXPECT_TRUE(refused([](auto& load) { load.tokens.clear(); }));
  EXPECT_TRUE(refused([](auto& load) { load.transfer.reset(); }));
  EXPECT_TRUE(refused([](auto& load) { load.first_token = 8; }));
  EXPECT_TRUE(refused([](auto& load) { load.first_token = 32; }));
  EXPECT_TRUE(refused([](auto& load) { load.blocks.pop_back(); }));
  EXPECT_TRUE(refused([](auto& load) { load.blocks.push_back(7); }));
  EXPECT_TRUE(refused([](auto& load) { load.blocks[1] = kBareBlocks; }));
  ASSERT_TRUE(d_->load(1, p_->at("t"), {5}).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(d_->load(1, p_->at("u"), {6})));
}

TEST_F(Misuse, APrefillThatCannotBeCalledIsALoadThatFailedAtOnce) {
  uint64_t id = 0;
  for (const auto& [agent, address] :
       std::vector<std::pair<std::string, std::string>>{{"a", ""},
                                                        {"a", "127.0.0.1"},
                                                        {"a", "127.0.0.1:x"},
                                                        {"a", "127.0.0.1:70000"},
                                                        {"", "127.0.0.1:1:1"},
                                                        {std::string("a\0b", 3), "127.0.0.1:x"}}) {
    ASSERT_TRUE(d_->load(++id,
                         {.transfer = "t", .agent = agent, .address = address, .finished = false},
                         {5})
                    .ok());
    decode_until([&] { return d_->ended(id); });
    EXPECT_TRUE((*d_)->end_load(id));
  }
}

TEST_F(Misuse, BinaryNamesMatchNoRequest) {
  EXPECT_EQ((*p_)->open("\xff", kBlockTokens), 0U);
  EXPECT_TRUE(absl::IsInvalidArgument(d_->load(1, p_->at("\xff"), {5})));
  kvtransfer::KvTransfer nobody = p_->at("t");
  nobody.agent = "\xff";
  EXPECT_TRUE(absl::IsInvalidArgument(d_->load(1, nobody, {5})));
  (*d_)->decline(nobody);
  (*d_)->decline(p_->at("\xff"));
  d_->turn();
}

TEST_F(Misuse, EachMayLoadFromTheOther) {
  // Whoever has asked us is known, and its memory is not.
  p_->fill(1, 3);
  d_->fill(2, 9);
  p_->save("t", {1});
  d_->save("u", {2});
  ASSERT_TRUE(d_->load(1, p_->at("t"), {5}).ok());
  until([&] { return d_->ended(1); });
  ASSERT_TRUE(p_->load(1, d_->at("u"), {6}).ok());
  until([&] { return p_->ended(1); });
  EXPECT_TRUE(d_->holds(5, 3)) << d_->why(1);
  EXPECT_TRUE(p_->holds(6, 9)) << p_->why(1);
}

TEST_F(Misuse, APrefillThatCameBackAndAskedFirstIsLearntAnew) {
  p_->fill(1, 3);
  p_->save("t", {1});
  ASSERT_TRUE(d_->load(1, p_->at("t"), {5}).ok());
  until([&] { return d_->complete(1) && (*d_)->end_load(1); });
  p_.reset();
  p_.emplace("prefill", clock_);
  d_->fill(2, 9);
  d_->save("u", {2});
  ASSERT_TRUE(p_->load(1, d_->at("u"), {6}).ok());
  until([&] { return p_->ended(1); });
  p_->fill(1, 4);
  p_->save("v", {1});
  ASSERT_TRUE(d_->load(2, p_->at("v"), {7}).ok());
  until([&] { return d_->ended(2); });
  EXPECT_TRUE(d_->holds(7, 4)) << d_->why(2);
}

TEST_F(Misuse, SilenceIsAPrefillsAndNotATransfers) {
  // One that has ten thousand of them cannot speak of each in time.
  const auto stranger = be_asked("t");
  for (int i = 0; i < 20; ++i) {
    clock_.advance(milliseconds(250));
    exchange(*stranger);  // of another transfer
    ASSERT_TRUE((*d_)->load_status(1).ok()) << d_->why(1);
  }
}

TEST_F(Misuse, PrefillIsNotAskedAgainBeforeItHasAnswered) {
  const auto stranger = be_asked("t");
  for (int i = 0; i < 3; ++i) {
    clock_.advance(milliseconds(250));
    d_->turn();
  }
  exchange(*stranger);
  EXPECT_EQ(stranger->count("want", "t"), 1U);
  stranger->say("decode/0", {{"kind", "alive"}, {"transfer", "t"}});
  exchange(*stranger);
  clock_.advance(milliseconds(250));
  decode_until([&] { return stranger->count("want", "t") == 2; });
}

TEST_F(Misuse, AFullQueueOfDecodesKeepsNoBlock) {
  d_.emplace("decode", clock_, narrow());
  const auto stranger = be_asked("t");
  for (int i = 0; i < kMany; ++i) (*d_)->decline(from(*stranger, absl::StrCat(i)));
  for (int i = 0; i < 50; ++i) d_->turn();  // it takes nothing while it is not called
  decode_until([&] { return stranger->count("done") == kMany; });
}

TEST_F(Misuse, ALayoutThatCannotBeIsRefused) {
  const json kv = ForeignLayout::own(kBareGeometry).say();
  const json right = {{"kind", "layout"}, {"model", "a checkpoint"}, {"kv", kv}};
  const auto row = [&](uint64_t address, uint64_t stride, uint64_t count) {
    return json{address, kv["bytes"], 0, stride, count};
  };
  const std::vector<json> wrong = {
      json::array(),
      {row(4096, 1, 0), row(4096, 1, 0), row(4096, 1, 0)},
      {row(4096, UINT64_MAX, UINT64_MAX), row(4096, 1, 1), row(4096, 1, 1)},
      {row(4096, 4096, 1), row(4096, 4096, 1)},
      {{4096, 7, 0, 4096, 1}, row(4096, 4096, 1), row(4096, 4096, 1)},
      {"row", 3, nullptr},
  };
  for (const json& rows : wrong) {
    d_.emplace("decode", clock_);
    const auto stranger = be_asked("t");
    json message = right;
    message["rows"] = rows;
    stranger->say("decode/0", message);
    decode_until([&] { return stranger->count("") > 0 || d_->ended(1); });
    EXPECT_THAT(d_->why(1), HasSubstr("prefill stranger/0: ")) << rows;
  }
}

// --- prefill

TEST_F(Misuse, AReusedNameStopsItsReaders) {
  Stranger stranger("stranger/0");
  meet(stranger, "t");
  const uint64_t first = (*p_)->open("t", 2 * kBlockTokens);
  (*p_)->computed(first, 0, kBlockTokens, {{1, 2}});
  prefill_until([&] { return stranger.count("ready", "t") == 1; });
  EXPECT_EQ((*p_)->open("t", kBlockTokens), 0U);
  p_->compute(first, {1, 2});
  prefill_until([&] { return stranger.count("gone", "t") == 1; });
  EXPECT_EQ(stranger.count("ready", "t"), 1U);
  EXPECT_THAT((*p_)->released(), IsEmpty());
  (*p_)->hold(first);
  EXPECT_THAT((*p_)->released(), ElementsAre(first));
}

TEST_F(Misuse, WhatOneDoesNotWantAnotherStillReads) {
  Stranger reader("reader/0");
  Stranger other("other/0");
  meet(reader, "t");
  meet(other, "u");
  other.say("prefill/0", {{"kind", "done"}, {"transfer", "t"}});
  other.say("prefill/0", other.want("v", false));
  prefill_until([&] { return other.count("alive", "v") > 0; });
  p_->save("t", {1});
  prefill_until([&] { return reader.count("ready", "t") > 0; });
}

TEST_F(Misuse, AFullQueueOfPrefillsDelaysWhatIsReadyAndWhatIsDropped) {
  p_.emplace("prefill", clock_, narrow());
  Stranger stranger("stranger/0");
  want_many(stranger);
  for (int i = 1; i <= kMany; i += 2) {
    p_->save(absl::StrCat(i), {1, 2});
    (*p_)->drop((*p_)->open(absl::StrCat(i + 1), kBlockTokens));
  }
  for (int i = 0; i < 50; ++i) p_->turn();  // it takes nothing while it is not called
  prefill_until(
      [&] { return stranger.count("ready") >= kMany / 2 && stranger.count("gone") == kMany / 2; });
  for (int i = 1; i <= kMany; i += 2) {
    EXPECT_EQ(stranger.count("ready", absl::StrCat(i)), 1U) << i;
  }
}

TEST_F(Misuse, ManyBlocksAreToldInSeveralMessages) {
  Stranger stranger("stranger/0");
  meet(stranger, "t");
  std::vector<uint32_t> blocks(3000);
  for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i % kBareBlocks;
  p_->save("t", blocks);
  // Of 3 layers; one more where it was told before all of them were saved.
  prefill_until([&] { return stranger.count("ready") >= 5; });
}

TEST_F(Misuse, RequestsForUnopenedNamesAreBounded) {
  if (kSanitized) GTEST_SKIP() << "16,384 messages of one kind; the release counts them";
  Stranger stranger("stranger/0");
  meet(stranger, "0");
  constexpr int kMost = 1 << 14;
  for (int i = 1; i < kMost; ++i) {
    stranger.say("prefill/0", stranger.want(absl::StrCat(i), false));
    if (i % 256 == 0) p_->turn();
  }
  prefill_until([&] { return stranger.count("alive") == kMost; });
  EXPECT_EQ(stranger.count("gone"), 0U);
  stranger.say("prefill/0", stranger.want("one more", false));
  prefill_until([&] { return stranger.count("gone") == 1; });
  p_->save("0", {1});  // makes room
  stranger.say("prefill/0", stranger.want("one more", false));
  prefill_until([&] { return stranger.count("alive") == kMost + 1; });
}

TEST_F(Misuse, AskingRenewsTheLease) {
  Stranger stranger("stranger/0");
  meet(stranger, "0");
  const uint64_t send = p_->save("t", {1});
  (*p_)->hold(send);
  clock_.advance(seconds(30) - Time(1));
  p_->turn();
  EXPECT_THAT((*p_)->released(), IsEmpty());
  stranger.say("prefill/0", stranger.want("t", false));
  stranger.forget();
  prefill_until([&] { return stranger.count("ready") == 1; });
  EXPECT_THAT((*p_)->released(), ElementsAre(send));  // it is converted
  clock_.advance(seconds(30) - Time(1));
  stranger.forget();
  stranger.say("prefill/0", stranger.want("t", false));
  prefill_until([&] { return stranger.count("alive") == 1; });
  clock_.advance(seconds(30));
  p_->turn();
  stranger.forget();
  json sure = stranger.want("t", false);
  sure["sure"] = true;
  stranger.say("prefill/0", sure);
  prefill_until([&] { return stranger.count("gone") == 1; });
}

// --- ends

TEST_F(Misuse, ACacheIsUsedOnceAndBeforeAllElse) {
  EXPECT_TRUE(absl::IsFailedPrecondition((*p_)->use_cache(p_->cache())));
  HandOffOptions options;
  options.name = "bare";
  options.model = "a checkpoint";
  options.worker = bare_worker();
  const auto bare = *HandOff::create(std::move(options));
  EXPECT_TRUE(absl::IsFailedPrecondition(bare->start_load(Bare::order(1, {5}))));
  bare->close();
}

// --- many, and threads

TEST_F(Misuse, TenThousandLoadsAtOnce) {
  const auto loads = static_cast<uint64_t>(rounds_of(10'000, 2500));
  p_->fill(1, 3);
  for (uint64_t id = 1; id <= loads; ++id) {
    ASSERT_TRUE(d_->load(id, p_->at(absl::StrCat(id)), {static_cast<uint32_t>(id % 64)}).ok());
  }
  std::vector<uint64_t> sends;
  for (uint64_t id = 1; id <= loads; ++id) {
    sends.push_back(p_->save(absl::StrCat(id), {1}));
    (*p_)->hold(sends.back());
  }
  uint64_t here = 0;
  size_t free = 0;
  until([&] {
    for (; here < loads && d_->ended(here + 1); ++here) {
      EXPECT_TRUE(d_->complete(here + 1)) << d_->why(here + 1);
    }
    free += (*p_)->released().size();
    return here == loads && free == loads;
  });
}

TEST_F(Misuse, EnginesThatComputeAndChangeTheirMindsWhileAllIsServed) {
  p_.emplace("prefill", Clock::steady(), HandOffOptions{}, true);
  d_.emplace("decode", Clock::steady(), HandOffOptions{}, true);
  for (uint32_t block = 0; block < kBareBlocks; ++block) p_->fill(block, static_cast<int>(block));
  constexpr uint32_t kRounds = 300;
  std::thread engine([&] {
    for (uint32_t i = 0; i < kRounds; ++i) {
      const uint32_t block = i % kBareBlocks;
      const uint64_t send = (*p_)->open(absl::StrCat(i), kBlockTokens);
      if (i % 3 == 0) (*p_)->computed(send, 0, kBlockTokens, {block});
      if (i % 5 == 0) (*p_)->restart(send);
      p_->compute(send, {block});
      i % 7 == 0 ? (*p_)->drop(send) : (*p_)->hold(send);
      (*p_)->released();
    }
  });
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint64_t id = i + 1;
    kvtransfer::KvLoad load = Bare::order(id, {(i + 1) % 64});
    load.timeout = load.silence = patient(seconds(20));
    load.transfer = p_->at(absl::StrCat(i));
    ASSERT_TRUE((*d_)->start_load(load).ok());
    const auto step = [&] {
      (*d_)->wait(seconds(1), -1);
      (*d_)->progress();
    };
    const bool wanted = i % 7 != 0 && i % 4 != 0;
    if (wanted) baton::until([&] { return d_->ended(id); }, step);
    if (wanted) {
      EXPECT_TRUE(d_->holds((i + 1) % 64, static_cast<int>(i % 64))) << d_->why(id);
    }
    baton::until([&] { return (*d_)->end_load(id); }, step);
  }
  engine.join();
}

}  // namespace
}  // namespace baton::engine::handoff
