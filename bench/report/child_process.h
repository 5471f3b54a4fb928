// Child processes: forked functions and programs, pinned, bounded in time, never left behind.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/clock.h"

namespace baton::bench {

// The CPUs this process might run on before it pinned itself, in order.
const std::vector<int>& allowed_cpus();
// Pins the calling thread; -1 does nothing. False where the kernel refuses.
bool pin_to(int cpu);

// A child of this process. Dies with it; killed and reaped by the destructor. Make children before
// threads: a fork copies only the calling one.
class ChildProcess {
 public:
  // Runs `body` in a forked child, pinned to `cpu` (-1: not), with the writing end of a pipe; its
  // result is the exit status.
  static absl::StatusOr<ChildProcess> fork(int cpu, const std::function<int(int out)>& body);
  // Runs a program found in PATH; its standard output goes to the pipe, its errors nowhere.
  static absl::StatusOr<ChildProcess> spawn(
      int cpu, const std::vector<std::string>& argv,
      const std::vector<std::pair<std::string, std::string>>& environment);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  // The next line of its output without the newline. Unavailable when it has ended without one,
  // DeadlineExceeded when `timeout` ran out.
  absl::StatusOr<std::string> read_line(Time timeout);
  // Waits for the end; the exit status, or DeadlineExceeded (the child then still runs).
  absl::StatusOr<int> wait(Time timeout);
  void kill();
  pid_t pid() const { return pid_; }  // -1: it has ended and was waited for

 private:
  ChildProcess(pid_t pid, int out) : pid_(pid), out_(out) {}
  pid_t pid_ = -1;
  int out_ = -1;
  std::string buffer_;
};

// A program's whole output. Unavailable when it fails, with what it said last.
absl::StatusOr<std::string> output_of(
    int cpu, const std::vector<std::string>& argv,
    const std::vector<std::pair<std::string, std::string>>& environment, Time timeout);

// A program of bench/baselines, where the build puts it; it need not be there.
std::filesystem::path baseline_program(const std::string& name);
// The command line of Open MPI's launcher on this machine, up to the program's arguments.
std::vector<std::string> mpirun(int ranks, bool tcp, bool binds, const std::string& program);

}  // namespace baton::bench
