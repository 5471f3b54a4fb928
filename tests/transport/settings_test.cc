// Settings as a provider reads them: defaults, units, limits, and the first error.
#include "transport/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class SettingsTest : public testing::Test {
 protected:
  ClusterKey key_ = *ClusterKey::from_bytes("0123456789abcdef");
  RegionTable regions_{WorkerUid{}};
  CounterTable counters_ = *CounterTable::create(WorkerUid{});
  ProviderContext context_{.clock = Clock::steady(),
                           .key = key_,
                           .self = {},
                           .host_id = "here",
                           .regions = regions_,
                           .counters = counters_,
                           .listen_port = 0,
                           .settings = {}};
};

TEST_F(SettingsTest, WhatIsGivenReplacesTheDefault) {
  context_.settings = {{"p.count", "7"},   {"p.size_kib", "64"}, {"p.wait_ms", "1500"},
                       {"p.name", "eth0"}, {"p.io", "epoll"},    {"p.cma", "off"},
                       {"p.empty", ""}};
  uint16_t count = 1;
  size_t size = 1;
  Time wait{1};
  std::string name = "none", io = "auto", empty = "as it was", missing = "as well";
  bool cma = true, memfd = true;
  SettingsReader read(context_);
  read.number("p.count", count, 1, 64);
  read.kib("p.size_kib", size, 0, 64);
  read.ms("p.wait_ms", wait);
  read.text("p.name", name);
  read.choice("p.io", io, {"auto", "epoll", "uring"});
  read.on_off("p.cma", cma);
  read.on_off("p.memfd", memfd);
  read.text("p.empty", empty);
  read.text("p.missing", missing);
  EXPECT_TRUE(read.status().ok()) << read.status();
  EXPECT_EQ(count, 7);
  EXPECT_EQ(size, 64u << 10);
  EXPECT_EQ(wait, std::chrono::milliseconds(1500));
  EXPECT_EQ(name, "eth0");
  EXPECT_EQ(io, "epoll");
  EXPECT_FALSE(cma);
  EXPECT_TRUE(memfd);
  EXPECT_EQ(empty, "as it was");
  EXPECT_EQ(missing, "as well");
}

TEST_F(SettingsTest, WhatIsMissingLeavesTheDefaultToTheLastByte) {
  size_t size = 1500;
  Time wait{1234567};
  SettingsReader read(context_);
  read.kib("p.size_kib", size, 0, 64);
  read.ms("p.wait_ms", wait);
  EXPECT_EQ(size, 1500u);
  EXPECT_EQ(wait, Time{1234567});
}

TEST_F(SettingsTest, TheFirstErrorNamesSettingValueAndRemedy) {
  const auto error = [&](const std::string& key, const std::string& value) {
    context_.settings = {{key, value}, {"p.later", "also wrong"}};
    uint16_t count = 5;
    Time wait{5};
    std::string io = "auto";
    bool cma = true;
    int later = 5;
    SettingsReader read(context_);
    read.number("p.count", count, 1, 64);
    read.ms("p.wait_ms", wait, 10);
    read.choice("p.io", io, {"auto", "epoll"});
    read.on_off("p.cma", cma);
    read.number("p.later", later, 0, 9);
    EXPECT_TRUE(absl::IsInvalidArgument(read.status()));
    EXPECT_EQ(count, 5);
    EXPECT_EQ(wait, Time{5});
    EXPECT_EQ(io, "auto");
    EXPECT_TRUE(cma);
    EXPECT_EQ(later, 5);
    return std::string(read.status().message());
  };
  for (const char* bad : {"0", "65", "-1", "many", "7 or so", "99999999999999999999"}) {
    EXPECT_EQ(error("p.count", bad),
              "setting p.count=" + std::string(bad) + ": give a number from 1 to 64");
  }
  EXPECT_THAT(error("p.wait_ms", "9"), HasSubstr("from 10 to 3600000"));
  EXPECT_THAT(error("p.io", "pigeon"), AllOf(HasSubstr("p.io=pigeon"), HasSubstr("auto or epoll")));
  EXPECT_THAT(error("p.cma", "no"), HasSubstr("on or off"));
}

}  // namespace
}  // namespace baton
