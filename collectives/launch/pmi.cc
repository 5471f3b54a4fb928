// PMI-1 from a rank's side: init, put, barrier, get, finalize; a line each way.
#include "collectives/launch/environment.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "transport/base/durations.h"
#include "transport/net/interfaces.h"

namespace baton::launch {
namespace {

class Pmi {
 public:
  Pmi(int fd, Time timeout)
      : fd_(fd), deadline_(base::deadline_after(Clock::steady().now(), timeout)) {}

  // Sends a command and returns the value of `key` ("": it has none) in the answer, which must be
  // `answer`.
  absl::StatusOr<std::string> ask(const std::string& command, const std::string& answer,
                                  const std::string& key = "") {
    const std::string line = absl::StrCat("cmd=", command, "\n");
    if (::send(fd_, line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) {
      return unusable("it accepts no command");
    }
    const absl::StatusOr<std::string> got = next_line();
    if (!got.ok()) return got.status();
    std::string value;
    bool ok = false;
    for (const absl::string_view word : absl::StrSplit(*got, ' ', absl::SkipEmpty())) {
      ok |= word == absl::StrCat("cmd=", answer);
      if (absl::StartsWith(word, "rc=") && word != "rc=0") {
        return unusable(absl::StrCat("\"", *got, "\""));
      }
      if (absl::StartsWith(word, key + "=")) value = std::string(word.substr(key.size() + 1));
    }
    if (!ok || (!key.empty() && value.empty())) return unusable(absl::StrCat("\"", *got, "\""));
    return value;
  }

 private:
  static absl::Status unusable(const std::string& why) {
    return absl::UnavailableError(
        absl::StrCat("the launcher does not speak PMI-1 over PMI_FD: ", why));
  }

  absl::StatusOr<std::string> next_line() {
    while (true) {
      if (const size_t end = read_.find('\n'); end != std::string::npos) {
        std::string line = read_.substr(0, end);
        read_.erase(0, end + 1);
        return line;
      }
      const timespec left =
          base::to_timespec(std::max(Time::zero(), deadline_ - Clock::steady().now()));
      pollfd one{.fd = fd_, .events = POLLIN, .revents = 0};
      const int ready = ::ppoll(&one, 1, &left, nullptr);
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) {
        return absl::DeadlineExceededError(
            "the launcher (PMI_FD) does not say that all ranks have started");
      }
      std::array<char, 1024> bytes;
      const ssize_t n = ::read(fd_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return unusable("it sends nothing");
      read_.append(bytes.data(), static_cast<size_t>(n));
    }
  }

  const int fd_;
  const Time deadline_;
  std::string read_;
};

}  // namespace

absl::StatusOr<PmiTold> tell_by_pmi(int fd, int rank, int ranks, const std::string& mine,
                                    Time timeout) {
  Pmi pmi(fd, timeout);
  auto said = pmi.ask("init pmi_version=1 pmi_subversion=1", "response_to_init");
  if (said.ok()) said = pmi.ask("get_my_kvsname", "my_kvsname", "kvsname");
  if (!said.ok()) return said.status();
  PmiTold told{.job = *said, .ranks = {}};
  const std::string store = absl::StrCat(" kvsname=", told.job, " key=baton-");
  said = pmi.ask(absl::StrCat("put", store, rank, " value=", mine), "put_result");
  if (said.ok()) said = pmi.ask("barrier_in", "barrier_out");
  for (int other = 0; said.ok() && other < ranks; ++other) {
    said = pmi.ask(absl::StrCat("get", store, other), "get_result", "value");
    if (said.ok()) told.ranks.push_back(*said);
  }
  // Else the launcher takes the end of this process for a crash, and kills the others.
  if (said.ok()) said = pmi.ask("finalize", "finalize_ack");
  if (!said.ok()) return said.status();
  return told;
}

std::string this_host() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string text = name.data();
  char mark = '|';
  for (const auto& [interface, endpoint] : net::own_addresses()) {
    std::string address = endpoint.text();  // with a port
    address.resize(address.rfind(':'));
    const bool local = net::loopback_host(address) || absl::StartsWith(address, "[::1") ||
                       absl::StartsWith(address, "[fe80:");
    if (local || text.size() > 700) continue;  // Hydra takes a value of 1023 bytes
    absl::StrAppend(&text, std::string(1, mark), address);
    mark = ',';
  }
  return text;
}

}  // namespace baton::launch
