// A connection's stages.
#include "collectives/rendezvous_guest.h"

#include <algorithm>
#include <cerrno>

namespace baton::collectives {
namespace {

// From the first byte to a whole card, and for taking the answer: nobody holds a place for longer.
constexpr Time kMannersTime = std::chrono::seconds(5);

}  // namespace

RendezvousService::Guest::Guest(Descriptor fd, const ClusterKey& key, Time now)
    : fd_(std::move(fd)),
      handshake_(Handshake::Role::kServer, key, rendezvous_hello()),
      deadline_(now + kMannersTime) {
  set_up(fd_.get());
}

RendezvousService::Guest::Io RendezvousService::Guest::read(size_t want) {
  char bytes[16 << 10];
  while (want > 0) {
    const ssize_t n = ::recv(fd_.get(), bytes, std::min(want, sizeof(bytes)), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Io::kLater;
    if (n <= 0) return Io::kBroken;
    in_.append(bytes, static_cast<size_t>(n));
    want -= static_cast<size_t>(n);
  }
  return Io::kDone;
}

RendezvousService::Guest::Io RendezvousService::Guest::write(std::string_view& unsent) {
  while (!unsent.empty()) {
    const ssize_t n = ::send(fd_.get(), unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Io::kLater : Io::kBroken;
    unsent.remove_prefix(static_cast<size_t>(n));
  }
  return Io::kDone;
}

RendezvousService::Guest::Io RendezvousService::Guest::shake() {
  while (true) {
    std::string_view out = handshake_.to_send();
    const size_t before = out.size();
    const Io sent = write(out);
    handshake_.sent(before - out.size());
    if (sent != Io::kDone) return sent;
    if (handshake_.done()) return is_rendezvous(handshake_.peer()) ? Io::kDone : Io::kBroken;
    if (const Io got = read(handshake_.wanted() - in_.size()); got != Io::kDone) return got;
    const absl::Status good = handshake_.receive(in_);
    in_.clear();
    if (!good.ok()) {
      std::string_view why = handshake_.to_send();  // tells the other side
      static_cast<void>(write(why));
      return Io::kBroken;
    }
  }
}

RendezvousService::Guest::Io RendezvousService::Guest::read_card() {
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
    const size_t before = in_.size();
    const Io got = read(16 << 10);
    if (got == Io::kBroken || in_.size() == before) return got;
  }
}

bool RendezvousService::Guest::advance(Time now) {
  if (now >= deadline_) return false;
  Io io = Io::kDone;
  if (stage_ == Stage::kShaking) {
    io = shake();
    if (io == Io::kDone) stage_ = Stage::kJoining;
  }
  if (io == Io::kDone && stage_ == Stage::kJoining) {
    io = read_card();
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
    }
  }
  // Closing before the rank has read everything could take the answer away from it.
  if (io == Io::kDone && stage_ == Stage::kLeaving) io = read(1);
  return io == Io::kLater;
}

void RendezvousService::Guest::answer(std::shared_ptr<const std::string> frames, Time now) {
  answer_ = std::move(frames);
  unsent_ = *answer_;
  stage_ = Stage::kAnswering;
  deadline_ = now + kMannersTime;
}

short RendezvousService::Guest::events() const {  // NOLINT(google-runtime-int)
  if (stage_ == Stage::kAnswering) return POLLOUT;
  return stage_ == Stage::kShaking && !handshake_.to_send().empty() ? POLLIN | POLLOUT : POLLIN;
}

bool RendezvousService::Guest::hung_up() const {
  char byte;
  const ssize_t n = ::recv(fd_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

}  // namespace baton::collectives
