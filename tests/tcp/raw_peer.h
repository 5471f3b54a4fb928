// A peer that holds the cluster key but says what it likes: blocking socket, real handshake.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/tcp/tcp_pair.h"
#include "transport/framed/frame.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake.h"

namespace baton::tcp {

class RawPeer {
 public:
  ~RawPeer() { close(); }

  // A blocking connection to a listening node. Connecting needs nothing of the node yet.
  static int dial(const std::string& address) {
    const auto endpoints = net::resolve(address);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const net::Endpoint& to = endpoints->front();
    EXPECT_EQ(0, ::connect(fd, reinterpret_cast<const sockaddr*>(&to.storage), to.size));
    return fd;
  }

  // Connects to `node`, which runs meanwhile, and becomes a rail of it.
  void connect(TcpNode& node, const std::string& address) {
    fd_ = dial(address);
    shake(node, net::Handshake::Role::kClient);
    ASSERT_TRUE(run_until({&node}, [&] { return !node.rails.empty(); }));
  }
  // Accepts a rail that `node` is connecting.
  void accept(TcpNode& node, int listener) {
    ASSERT_TRUE(run_until({&node}, [&] {
      fd_ = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      return fd_ >= 0;
    }));
    shake(node, net::Handshake::Role::kServer);
    ASSERT_TRUE(run_until({&node}, [&] { return !node.rails.empty(); }));
  }

  bool send(std::string_view bytes) {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // Up to `want` bytes, while `node` runs.
  std::string receive(TcpNode& node, size_t want) {
    std::string in;
    EXPECT_TRUE(run_until({&node}, [&] {
      char bytes[4096];
      const ssize_t n = ::recv(fd_, bytes, std::min(want - in.size(), sizeof(bytes)), MSG_DONTWAIT);
      if (n > 0) in.append(bytes, static_cast<size_t>(n));
      return n == 0 || in.size() == want;
    }));
    return in;
  }
  // Closes so that the other side hears of a reset.
  void reset() {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    if (fd_ >= 0) setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close();
  }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  void shake(TcpNode& node, net::Handshake::Role role) {
    HelloInfo self{.uid = WorkerUid::random(), .name = "raw"};
    net::Handshake handshake(role, node.key, self);
    std::string in;
    ASSERT_TRUE(run_until({&node}, [&] {
      const std::string_view out = handshake.to_send();
      if (!out.empty()) {
        send(out);
        handshake.sent(out.size());
      }
      if (handshake.done()) return true;
      char bytes[1024];
      const ssize_t n =
          ::recv(fd_, bytes, std::min(handshake.wanted() - in.size(), sizeof(bytes)), MSG_DONTWAIT);
      if (n > 0) in.append(bytes, static_cast<size_t>(n));
      if (in.size() < handshake.wanted()) return false;
      EXPECT_TRUE(handshake.receive(in).ok());
      in.clear();
      return handshake.done() && handshake.to_send().empty();
    }));
  }

  int fd_ = -1;
};

inline std::string encoded(const framed::Frame& frame, std::vector<framed::WirePiece> pieces = {},
                           std::string_view rest = {}) {
  std::string out(framed::kHeaderBytes + pieces.size() * framed::kPieceBytes, '\0');
  framed::encode_header(frame, out.data());
  for (size_t i = 0; i < pieces.size(); ++i) {
    framed::encode_piece(pieces[i], &out[framed::kHeaderBytes + i * framed::kPieceBytes]);
  }
  out.append(rest);
  return out;
}

}  // namespace baton::tcp
