// A library that copies under the guard, and is unloaded.
#include "transport/base/copies/fault_guard.h"

extern "C" __attribute__((visibility("default"))) bool copy_under_guard() {
  volatile int from = 1, to = 0;
  return baton::base::guarded([&] { to = from; }) && to == 1;
}
