// The histogram against sorted samples.
#include "bench/perftest/perf_histogram.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

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

TEST(Histogram, TheLargestSampleIsNeverDropped) {
  Histogram histogram;
  for (int i = 0; i < 999; ++i) histogram.record(std::chrono::microseconds(10));
  histogram.record(std::chrono::seconds(3));
  EXPECT_EQ(histogram.max(), std::chrono::seconds(3));
  EXPECT_LT(histogram.quantile_us(0.99), 11);
  EXPECT_EQ(histogram.summary().max, 3e6);
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
