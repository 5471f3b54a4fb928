// What each dataset asks, how files that are wrong are told, and when requests are sent.
#include "engine/load/workload.h"

#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::load {
namespace {

using testing::HasSubstr;

const Words kWords{.tokens = {3, 5, 8, 13, 21, 34}};

std::vector<LoadRequest> made(const WorkloadOptions& options) {
  auto requests = make_workload(options, kWords);
  EXPECT_TRUE(requests.ok()) << requests.status();
  return requests.ok() ? *std::move(requests) : std::vector<LoadRequest>();
}

std::string refused(const WorkloadOptions& options) {
  return std::string(make_workload(options, kWords).status().message());
}

// Tokens that two prompts begin with in common.
size_t alike(const LoadRequest& a, const LoadRequest& b) {
  const auto [at, other] =
      std::mismatch(a.tokens.begin(), a.tokens.end(), b.tokens.begin(), b.tokens.end());
  return static_cast<size_t>(at - a.tokens.begin());
}

TEST(Workload, TheSameSeedAsksTheSame) {
  for (const std::string& name : dataset_names()) {
    if (name == "mooncake") continue;
    WorkloadOptions options{.dataset = name, .requests = 7, .seed = 4};
    const auto first = made(options), again = made(options);
    options.seed = 5;
    const auto other = made(options);
    ASSERT_EQ(first.size(), 7u) << name;
    bool differs = false;
    for (size_t i = 0; i < 7; ++i) {
      EXPECT_EQ(first[i].tokens, again[i].tokens) << name;
      EXPECT_EQ(first[i].text, again[i].text) << name;
      EXPECT_EQ(first[i].output, again[i].output) << name;
      differs |= first[i].tokens != other[i].tokens || first[i].text != other[i].text;
    }
    EXPECT_TRUE(differs) << name;
  }
}

TEST(Workload, TextHasItsBytes) {
  for (const LoadRequest& request : made({.requests = 9, .text_bytes = 70'000})) {
    EXPECT_EQ(request.text.size(), 70'000u);
    EXPECT_EQ(request.output, WorkloadOptions::kOutput);
  }
}

TEST(Workload, RandomPromptsHaveTheirLength) {
  for (const LoadRequest& request : made({.dataset = "random", .output = 3, .input = 9})) {
    EXPECT_EQ(request.tokens.size(), 9u);
    EXPECT_EQ(request.output, 3);
    for (const int32_t token : request.tokens) {
      EXPECT_THAT(kWords.tokens, testing::Contains(token));
    }
  }
}

TEST(Workload, ATracesHashesSayWhatIsAlike) {
  TemporaryFolder folder;
  folder.file("t.jsonl",
              R"({"timestamp":3000,"input_length":1200,"output_length":20,"hash_ids":[1,2,3]})"
              "\n"
              R"({"timestamp":1000,"input_length":1024,"output_length":8,"hash_ids":[1,2]})"
              "\n"
              R"({"timestamp":2000,"input_length":600,"output_length":1,"hash_ids":[7,2]})"
              "\n"
              R"({"timestamp":9000,"input_length":50,"output_length":1})"
              "\n");
  WorkloadOptions options{.dataset = "mooncake", .file = folder.path("t.jsonl")};
  auto requests = made(options);
  ASSERT_EQ(requests.size(), 4u);
  // In the order of their times, which begin with the first one.
  EXPECT_EQ(requests[0].at, Time{});
  EXPECT_EQ(requests[1].at, std::chrono::seconds(1));
  EXPECT_EQ(requests[2].at, std::chrono::seconds(2));
  EXPECT_EQ(requests[0].tokens.size(), 1024u);
  EXPECT_EQ(requests[2].tokens.size(), 1200u);
  EXPECT_EQ(requests[2].output, 20);
  EXPECT_EQ(alike(requests[0], requests[2]), 1024u);
  EXPECT_LT(alike(requests[0], requests[1]), 100u);
  EXPECT_EQ(requests[3].tokens.size(), 50u);

  options.trace_scale = 1.0 / 32;
  options.trace_speed = 10;
  requests = made(options);
  EXPECT_EQ(requests[1].at, std::chrono::milliseconds(100));
  EXPECT_EQ(requests[0].tokens.size(), 32u);
  EXPECT_EQ(requests[2].tokens.size(), 38u);
  EXPECT_EQ(requests[0].output, 1);
  EXPECT_EQ(alike(requests[0], requests[2]), 32u);
}

TEST(Workload, ATraceThatIsWrongIsRefusedByItsLine) {
  TemporaryFolder folder;
  const WorkloadOptions options{.dataset = "mooncake", .file = folder.path("t.jsonl")};
  EXPECT_FALSE(refused(options).empty());  // there is no such file yet
  for (const auto& [bytes, words] : std::vector<std::pair<std::string, std::string>>{
           {R"({"timestamp":1)", "line 1"},
           {"[]", "not a JSON object"},
           {R"({"timestamp":1,"output_length":3})", "input_length"},
           {R"({"timestamp":1,"input_length":3})", "output_length"},
           {R"({"timestamp":-1,"input_length":3,"output_length":1})", "timestamp"},
           {R"({"timestamp":1,"input_length":3,"output_length":1,"hash_ids":4})", "not a list"},
           {R"({"timestamp":1,"input_length":3,"output_length":1,"hash_ids":["a"]})",
            "whole number"},
           {R"({"timestamp":1,"input_length":99999999999,"output_length":1})", "input_length"}}) {
    folder.file("t.jsonl", bytes);
    EXPECT_THAT(refused(options), HasSubstr(words)) << bytes;
    EXPECT_THAT(refused(options), HasSubstr("line 1")) << bytes;
  }
}

TEST(Workload, TokensNeedWords) {
  EXPECT_FALSE(make_workload({.dataset = "random"}, {}).ok());
  EXPECT_TRUE(make_workload({.dataset = "text"}, {}).ok());
}

TEST(Arrivals, HaveTheirRate) {
  const std::vector<Time> at = arrivals(2000, 50, 3);
  ASSERT_EQ(at.size(), 2000u);
  EXPECT_TRUE(std::is_sorted(at.begin(), at.end()));
  EXPECT_NEAR(seconds_of(at.back()), 40, 1e-3);
  EXPECT_TRUE(arrivals(0, 50, 3).empty());
}

}  // namespace
}  // namespace baton::engine::load
