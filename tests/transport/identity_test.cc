// Cluster keys are taken from where only their user can have put them; names fit into addresses.
#include "transport/identity.h"

#include <pwd.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"
#include "transport/base/child.h"

namespace {
std::string home_of_account;  // NOLINT: what the account database of this test says
uid_t user_offset = 0;
gid_t given_group = 0;  // a group of this process beside its own; 0: none
bool mounted_read_only = false;
}  // namespace

// Stand in for the C library's: a test cannot make accounts.
extern "C" int getpwuid_r(uid_t, passwd* account, char*, size_t, passwd** found) {
  account->pw_dir = home_of_account.data();
  *found = home_of_account.empty() ? nullptr : account;
  return 0;
}
extern "C" int getgroups(int room, gid_t* groups) noexcept {
  if (given_group == 0) return 0;
  if (room > 0) groups[0] = given_group;
  return 1;
}
extern "C" int fstatvfs(int, struct statvfs* out) noexcept {
  out->f_flag = mounted_read_only ? ST_RDONLY : 0;
  return 0;
}
extern "C" uid_t geteuid() { return static_cast<uid_t>(syscall(SYS_geteuid)) + user_offset; }

namespace baton {
namespace {

using ::testing::HasSubstr;

// The environment without what says where keys are; put back afterwards.
class Environment {
 public:
  Environment() {
    for (Variable& variable : variables_) {
      const char* value = std::getenv(variable.name);
      variable.was_set = value != nullptr;
      if (value != nullptr) variable.value = value;
      unsetenv(variable.name);
    }
  }
  ~Environment() {
    for (const Variable& variable : variables_) {
      if (variable.was_set) {
        setenv(variable.name, variable.value.c_str(), 1);
      } else {
        unsetenv(variable.name);
      }
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  struct Variable {
    const char* name;
    bool was_set = false;
    std::string value;
  };
  Variable variables_[3] = {{"HOME"}, {"XDG_CONFIG_HOME"}, {"BATON_KEY_FILE"}};
};

struct KeyFile {
  explicit KeyFile(mode_t mode) : path(folder.file("key", "0123456789abcdef").path("key")) {
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
  }
  TemporaryFolder folder;
  const std::string path;
};

TEST(ClusterKey, IsInTheAccountsHomeWhenHomeIsNotSet) {
  const Environment environment;
  const TemporaryFolder folder;
  home_of_account = folder.path();
  const auto made = ClusterKey::for_this_user().value();
  struct stat info {};
  ASSERT_EQ(stat(folder.path(".config/baton/cluster.key").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  const auto again = ClusterKey::for_this_user().value();
  EXPECT_EQ(made.hmac("x"), again.hmac("x"));
}

TEST(ClusterKey, IsNowhereForAUserWithoutAHome) {
  const Environment environment;
  home_of_account.clear();
  const auto key = ClusterKey::for_this_user();
  ASSERT_FALSE(key.ok());
  EXPECT_THAT(std::string(key.status().message()), HasSubstr("BATON_KEY_FILE"));
}

absl::StatusOr<ClusterKey> key_from(const std::string& content) {
  TemporaryFolder folder;
  folder.file("key", content);
  EXPECT_EQ(chmod(folder.path("key").c_str(), 0600), 0);
  return ClusterKey::from_file(folder.path("key"));
}

TEST(ClusterKey, AFileMayHoldThePreviousOneToo) {
  const ClusterKey first = *ClusterKey::from_bytes("0123456789abcdef");
  const ClusterKey second = *ClusterKey::from_bytes("fedcba9876543210");
  const auto both = key_from("0123456789abcdef\r\n\n  fedcba9876543210\n").value();
  ASSERT_EQ(both.count(), 2u);
  EXPECT_EQ(both.hmac("x"), first.hmac("x"));
  EXPECT_EQ(both.hmac("x", 1), second.hmac("x"));
  EXPECT_EQ(key_from("0123456789abcdef\n")->count(), 1u);
  // Bytes that are no text are one key, whatever they are.
  const auto binary =
      key_from(std::string("0123456789\n\x01\xff 3456789abcdef\n789\0", 31)).value();
  EXPECT_EQ(binary.count(), 1u);
  const auto three = key_from("0123456789abcdef\n0123456789abcdef\n0123456789abcdef\n");
  EXPECT_THAT(std::string(three.status().message()), HasSubstr("3 lines"));
  const auto short_one = key_from("0123456789abcdef\nshort\n");
  EXPECT_THAT(std::string(short_one.status().message()), HasSubstr("at least 16 bytes"));
  EXPECT_FALSE(key_from("\n").ok());
}

// Promise(security): A key file that others can read or write is refused | own user or root, mode
//   0600 or less
TEST(ClusterKey, OthersMustNotReadOrWriteItsFile) {
  for (const mode_t mode : {0644, 0640, 0620, 0602}) {
    const KeyFile file(mode);
    const auto key = ClusterKey::from_file(file.path);
    ASSERT_FALSE(key.ok()) << mode;
    EXPECT_EQ(key.status().code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(std::string(key.status().message()), HasSubstr("chmod 600 " + file.path));
  }
  for (const mode_t mode : {0600, 0400}) {
    const KeyFile file(mode);
    EXPECT_TRUE(ClusterKey::from_file(file.path).ok()) << mode;
  }
}

TEST(ClusterKey, AnothersFileIsNotBelieved) {
  const KeyFile file(0600);
  if (getuid() == 0) {
    ASSERT_EQ(chown(file.path.c_str(), 4242, 4242), 0);
  } else {
    user_offset = 1;
  }
  const auto key = ClusterKey::from_file(file.path);
  user_offset = 0;
  ASSERT_FALSE(key.ok());
  EXPECT_EQ(key.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(key.status().message()), HasSubstr("chown"));
}

// What a Kubernetes Secret with an fsGroup looks like, and what is only nearly so.
TEST(ClusterKey, RootsFileMayBeReadByAGroupOfThisProcess) {
  if (getuid() != 0) GTEST_SKIP() << "only root can make a file of root's";
  constexpr gid_t kGroup = 4242;
  constexpr uid_t kRoot = 0, kUser = 1000;
  const struct {
    uid_t owner, process;
    mode_t mode;
    gid_t has;  // the group that the process has
    bool read_only, good;
  } rows[] = {
      {kRoot, kUser, 0440, kGroup, false, true},      {kRoot, kUser, 0640, kGroup, false, true},
      {kRoot, kUser, 0440, kGroup + 1, false, false}, {kRoot, kUser, 0444, kGroup, false, false},
      {kRoot, kUser, 0441, kGroup, false, false},     {kRoot, kUser, 0460, kGroup, false, false},
      {kRoot, kUser, 0450, kGroup, false, false},     {kUser, kUser, 0440, kGroup, false, false},
      {kUser + 1, kUser, 0440, kGroup, false, false}, {kRoot, kRoot, 0440, kGroup, false, false},
      {kRoot, kRoot, 0440, kGroup, true, true},       {kRoot, kRoot, 0444, kGroup, true, false},
      {kRoot, kRoot, 0440, kGroup + 1, true, false},
  };
  for (const auto& row : rows) {
    const KeyFile file(row.mode);
    ASSERT_EQ(chown(file.path.c_str(), row.owner, kGroup), 0);
    user_offset = row.process, given_group = row.has, mounted_read_only = row.read_only;
    const auto key = ClusterKey::from_file(file.path);
    user_offset = given_group = 0, mounted_read_only = false;
    EXPECT_EQ(key.ok(), row.good) << "row " << &row - rows << ": " << key.status();
    if (!row.good) {
      EXPECT_EQ(key.status().code(), absl::StatusCode::kPermissionDenied);
    }
  }
}

TEST(ClusterKey, AFolderOrAPipeIsNoKey) {
  const TemporaryFolder folder;
  EXPECT_EQ(ClusterKey::from_file(folder.path()).status().code(),
            absl::StatusCode::kPermissionDenied);
  ASSERT_EQ(mkfifo(folder.path("pipe").c_str(), 0600), 0);
  EXPECT_EQ(ClusterKey::from_file(folder.path("pipe")).status().code(),
            absl::StatusCode::kPermissionDenied);
}

absl::StatusOr<std::unique_ptr<Worker>> named(size_t bytes, const std::string& where = "here") {
  static std::atomic<int> armed{0};
  static StubProvider* provider = nullptr;
  return worker_over(provider, armed, {.name = std::string(bytes, 'n')}, where);
}

TEST(WorkerName, FitsIntoAnAddressOrIsRefused) {
  const auto longest = named(kMaxWorkerName).value();
  const auto address = Address::decode(longest->address()).value();
  EXPECT_EQ(address.name, std::string(kMaxWorkerName, 'n'));

  const auto longer = named(kMaxWorkerName + 1);
  ASSERT_EQ(longer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(longer.status().message()), HasSubstr("at most 64"));
}

// Both sides of a session dial. Numbers that two processes give out alike made a question about one
// rail close another, and what had landed landed again.
TEST(LinkNumber, DiffersBetweenProcesses) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = base::fork_child();
  if (child == 0) {
    const uint64_t theirs = link_number();
    _exit(write(ends[1], &theirs, sizeof theirs) == sizeof theirs ? 0 : 1);
  }
  const uint64_t ours = link_number();
  uint64_t theirs = 0;
  EXPECT_EQ(read(ends[0], &theirs, sizeof theirs), static_cast<ssize_t>(sizeof theirs));
  waitpid(child, nullptr, 0);
  for (const int end : ends) close(end);
  EXPECT_NE(ours, theirs);
  EXPECT_NE(link_number(), ours);
  EXPECT_EQ(ours % (1 << 20), 0u);
}

TEST(WorkerAddress, AnAddressThatIsTooLongIsRefused) {
  const auto worker = named(1, std::string(2000, 'x'));
  EXPECT_EQ(worker.status().code(), absl::StatusCode::kInternal) << worker.status();
}

}  // namespace
}  // namespace baton
