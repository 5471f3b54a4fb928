// A rank's side of the rendezvous.
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/rendezvous.h"
#include "collectives/rendezvous_socket.h"
#include "collectives/rendezvous_wire.h"

namespace baton::collectives {
namespace {

constexpr Time kConnectTime = std::chrono::seconds(3);  // then another address is tried
constexpr Time kFirstPause = std::chrono::milliseconds(5);
constexpr Time kLongestPause = std::chrono::milliseconds(250);

Time now() { return Clock::steady().now(); }

Time left_until(Time deadline) {
  return deadline == kNever ? kNever : std::max(Time::zero(), deadline - now());
}

// Waits for `events` of `fd` (or, with -1, for nothing) until `deadline`; false: it has passed.
bool wait_for(int fd, short events, Time deadline) {  // NOLINT(google-runtime-int): poll's type
  while (true) {
    const Time left = left_until(deadline);
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    pollfd one{.fd = fd, .events = events, .revents = 0};
    const int ready =
        ::poll(&one, 1, left == kNever ? -1 : static_cast<int>(std::min<int64_t>(ms, 1 << 30)));
    if (ready > 0) return true;
    if (left == Time::zero()) return false;
  }
}

// One connection to the server. Unavailable: worth another try.
class Visit {
 public:
  Visit(const ClusterKey& key, const RankCard& card, Time deadline)
      : handshake_(Handshake::Role::kClient, key, rendezvous_hello()),
        card_(card),
        deadline_(deadline) {}

  absl::StatusOr<std::vector<RankCard>> run(const SocketAddress& to) {
    if (absl::Status good = connect(to); !good.ok()) return good;
    if (absl::Status good = shake(to); !good.ok()) return good;
    // The server answers a little before our own patience ends, for it knows who is missing.
    Join join{.patience = left_until(deadline_), .card = card_};
    if (join.patience != kNever) {
      join.patience -= std::min<Time>(join.patience / 4, std::chrono::milliseconds(500));
    }
    if (absl::Status good = send(encode_frame(FrameType::kJoin, encode_join(join))); !good.ok()) {
      return good;
    }
    return receive_cards();
  }

 private:
  absl::Status connect(const SocketAddress& to) {
    auto fd = start_connect(to);
    if (!fd.ok()) return fd.status();
    fd_ = *std::move(fd);
    const Time until =
        deadline_ == kNever ? now() + kConnectTime : std::min(deadline_, now() + kConnectTime);
    if (!wait_for(fd_.get(), POLLOUT, until)) {
      return absl::UnavailableError(
          "the connection attempt is not answered: is a firewall between?");
    }
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return absl::UnavailableError(strerror(error));
    set_up(fd_.get());
    return absl::OkStatus();
  }

  absl::Status shake(const SocketAddress& to) {
    while (true) {
      const std::string out(handshake_.to_send());
      if (absl::Status good = send(out); !good.ok()) return good;
      handshake_.sent(out.size());
      if (handshake_.done()) break;
      std::string in;
      while (in.size() < handshake_.wanted()) {
        if (absl::Status good = read(handshake_.wanted() - in.size(), in); !good.ok()) return good;
      }
      absl::Status good = handshake_.receive(in);
      if (absl::IsPermissionDenied(good)) {
        return absl::UnauthenticatedError(
            absl::StrCat("the rendezvous at ", to.text(), ": ", std::string(good.message())));
      }
      if (!good.ok()) return good;
    }
    if (is_rendezvous(handshake_.peer())) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(to.text(),
                     " is a Baton worker, not a rendezvous: pass the address at which "
                     "rank 0 or the launcher serves it"));
  }

