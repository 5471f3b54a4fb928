// Every vector width of this machine, so that tests run the kernels that another one would choose.
#pragma once

#include "hwy/targets.h"
#include "tests/test.h"

namespace baton::engine {

// Kernels of one Highway target, while it lives.
class OneWidth {
 public:
  explicit OneWidth(int64_t target) : trace_(__FILE__, __LINE__, hwy::TargetName(target)) {
    choose(target);
  }
  ~OneWidth() { choose(0); }
  OneWidth(const OneWidth&) = delete;
  OneWidth& operator=(const OneWidth&) = delete;

 private:
  static void choose(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  testing::ScopedTrace trace_;
};

// Calls `fn` once for every width whose multiply and add are fused, as the references' are; where
// there is none the test is skipped.
template <typename Fn>
void for_every_width(Fn&& fn) {
  const int64_t widths = hwy::SupportedTargets() & (HWY_AVX2 | HWY_AVX3);
  if (widths == 0) GTEST_SKIP() << "this CPU has no fused multiply-add";
  for (int64_t rest = widths; rest != 0; rest &= rest - 1) {
    const OneWidth one(rest & -rest);
    fn();
  }
}

}  // namespace baton::engine
