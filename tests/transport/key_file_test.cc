// Files of cluster keys that are wrong, half there, or in the way: each is refused with what to do,
// and no key is made that another may guess, change or lose.
#include <sys/syscall.h>
#include <sys/un.h>

#include <ctime>

#include "tests/fails_with.h"
#include "tests/no_descriptors.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/unique_fd.h"
#include "transport/identity.h"

namespace {
bool openssl_has_none = false;  // of random bytes
int openssl_was_asked = 0;      // how often
bool kernel_has_none = false;
std::atomic<bool> time_of_day_stands{false};  // long ago, so that whoever writes has just written
}  // namespace

// Stand in for OpenSSL's and the C library's.
extern "C" int RAND_bytes(unsigned char* out, int bytes) {
  ++openssl_was_asked;
  if (openssl_has_none) return 0;
  return syscall(SYS_getrandom, out, static_cast<size_t>(bytes), 0) == bytes ? 1 : 0;
}
extern "C" ssize_t getrandom(void* out, size_t bytes, unsigned flags) {
  if (kernel_has_none) {
    errno = ENOSYS;
    return -1;
  }
  return syscall(SYS_getrandom, out, bytes, flags);
}

extern "C" int clock_gettime(clockid_t which, timespec* now) noexcept {
  if (which != CLOCK_REALTIME || !time_of_day_stands) {
    return static_cast<int>(syscall(SYS_clock_gettime, which, now));
  }
  *now = {};
  return 0;
}

namespace baton {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kLine[] = "0123456789abcdef";

// Where for_this_user() looks, and makes what is not there.
class KeyFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("BATON_KEY_FILE");
    setenv("XDG_CONFIG_HOME", folder_.path().c_str(), 1);
    std::filesystem::create_directories(folder_.path("baton"));
  }
  std::string path(const std::string& name) const { return folder_.path("baton/" + name); }
  std::string write(const std::string& name, const std::string& content, mode_t mode = 0600) const {
    std::ofstream(path(name), std::ios::binary) << content;
    EXPECT_EQ(chmod(path(name).c_str(), mode), 0);
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::stringstream content;
    content << std::ifstream(path(name)).rdbuf();
    return content.str();
  }
  size_t files() const {
    const std::filesystem::directory_iterator all(folder_.path("baton"));
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  }
  void expect_refused(const std::string& file, absl::StatusCode code,
                      const std::string& what) const {
    const absl::Status status = ClusterKey::from_file(file).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(file), HasSubstr(what)));
  }

  const TemporaryFolder folder_;
};

TEST_F(KeyFolder, AFileThatIsNotThereIsSaidHowToMake) {
  expect_refused(path("none"), absl::StatusCode::kNotFound,
                 "openssl rand -hex 32 > " + path("none"));
  const std::string link = path("link");
  ASSERT_EQ(symlink("nowhere", link.c_str()), 0);
  expect_refused(link, absl::StatusCode::kNotFound, "openssl rand -hex 32 > " + link);
}

TEST_F(KeyFolder, AFileThatCannotBeReadIsSaidWhoseItMustBe) {
  const std::string file = write("key", kLine, 0000);
  if (getuid() == 0) {  // who may read everything
    ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
    ASSERT_EQ(seteuid(65534), 0);
  }
  expect_refused(file, absl::StatusCode::kPermissionDenied, "chmod 600 " + file);
  ASSERT_EQ(seteuid(getuid()), 0);
}

TEST_F(KeyFolder, WithoutDescriptorsTheLimitIsNamed) {
  const std::string file = write("key", kLine, 0600);
  const NoDescriptors none;
  expect_refused(file, absl::StatusCode::kResourceExhausted, "ulimit -n");
}

TEST_F(KeyFolder, AFolderThatCannotBeMadeIsSaidWhy) {
  setenv("XDG_CONFIG_HOME", folder_.path("config").c_str(), 1);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0555), 0);
  if (getuid() == 0) {  // who may make everything
    ASSERT_EQ(seteuid(65534), 0);
  }
  const absl::Status status = ClusterKey::for_this_user().status();
  ASSERT_EQ(seteuid(getuid()), 0);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("Permission denied"), HasSubstr("BATON_KEY_FILE")));
}

