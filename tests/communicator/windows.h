// What tests of windows do again and again.
#pragma once

#include "collectives/window.h"
#include "tests/test.h"

namespace baton {

inline absl::Status ended(Communicator& comm, const absl::StatusOr<Work>& work) {
  return work.ok() ? comm.wait(*work) : work.status();
}
inline std::unique_ptr<Window> window_of(Communicator& comm, size_t bytes, uint32_t signals = 1) {
  auto window = Window::allocate(comm, bytes, {.signals = signals});
  EXPECT_TRUE(window.ok()) << "rank " << comm.rank() << ": " << window.status();
  return window.ok() ? *std::move(window) : nullptr;
}

}  // namespace baton
