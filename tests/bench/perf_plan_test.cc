// What a server accepts of what a client asks for.
#include "bench/perftest/perf_plan.h"

#include "bench/perftest/perf_histogram.h"
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
  const auto again = must(PerfPlan::from_json(Json::parse(plan.to_json().dump())));
  EXPECT_EQ(again.to_json(), plan.to_json());
  const PerfRun run{.size = 4096, .iterations = 0, .seconds = 1.5, .margin = 0.25, .seed = 9};
  const auto same = must(PerfRun::from_json(Json::parse(run.to_json().dump()), plan));
  EXPECT_EQ(same.to_json(), run.to_json());
  EXPECT_EQ(same.length(), std::chrono::milliseconds(1500));
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

// The histogram against sorted samples.
TEST(Histogram, EmptyIsZero) {
  const Histogram histogram;
  EXPECT_EQ(histogram.count(), 0u);
  EXPECT_EQ(histogram.quantile(0.5), Time(0));
  EXPECT_EQ(histogram.min(), Time(0));
  EXPECT_EQ(histogram.max(), Time(0));
  EXPECT_EQ(histogram.stdev_us(), 0);
}

TEST(Histogram, SmallValuesAreExact) {
  Histogram histogram;
  for (int i = 1; i <= 200; ++i) histogram.record(Time(i));
  EXPECT_EQ(histogram.quantile(0.5), Time(100));
  EXPECT_EQ(histogram.quantile(0.99), Time(198));
  EXPECT_EQ(histogram.quantile(0), Time(1));
  EXPECT_EQ(histogram.quantile(1), Time(200));
}

TEST(Histogram, AgreesWithSortedSamplesToAPercent) {
  std::mt19937_64 random(7);
  for (const double spread : {0.1, 1.0, 4.0}) {
    std::lognormal_distribution<double> draw(8, spread);
    Histogram histogram;
    std::vector<int64_t> samples;
    double sum = 0, squares = 0;
    for (int i = 0; i < 20000; ++i) {
      samples.push_back(static_cast<int64_t>(std::min(1e15, draw(random))));
      histogram.record(Time(samples.back()));
      sum += static_cast<double>(samples.back());
    }
    std::sort(samples.begin(), samples.end());
    const double mean = sum / 20000;
    for (const int64_t s : samples) squares += std::pow(static_cast<double>(s) - mean, 2);
    for (const double q : {0.01, 0.5, 0.9, 0.99, 0.999}) {
      const double truth =
          static_cast<double>(samples[static_cast<size_t>(std::ceil(q * 20000)) - 1]);
      EXPECT_NEAR(static_cast<double>(histogram.quantile(q).count()), truth, 0.008 * truth + 1);
    }
    EXPECT_EQ(histogram.min(), Time(samples.front()));
    EXPECT_EQ(histogram.max(), Time(samples.back()));
    EXPECT_EQ(histogram.quantile(1), Time(samples.back()));
    EXPECT_NEAR(histogram.mean_us(), mean * 1e-3, mean * 1e-9);
    EXPECT_NEAR(histogram.stdev_us(), std::sqrt(squares / 20000) * 1e-3, 1e-6 * mean);
  }
}

TEST(Histogram, TakesEveryValue) {
  Histogram histogram;
  histogram.record(Time(-5));
  histogram.record(Time(0));
  histogram.record(Time(INT64_MAX));
  EXPECT_EQ(histogram.min(), Time(0));
  EXPECT_EQ(histogram.quantile(1), Time(INT64_MAX));
  histogram.clear();
  EXPECT_EQ(histogram.count(), 0u);
}

}  // namespace
}  // namespace baton::bench
