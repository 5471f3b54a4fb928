// Settings: what is declared, what is given, how a provider reads them, and what is wrong with
// them.
#include "transport/settings.h"

#include "tests/test.h"
#include "transport/worker.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr auto kChoice = Setting::Kind::kChoice;
constexpr auto kText = Setting::Kind::kText;

constexpr std::array kTable = {
    Setting{.name = "p.count", .standard = "5", .least = 1, .most = 64},
    Setting{.name = "p.size_kib", .unit = "KiB", .standard = "3", .least = 0, .most = 64},
    Setting{.name = "p.wait_ms", .unit = "ms", .standard = "20", .least = 10, .most = 3600},
    Setting{.name = "p.name", .kind = kText},
    Setting{.name = "p.io", .kind = kChoice, .standard = "auto", .choices = "auto epoll uring"},
    Setting{.name = "p.cma", .kind = kChoice, .standard = "on", .choices = "on off"},
    Setting{.name = "p.chosen", .least = 1, .most = 9},
    Setting{.name = "p.stall_ms", .unit = "ms", .standard = "50", .most = 3600, .patience = true},
};

class SettingsTest : public testing::Test {
 protected:
  ClusterKey key_ = *ClusterKey::from_bytes("0123456789abcdef");
  RegionTable regions_{WorkerUid{}};
  CounterTable counters_ = *CounterTable::create(WorkerUid{});
  ProviderContext context_ = context_of(Clock::steady());

  ProviderContext context_of(const Clock& clock) {
    return {.clock = clock,
            .key = key_,
            .self = {},
            .host_id = "here",
            .regions = regions_,
            .counters = counters_,
            .listen_port = 0,
            .settings = {}};
  }

  struct Values {
    uint16_t count = 0;
    size_t size = 0;
    Time wait{0}, stall{0};
    std::string name = "as it was", io;
    bool cma = false;
    int chosen = 7;
  };
  absl::Status read(Values& values) { return read_from(context_, values); }
  static absl::Status read_from(const ProviderContext& context, Values& values) {
    SettingsReader read(context, kTable);
    read.number("p.count", values.count);
    read.kib("p.size_kib", values.size);
    read.ms("p.wait_ms", values.wait);
    read.text("p.name", values.name);
    read.text("p.io", values.io);
    read.on_off("p.cma", values.cma);
    read.number("p.chosen", values.chosen);
    read.ms("p.stall_ms", values.stall);
    return read.finish();
  }
};

TEST_F(SettingsTest, WhatIsGivenReplacesTheDefault) {
  context_.settings = {{"p.count", "7"},   {"p.size_kib", "64"}, {"p.wait_ms", "1500"},
                       {"p.name", "eth0"}, {"p.io", "epoll"},    {"p.cma", "off"},
                       {"p.chosen", "2"}};
  Values values;
  EXPECT_EQ(read(values), absl::OkStatus());
  EXPECT_EQ(values.count, 7);
  EXPECT_EQ(values.size, 64u << 10);
  EXPECT_EQ(values.wait, std::chrono::milliseconds(1500));
  EXPECT_EQ(values.name, "eth0");
  EXPECT_EQ(values.io, "epoll");
  EXPECT_FALSE(values.cma);
  EXPECT_EQ(values.chosen, 2);
}

TEST_F(SettingsTest, TheFirstOfEqualNamesCounts) {
  context_.settings = {{"p.count", "7"}, {"p.count", "9"}};
  Values values;
  EXPECT_TRUE(read(values).ok());
  EXPECT_EQ(values.count, 7);
}

TEST_F(SettingsTest, TheTableHoldsTheDefaults) {
  context_.settings = {{"p.count", ""}};
  Values values;
  EXPECT_EQ(read(values), absl::OkStatus());
  EXPECT_EQ(values.count, 5);
  EXPECT_EQ(values.size, 3u << 10);
  EXPECT_EQ(values.wait, std::chrono::milliseconds(20));
  EXPECT_EQ(values.io, "auto");
  EXPECT_TRUE(values.cma);
  // Without one the provider's own choice stays.
  EXPECT_EQ(values.name, "as it was");
  EXPECT_EQ(values.chosen, 7);
}

