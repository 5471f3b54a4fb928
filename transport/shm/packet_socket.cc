// Unix sockets that keep packets apart and carry descriptors.
#include "transport/shm/packet_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/wire.h"

namespace baton::shm {
namespace {

constexpr int kBacklog = 128;
constexpr int kType = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;

struct AbstractName {
  sockaddr_un address{};
  socklen_t length = 0;
};

absl::StatusOr<AbstractName> abstract_name(const std::string& name) {
  AbstractName out;
  out.address.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof out.address.sun_path) {
    return absl::InvalidArgumentError("not the name of a shm listener");
  }
  std::memcpy(out.address.sun_path + 1, name.data(), name.size());
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

}  // namespace

absl::StatusOr<PacketSocket> PacketSocket::listen(const std::string& name) {
  auto at = abstract_name(name);
  if (!at.ok()) return at.status();
  PacketSocket out(base::UniqueFd(socket(AF_UNIX, kType, 0)));
  if (out.fd() < 0 || bind(out.fd(), reinterpret_cast<sockaddr*>(&at->address), at->length) != 0 ||
      ::listen(out.fd(), kBacklog) != 0) {
    return absl::UnavailableError(
        absl::StrFormat("listening on a unix socket failed: %s", strerror(errno)));
  }
  return out;
}

absl::StatusOr<PacketSocket> PacketSocket::dial(const std::string& name) {
  auto at = abstract_name(name);
  if (!at.ok()) return at.status();
  PacketSocket out(base::UniqueFd(socket(AF_UNIX, kType, 0)));
  if (out.fd() < 0) {
    return absl::UnavailableError(base::refusal("a unix socket", errno));
  }
  if (connect(out.fd(), reinterpret_cast<sockaddr*>(&at->address), at->length) != 0) {
    if (errno == EAGAIN) return absl::ResourceExhaustedError("the peer's backlog is full");
    if (errno != ECONNREFUSED) {  // says nothing of the peer
      return absl::UnavailableError(
          absl::StrFormat("dialling the peer's unix socket failed: %s", strerror(errno)));
    }
    return absl::NotFoundError(
        absl::StrFormat("the peer is not listening on its unix socket (%s): it has ended or "
                        "restarted; get its address again",
                        strerror(errno)));
  }
  return out;
}

absl::StatusOr<PacketSocket> PacketSocket::accept() const {
  const int fd = accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) return PacketSocket(base::UniqueFd(fd));
  if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) {
    return absl::NotFoundError("no connection is waiting");
  }
  return absl::ResourceExhaustedError(base::refusal("accepting a peer", errno));
}

PacketSocket::Io PacketSocket::send(std::string_view bytes, absl::Span<const int> fds) const {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxMessageFds)] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * fds.size());
  }
  while (true) {
    if (sendmsg(fd_.get(), &header, MSG_NOSIGNAL) >= 0) return Io::kDone;
    if (errno == EINTR) continue;
    // ETOOMANYREFS: too many descriptors are under way until the peer reads some.
    const bool later =
        errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS;
    return later ? Io::kLater : Io::kClosed;
  }
}

absl::StatusOr<PacketSocket::Io> PacketSocket::receive(Packet& packet, bool with_fds) const {
  for (size_t i = 0; i < packet.fd_count; ++i) packet.fds[i].reset();
  packet.fd_count = 0;
  iovec data{packet.buffer.data(), packet.buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxMessageFds)];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (with_fds) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  ssize_t got = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
  // ECONNRESET: the peer closed before it had read everything. Reported once, ahead of packets that
  // it sent before.
  while (got < 0 && (errno == EINTR || errno == ECONNRESET)) {
    got = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
  }
  if (got < 0) return errno == EAGAIN ? Io::kLater : Io::kClosed;
  bool too_many = false;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      base::UniqueFd received(fd);
      // Padding has room for more than any message has.
      too_many |= packet.fd_count == kMaxMessageFds;
      if (!too_many) packet.fds[packet.fd_count++] = std::move(received);
    }
  }
  if (too_many)
    return absl::InvalidArgumentError("the peer sent more descriptors than belong to any message");
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return absl::ResourceExhaustedError(
        with_fds ? "descriptors that the peer sent were lost: raise `ulimit -n` here"
                 : "the peer sent descriptors before it had authenticated itself");
  }
  if (got == 0) return Io::kClosed;  // packets are never empty
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer sent a packet of more than %u bytes", kMaxMessage));
  }
  packet.bytes = static_cast<size_t>(got);
  return Io::kDone;
}

bool PacketSocket::peer_gone() const {
  if (fd_.get() < 0) return true;
  pollfd query{fd_.get(), 0, 0};  // what is said unasked: POLLHUP is of both directions
  return poll(&query, 1, 0) > 0;
}

pid_t PacketSocket::peer_pid() const {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return 0;
  return peer.pid;
}

bool PacketSocket::peer_is_this_user() const {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == geteuid();
}

namespace {
constexpr size_t kMaxText = 256;

// The fields of a message of this kind, in their order on the wire. False: the kind does not exist.
template <typename Wire, typename T>
bool members(Wire& wire, T& m) {
  wire(m.kind);
  switch (m.kind) {
    case Message::Kind::kSetup:
      wire(m.control_bytes, m.counter_bytes, m.connection_bytes, m.nonce_address, m.nonce);
      return true;
    case Message::Kind::kFile:
      wire(m.file, m.file_bytes);
      return true;
    case Message::Kind::kDeviceFile:
      wire(m.file, m.file_bytes, m.device_uuid);
      return true;
    case Message::Kind::kDeviceHandle:
      wire(m.file, m.file_bytes, m.device_uuid, m.allocation, m.handle);
      return true;
    case Message::Kind::kDrop:
      wire(m.file);
      return true;
    case Message::Kind::kGoodbye:
      wire.text(m.text, kMaxText);
      return true;
    case Message::Kind::kDoorbell:
      return true;
  }
  return false;
}

}  // namespace

size_t Message::expected_fds(bool from_client) const {
  switch (kind) {
    case Kind::kSetup:
      return from_client ? 3 : 2;
    case Kind::kFile:
    case Kind::kDeviceFile:
      return 1;
    default:
      return 0;
  }
}

std::string Message::encode() const {
  std::string out;
  base::WireWriter wire(out);
  members(wire, *this);
  return out;
}

absl::StatusOr<Message> Message::decode(std::string_view packet) {
  base::WireReader in(packet);
  Message message;
  const bool known = members(in, message);
  const auto kind = static_cast<int>(message.kind);
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer sent a message of unknown kind %d", kind));
  }
  if (!in.finished()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer sent a message of kind %d with %u bytes, which is not its size",
                        kind, packet.size()));
  }
  return message;
}

}  // namespace baton::shm
