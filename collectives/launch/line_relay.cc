// Relays the output lines of forked ranks, each with its rank in front, through pipes.
#include "collectives/launch/line_relay.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "transport/base/limits/refusals.h"

namespace baton::launch {
namespace {

constexpr size_t kLongestLine = 64 << 10;  // longer ones are cut

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;  // no process listens to the launcher: not the ranks' business
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace

absl::StatusOr<LineRelay> LineRelay::create(std::string prefix, int to) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return absl::UnavailableError(base::refusal("a pipe for a rank's output", errno));
  }
  // Only this end: the rank shares the other one's mode and expects to block.
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return LineRelay(std::move(prefix), to, base::UniqueFd(ends[0]), base::UniqueFd(ends[1]));
}

LineRelay::LineRelay(std::string prefix, int to, base::UniqueFd read_end, base::UniqueFd write_end)
    : prefix_(std::move(prefix)),
      to_(to),
      read_end_(std::move(read_end)),
      write_end_(std::move(write_end)) {}

void LineRelay::become() { ::dup2(write_end_.get(), to_); }

void LineRelay::put(std::string_view line) {
  write_all(to_, absl::StrCat(prefix_, std::string(line), "\n"));
}

bool LineRelay::relay() {
  char bytes[16 << 10];
  while (true) {
    const ssize_t n = ::read(read_end_.get(), bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 && errno == EAGAIN;
    pending_.append(bytes, static_cast<size_t>(n));
    size_t from = 0;
    for (size_t end; (end = pending_.find('\n', from)) != std::string::npos; from = end + 1) {
      put(std::string_view(pending_).substr(from, end - from));
    }
    pending_.erase(0, from);
    if (pending_.size() >= kLongestLine) {
      put(pending_);
      pending_.clear();
    }
  }
}

void LineRelay::finish() {
  relay();
  if (!pending_.empty()) put(pending_);
  pending_.clear();
}

}  // namespace baton::launch
