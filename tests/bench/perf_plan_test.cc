// What a server accepts of what a client asks for.
#include "bench/perftest/perf_plan.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

TEST(PerfTest, NamesGoBothWays) {
  for (const char* name : {"write_bw", "read_bw", "send_bw", "write_lat", "read_lat", "send_lat"}) {
    const auto test = PerfTest::named(name);
    ASSERT_TRUE(test.has_value()) << name;
    EXPECT_EQ(test->name(), name);
  }
  EXPECT_FALSE(PerfTest::named("atomic_bw").has_value());
}

TEST(PerfPlan, SurvivesTheWire) {
  PerfPlan plan;
  plan.test = {PerfTest::Verb::kRead, false};
  plan.bidirectional = true;
  plan.cold = true;
  plan.depth = 7;
  plan.post_list = 3;
  plan.receives = 16;
  plan.area = 1 << 20;
  const auto again = PerfPlan::from_json(Json::parse(plan.to_json().dump()));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->to_json(), plan.to_json());
  const PerfRun run{.size = 4096, .iterations = 0, .seconds = 1.5, .margin = 0.25, .seed = 9};
  const auto same = PerfRun::from_json(Json::parse(run.to_json().dump()), plan);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->to_json(), run.to_json());
  EXPECT_EQ(same->length(), std::chrono::milliseconds(1500));
}

TEST(PerfPlan, PlacesFitIntoTheArea) {
  PerfPlan plan;
  plan.area = 4096;
  EXPECT_EQ(plan.slots(1), 64u);
  EXPECT_EQ(plan.slots(65), 32u);
  EXPECT_EQ(plan.slots(4096), 1u);
  EXPECT_EQ(plan.slots(4097), 0u);
}

struct Change {
  const char* key;
  Json value;
};
class BadPlan : public testing::TestWithParam<Change> {};
TEST_P(BadPlan, IsRefusedByName) {
  Json json = PerfPlan().to_json();
  json[GetParam().key] = GetParam().value;
  const auto plan = PerfPlan::from_json(json);
  ASSERT_FALSE(plan.ok()) << json;
  json.erase(GetParam().key);
  EXPECT_THAT(std::string(PerfPlan::from_json(json).status().message()), HasSubstr(GetParam().key));
}
INSTANTIATE_TEST_SUITE_P(PerfPlan, BadPlan,
                         testing::Values(Change{"test", "atomic_bw"}, Change{"test", 3},
                                         Change{"depth", 0}, Change{"depth", -1},
                                         Change{"depth", 1e9}, Change{"depth", "many"},
                                         Change{"post_list", 129}, Change{"area", 1},
                                         Change{"receives", 0}, Change{"receives", 8193},
                                         Change{"area", UINT64_MAX}, Change{"verify", 1},
                                         Change{"events", nullptr}, Change{"cold", "yes"}));

TEST(PerfPlan, RefusesWhatIsNoObject) {
  EXPECT_FALSE(PerfPlan::from_json(Json()).ok());
  EXPECT_FALSE(PerfPlan::from_json(Json::array({1, 2})).ok());
  EXPECT_FALSE(PerfRun::from_json(Json("x"), PerfPlan()).ok());
  PerfPlan plan;
  plan.test.latency = plan.bidirectional = true;
  EXPECT_FALSE(PerfPlan::from_json(plan.to_json()).ok());
}

TEST(PerfRun, StaysInsideThePlan) {
  PerfPlan plan;
  plan.area = 1 << 20;
  const auto accepts = [&](size_t size) {
    return PerfRun::from_json(PerfRun{.size = size, .iterations = 5}.to_json(), plan).ok();
  };
  EXPECT_TRUE(accepts(1));
  EXPECT_TRUE(accepts(1 << 20));
  EXPECT_FALSE(accepts(0));
  EXPECT_FALSE(accepts((1 << 20) + 1));
  plan.test.verb = PerfTest::Verb::kSend;
  EXPECT_TRUE(accepts(1 << 20));
  Json late = PerfRun{.size = 8}.to_json();
  late["seconds"] = -1;
  EXPECT_FALSE(PerfRun::from_json(late, plan).ok());
  late["seconds"] = 1e300;
  EXPECT_FALSE(PerfRun::from_json(late, plan).ok());
}

}  // namespace
}  // namespace baton::bench
