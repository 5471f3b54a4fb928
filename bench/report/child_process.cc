// Child processes of benchmarks: forks, pins, reads and reaps them.
#include "bench/report/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/child.h"
#include "transport/base/durations.h"

namespace baton::bench {
namespace {

constexpr int kCannotRun = 127;

// Milliseconds left until `end`, for poll().
int left_until(Time end) {
  const Time left = end - Clock::steady().now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
  return left <= Time::zero() ? 0 : static_cast<int>(std::min<int64_t>(ms, 3600 * 1000));
}

Time end_of(Time timeout) { return base::deadline_after(Clock::steady().now(), timeout); }

}  // namespace

const std::vector<int>& allowed_cpus() {
  static const std::vector<int> kCpus = [] {
    std::vector<int> cpus;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(static_cast<size_t>(cpu), &set)) cpus.push_back(cpu);
    }
    return cpus;
  }();
  return kCpus;
}

bool pin_to(int cpu) {
  if (cpu < 0) return true;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

absl::StatusOr<ChildProcess> ChildProcess::fork(int cpu, const std::function<int(int out)>& body) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(absl::StrFormat("no pipe: %s", strerror(errno)));
  }
  const pid_t pid = base::fork_child();
  if (pid < 0) {
    const int why = errno;
    close(ends[0]);
    close(ends[1]);
    return absl::ResourceExhaustedError(absl::StrFormat("cannot fork: %s", strerror(why)));
  }
  if (pid == 0) {
    close(ends[0]);
    pin_to(cpu);
    _exit(body(ends[1]));
  }
  close(ends[1]);
  return ChildProcess(pid, ends[0]);
}

absl::StatusOr<ChildProcess> ChildProcess::spawn(
    int cpu, const std::vector<std::string>& argv,
    const std::vector<std::pair<std::string, std::string>>& environment) {
  return fork(cpu, [&](int out) {
    for (const auto& [key, value] : environment) setenv(key.c_str(), value.c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& argument : argv) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    const int nothing = open("/dev/null", O_RDWR);
    dup2(nothing, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(nothing, STDERR_FILENO);
    execvp(arguments[0], arguments.data());
    return kCannotRun;
  });
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      out_(std::exchange(other.out_, -1)),
      buffer_(std::move(other.buffer_)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(out_, other.out_);
  std::swap(buffer_, other.buffer_);
  return *this;
}

ChildProcess::~ChildProcess() {
  kill();
  if (out_ >= 0) close(out_);
}

void ChildProcess::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

absl::StatusOr<std::string> ChildProcess::read_line(Time timeout) {
  const Time end = end_of(timeout);
  while (true) {
    if (const size_t newline = buffer_.find('\n'); newline != std::string::npos) {
      std::string line = buffer_.substr(0, newline);
      buffer_.erase(0, newline + 1);
      return line;
    }
    pollfd fd{.fd = out_, .events = POLLIN, .revents = 0};
    const int ready = poll(&fd, 1, timeout == kNever ? -1 : left_until(end));
    if (ready == 0) return absl::DeadlineExceededError("the child process sends nothing");
    char chunk[4096];
    const ssize_t got = ready < 0 ? -1 : read(out_, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return absl::UnavailableError("the child process has ended");
    buffer_.append(chunk, static_cast<size_t>(got));
  }
}

absl::StatusOr<int> ChildProcess::wait(Time timeout) {
  if (pid_ <= 0) return absl::FailedPreconditionError("there is no child process");
  // glibc has pidfd_open() from 2.36 on; the kernel has had it since 5.3.
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  if (fd >= 0) {
    pollfd ended{.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = poll(&ended, 1, timeout == kNever ? -1 : left_until(end_of(timeout)));
    close(fd);
    if (ready == 0) return absl::DeadlineExceededError("the child process still runs");
  }
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0) {
    if (errno != EINTR) return absl::InternalError("the child process is lost");
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

absl::StatusOr<std::string> output_of(
    int cpu, const std::vector<std::string>& argv,
    const std::vector<std::pair<std::string, std::string>>& environment, Time timeout) {
  auto child = ChildProcess::spawn(cpu, argv, environment);
  if (!child.ok()) return child.status();
  const Time end = end_of(timeout);
  std::string output, last;
  while (true) {
    const Time left = timeout == kNever ? kNever : end - Clock::steady().now();
    auto line = child->read_line(left);
    if (absl::IsDeadlineExceeded(line.status())) {
      return absl::DeadlineExceededError(absl::StrFormat("%s did not end in time", argv[0]));
    }
    if (!line.ok()) break;
    last = *line;
    output += *line + "\n";
  }
  const auto status = child->wait(std::chrono::seconds(5));
  if (!status.ok()) return status.status();
  if (*status == kCannotRun) {
    return absl::NotFoundError(absl::StrFormat("%s is not installed", argv[0]));
  }
  if (*status != 0) {
    return absl::UnavailableError(
        absl::StrFormat("%s failed with status %d: %s", argv[0], *status, last));
  }
  return output;
}

std::filesystem::path baseline_program(const std::string& name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return self.parent_path() / "baselines" / name;
}

std::vector<std::string> mpirun(int ranks, bool tcp, bool binds, const std::string& program) {
  std::vector<std::string> argv = {"mpirun",
                                   "--allow-run-as-root",
                                   "--oversubscribe",
                                   "--bind-to",
                                   binds ? "core" : "none",
                                   "-n",
                                   std::to_string(ranks),
                                   "--mca",
                                   "pml",
                                   "ob1",
                                   "--mca",
                                   "btl",
                                   tcp ? "tcp,self" : "vader,self"};
  // On a machine without other networks it would not take loopback by itself.
  if (tcp) argv.insert(argv.end(), {"--mca", "btl_tcp_if_include", "lo"});
  argv.push_back(program);
  return argv;
}

}  // namespace baton::bench
