// The plugin's tuner and profiler, as NCCL calls them.
#include <cstdarg>
#include <fstream>
#include <nlohmann/json.hpp>

#include "plugins/nccl/abi_tools.h"
#include "tests/nccl_rma/rma_rig.h"
#include "tests/temporary_folder.h"

namespace baton::nccl {
namespace {

class Tools : public testing::Test {
 public:
  void TearDown() override {
    for (const char* name :
         {"BATON_NCCL_TUNING", "BATON_NCCL_TIMELINE", "NCCL_PROFILE_EVENT_MASK"}) {
      unsetenv(name);
    }
  }
  std::string file(const std::string& name) const { return folder_.path() + "/" + name; }
  void tuning(const std::string& text) const {
    std::ofstream(file("rows")) << text;
    setenv("BATON_NCCL_TUNING", file("rows").c_str(), 1);
  }

 private:
  TemporaryFolder folder_;
};

constexpr int kBroadcast = 0, kAllReduce = 4;
constexpr int kTree = 0, kRing = 1, kLl128 = 1, kSimple = 2;
using Costs = std::array<std::array<float, 3>, 7>;

struct Choice {
  Costs costs;
  int channels = 0;
  size_t chunk = 1;
};
Choice choose(const TunerV6& tuner, void* context, int collective, size_t bytes, Costs costs) {
  Choice choice{costs};
  EXPECT_EQ(tuner.choose(context, collective, bytes, 1, reinterpret_cast<float**>(&choice.costs), 7,
                         3, 0, &choice.channels),
            Result::kSuccess);
  EXPECT_EQ(tuner.chunk(context, collective, bytes, kTree, kLl128, 4, &choice.chunk),
            Result::kSuccess);
  return choice;
}

// Promise(nccl): The tuner leaves NCCL's choice alone but for what the user's file says |
//   costs that NCCL gives, with and without BATON_NCCL_TUNING
TEST_F(Tools, TheTunerSaysWhatTheUserHasMeasured) {
  const auto* v6 = table_of<TunerV6>("ncclTunerPlugin_v6");
  const auto* v5 = table_of<TunerV5>("ncclTunerPlugin_v5");
  ASSERT_TRUE(v5 != nullptr && v6 != nullptr);
  EXPECT_EQ(v5->choose, v6->choose);
  Costs given;
  for (auto& row : given) row.fill(10);
  given[kRing][kSimple] = -1;  // NCCL cannot
  void* context = nullptr;
  ASSERT_EQ(v6->init(&context, 1, 16, 2, nullptr, nullptr, nullptr), Result::kSuccess);
  EXPECT_EQ(choose(*v6, context, kAllReduce, 1000, given).costs, given);
  EXPECT_EQ(v6->finalize(context), Result::kSuccess);

  tuning(
      "# measured\n"
      "allreduce 0 65536 tree ll128 4 8192\r\n\n"
      "allreduce 65537 - ring simple - -  # not to be had\n"
      "broadcast 5 5 pat simple 2 -\n");
  ASSERT_EQ(v6->init(&context, 1, 16, 2, nullptr, nullptr, nullptr), Result::kSuccess);
  const Choice small = choose(*v6, context, kAllReduce, 65536, given);
  Costs wanted = given;
  wanted[kTree][kLl128] = 0;
  EXPECT_EQ(small.costs, wanted);
  EXPECT_EQ(small.channels, 4);
  EXPECT_EQ(small.chunk, 8192u);
  const Choice large = choose(*v6, context, kAllReduce, 65537, given);
  EXPECT_EQ(large.costs, given);
  EXPECT_EQ(large.channels, 0);
  EXPECT_EQ(large.chunk, 1u);
  EXPECT_EQ(choose(*v6, context, kBroadcast, 5, given).channels, 2);
  EXPECT_EQ(choose(*v6, context, kBroadcast, 6, given).costs, given);
  EXPECT_EQ(choose(*v6, context, 99, 5, given).costs, given);
  // An NCCL with fewer algorithms.
  int channels = 0;
  EXPECT_EQ(
      v6->choose(context, kBroadcast, 5, 1, reinterpret_cast<float**>(&given), 6, 3, 0, &channels),
      Result::kSuccess);
  EXPECT_EQ(channels, 0);
  EXPECT_EQ(v6->finalize(context), Result::kSuccess);
}

std::mutex saying;  // the plugin keeps the logger: tests behind this one have threads
std::string said;
void keep_line(LogLevel, unsigned long, const char*, int, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char line[1000];
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  const std::lock_guard lock(saying);
  said = line;
}

TEST_F(Tools, ATuningFileThatMakesNoSenseIsRefusedByItsLine) {
  const auto* tuner = table_of<TunerV6>("ncclTunerPlugin_v6");
  const std::pair<const char*, const char*> cases[] = {
      {"allreduce 0 1 tree ll128 4\n", "line 1: a row has 7 columns"},
      {"\nallsum 0 1 tree ll128 4 -\n", "line 2: there is no collective allsum"},
      {"allreduce 0 1 star ll128 4 -\n", "there is no algorithm star"},
      {"allreduce 0 1 tree ll64 4 -\n", "there is no protocol ll64"},
      {"allreduce 2 1 tree ll128 4 -\n", "a number is out of range"},
      {"allreduce -1 1 tree ll128 4 -\n", "a number is out of range"},
      {"allreduce 0 1 tree ll128 4000000000 -\n", "a number is out of range"},
  };
  for (const auto& [text, reason] : cases) {
    tuning(text);
    void* context = nullptr;
    EXPECT_EQ(tuner->init(&context, 1, 2, 2, keep_line, nullptr, nullptr),
              Result::kInvalidArgument);
    EXPECT_THAT(said, testing::HasSubstr(reason));
  }
  setenv("BATON_NCCL_TUNING", "/nowhere", 1);
  void* context = nullptr;
  EXPECT_EQ(tuner->init(&context, 1, 2, 2, keep_line, nullptr, nullptr), Result::kInvalidArgument);
  EXPECT_THAT(said, testing::HasSubstr("/nowhere cannot be read"));
}

// Promise(nccl): NCCL's events become a timeline, and cost nothing where none is asked for | events
//   of a collective, its proxy and its steps, read back as JSON
TEST_F(Tools, TheProfilerWritesATimeline) {
  for (const char* name : {"ncclProfiler_v5", "ncclProfiler_v6", "ncclProfiler_v7"}) {
    ASSERT_NE(table_of<Profiler>(name), nullptr) << name;
  }
  const auto& profiler = *table_of<Profiler>("ncclProfiler_v7");
  void* context = nullptr;
  int wanted = -1;
  ASSERT_EQ(profiler.init(&context, 5, &wanted, "", 2, 4, 3, nullptr), Result::kSuccess);
  EXPECT_EQ(wanted, 0);
  void* event = &wanted;
  ProfiledEvent description{};
  description.kind = kCollectiveEvent;
  EXPECT_EQ(profiler.start(context, &event, &description), Result::kSuccess);
  EXPECT_EQ(event, nullptr);
  EXPECT_EQ(profiler.stop(nullptr), Result::kSuccess);
  EXPECT_EQ(profiler.record(nullptr, kSendWaits, nullptr), Result::kSuccess);
  EXPECT_EQ(profiler.finalize(context), Result::kSuccess);

  setenv("BATON_NCCL_TIMELINE", file("line").c_str(), 1);
  ASSERT_EQ(profiler.init(&context, 5, &wanted, "", 2, 4, 3, nullptr), Result::kSuccess);
  EXPECT_EQ(static_cast<uint64_t>(wanted) & kProxyStepEvent, 0u);
  EXPECT_NE(static_cast<uint64_t>(wanted) & kCollectiveEvent, 0u);
  description.collective = {.sequence = 9,
                            .function = "AllReduce",
                            .count = 1000,
                            .type = "ncclBfloat16",
                            .channels = 2,
                            .algorithm = "RING",
                            .protocol = "LL128"};
  void* collective = nullptr;
  ASSERT_EQ(profiler.start(context, &collective, &description), Result::kSuccess);
  ASSERT_NE(collective, nullptr);
  ProfiledEvent operation{.kind = kProxyOperationEvent, .parent = collective, .rank = 3};
  operation.operation = {.channel = 1, .peer = 2, .steps = 8, .chunk = 4096, .sends = 1};
  void* sends = nullptr;
  ASSERT_EQ(profiler.start(context, &sends, &operation), Result::kSuccess);
  // The collective is enqueued long before its proxy is done.
  EXPECT_EQ(profiler.stop(collective), Result::kSuccess);
  ProfiledEvent step{.kind = kProxyStepEvent, .parent = sends, .rank = 3};
  step.step = 7;
  void* stepped = nullptr;
  ASSERT_EQ(profiler.start(context, &stepped, &step), Result::kSuccess);
  ProfiledState state{.step_bytes = 555};
  EXPECT_EQ(profiler.record(stepped, kSendWaits, &state), Result::kSuccess);
  EXPECT_EQ(profiler.stop(stepped), Result::kSuccess);
  EXPECT_EQ(profiler.stop(sends), Result::kSuccess);
  ProfiledEvent unknown{.kind = uint64_t{1} << 40};
  ASSERT_EQ(profiler.start(context, &event, &unknown), Result::kSuccess);
  EXPECT_EQ(event, nullptr);
  EXPECT_EQ(profiler.finalize(context), Result::kSuccess);

  const auto json = nlohmann::json::parse(std::ifstream(file("line.3.json")));
  std::map<std::string, nlohmann::json> spans;
  for (const auto& span : json["traceEvents"]) {
    if (span["ph"] == "X") spans[span["name"]] = span;
  }
  ASSERT_EQ(spans.size(), 3u) << json.dump(1);
  const auto& all_reduce = spans["AllReduce 9, RING/LL128, 2 channels"];
  EXPECT_EQ(all_reduce["args"]["bytes"], 2000);
  EXPECT_EQ(all_reduce["args"]["request"], 5);
  const auto& proxy = spans["peer 2, channel 1, 8 steps"];
  EXPECT_EQ(proxy["cat"], "NCCL proxy sends");
  EXPECT_EQ(spans["step 7"]["args"]["bytes"], 555);
  EXPECT_GE(proxy["ts"].get<double>() + proxy["dur"].get<double>(),
            spans["step 7"]["ts"].get<double>());
}

}  // namespace
}  // namespace baton::nccl
