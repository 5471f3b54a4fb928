// Settings that are refused, and what the provider says of itself.
#include "tests/test.h"
#include "tests/transport/provider_node.h"
#include "transport/ucx/library.h"

namespace baton::ucx {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class UcxSettings : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto library = Library::get(); !library.ok()) GTEST_SKIP() << library.status();
    unsetenv("UCX_TLS");
    unsetenv("UCX_NET_DEVICES");
  }
  static Capabilities with(ProviderNode::Settings settings) {
    return ProviderNode("ucx", "a", std::move(settings), "0123456789abcdef")
        .provider->capabilities();
  }
};

TEST_F(UcxSettings, NumbersOutOfRangeAreNamedWithTheirRange) {
  for (const auto& [key, value] : ProviderNode::Settings{{"ucx.slice_kib", "3"},
                                                         {"ucx.slice_kib", "many"},
                                                         {"ucx.stall_ms", "0"},
                                                         {"ucx.handshake_ms", "-5"}}) {
    const Capabilities can = with({{key, value}});
    EXPECT_FALSE(can.available) << key;
    EXPECT_THAT(can.detail, AllOf(HasSubstr(key), HasSubstr(value), HasSubstr("give a number")));
  }
}

TEST_F(UcxSettings, TransportsThatDoNotExistAreRefusedAtOnce) {
  const Capabilities can = with({{"ucx.tls", "carrier_pigeon"}});
  EXPECT_FALSE(can.available);
  EXPECT_THAT(can.detail, AllOf(HasSubstr("carrier_pigeon"), HasSubstr("ucx_info -d")));
}

TEST_F(UcxSettings, DevicesThatDoNotExistAreRefusedAtOnce) {
  const Capabilities can = with({{"ucx.tls", "tcp"}, {"ucx.net_devices", "nowhere0"}});
  EXPECT_FALSE(can.available);
  EXPECT_THAT(can.detail, AllOf(HasSubstr("nowhere0"), HasSubstr("ucx.net_devices")));
}

TEST_F(UcxSettings, TheEnvironmentChoosesWhereNoSettingDoes) {
  setenv("UCX_TLS", "carrier_pigeon", 1);
  const Capabilities refused = with({});
  EXPECT_FALSE(refused.available);
  EXPECT_THAT(refused.detail, HasSubstr("carrier_pigeon"));
  const Capabilities taken = with({{"ucx.tls", "tcp"}});
  unsetenv("UCX_TLS");
  EXPECT_TRUE(taken.available) << taken.detail;
}

TEST_F(UcxSettings, ItSaysWhichUcxAndWhichTransports) {
  const Capabilities chosen = with({{"ucx.tls", "tcp"}});
  EXPECT_TRUE(chosen.available) << chosen.detail;
  EXPECT_EQ(chosen.rank, 50);
  EXPECT_THAT(chosen.detail,
              AllOf(HasSubstr("UCX " + (*Library::get())->version()), HasSubstr("tcp")));
  EXPECT_TRUE(with({}).available);
}

}  // namespace
}  // namespace baton::ucx
