// Whether a thread of this process waits for something: for tests of who waits for whom.
#pragma once

#include "tests/std.h"

namespace baton {

// `thread`: what gettid() says in it.
inline bool sleeps(pid_t thread) {
  std::string stat;
  std::getline(std::ifstream("/proc/self/task/" + std::to_string(thread) + "/stat"), stat);
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat[name_end + 2] == 'S';
}

}  // namespace baton
