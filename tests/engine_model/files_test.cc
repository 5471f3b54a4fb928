// Files as commands write them: replaced where that can be done, written to where it cannot; and
// folders that one process writes at a time.
#include "engine/files/files.h"

#include <sys/mount.h>
#include <sys/sysmacros.h>

#include "tests/fails_with.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

namespace fs = std::filesystem;

struct stat status_of(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(0, lstat(path.c_str(), &info)) << path;
  return info;
}

class Files : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& bytes = "new") {
    EXPECT_EQ(write_file_atomically(path, bytes), absl::OkStatus());
    // Nothing else is left beside it.
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << entry.path();
    }
  }
  const TemporaryFolder folder_;
};

TEST_F(Files, ARegularFileIsReplacedAndKeepsItsMode) {
  const std::string path = folder_.path("a");
  EXPECT_TRUE(is_replaced(path));
  write(path, "old");
  ASSERT_EQ(0, chmod(path.c_str(), 0600));
  const int reader = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const ino_t before = status_of(path).st_ino;
  write(path);
  EXPECT_EQ(*read_file(path), "new");
  EXPECT_NE(status_of(path).st_ino, before);
  EXPECT_EQ(status_of(path).st_mode & 0777, 0600u);
  std::array<char, 8> old{};  // who reads it reads all of what it was
  EXPECT_EQ(3, read(reader, old.data(), old.size()));
  EXPECT_STREQ(old.data(), "old");
  close(reader);
}

TEST_F(Files, LinksStayAndWhatTheyLeadToIsReplaced) {
  fs::create_directory(folder_.path("there"));
  const std::string target = folder_.path("there/file"), link = folder_.path("link");
  fs::create_symlink("there/second", link);  // relative, to a link
  fs::create_symlink(target, folder_.path("there/second"));
  for (const char* bytes : {"first", "second"}) {  // not there at first
    write(link, bytes);
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_EQ(*read_file(target), bytes);
  }
  EXPECT_EQ(2, std::distance(fs::directory_iterator(folder_.path("there")), {}));
  fs::create_symlink("loop", folder_.path("loop"));
  EXPECT_FALSE(write_file_atomically(folder_.path("loop") + "/x", "bytes").ok());
}

TEST_F(Files, AFifoIsWrittenTo) {
  const std::string fifo = folder_.path("fifo"), link = folder_.path("link");
  ASSERT_EQ(0, mkfifo(fifo.c_str(), 0600));
  fs::create_symlink(fifo, link);
  for (const std::string& path : {fifo, link}) {
    EXPECT_FALSE(is_replaced(path));
    const int reader = open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    write(path);
    std::array<char, 8> bytes{};
    EXPECT_EQ(3, read(reader, bytes.data(), bytes.size()));
    EXPECT_STREQ(bytes.data(), "new");
    close(reader);
    EXPECT_TRUE(S_ISFIFO(status_of(fifo).st_mode));
  }
}

TEST_F(Files, ADeviceStaysOne) {
  const std::string device = folder_.path("null");
  if (mknod(device.c_str(), S_IFCHR | 0600, makedev(1, 3)) != 0) {
    GTEST_SKIP() << "this user may not make devices";
  }
  const int opened = open(device.c_str(), O_WRONLY | O_CLOEXEC);
  if (opened < 0) GTEST_SKIP() << "devices may not be opened in " << folder_.path();
  close(opened);
  fs::create_symlink(device, folder_.path("link"));
  for (const std::string& path : {device, folder_.path("link")}) {
    EXPECT_FALSE(is_replaced(path));
    write(path);
    EXPECT_TRUE(S_ISCHR(status_of(device).st_mode));
  }
}

// /dev/stdout of a shell's redirection is one open file: what is written goes where it stands.
TEST_F(Files, ADescriptorIsWrittenTo) {
  const std::string path = folder_.path("redirected");
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(7, ::write(fd, "before ", 7));
  const ino_t before = status_of(path).st_ino;
  fs::create_symlink(absl::StrCat("/proc/self/fd/", fd), folder_.path("link"));
  for (const std::string& name : {absl::StrCat("/dev/fd/", fd), folder_.path("link")}) {
    EXPECT_FALSE(is_replaced(name));
    write(name, "in it ");
  }
  ASSERT_EQ(5, ::write(fd, "after", 5));
  close(fd);
  EXPECT_EQ(*read_file(path), "before in it in it after");
  EXPECT_EQ(status_of(path).st_ino, before);
}

// As a container has single files of its host.
TEST_F(Files, AFileThatIsMountedByItselfIsWrittenTo) {
  const std::string host = folder_.path("host"), inside = folder_.path("inside");
  write(host, "something longer");
  write(inside, "");
  if (mount(host.c_str(), inside.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    GTEST_SKIP() << "this user may not mount";
  }
  write(inside);
  EXPECT_EQ(0, umount(inside.c_str()));
  EXPECT_EQ(*read_file(host), "new");
}

TEST_F(Files, WhatCannotBeWrittenIsNamedAndNothingStays) {
  for (const char* path : {"/nowhere/file", "/proc/self/nothing"}) {
    const absl::Status status = write_file_atomically(path, "bytes");
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(path)) << status;
  }
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  EXPECT_FALSE(write_file_atomically("/dev/full", "bytes").ok());
}

TEST_F(Files, FoldersAreMadeAndAreNoFiles) {
  const std::string inner = folder_.path("a/b"), file = inner + "/f";
  ASSERT_TRUE(make_directories(inner).ok());
  write(file, "two");
  EXPECT_TRUE(absl::IsResourceExhausted(read_file(file, 2).status()));
  EXPECT_FALSE(read_file(inner).ok());
  EXPECT_FALSE(make_directories(file + "/g").ok());
  // The rename fails, and the temporary file goes.
  EXPECT_FALSE(write_file_atomically(inner, "x").ok());
  EXPECT_EQ(1, std::distance(fs::directory_iterator(folder_.path("a")), {}));
}

TEST(FolderLock, IsHeldByOneProcess) {
  const TemporaryFolder folder;
  {
    const auto lock = must(FolderLock::take(folder.path()));
    EXPECT_THAT(FolderLock::take(folder.path()).status(),
                fails_with(Code::kAlreadyExists,
                           {absl::StrCat(folder.path(), " is being written by process ", getpid(),
                                         " of ")}));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  // A killed process leaves the file, and nothing that stands in the way.
  const pid_t child = fork();
  if (child == 0) {
    const auto lock = FolderLock::take(folder.path());
    kill(getpid(), SIGKILL);
  }
  ASSERT_EQ(child, waitpid(child, nullptr, 0));
  EXPECT_FALSE(fs::is_empty(folder.path()));
  EXPECT_TRUE(FolderLock::take(folder.path()).ok());
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_FALSE(FolderLock::take("/nowhere").ok());
}

}  // namespace
}  // namespace baton::engine
