// Two processes: prefill in one, decode in the other, and kill -9 for either of them.
#include "tests/kvtransfer/kv_pair.h"
#include "tests/test.h"
#include "transport/base/child.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// A pipe that carries one line.
class Line {
 public:
  Line() { EXPECT_EQ(pipe(ends_), 0); }
  Line(int in, int out) : ends_{in, out} {}
  ~Line() {
    for (int end : ends_) close(end);
  }
  void put(const std::string& text) {
    const std::string line = text + "\n";
    EXPECT_EQ(write(ends_[1], line.data(), line.size()), static_cast<ssize_t>(line.size()));
  }
  std::string get() {
    std::string line;
    for (char c; read(ends_[0], &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }
  int in() const { return ends_[0]; }
  int out() const { return ends_[1]; }

 private:
  int ends_[2] = {-1, -1};
};

// This program once more, as an engine that runs until it is killed: started anew, because a
// library below a provider may not survive a fork.
class Process {
 public:
  static constexpr const char* kPrefill = "--prefill";
  static constexpr const char* kDecode = "--decode";
  static constexpr const char* kDecodePulls = "--decode-pulls";

  Process(const char* role, const std::string& provider, uint32_t stop_before_layer,
          const Line& line) {
    std::vector<std::string> words = {"/proc/self/exe",
                                      role,
                                      provider,
                                      std::to_string(stop_before_layer),
                                      std::to_string(line.in()),
                                      std::to_string(line.out())};
    std::vector<char*> args;
    for (std::string& word : words) args.push_back(word.data());
    args.push_back(nullptr);
    pid_ = base::fork_child();
    if (pid_ != 0) return;
    const auto first = static_cast<unsigned>(std::min(line.in(), line.out()));
    const auto last = static_cast<unsigned>(std::max(line.in(), line.out()));
    if (first > 3) close_range(3, first - 1, 0);  // nothing else goes along
    if (last > first + 1) close_range(first + 1, last - 1, 0);
    close_range(last + 1, ~0u, 0);
    execv(args[0], args.data());
    _exit(7);
  }
  ~Process() { kill_now(); }
  void kill_now() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

KvLoad load_of(KvRequestId id, const std::string& prefill, bool pull) {
  return {.id = id, .prefill = prefill, .pull = pull};
}

// An engine that tells its address and prefills for ever.
void prefill_main(const std::string& provider, uint32_t stop_before_layer, Line& out) {
  BatonConnectorOptions options = options_for(provider, "prefill-0");
  options.allow_pull = true;
  auto made = make_baton_connector(options);
  if (!made.ok()) _exit(1);
  TestPrefill prefill(**made, test_layout(60), 1);
  prefill.stop_before_layer(stop_before_layer);
  out.put((*made)->address());
  while (true) {
    prefill.step();
    if (prefill.open_jobs() == 0) (*made)->wait(std::chrono::seconds(1), -1);
  }
}

// An engine that asks the prefill worker it is told of for two loads.
void decode_main(const std::string& provider, bool pull, Line& in) {
  const std::string address = in.get();
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
    Line line;
    Process prefill(Process::kPrefill, GetParam(), UINT32_MAX, line);
    const std::string address = line.get();
    auto connector = make_or_fail(options_for(GetParam(), "decode-0"));
    ASSERT_NE(connector, nullptr);
    TestDecode decode(*connector, test_layout(80), 2);
    for (KvRequestId id = 1; id <= 20; ++id) {
      ASSERT_TRUE(decode.start(load_of(id, address, pull), 60).ok());
      for (uint32_t layer = 0; layer < 6; ++layer) {
        const absl::Status status = connector->wait_for_layer(id, layer);
        ASSERT_TRUE(status.ok()) << status;
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
  Line first_line;
  Line second_line;
  Process first(Process::kPrefill, GetParam(), 2, first_line);
  Process second(Process::kPrefill, GetParam(), UINT32_MAX, second_line);
  auto connector = make_or_fail(options_for(GetParam(), "decode-0"));
  ASSERT_NE(connector, nullptr);
  TestDecode decode(*connector, test_layout(80), 2);
  const std::string address = first_line.get();
  ASSERT_TRUE(decode.start(1, address, 40).ok());
  ASSERT_TRUE(decode.start(load_of(2, address, true), 40).ok());
  until(decode, [&] { return decode.load(1).verified == 2 && decode.load(2).verified == 2; });
  first.kill_now();
  const absl::Status status = connector->wait_for_layer(1, 5);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("prefill-0"));
  until(decode, [&] { return decode.open() == 0; });
  EXPECT_FALSE(decode.load(2).status.ok());
  EXPECT_EQ(decode.cache().free_blocks(), 80u);

  ASSERT_TRUE(decode.start(load_of(3, second_line.get(), true), 79).ok());
  until(decode, [&] { return decode.open() == 0; });
  EXPECT_EQ(decode.load(3).verified, 6u) << decode.load(3).status;
  EXPECT_FALSE(decode.load(3).wrong);
  EXPECT_EQ(decode.cache().damaged(), 0u);
}

TEST_P(KvProcessesTest, AKilledDecodeMakesItsJobsUnwanted) {
  for (const bool pulls : {false, true}) {
    SCOPED_TRACE(pulls);
    Line line;
    Process decode(pulls ? Process::kDecodePulls : Process::kDecode, GetParam(), 0, line);
    BatonConnectorOptions options = options_for(GetParam(), "prefill-0");
    options.allow_pull = pulls;
    auto connector = make_or_fail(options);
    ASSERT_NE(connector, nullptr);
    TestPrefill prefill(*connector, test_layout(60), 1);
    prefill.stop_before_layer(2);
    line.put(connector->address());
    const auto turn = [&] { prefill.step(); };
    baton::until(
        [&] { return prefill.jobs_seen() == 2 && (pulls || connector->stats().bytes_sent > 0); },
        turn);
    decode.kill_now();
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
  const std::string_view role = argc == 6 ? argv[1] : "";
  if (role == Process::kPrefill || role == Process::kDecode || role == Process::kDecodePulls) {
    baton::kvtransfer::Line line(std::stoi(argv[4]), std::stoi(argv[5]));
    if (role == Process::kDecode) baton::kvtransfer::decode_main(argv[2], false, line);
    if (role == Process::kDecodePulls) baton::kvtransfer::decode_main(argv[2], true, line);
    baton::kvtransfer::prefill_main(argv[2], static_cast<uint32_t>(std::stoul(argv[3])), line);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
