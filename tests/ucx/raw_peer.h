// A peer that holds the cluster key but says what it likes: real handshake, real UCX, any words.
#pragma once

#include "tests/net/raw_handshake.h"
#include "tests/test.h"
#include "tests/transport/provider_node.h"
#include "transport/framed/frame.h"
#include "transport/net/seal.h"
#include "transport/ucx/engine.h"
#include "transport/ucx/message.h"

namespace baton::ucx {

inline const Engine::Options kLoopback{.tls = "tcp", .net_devices = "lo"};

class RawPeer {
 public:
  RawPeer() {
    auto made = Engine::create(kLoopback,
                               [this](std::string_view message) { heard.emplace_back(message); });
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
    fd_ = net::dial(address);
    net::Handshake handshake(net::Handshake::Role::kClient, node.key,
                             {.uid = WorkerUid::random(), .name = "raw"});
    std::string in;
    until({&node}, [&] { return net::go_on(handshake, fd_, in); });
    const net::LinkKeys& keys = handshake.keys();
    say_.emplace(net::hkdf_expand(keys.send, "baton messages"), net::Protection::kEncrypt);
    hear_.emplace(net::hkdf_expand(keys.receive, "baton messages"), net::Protection::kEncrypt);
    sealer_.emplace(keys.send, keys.protection);
    opener_.emplace(keys.receive, keys.protection);
  }
  // Becomes a rail of `node`.
  void join(ProviderNode& node, const std::string& address) {
    introduce(node, address);
    say(Introduction{0, engine->address()}.encode());
    std::string in;
    until({&node}, [&] { return net::take(fd_, in, 4); });
    uint32_t bytes = 0;
    std::memcpy(&bytes, in.data(), 4);
    until({&node}, [&] { return net::take(fd_, in, bytes + net::kSealBytes); });
    std::string_view words;
    EXPECT_EQ(hear_->head(in.data(), in.size(), bytes, words), net::Opener::Found::kHead);
    const Introduction peer = Introduction::decode(words).value();
    to_ = peer.rail;
    endpoint_ = engine->connect(peer.address).value();
    say("");
    until({&node}, [&] {
      engine->progress();
      return !node.rails.empty();
    });
  }
  // On the connection beside UCX.
  void say(std::string_view words) { EXPECT_TRUE(put(as_said(words))); }
  std::string as_said(std::string_view words) {
    std::string out(words.size() + net::kSealBytes, '\0');
    words.copy(out.data() + net::kSealPrefix, words.size());
    say_->head(out.data(), words.size());
    return out;
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
  void send(const framed::Frame& frame, std::string_view rest = {}) { send(sealed(frame, rest)); }
  // `rest`: pieces, text and payload.
  std::string sealed(const framed::Frame& frame, std::string_view rest = {}) {
    std::string head(framed::kHeaderBytes, '\0');
    framed::encode_header(frame, head.data());
    head.append(rest.substr(0, frame.meta_bytes()));
    return sealed(head, rest.substr(std::min(frame.meta_bytes(), rest.size())));
  }
  std::string sealed(std::string_view head, std::string_view payload) {
    std::string out(Envelope::kBytes + head.size() + net::kSealBytes, '\0');
    Envelope{to_, sealer_->next()}.encode(out.data());
    head.copy(out.data() + Envelope::kBytes + net::kSealPrefix, head.size());
    sealer_->head(out.data() + Envelope::kBytes, head.size());
    return out.append(payload);
  }
  // The head of a frame that was heard.
  std::string opened(std::string message) {
    const Envelope envelope = Envelope::decode(message);
    message.erase(0, Envelope::kBytes);
    uint32_t bytes = 0;
    std::memcpy(&bytes, message.data(), sizeof bytes);
    EXPECT_TRUE(opener_->open(message.data(), bytes, envelope.number));
    return message.substr(net::kSealPrefix, bytes);
  }
  void hang_up() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  // Says nothing more. How many bytes came from the node until it hung up.
  size_t last_words_of(ProviderNode& node) {
    ::shutdown(fd_, SHUT_WR);
    size_t bytes = 0;
    until({&node}, [&] {
      char some[256];
      const ssize_t got = ::recv(fd_, some, sizeof some, MSG_DONTWAIT);
      if (got > 0) bytes += static_cast<size_t>(got);
      return got == 0 || (got < 0 && errno != EAGAIN);
    });
    return bytes;
  }

  std::unique_ptr<Engine> engine;
  std::vector<std::string> heard;

 private:
  int fd_ = -1;
  uint32_t to_ = 0;
  std::optional<net::Sealer> say_;
  std::optional<net::Opener> hear_;
  std::optional<net::Sealer> sealer_;
  std::optional<net::Opener> opener_;
  Endpoint* endpoint_ = nullptr;
};

}  // namespace baton::ucx
