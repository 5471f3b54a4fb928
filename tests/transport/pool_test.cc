// Pools and the memory that is left: what would get the process killed is refused before a page of
// it is touched.
#include "transport/pool.h"

#include "tests/captured_log.h"
#include "tests/fails_with.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"
#include "transport/base/limits/memory_left.h"

namespace baton {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kMiB = 1 << 20;

// A machine with 1,000 MiB available, and what the test says of its cgroups.
class PoolMemory : public testing::Test {
 protected:
  PoolMemory() {
    folder_.file("proc/meminfo",
                 absl::StrCat("MemTotal: 2000000 kB\nMemAvailable: ", 1000 * 1024, " kB"));
    base::look_for_memory_below(folder_.path());
  }
  ~PoolMemory() override { base::look_for_memory_below(""); }

  void group(const std::string& line) { folder_.file("proc/self/cgroup", line); }
  void v2(const std::string& path, const std::string& limit, size_t used, size_t file_pages = 0) {
    const std::string at = "sys/fs/cgroup" + path;
    folder_.file(at + "/memory.max", limit);
    folder_.file(at + "/memory.current", absl::StrCat(used));
    folder_.file(at + "/memory.stat", absl::StrCat("anon 1\ninactive_file ", file_pages / 2,
                                                   "\nactive_file ", file_pages / 2, "\nshmem 2"));
  }
  void v1(const std::string& path, size_t limit, size_t used, size_t file_pages = 0) {
    const std::string at = "sys/fs/cgroup/memory" + path;
    folder_.file(at + "/memory.limit_in_bytes", absl::StrCat(limit));
    folder_.file(at + "/memory.usage_in_bytes", absl::StrCat(used));
    folder_.file(at + "/memory.stat", absl::StrCat("cache 7\ntotal_inactive_file ", file_pages));
  }
  std::unique_ptr<MemoryPool> pool(PoolOptions options) {
    return *MemoryPool::create(*stub_.worker, options);
  }

  TemporaryFolder folder_;
  StubWorker stub_;
};

TEST_F(PoolMemory, WithoutCgroupsTheMachineIsTheLimit) {
  EXPECT_EQ(base::memory_left().bytes, 1000 * kMiB);
  group("0::/");  // of the machine itself: it has no limit
  EXPECT_EQ(base::memory_left().bytes, 1000 * kMiB);
  EXPECT_THAT(base::memory_left().limit, HasSubstr("the machine's memory"));
}

TEST_F(PoolMemory, TheLeastOfAGroupAndThoseAboveIt) {
  group("0::/service/part");
  v2("/service/part", absl::StrCat(400 * kMiB), 100 * kMiB);
  EXPECT_EQ(base::memory_left().bytes, 300 * kMiB);
  v2("/service", absl::StrCat(500 * kMiB), 450 * kMiB);
  EXPECT_EQ(base::memory_left().bytes, 50 * kMiB);
  EXPECT_THAT(base::memory_left().limit, HasSubstr("/service/memory.max"));
  // File pages make room; those of memfds do not.
  v2("/service", absl::StrCat(500 * kMiB), 450 * kMiB, 200 * kMiB);
  EXPECT_EQ(base::memory_left().bytes, 250 * kMiB);
  v2("/service", "max", 450 * kMiB);
  EXPECT_EQ(base::memory_left().bytes, 300 * kMiB);
  v2("/service", absl::StrCat(10 * kMiB), 450 * kMiB);  // lowered below what is in use
  EXPECT_EQ(base::memory_left().bytes, 0U);
}

TEST_F(PoolMemory, AContainerThatSeesTheHostsPath) {
  group("0::/docker/0123");
  v2("", absl::StrCat(200 * kMiB), 150 * kMiB);
  EXPECT_EQ(base::memory_left().bytes, 50 * kMiB);
}

TEST_F(PoolMemory, Version1HasItsOwnFiles) {
  group("5:cpu,cpuacct:/a\n4:memory:/a\n0::/b");
  v1("/a", 300 * kMiB, 100 * kMiB, 50 * kMiB);
  EXPECT_EQ(base::memory_left().bytes, 250 * kMiB);
  v1("", 9223372036854771712U, 100 * kMiB);  // as it says "none"
  EXPECT_EQ(base::memory_left().bytes, 250 * kMiB);
  EXPECT_THAT(base::memory_left().limit, HasSubstr("memory.limit_in_bytes"));
}

// Promise(memory): A pool, cache or buffer that memory or a cgroup has no room for is refused
//   before it is touched | `MemAvailable` and each cgroup's limit are read first
TEST_F(PoolMemory, ASlabThatTheCgroupHasNoRoomForIsRefused) {
  group("0::/box");
  v2("/box", absl::StrCat(100 * kMiB), 90 * kMiB);
  const auto small = pool({.slab_bytes = 4 * kMiB, .huge_pages = false});
  EXPECT_TRUE(small->allocate(kMiB).ok());
  EXPECT_THAT(small->allocate(16 * kMiB).status(),
              fails_with(Code::kResourceExhausted, {"16777216 bytes", "10485760", "memory.max"}));
  EXPECT_TRUE(small->allocate(kMiB).ok());  // the pool is as it was
  EXPECT_EQ(small->slab_count(), 1U);
}

TEST_F(PoolMemory, ALimitThatCannotBeReachedIsAWarning) {
  group("0::/box");
  v2("/box", absl::StrCat(100 * kMiB), 0);
  CapturedLog log(base::LogLevel::kWarning);
  pool({.limit_bytes = 100 * kMiB});
  EXPECT_THAT(log.lines, IsEmpty());
  pool({.limit_bytes = 200 * kMiB});
  EXPECT_THAT(log.lines, ElementsAre(AllOf(HasSubstr("warning: a pool of 209715200 bytes"),
                                           HasSubstr("memory.max"))));
}

}  // namespace
}  // namespace baton