TEST_F(KeyFolder, ASocketIsNoKey) {
  const base::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name{.sun_family = AF_UNIX, .sun_path = {}};
  ASSERT_LT(path("socket").size(), sizeof name.sun_path);
  std::strcpy(name.sun_path, path("socket").c_str());
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name), 0);
  expect_refused(path("socket"), absl::StatusCode::kPermissionDenied, "not a plain file");
}

TEST_F(KeyFolder, AnEmptyFileIsNamed) {
  for (const char* content : {"", "\n\n", "   \r\n"}) {
    expect_refused(write("key", content), absl::StatusCode::kInvalidArgument, "at least 16 bytes");
  }
}

// What a machine that lost its power leaves of a file.
TEST_F(KeyFolder, ZerosAreNoKey) {
  expect_refused(write("key", std::string(65, '\0')), absl::StatusCode::kInvalidArgument, "zeros");
  EXPECT_TRUE(ClusterKey::from_file(write("key", std::string(31, '\0') + "k")).ok());
}

// Two files that differ behind what was read of them would be one key, and one in the second line
// would not be there.
// Promise(security): A key file is read whole or refused with what to do | created by `mkostemp`,
//   `fsync`, `link`; read under a lease
TEST_F(KeyFolder, AFileIsReadWholeOrRefused) {
  const std::string longest(4096 - sizeof kLine, 'k');
  const auto both = ClusterKey::from_file(write("key", longest + "\n" + kLine)).value();
  EXPECT_EQ(both.count(), 2U);
  expect_refused(write("key", longest + "kk\n" + kLine), absl::StatusCode::kInvalidArgument,
                 "4096 bytes");
  ASSERT_EQ(truncate(path("key").c_str(), int64_t{1} << 40), 0);
  expect_refused(path("key"), absl::StatusCode::kInvalidArgument, "4096 bytes");
}

TEST_F(KeyFolder, AnEmptyPathNamesNoFile) {
  const absl::Status status = ClusterKey::from_file("").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  setenv("BATON_KEY_FILE", "", 1);
  EXPECT_TRUE(ClusterKey::for_this_user().ok());
  EXPECT_EQ(read("cluster.key").size(), 64U);
}

// Whether this file system tells who writes to a file.
bool knows_writers(const std::string& file) {
  const base::UniqueFd fd(open(file.c_str(), O_RDONLY | O_CLOEXEC));
  return fcntl(fd.get(), F_SETLEASE, F_RDLCK) == 0 && fcntl(fd.get(), F_SETLEASE, F_UNLCK) == 0;
}

TEST_F(KeyFolder, AFileThatIsBeingWrittenIsNotRead) {
  const std::string file = write("key", kLine);
  if (!knows_writers(file)) GTEST_SKIP() << "this file system does not tell who writes to a file";
  {
    const base::UniqueFd writer(open(file.c_str(), O_WRONLY | O_CLOEXEC));
    const auto changed_at = [&](time_t when) {
      const timespec times[2] = {{when, 0}, {when, 0}};
      ASSERT_EQ(futimens(writer.get(), times), 0);
    };
    changed_at(time(nullptr) + 3600);  // however long this test is held up
    expect_refused(file, absl::StatusCode::kUnavailable, "being written");
    changed_at(time(nullptr) - 3600);  // nobody writes a key for an hour
    EXPECT_TRUE(ClusterKey::from_file(file).ok());
    // Written, and not closed, as a temporary file that is named to another program.
    EXPECT_EQ(::write(writer.get(), kLine, strlen(kLine)), static_cast<ssize_t>(strlen(kLine)));
    EXPECT_TRUE(ClusterKey::from_file(file).ok());
  }
  EXPECT_TRUE(ClusterKey::from_file(file).ok());
}

