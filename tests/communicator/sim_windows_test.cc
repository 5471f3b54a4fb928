// The order that windows promise, in virtual time, over a network that loses, repeats and
// overtakes.
//
// tests/seeds.h says which seeds run.
#include "tests/communicator/windows_litmus.h"

namespace baton {
namespace {

// Promise(collectives): A signal is never seen before a byte of an earlier put of that rank to that
//   target | random puts and signals over a network that loses, repeats and overtakes, in virtual
//   time
TEST(SimWindows, NoSignalOvertakesAPut) { signals_of<Litmus>(Signals::kCounters, 20); }

// Promise(collectives): A word is never added to before a byte of an earlier put of that rank to
//   that target with that tag is there | the same with put_add(); signals that need not wait are
//   seen early there
TEST(SimWindows, NoWordOvertakesAPut) { signals_of<Litmus>(Signals::kWords, 20); }

// The order of the two tests above is not the network's: without it the same litmus notices.
TEST(SimWindows, WordsThatNeedNotWaitOvertake) {
  EXPECT_GT(signals_of<Litmus>(Signals::kWeakWords, 5).early, 0u);
}

}  // namespace
}  // namespace baton
