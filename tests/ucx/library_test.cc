// Which UCX is taken, what is said of one that is not, and what loading one leaves alone.
#include "transport/ucx/library.h"

#include <sched.h>

#include "tests/test.h"
#include "tests/transport/provider_node.h"

namespace baton::ucx {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(UcxLibrary, AMissingOneIsNamedWithItsPackage) {
  const auto library = Library::load("libucp-that-is-nowhere.so.0");
  ASSERT_TRUE(absl::IsUnavailable(library.status())) << library.status();
  EXPECT_THAT(std::string(library.status().message()),
              AllOf(HasSubstr("libucp-that-is-nowhere"), HasSubstr("apt-get install libucx0")));
}

TEST(UcxLibrary, AHostNameThatItDoesNotSurviveIsRefused) {
  EXPECT_TRUE(Library::survives_name("").ok());
  EXPECT_TRUE(Library::survives_name(std::string(63, 'n')).ok());
  const absl::Status status = Library::survives_name(std::string(64, 'n'));
  ASSERT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("64 characters"), HasSubstr("hostname")));
  // The installed one, on a host with such a name, in a child.
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWUTS) != 0 || sethostname(std::string(64, 'n').data(), 64) != 0) _exit(77);
    _exit(absl::IsUnavailable(Library::load("libucp.so.0").status()) ? 0 : 1);
  }
  int how = -1;
  waitpid(child, &how, 0);
  ASSERT_TRUE(WIFEXITED(how)) << "it ended by signal " << WTERMSIG(how);
  if (WEXITSTATUS(how) == 77) GTEST_SKIP() << "the host's name cannot be changed here";
  EXPECT_EQ(WEXITSTATUS(how), 0);
}

TEST(UcxLibrary, AnOldOneIsRefusedWithBothVersions) {
  const auto library = Library::load(BATON_OLD_UCP);
  ASSERT_TRUE(absl::IsUnavailable(library.status())) << library.status();
  const std::string needed =
      std::to_string(UCP_API_MAJOR) + "." + std::to_string(UCP_API_MINOR) + " or a newer";
  EXPECT_THAT(std::string(library.status().message()),
              AllOf(HasSubstr("UCX 1.9.3"), HasSubstr(needed), HasSubstr("upgrade")));
}

TEST(UcxLibrary, AnythingElseIsRefused) {
  const auto library = Library::load("libc.so.6");
  ASSERT_TRUE(absl::IsUnavailable(library.status())) << library.status();
  EXPECT_THAT(std::string(library.status().message()), HasSubstr("lacks ucs_status_string"));
}

TEST(UcxLibrary, TheInstalledOneTakesNoSignals) {
  struct sigaction before[32];
  for (int signal = 1; signal < 32; ++signal) sigaction(signal, nullptr, &before[signal]);
  const auto library = Library::get();
  if (!library.ok()) GTEST_SKIP() << library.status();
  EXPECT_THAT((*library)->version(), HasSubstr(std::to_string(UCP_API_MAJOR) + "."));
  for (int signal = 1; signal < 32; ++signal) {
    struct sigaction after;
    sigaction(signal, nullptr, &after);
    EXPECT_EQ(after.sa_handler, before[signal].sa_handler) << "signal " << signal;
  }
}

// Another thread may be in the midst of getenv().
TEST(UcxLibrary, TheEnvironmentThatOthersReadStaysAsItIs) {
  unsetenv("UCX_MEM_EVENTS");
  setenv("UCX_DEBUG_SIGNO", "7", 1);
  setenv("LIBRARY_TEST", "a list that the C library has allocated, and frees", 1);
  char** const read = environ;
  std::vector<char*> before;
  for (char** entry = read; *entry != nullptr; ++entry) before.push_back(*entry);
  EXPECT_FALSE(Library::load("libucp-that-is-nowhere.so.0").ok());
  for (size_t i = 0; i < before.size(); ++i) ASSERT_EQ(read[i], before[i]);
  EXPECT_EQ(read[before.size()], nullptr);
  EXPECT_STREQ(std::getenv("LIBRARY_TEST"), "a list that the C library has allocated, and frees");
  EXPECT_STREQ(std::getenv("UCX_MEM_EVENTS"), "n");
  EXPECT_STREQ(std::getenv("UCX_DEBUG_SIGNO"), "7") << "whoever has set it is obeyed";
  unsetenv("LIBRARY_TEST");
  setenv("UCX_DEBUG_SIGNO", "0", 1);
}

// In a child, so that this process is not counted as a user of UCX.
TEST(UcxLibrary, AForkOfAUserIsToldThatItCannotUseIt) {
  const pid_t user = fork();
  if (user == 0) {
    Library::use();
    if (!Library::usable().ok()) _exit(1);
    const pid_t child = fork();
    if (child == 0) {
      const absl::Status status = Library::usable();
      _exit(absl::IsUnavailable(status) &&
                    status.message().find("forked") != absl::string_view::npos
                ? 0
                : 2);
    }
    int how = 0;
    waitpid(child, &how, 0);
    _exit(WIFEXITED(how) ? WEXITSTATUS(how) : 3);
  }
  int how = 0;
  ASSERT_EQ(waitpid(user, &how, 0), user);
  EXPECT_TRUE(WIFEXITED(how));
  EXPECT_EQ(WEXITSTATUS(how), 0);
}

// Settings that are refused, and what the provider says of itself.
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
