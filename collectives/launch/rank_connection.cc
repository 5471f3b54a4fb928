// The stages of a rank's connection to the rendezvous.
#include "collectives/launch/rank_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace baton::launch {
namespace {

// For a whole Join, and for taking the answer: nobody holds a place for longer.
constexpr Time kPatience = std::chrono::seconds(5);

}  // namespace

RankConnection::RankConnection(int fd, net::Poller& poller, Time now)
    : fd_(fd), poller_(poller), deadline_(now + kPatience) {
  // Should it not be watched, it ends at its deadline.
  poller_.add(fd_.get(), EPOLLIN, *this).IgnoreError();
  ready = EPOLLIN;  // the Join may have come already
}

RankConnection::~RankConnection() { poller_.remove(fd_.get()); }

RankConnection::Io RankConnection::read(size_t most) {
  char bytes[16 << 10];
  while (true) {
    const ssize_t n = ::recv(fd_.get(), bytes, std::min(most, sizeof(bytes)), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Io::kLater;
    if (n <= 0) return Io::kBroken;
    in_.append(bytes, static_cast<size_t>(n));
    return Io::kDone;
  }
}

RankConnection::Io RankConnection::write(std::string_view& unsent) {
  while (!unsent.empty()) {
    const ssize_t n = ::send(fd_.get(), unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Io::kLater : Io::kBroken;
    unsent.remove_prefix(static_cast<size_t>(n));
  }
  return Io::kDone;
}

RankConnection::Io RankConnection::read_join() {
  while (true) {
    Frame frame;
    auto whole = take_frame(in_, frame);
    if (!whole.ok()) return Io::kBroken;
    if (*whole) {
      // A rank says one thing and then waits.
      if (frame.type != FrameType::kJoin || !in_.empty()) return Io::kBroken;
      auto join = decode_join(frame.body);
      if (!join.ok()) return Io::kBroken;
      join_ = *std::move(join);
      return Io::kDone;
    }
    // Never more than a frame: what lies in memory is bounded.
    if (const Io got = read(16 << 10); got != Io::kDone) return got;
  }
}

bool RankConnection::advance(Time now) {
  ready = 0;
  if (now >= deadline_) return false;
  Io io = Io::kDone;
  if (stage_ == Stage::kJoining) {
    io = read_join();
    if (io == Io::kDone) {
      stage_ = Stage::kWaiting;
      deadline_ = kNever;  // the gathering's business from here
      return true;
    }
  }
  if (io == Io::kDone && stage_ == Stage::kWaiting) {
    io = read(1);
    if (io == Io::kDone) io = Io::kBroken;  // nothing is to be said now
  }
  if (io == Io::kDone && stage_ == Stage::kAnswering) {
    io = write(unsent_);
    if (io == Io::kDone) {
      ::shutdown(fd_.get(), SHUT_WR);
      stage_ = Stage::kLeaving;
      poller_.modify(fd_.get(), EPOLLIN, *this);
    }
  }
  // Closing before the rank has read everything could take the answer away from it.
  if (io == Io::kDone && stage_ == Stage::kLeaving) {
    io = read(1);
    if (io == Io::kDone) io = Io::kBroken;
  }
  return io == Io::kLater;
}

void RankConnection::answer(std::shared_ptr<const std::string> frames, Time now) {
  answer_ = std::move(frames);
  unsent_ = *answer_;
  stage_ = Stage::kAnswering;
  deadline_ = now + kPatience;
  poller_.modify(fd_.get(), EPOLLOUT, *this);
}

bool RankConnection::hung_up() const {
  char byte;
  const ssize_t n = ::recv(fd_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

}  // namespace baton::launch