  absl::StatusOr<std::vector<RankCard>> receive_cards() {
    std::vector<RankCard> cards;
    std::string in;
    while (true) {
      Frame frame;
      auto whole = take_frame(in, frame);
      if (!whole.ok()) return whole.status();
      if (!*whole) {
        if (absl::Status good = read(16 << 10, in); !good.ok()) return good;
        continue;
      }
      if (frame.type == FrameType::kRefusal) return decode_refusal(frame.body);
      auto card = RankCard::decode(frame.body);
      if (!card.ok()) return card.status();
      if (frame.type != FrameType::kCard || card->rank != cards.size() ||
          card->ranks != card_.ranks || card->generation != card_.generation) {
        return absl::InternalError("the rendezvous sent a card that is none of this group");
      }
      cards.push_back(*std::move(card));
      if (cards.size() == card_.ranks) return cards;
    }
  }

  absl::Status send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n >= 0) {
        bytes.remove_prefix(static_cast<size_t>(n));
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!wait_for(fd_.get(), POLLOUT, deadline_)) return late();
      } else if (errno != EINTR) {
        return absl::UnavailableError(strerror(errno));
      }
    }
    return absl::OkStatus();
  }

  // At least one byte and at most `most`.
  absl::Status read(size_t most, std::string& in) {
    char bytes[16 << 10];
    while (true) {
      const ssize_t n = ::recv(fd_.get(), bytes, std::min(most, sizeof(bytes)), MSG_DONTWAIT);
      if (n > 0) {
        in.append(bytes, static_cast<size_t>(n));
        return absl::OkStatus();
      }
      if (n == 0) return absl::UnavailableError("the server closed the connection");
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!wait_for(fd_.get(), POLLIN, deadline_)) return late();
      } else if (errno != EINTR) {
        return absl::UnavailableError(strerror(errno));
      }
    }
  }

  absl::Status late() const {
    return absl::DeadlineExceededError(
        handshake_.done() ? "it took this rank's card but does not say who is missing: is its "
                            "process stopped?"
                          : "it took the connection but says nothing: is its process stopped?");
  }

  Descriptor fd_;
  Handshake handshake_;
  const RankCard& card_;
  Time deadline_;
};

absl::Status check(const RankCard& card) {
  if (card.ranks == 0 || card.rank >= card.ranks) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %u of %u is out of range: ranks are counted from 0", card.rank, card.ranks));
  }
  if (const size_t size = card.encode().size(); size > kMaxCardBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the card of rank %u has %u bytes, more than %u: give it fewer regions",
                        card.rank, size, kMaxCardBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<RankCard>> meet(const std::string& address, const ClusterKey& key,
                                           const RankCard& card, Time timeout) {
  if (absl::Status good = check(card); !good.ok()) return good;
  if (address.empty() && card.ranks == 1) return std::vector<RankCard>{card};
  auto parts = split_address(address);
  if (!parts.ok()) return parts.status();

  const Time deadline = timeout == kNever ? kNever : now() + timeout;
  Time pause = kFirstPause;
  absl::Status last;
  for (size_t attempt = 0;; ++attempt) {
    auto found = resolve(parts->first, parts->second);
    if (found.ok()) {
      Visit visit(key, card, deadline);
      auto cards = visit.run((*found)[attempt % found->size()]);
      if (cards.ok()) return cards;
      last = cards.status();
      // A server that answers says everything; one that cannot be reached may still be on its way.
      const bool own = absl::IsDeadlineExceeded(last) && left_until(deadline) == Time::zero();
      if (!absl::IsUnavailable(last) && !own) return last;
    } else {
      last = found.status();
    }
    if (left_until(deadline) == Time::zero()) break;
    wait_for(-1, 0, deadline == kNever ? now() + pause : std::min(deadline, now() + pause));
    pause = std::min(2 * pause, kLongestPause);
  }
  return absl::DeadlineExceededError(
      absl::StrFormat("rank %u of %u did not meet the others at the rendezvous %s within %.1f s: "
                      "%s; check that rank "
                      "0 or the launcher serves at this address",
                      card.rank, card.ranks, address,
                      std::chrono::duration<double>(timeout).count(), std::string(last.message())));
}

}  // namespace baton::collectives
