// Two processes: prefill in one, decode in the other, and kill -9 for either of them.
#include <iostream>

#include "tests/fails_with.h"
#include "tests/kvtransfer/kv_pair.h"
#include "tests/peer_process.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

// This program once more, as an engine that runs until it is killed: started anew, because a
// library below a provider may not survive a fork.
struct Process : PeerProcess {
  static constexpr const char* kPrefill = "--prefill";
  static constexpr const char* kDecode = "--decode";
  // `number`: before which layer prefill stops; whether decode pulls.
  Process(const char* role, const std::string& provider, uint32_t number)
      : PeerProcess("/proc/self/exe", {role, provider, std::to_string(number)}) {}
};

KvLoad load_of(KvRequestId id, const std::string& prefill, bool pull) {
  return {.id = id, .prefill = prefill, .pull = pull};
}

// An engine that tells its address and prefills for ever.
void prefill_main(const std::string& provider, uint32_t stop_before_layer) {
  BatonConnectorOptions options = options_for(provider, "prefill-0");
  options.allow_pull = true;
  auto made = make_baton_connector(options);
  if (!made.ok()) _exit(1);
  TestPrefill prefill(**made, test_layout(60), 1);
  prefill.stop_before_layer(stop_before_layer);
  std::cout << (*made)->address() << std::endl;
  while (true) {
    prefill.step();
    if (prefill.open_jobs() == 0) (*made)->wait(std::chrono::seconds(1), -1);
  }
}

// An engine that asks the prefill worker it is told of for two loads.
void decode_main(const std::string& provider, bool pull) {
  std::string address;
  std::getline(std::cin, address);
  auto made = make_baton_connector(options_for(provider, "decode-0"));
  if (!made.ok()) _exit(1);
  TestDecode decode(**made, test_layout(80), 2);
  for (const KvRequestId id : {1, 2}) {
    KvLoad load = load_of(id, address, pull);
    if (pull) load.lease = std::chrono::seconds(2);
    if (!decode.start(std::move(load), id == 1 ? 40 : 12).ok()) _exit(2);
  }
  while (true) decode.step();
}

class KvProcessesTest : public OverEveryProvider<std::string> {
 protected:
  template <typename Fact>
  static void until(TestDecode& decode, Fact fact, CallSite from = CallSite::here()) {
    const auto state = [&] { return std::to_string(decode.open()) + " loads are open"; };
    baton::until([&] { return decode.step(), fact(); }, [] {}, state, from);
  }
};

TEST_P(KvProcessesTest, DecodeWaitsLayerByLayer) {
  for (const bool pull : {false, true}) {
    Process prefill(Process::kPrefill, GetParam(), UINT32_MAX);
    const std::string address = prefill.line();
    auto connector = make_or_fail(options_for(GetParam(), "decode-0"));
    ASSERT_NE(connector, nullptr);
    TestDecode decode(*connector, test_layout(80), 2);
    for (KvRequestId id = 1; id <= 20; ++id) {
      ASSERT_TRUE(decode.start(load_of(id, address, pull), 60).ok());
      for (uint32_t layer = 0; layer < 6; ++layer) {
        ASSERT_EQ(connector->wait_for_layer(id, layer), absl::OkStatus());
        EXPECT_GT(connector->layers_loaded(id), layer);
      }
      until(decode, [&] { return decode.open() == 0; });
      EXPECT_EQ(decode.load(id).verified, 6u);
      EXPECT_FALSE(decode.load(id).wrong);
    }
    EXPECT_EQ(decode.cache().damaged(), 0u);
  }
}

TEST_P(KvProcessesTest, AKilledPrefillFailsItsLoadsAndAnotherTakesOver) {
  Process first(Process::kPrefill, GetParam(), 2);
  Process second(Process::kPrefill, GetParam(), UINT32_MAX);
  auto connector = make_or_fail(options_for(GetParam(), "decode-0"));
  ASSERT_NE(connector, nullptr);
  TestDecode decode(*connector, test_layout(80), 2);
  const std::string address = first.line();
  ASSERT_TRUE(decode.start(1, address, 40).ok());
  ASSERT_TRUE(decode.start(load_of(2, address, true), 40).ok());
  until(decode, [&] { return decode.load(1).verified == 2 && decode.load(2).verified == 2; });
  first.kill_it();
  const absl::Status status = connector->wait_for_layer(1, 5);
  EXPECT_THAT(status, fails_with(Code::kUnavailable, {"prefill-0"}));
  until(decode, [&] { return decode.open() == 0; });
  EXPECT_FALSE(decode.load(2).status.ok());
  EXPECT_EQ(decode.cache().free_blocks(), 80u);

  ASSERT_TRUE(decode.start(load_of(3, second.line(), true), 79).ok());
  until(decode, [&] { return decode.open() == 0; });
  EXPECT_EQ(decode.load(3).verified, 6u) << decode.load(3).status;
  EXPECT_FALSE(decode.load(3).wrong);
  const absl::Status late = decode.start(4, address, 12);  // of the one that is gone
  until(decode, [&] { return decode.open() == 0; });
  EXPECT_FALSE(late.ok() && decode.load(4).status.ok());
  EXPECT_EQ(decode.cache().damaged(), 0u);
}

TEST_P(KvProcessesTest, AKilledDecodeMakesItsJobsUnwanted) {
  for (const bool pulls : {false, true}) {
    SCOPED_TRACE(pulls);
    Process decode(Process::kDecode, GetParam(), pulls ? 1 : 0);
    BatonConnectorOptions options = options_for(GetParam(), "prefill-0");
    options.allow_pull = pulls;
    auto connector = make_or_fail(options);
    ASSERT_NE(connector, nullptr);
    TestPrefill prefill(*connector, test_layout(60), 1);
    prefill.stop_before_layer(2);
    decode.say(connector->address());
    const auto turn = [&] { prefill.step(); };
    baton::until(
        [&] { return prefill.jobs_seen() == 2 && (pulls || connector->stats().bytes_sent > 0); },
        turn);
    decode.kill_it();
    baton::until([&] { return prefill.open_jobs() == 0; }, turn);
    EXPECT_EQ(prefill.unwanted(), 2u);
    EXPECT_EQ(prefill.cache().free_blocks(), 60u);
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, KvProcessesTest, ::testing::ValuesIn(real_providers()),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KvProcessesTest);

}  // namespace
}  // namespace baton::kvtransfer

int main(int argc, char** argv) {
  using baton::kvtransfer::Process;
  const std::string_view role = argc == 4 ? argv[1] : "";
  const auto number = [&] { return static_cast<uint32_t>(std::stoul(argv[3])); };
  if (role == Process::kDecode) baton::kvtransfer::decode_main(argv[2], number() != 0);
  if (role == Process::kPrefill) baton::kvtransfer::prefill_main(argv[2], number());
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
