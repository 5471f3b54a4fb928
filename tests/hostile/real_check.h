// Runs a schedule of real faults in two processes, and what must hold when they are gone.
#pragma once

#include "tests/hostile/real_schedule.h"
#include "tests/seeds.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {

// Asked in a process of its own: libraries that have begun do not survive a fork.
bool usable_in_a_fork(const std::string& provider);

// What runs came to, added up.
struct RealSeen {
  size_t done = 0, cuts = 0, killed = 0;
  uint64_t resumed = 0;
};

class RealRun {
 public:
  RealRun(const std::string& provider, uint64_t seed, RealNetwork network = {})
      : schedule_(provider, seed, network), shared_(*schedule_.shared), random_(~seed) {}
  virtual ~RealRun();

  // Until both sides are over: they have met, disturb() returned, and all has been checked.
  void run(RealSeen& seen);

 protected:
  // In a side's process, before it begins.
  virtual void become(size_t) {}
  // Makes the faults. False: one of them failed, and was reported.
  virtual bool disturb() = 0;
  // Lets some time pass.
  virtual void pause() = 0;

  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  bool over(size_t side) const { return shared_.sides[side].done != 0 || dead_ == side; }
  // False, reported: a side failed before.
  bool until(const std::function<bool()>& ready, CallSite from = CallSite::here());
  // Kills a side for good.
  void lose(size_t side);
  std::string state() const;

  RealSchedule schedule_;
  RealShared& shared_;
  std::mt19937_64 random_;
  std::string what_;  // was done, for reports
  std::array<pid_t, 2> pids_{-1, -1};
  size_t dead_ = 2;  // which side was killed

 private:
  void reap(size_t side);
  bool ended(size_t side);
  // Fails the test where a transfer ended wrongly: twice, with bytes missing or moved since, or in
  // a way that nobody asked for. True if it was done.
  bool check(size_t number) const;
};

}  // namespace baton
