// A forked child makes agents of its own while its parent's threads make and destroy some, the
// first ones of the process, which meet and write lines of the log. Each time in a process in which
// the library has done nothing yet.
#include "tests/capi/side.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::capi_tests {
namespace {

// 0: all of it works.
int parent_of_some() {
  std::atomic<bool> over{false}, failed{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i) {
    busy.emplace_back([&] {
      while (!over && !failed) {
        if (!two_agents_work()) failed = true;
      }
    });
  }
  int wrong = 0;
  for (int i = 0; i < 4; ++i) {
    Child child([](int, int) { return two_agents_work() ? 0 : 1; });
    if (child.ends() != 0) ++wrong;
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
  return failed ? 10 : wrong;
}

TEST(Fork, AChildMakesAgentsOfItsOwn) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's own locks are taken in a forked child";
  setenv("BATON_LOG", "info", 1);  // lines to be in the midst of
  for (int i = 0; i < 20; ++i) {
    Child fresh([](int, int) {
      dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), 2);
      return parent_of_some();
    });
    ASSERT_EQ(fresh.ends(), 0) << "process " << i;
  }
}

}  // namespace
}  // namespace baton::capi_tests
