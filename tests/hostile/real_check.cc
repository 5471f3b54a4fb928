// Both processes of a schedule, and each transfer against what they have written down.
#include "tests/hostile/real_check.h"

#include "tests/until.h"
#include "tests/usable_provider.h"
#include "transport/base/child.h"

namespace baton {

bool usable_in_a_fork(const std::string& provider) {
  const pid_t child = base::fork_child();
  if (child == 0) _exit(why_unusable(provider).empty() ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0;
}

RealRun::~RealRun() {
  for (size_t side = 0; side < 2; ++side) reap(side);
}

void RealRun::run(RealSeen& seen) {
  for (size_t side = 0; side < 2; ++side) {
    pids_[side] = base::fork_child();
    if (pids_[side] != 0) continue;
    become(side);
    run_real_side(schedule_, side);
    _exit(0);
  }
  const auto began = [&](size_t side) { return shared_.sides[side].began != 0; };
  if (!until([&] { return began(0) && began(1); })) return;
  if (!disturb()) return;
  shared_.finish = 1;
  if (!until([&] { return ended(0) && ended(1); })) return;
  SCOPED_TRACE(what_);
  for (size_t side = 0; side < 2; ++side) {
    EXPECT_STREQ(shared_.sides[side].failure, "") << "side " << side;
    seen.cuts += static_cast<size_t>(shared_.sides[side].cuts);
    seen.resumed += shared_.sides[side].resumed;
  }
  for (size_t i = 0; i < kRealTransfers; ++i) seen.done += check(i) ? 1 : 0;
  seen.killed += dead_ < 2 ? 1 : 0;
}

bool RealRun::until(const std::function<bool()>& ready, CallSite from) {
  bool is = false;
  const auto ready_or_failed = [&] {
    is = ready();
    return is || shared_.sides[0].failure[0] != 0 || shared_.sides[1].failure[0] != 0;
  };
  baton::until(
      ready_or_failed, [&] { pause(); }, [&] { return state(); }, from);
  if (!is) ADD_FAILURE_AT(from.file, from.line) << "a side failed: " << state();
  return is;
}

void RealRun::lose(size_t side) {
  reap(side);
  dead_ = side;
}

void RealRun::reap(size_t side) {
  if (pids_[side] <= 0) return;
  kill(pids_[side], SIGKILL);
  waitpid(std::exchange(pids_[side], -1), nullptr, 0);
}

bool RealRun::ended(size_t side) {
  if (pids_[side] <= 0) return true;
  int status = 0;
  if (waitpid(pids_[side], &status, WNOHANG) == 0) return false;
  pids_[side] = -1;
  EXPECT_EQ(status, 0) << "side " << side << " died" << what_;
  return true;
}

std::string RealRun::state() const {
  const auto& sides = shared_.sides;
  return absl::StrCat("side 0: \"", sides[0].failure, "\", done ", sides[0].done.load(),
                      "; side 1: \"", sides[1].failure, "\", done ", sides[1].done.load(),
                      "; killed ", dead_, ";", what_);
}

bool RealRun::check(size_t number) const {
  const RealItem& item = shared_.items[number];
  const RealPlan& plan = schedule_.plan[number];
  const auto& sides = shared_.sides;
  if (item.submitted == 0) return false;
  SCOPED_TRACE(testing::Message() << "transfer " << number << " from side " << plan.from << ": "
                                  << item.words << "; parted " << item.parted << ", frozen "
                                  << item.frozen << "; killed " << dead_ << ", left "
                                  << shared_.sides[0].left << shared_.sides[1].left << ", down "
                                  << shared_.sides[0].down << shared_.sides[1].down << ", cuts "
                                  << shared_.sides[0].cuts << "+" << shared_.sides[1].cuts
                                  << ", resumed " << shared_.sides[0].resumed << "+"
                                  << shared_.sides[1].resumed);
  const char* now = schedule_.destination(number);
  EXPECT_EQ(item.wrong, 0) << "announced, but not there";
  EXPECT_LE(item.notified, 1);
  EXPECT_LE(item.counter, 1u);
  const bool target_lives = plan.target() != dead_;
  const bool gone = dead_ < 2 || sides[0].left != 0 || sides[1].left != 0 ||
                    (!schedule_.network.survives && (sides[0].down != 0 || sides[1].down != 0));
  if ((item.notified != 0 || item.parted != 0) && target_lives) {
    EXPECT_EQ(std::count(now, now + kRealBlock, kRealReused), static_cast<ptrdiff_t>(kRealBlock))
        << "landed in memory that had been reused";
  } else if (item.frozen != 0 && target_lives) {
    EXPECT_TRUE(std::equal(now, now + kRealBlock, item.at_end)) << "bytes moved after the end";
  }
  if (plan.from == dead_) return false;
  EXPECT_EQ(item.ended, 1);
  if (item.code == 0) {
    for (size_t at = 0; target_lives && item.notified == 0 && item.parted == 0 && at < plan.bytes;
         ++at) {
      EXPECT_EQ(now[at], real_byte(schedule_.seed, number, at)) << at;
      if (testing::Test::HasFailure()) return false;
    }
    if (plan.op == Op::kWrite && target_lives) {
      EXPECT_EQ(item.counter, 1u);
      EXPECT_EQ(item.notified, 1);
    }
    return true;
  }
  const auto code = static_cast<absl::StatusCode>(item.code.load());
  const bool asked = (code == absl::StatusCode::kCancelled && item.cancelled != 0) ||
                     (code == absl::StatusCode::kDeadlineExceeded && plan.timeout_ms >= 0);
  EXPECT_TRUE(asked || (gone && code == absl::StatusCode::kUnavailable))
      << "nobody asked for this end";
  return false;
}

}  // namespace baton
