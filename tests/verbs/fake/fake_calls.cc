// The fake's table of calls, put together.
#include "tests/verbs/fake/fake_calls.h"

#include <unistd.h>

namespace baton {

verbs::VerbsApi fake_calls() {
  verbs::VerbsApi api{};
  add_device_calls(api);
  add_memory_calls(api);
  add_completion_calls(api);
  add_queue_calls(api);
  return api;
}

bool take_count(int fd) {
  uint64_t count = 0;
  return read(fd, &count, sizeof count) == sizeof count;
}

}  // namespace baton
