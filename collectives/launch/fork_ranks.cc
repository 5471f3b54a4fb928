// The launcher: forks ranks, serves their rendezvous, passes signals on, restarts and reaps them.
// One thread, so that it can fork at any time.
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "collectives/launch.h"
#include "collectives/launch/gathering.h"
#include "collectives/launch/rendezvous_service.h"
#include "transport/base/child.h"
#include "transport/base/durations.h"
#include "transport/base/unique_fd.h"

namespace baton::launch {
namespace {

using RankMain = std::function<int(const Place&, int restarts)>;

// Takes the signals of a launcher out of their usual way, into a descriptor.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    for (int number : {SIGCHLD, SIGINT, SIGTERM}) sigaddset(&set_, number);
    pthread_sigmask(SIG_BLOCK, &set_, &old_mask_);
    struct sigaction normal {};
    normal.sa_handler = SIG_DFL;  // ignored children would leave no status
    sigaction(SIGCHLD, &normal, &old_child_);
    fd_ = base::UniqueFd(::signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  void restore() {
    sigaction(SIGCHLD, &old_child_, nullptr);
    pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  }
  int fd() const { return fd_.get(); }
  bool next(signalfd_siginfo& info) {
    return ::read(fd_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info));
  }

 private:
  sigset_t set_{};
  sigset_t old_mask_{};
  struct sigaction old_child_ {};
  base::UniqueFd fd_;
};

struct Rank {
  pid_t pid = -1;  // -1: not running
  int restarts = 0;
  std::deque<Time> restarted_at;  // within the last period
};

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status)) {
    return absl::StrFormat("was killed by signal %d (%s)", WTERMSIG(status),
                           strsignal(WTERMSIG(status)));
  }
  return absl::StrFormat("failed with exit status %d", WEXITSTATUS(status));
}

class Launcher {
 public:
  Launcher(const ForkOptions& options, const RankMain& rank_main,
           std::unique_ptr<RendezvousService> service)
      : options_(options),
        rank_main_(rank_main),
        service_(std::move(service)),
        ranks_(static_cast<size_t>(options.ranks)) {}
  ~Launcher() { kill_all(); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  absl::StatusOr<int> run();

 private:
  absl::Status start(int rank);
  [[noreturn]] void be(int rank);
  void on_signals();
  absl::Status reap();
  absl::Status on_end(int rank, int status);
  std::vector<uint32_t> running() const;
  void kill_all();

  const ForkOptions& options_;
  const RankMain& rank_main_;
  Signals signals_;
  std::unique_ptr<RendezvousService> service_;
  std::vector<Rank> ranks_;
  bool done_ = false;    // a rank has returned 0, with `restart`
  bool ending_ = false;  // a rank has failed for good, or we were told to end: no more restarts
  int result_ = 0;
  Time kill_at_ = kNever;
};

absl::StatusOr<int> Launcher::run() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (absl::Status good = start(rank); !good.ok()) return good;
  }
  while (!running().empty()) {
    pollfd signals{.fd = signals_.fd(), .events = POLLIN, .revents = 0};
    service_->run_once({&signals, 1}, kill_at_);
    on_signals();
    if (absl::Status good = reap(); !good.ok()) return good;
    if (Clock::steady().now() >= kill_at_ && !running().empty()) {
      std::fprintf(stderr, "baton: rank(s) %s did not end within %.1f s of that and are killed\n",
                   list_ranks(running()).c_str(),
                   std::chrono::duration<double>(options_.grace).count());
      kill_all();
    }
  }
  return result_;
}

absl::Status Launcher::start(int rank) {
  Rank& one = ranks_[static_cast<size_t>(rank)];
  std::fflush(nullptr);  // or the child would print it too
  const pid_t pid = base::fork_child();
  if (pid == 0) be(rank);
  if (pid < 0) {
    return absl::UnavailableError(absl::StrFormat(
        "starting rank %d: %s; raise the limit on processes (ulimit -u) or free memory", rank,
        strerror(errno)));
  }
  one.pid = pid;
  return absl::OkStatus();
}