// CTest runs this with a factor of its own; by hand it is 1.
TEST_F(SettingsTest, PatienceIsForDefaultsInRealTime) {
  Values values;
  ASSERT_TRUE(read(values).ok());
  EXPECT_EQ(values.stall, std::chrono::milliseconds(50) * baton::base::patience_factor());
  context_.settings = {{"p.stall_ms", "50"}};
  ASSERT_TRUE(read(values).ok());
  EXPECT_EQ(values.stall, std::chrono::milliseconds(50)) << "what is given holds";

  class Simulated : public Clock {
    Time now() const override { return Time(0); }
  } simulated;
  ASSERT_TRUE(read_from(context_of(simulated), values).ok());
  EXPECT_EQ(values.stall, std::chrono::milliseconds(50)) << "nobody is slow in virtual time";
}

TEST_F(SettingsTest, TheFirstErrorNamesSettingValueAndRemedy) {
  const auto error = [&](const std::string& key, const std::string& value) {
    context_.settings = {{key, value}, {"p.chosen", "also wrong"}};
    Values values;
    values.count = 55;
    values.cma = true;
    const absl::Status status = read(values);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_EQ(values.chosen, 7);
    EXPECT_TRUE(values.cma);
    EXPECT_EQ(values.count, key == "p.count" ? 55 : 5);
    return std::string(status.message());
  };
  for (const char* bad : {"0", "65", "-1", "many", "7 or so", "99999999999999999999"}) {
    EXPECT_EQ(error("p.count", bad),
              "setting p.count=" + std::string(bad) + ": give a number from 1 to 64");
  }
  EXPECT_THAT(error("p.wait_ms", "9"), HasSubstr("from 10 to 3600 ms"));
  EXPECT_THAT(error("p.io", "pigeon"),
              AllOf(HasSubstr("p.io=pigeon"), HasSubstr("auto, epoll or uring")));
  EXPECT_THAT(error("p.cma", "no"), HasSubstr("on or off"));
}

TEST_F(SettingsTest, TheTableAndTheCodeMustAgree) {
  int value = 0;
  SettingsReader undeclared(context_, absl::MakeConstSpan(kTable).subspan(0, 1));
  undeclared.number("p.count", value);
  undeclared.number("p.other", value);
  EXPECT_THAT(std::string(undeclared.finish().message()), HasSubstr("p.other is read but not"));
  SettingsReader unread(context_, absl::MakeConstSpan(kTable).subspan(0, 2));
  unread.number("p.count", value);
  EXPECT_THAT(std::string(unread.finish().message()),
              HasSubstr("p.size_kib is declared and never"));
  SettingsReader otherwise(context_, absl::MakeConstSpan(kTable).subspan(0, 1));
  size_t bytes = 0;
  otherwise.kib("p.count", bytes);
  EXPECT_THAT(std::string(otherwise.finish().message()), HasSubstr("number of KiB"));
  SettingsReader text(context_, absl::MakeConstSpan(kTable).subspan(3, 1));
  text.number("p.name", value);
  EXPECT_THAT(std::string(text.finish().message()), HasSubstr("read as a number"));
}

TEST_F(SettingsTest, UnknownNamesAndWrongValuesAreErrorsThatSayWhatToWrite) {
  declare_settings(kTable);
  const auto refused = [](const std::string& name, const std::string& value) {
    const absl::Status status = check_settings({{"p.count", "5"}, {name, value}});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << name << "=" << value;
    return std::string(status.message());
  };
  EXPECT_TRUE(check_settings({{"p.count", "5"}, {"p.name", ""}, {"p.io", "uring"}}).ok());
  EXPECT_EQ(refused("p.cuont", "5"), "there is no setting \"p.cuont\"; did you mean p.count?");
  EXPECT_EQ(refused("wait_ms", "5"), "there is no setting \"wait_ms\"; did you mean p.wait_ms?");
  EXPECT_THAT(refused("q.frobnicate", "5"),
              AllOf(HasSubstr("begin with a provider"), HasSubstr("baton info --settings")));
  EXPECT_EQ(refused("p.count", "65"), "setting p.count=65: give a number from 1 to 64");

  auto worker = Worker::create({.settings = {{"p.cuont", "5"}}});
  EXPECT_THAT(std::string(worker.status().message()), HasSubstr("did you mean p.count?"));
}

TEST(AddSetting, TakesAPair) {
  SettingValues values;
  EXPECT_TRUE(add_setting("tcp.x=a=b", values).ok());
  EXPECT_EQ(values, (SettingValues{{"tcp.x", "a=b"}}));
  for (const char* bad : {"tcp.x", "=epoll", ""}) {
    EXPECT_TRUE(absl::IsInvalidArgument(add_setting(bad, values))) << bad;
  }
}

}  // namespace
}  // namespace baton
