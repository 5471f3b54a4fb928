// gpu_trace_replay FILE: what the fake of the driver does otherwise than the driver that was
// recorded by BATON_GPU_TRACE. Exit 1 where there is something, 2 where it is no trace.
#include <cstdio>

#include "tests/gpudirect/trace/replayer.h"

int main(int count, char** words) {
  if (count != 2) {
    std::fprintf(stderr, "usage: gpu_trace_replay FILE (recorded with BATON_GPU_TRACE=FILE)\n");
    return 2;
  }
  const auto replayed = baton::gpudirect::replay(words[1]);
  if (!replayed.ok()) {
    std::fprintf(stderr, "%s\n", std::string(replayed.status().message()).c_str());
    return 2;
  }
  std::fputs(replayed->text(words[1]).c_str(), stdout);
  return replayed->differences.empty() ? 0 : 1;
}