void Launcher::be(int rank) {
  Place place;
  place.rank = place.local_rank = rank;
  place.ranks = place.local_ranks = options_.ranks;
  place.rendezvous = service_->address();
  place.generation = service_->next_generation();
  place.launcher = "baton";
  const int restarts = ranks_[static_cast<size_t>(rank)].restarts;

  // The child must close what it shares with the launcher, or connections would stay open after the
  // launcher closed them.
  service_->leave_to_parent();
  service_.reset();
  ranks_.clear();
  signals_.restore();
  int result = rank_main_(place, restarts);
  std::cout.flush();
  std::fflush(nullptr);
  if (std::ferror(stdout) != 0 && result == 0) {
    std::fprintf(stderr, "baton: rank %d: standard output could not be written\n", rank);
    result = 1;
  }
  _exit(result != 0 && (result & 0xff) == 0 ? 1 : result);
}

void Launcher::on_signals() {
  for (signalfd_siginfo info{}; signals_.next(info);) {
    if (info.ssi_signo == SIGCHLD) continue;
    ending_ = true;
    // A terminal's ^C has reached the ranks already: they are in our process group.
    if (info.ssi_code == SI_KERNEL) continue;
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0) ::kill(rank.pid, static_cast<int>(info.ssi_signo));
    }
  }
}

absl::Status Launcher::reap() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Rank& one = ranks_[static_cast<size_t>(rank)];
    int status = 0;
    if (one.pid <= 0 || waitpid(one.pid, &status, WNOHANG) != one.pid) continue;
    one.pid = -1;
    if (status == 0 && options_.restart && result_ == 0 && !done_) {
      done_ = true;
      service_->close(absl::StrCat("rank ", rank, " has ended, which ends the whole job"));
    }
    if (status == 0) continue;
    if (absl::Status good = on_end(rank, status); !good.ok()) return good;
  }
  return absl::OkStatus();
}

absl::Status Launcher::on_end(int rank, int status) {
  Rank& one = ranks_[static_cast<size_t>(rank)];
  if (done_) {
    std::fprintf(stderr, "baton: rank %d %s, after all ranks had finished their work\n", rank,
                 how_it_ended(status).c_str());
    return absl::OkStatus();
  }
  const Time now = Clock::steady().now();
  std::deque<Time>& recent = one.restarted_at;
  while (!recent.empty() && now - recent.front() >= options_.restart_period) recent.pop_front();
  if (options_.restart && !ending_ && static_cast<int>(recent.size()) < options_.max_restarts) {
    ++one.restarts;
    recent.push_back(now);
    std::fprintf(stderr, "baton: rank %d %s; restarting it (%d of %d within %s)\n", rank,
                 how_it_ended(status).c_str(), static_cast<int>(recent.size()),
                 options_.max_restarts,
                 absl::FormatDuration(absl::FromChrono(options_.restart_period)).c_str());
    return start(rank);
  }
  ending_ = true;
  if (result_ != 0) return absl::OkStatus();  // the first says why, the others follow
  result_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  kill_at_ = base::deadline_after(Clock::steady().now(), options_.grace);
  std::fprintf(stderr, "baton: rank %d %s\n", rank, how_it_ended(status).c_str());
  return absl::OkStatus();
}

std::vector<uint32_t> Launcher::running() const {
  std::vector<uint32_t> out;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].pid > 0) out.push_back(static_cast<uint32_t>(rank));
  }
  return out;
}

void Launcher::kill_all() {
  for (Rank& rank : ranks_) {
    if (rank.pid > 0) ::kill(rank.pid, SIGKILL);
  }
  for (Rank& rank : ranks_) {
    while (rank.pid > 0 && waitpid(rank.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    rank.pid = -1;
  }
}

}  // namespace

absl::StatusOr<int> fork_ranks(const ForkOptions& options, const RankMain& rank_main) {
  if (options.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot start %d ranks: there must be 1 at least", options.ranks));
  }
  absl::StatusOr<ClusterKey> key =
      options.key.has_value() ? *options.key : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  auto service = RendezvousService::listen(*key, "", 0, static_cast<uint32_t>(options.ranks));
  if (!service.ok()) return service.status();
  return Launcher(options, rank_main, *std::move(service)).run();
}

}  // namespace baton::launch
