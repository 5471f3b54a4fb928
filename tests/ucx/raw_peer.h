// A peer that holds the cluster key but says what it likes: real handshake, real UCX, any words.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "tests/transport/provider_node.h"
#include "transport/base/wire.h"
#include "transport/framed/frame.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake.h"
#include "transport/ucx/engine.h"
#include "transport/ucx/message.h"

namespace baton::ucx {

inline const Engine::Options kLoopback{.tls = "tcp", .net_devices = "lo"};

class RawPeer {
 public:
  RawPeer() {
    auto made = Engine::create(
        kLoopback, [this](std::string_view message) { heard.push_back(std::string(message)); });
    EXPECT_TRUE(made.ok()) << made.status();
    engine = *std::move(made);
  }
  ~RawPeer() {
    hang_up();
    Engine::end(std::move(engine));
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // Connects to `node` and proves itself.
  void introduce(ProviderNode& node, const std::string& address) {
    const auto endpoints = net::resolve(address);
    ASSERT_TRUE(endpoints.ok()) << endpoints.status();
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const net::Endpoint& to = endpoints->front();
    ASSERT_EQ(0, ::connect(fd_, reinterpret_cast<const sockaddr*>(&to.storage), to.size));
    net::Handshake handshake(net::Handshake::Role::kClient, node.key,
                             {.uid = WorkerUid::random(), .name = "raw"});
    std::string in;
    ASSERT_TRUE(run_until({&node}, [&] {
      while (true) {
        const std::string_view out = handshake.to_send();
        if (!out.empty() && put(out)) handshake.sent(out.size());
        if (handshake.done()) return true;
        if (!take(in, handshake.wanted())) return false;
        EXPECT_TRUE(handshake.receive(in).ok());
        in.clear();
      }
    }));
  }
  // Becomes a rail of `node`.
  void join(ProviderNode& node, const std::string& address) {
    introduce(node, address);
    if (testing::Test::HasFatalFailure()) return;
    say(Introduction{{0, 1}, engine->address()}.encode());
    std::string in;
    ASSERT_TRUE(run_until({&node}, [&] { return take(in, 4); }));
    uint32_t bytes = 0;
    std::memcpy(&bytes, in.data(), 4);
    ASSERT_TRUE(run_until({&node}, [&] { return take(in, 4 + bytes); }));
    const auto peer = Introduction::decode(std::string_view(in).substr(4));
    ASSERT_TRUE(peer.has_value());
    to_ = peer->to;
    auto endpoint = engine->connect(peer->address);
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    endpoint_ = *endpoint;
    say("");
    ASSERT_TRUE(run_until({&node}, [&] {
      engine->progress();
      return !node.rails.empty();
    }));
  }
  // On the connection beside UCX: a length and that many bytes.
  void say(std::string_view words) {
    std::string out;
    put_number(out, static_cast<uint32_t>(words.size()));
    EXPECT_TRUE(put(out.append(words)));
  }
  bool put(std::string_view bytes) {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // Through UCX: any bytes, or a frame in the right envelope.
  void send(std::string_view message) {
    Packet* packet = engine->acquire(message.size());
    ASSERT_GE(packet->capacity, message.size());
    std::memcpy(packet->data.get(), message.data(), message.size());
    engine->send(*endpoint_, packet, message.size());
  }
  void send(const framed::Frame& frame, std::string_view rest = {}) {
    std::string out(Envelope::kBytes + framed::kHeaderBytes, '\0');
    to_.encode(out.data());
    framed::encode_header(frame, out.data() + Envelope::kBytes);
    send(out.append(rest));
  }
  Envelope& envelope() { return to_; }
  void hang_up() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  std::unique_ptr<Engine> engine;
  std::vector<std::string> heard;

 private:
  // Whether `in` has reached `want` bytes.
  bool take(std::string& in, size_t want) {
    char bytes[4096];
    while (in.size() < want) {
      const ssize_t n = ::recv(fd_, bytes, std::min(want - in.size(), sizeof bytes), MSG_DONTWAIT);
      if (n <= 0) return false;
      in.append(bytes, static_cast<size_t>(n));
    }
    return true;
  }

  int fd_ = -1;
  Envelope to_;
  Endpoint* endpoint_ = nullptr;
};

}  // namespace baton::ucx
