// Three small parts of Abseil 20220623, in place of those in Debian's archives: they have variables
// of threads, which are compiled there for programs alone. The names and what they must do are
// those of Abseil's headers.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <thread>

#include "absl/base/internal/sysinfo.h"
#include "absl/container/internal/raw_hash_set.h"
#include "absl/strings/internal/cordz_functions.h"

namespace absl {
ABSL_NAMESPACE_BEGIN

namespace base_internal {

double NominalCPUFrequency() { return 1.0; }  // as Abseil says where it cannot be read
int NumCPUs() { return static_cast<int>(std::max(1U, std::thread::hardware_concurrency())); }
pid_t GetTID() { return static_cast<pid_t>(syscall(SYS_gettid)); }
pid_t GetCachedTID() {
  static thread_local const pid_t kThread = GetTID();
  return kThread;
}

}  // namespace base_internal

// Which cords are sampled for statistics: none.
namespace cord_internal {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
ABSL_CONST_INIT thread_local int64_t cordz_next_sample = kNever;

bool cordz_should_profile_slow() {
  cordz_next_sample = kNever;
  return false;
}
int32_t get_cordz_mean_interval() { return 0; }
void set_cordz_mean_interval(int32_t) {}
void cordz_set_next_sample_for_testing(int64_t) {}

}  // namespace cord_internal

namespace container_internal {

constexpr ctrl_t kE = ctrl_t::kEmpty;
alignas(16) ABSL_CONST_INIT const ctrl_t kEmptyGroup[16] = {
    ctrl_t::kSentinel, kE, kE, kE, kE, kE, kE, kE, kE, kE, kE, kE, kE, kE, kE, kE};

// Abseil's own answers by chance, so that no caller relies on an order.
bool ShouldInsertBackwards(size_t, const ctrl_t*) { return false; }

// As the header says it: what was deleted becomes empty, what is full deleted. Behind the sentinel
// stand the first bytes again, for groups that begin near the end; no table this is done to is
// small.
void ConvertDeletedToEmptyAndFullToDeleted(ctrl_t* ctrl, size_t capacity) {
  std::transform(ctrl, ctrl + capacity, ctrl,
                 [](ctrl_t slot) { return IsFull(slot) ? ctrl_t::kDeleted : ctrl_t::kEmpty; });
  std::copy_n(ctrl, NumClonedBytes(), ctrl + capacity + 1);
}

template FindInfo find_first_non_full(const ctrl_t*, size_t, size_t);

// Debian's correction of a table that would be too large; not in every header.
[[noreturn]] void HashTableSizeOverflow();
void HashTableSizeOverflow() { std::abort(); }

}  // namespace container_internal

ABSL_NAMESPACE_END
}  // namespace absl