TEST_F(KeyFolder, AKeyThatIsReplacedOrRewrittenIsTheOldOrTheNewOne) {
  const std::array<std::string, 2> keys = {std::string(64, 'a'), std::string(64, 'b')};
  const std::string file = write("key", keys[0]);
  if (!knows_writers(file)) GTEST_SKIP() << "this file system does not tell who writes to a file";
  // A writer that is held up for long in the midst of a key has not just forgotten to close it.
  time_of_day_stands = true;
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (size_t turn = 1; !over; ++turn) {
      const std::string& key = keys[turn % 2];
      if (turn / 2 % 2 == 0) {
        std::filesystem::rename(write("next", key), file);
        continue;
      }
      const base::UniqueFd fd(open(file.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
      for (size_t at = 0; at < key.size(); at += 16) {
        EXPECT_EQ(::write(fd.get(), key.data() + at, 16), 16);
        std::this_thread::yield();
      }
    }
  });
  std::array<std::array<uint8_t, 32>, 2> proofs;
  for (size_t i : {0, 1}) proofs[i] = ClusterKey::from_bytes(keys[i])->hmac("who?");
  for (int look = 0; look < 1000; ++look) {
    const auto key = ClusterKey::from_file(file);
    if (key.ok()) {
      const auto proof = key->hmac("who?");
      EXPECT_TRUE(proof == proofs[0] || proof == proofs[1]) << "look " << look;
    } else {
      EXPECT_TRUE(absl::IsUnavailable(key.status())) << key.status();
    }
  }
  over = true;
  writer.join();
  time_of_day_stands = false;
}

// Two threads, or two containers that share a home, have one number of their process.
TEST_F(KeyFolder, AKeyIsNotWrittenToAnotherUsersFile) {
  const std::string taken = "cluster.key." + std::to_string(getpid());
  write(taken, "another is writing here");
  must(ClusterKey::for_this_user());
  EXPECT_EQ(read(taken), "another is writing here");
  EXPECT_EQ(read("cluster.key").size(), 64U);

  ASSERT_EQ(unlink(path(taken).c_str()), 0);
  ASSERT_EQ(unlink(path("cluster.key").c_str()), 0);
  write("precious", "to be kept");
  ASSERT_EQ(symlink(path("precious").c_str(), path(taken).c_str()), 0);
  ASSERT_TRUE(ClusterKey::for_this_user().ok());
  EXPECT_EQ(read("precious"), "to be kept");
}

TEST_F(KeyFolder, AKeyThatCouldNotBeWrittenLeavesNothing) {
  signal(SIGXFSZ, SIG_DFL);  // it is asked before the file grows
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  for (const rlim_t room : {0, 40}) {
    const rlimit little{room, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
    const auto made = ClusterKey::for_this_user();
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_THAT(made.status(), fails_with(Code::kFailedPrecondition, {"BATON_KEY_FILE"}));
    EXPECT_EQ(files(), 0U);
  }
}

// A child that is forked while another thread is in OpenSSL finds its locks taken, for ever.
TEST_F(KeyFolder, OpenSslIsNotAskedForWhatTheKernelHas) {
  openssl_was_asked = 0;
  ASSERT_TRUE(ClusterKey::for_this_user().ok());
  WorkerUid::random();
  EXPECT_EQ(openssl_was_asked, 0);
  kernel_has_none = true;
  EXPECT_NE(WorkerUid::random(), WorkerUid::random());
  kernel_has_none = false;
  EXPECT_GT(openssl_was_asked, 0);
}

TEST_F(KeyFolder, WithoutRandomBytesOfOpenSslTheKernelsAreTaken) {
  openssl_has_none = true;
  const auto made = ClusterKey::for_this_user();
  const WorkerUid one = WorkerUid::random(), other = WorkerUid::random();
  openssl_has_none = false;
  ASSERT_TRUE(made.ok()) << made.status();
  const std::string first = read("cluster.key");
  EXPECT_NE(one, other);
  ASSERT_EQ(unlink(path("cluster.key").c_str()), 0);
  openssl_has_none = true;
  ASSERT_TRUE(ClusterKey::for_this_user().ok());
  openssl_has_none = false;
  EXPECT_NE(read("cluster.key"), first);
}

TEST_F(KeyFolder, WithoutAnyRandomBytesThereIsNoWorker) {
  openssl_has_none = kernel_has_none = true;
  EXPECT_DEATH(WorkerUid::random(), "getrandom");
  openssl_has_none = kernel_has_none = false;
}

}  // namespace
}  // namespace baton
