// A peer that holds the cluster key but says what it likes: blocking socket, real handshake.
#pragma once

#include "tests/net/raw_handshake.h"
#include "tests/std.h"
#include "tests/tcp/tcp_pair.h"
#include "transport/base/wire.h"
#include "transport/framed/frame.h"
#include "transport/net/seal.h"

namespace baton::tcp {

class RawPeer {
 public:
  ~RawPeer() { close(); }

  // Connects to `node`, which runs meanwhile, and becomes a rail of it.
  void connect(TcpNode& node, const std::string& address) {
    connect(node.key, {.uid = WorkerUid::random(), .name = "raw"}, address, running(node));
    until({&node}, [&] { return !node.rails.empty(); });
  }
  // Accepts a rail that `node` is connecting.
  void accept(TcpNode& node, int listener) {
    until({&node}, [&] {
      fd_ = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      return fd_ >= 0;
    });
    shake(net::Handshake::Role::kServer, node.key, {.uid = WorkerUid::random(), .name = "raw"},
          running(node));
    until({&node}, [&] { return !node.rails.empty(); });
  }

  // Runs what is at the other end until something is true; false: it never was.
  using Run = std::function<void(const std::function<bool()>&)>;
  // Connects to whatever listens there, and says that it is `self`.
  void connect(const ClusterKey& key, const HelloInfo& self, const std::string& address,
               const Run& run) {
    fd_ = net::dial(address);
    shake(net::Handshake::Role::kClient, key, self, run);
  }

  // Frames as encoded() makes them, under the keys of this connection. What is no frame becomes a
  // head all the same.
  bool send(std::string_view frames) { return send_raw(sealed(frames)); }
  // Bytes as they are.
  bool send_raw(std::string_view bytes) {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  std::string sealed(std::string_view frames) {
    std::string out;
    while (!frames.empty()) {
      size_t head = frames.size();
      size_t payload = 0;
      if (const auto end = head_and_payload(frames)) std::tie(head, payload) = *end;
      std::string one(head + net::kSealBytes, '\0');
      frames.substr(0, head).copy(one.data() + net::kSealPrefix, head);
      sealer_->head(one.data(), head);
      out.append(one).append(frames.substr(head, payload));
      frames.remove_prefix(head + payload);
    }
    return out;
  }
  // The next frame's head, of `bytes`, and `payload` behind it, while `node` runs.
  std::string receive_frame(TcpNode& node, size_t bytes, size_t payload = 0) {
    std::string in = receive(node, bytes + net::kSealBytes + payload);
    if (in.size() != bytes + net::kSealBytes + payload) return {};
    std::string_view head;
    EXPECT_EQ(net::Opener::Found::kHead, opener_->head(in.data(), in.size(), bytes, head));
    return std::string(head) + in.substr(in.size() - payload);
  }
  // The next frame and the text behind it, without its payload; nothing: the end.
  std::optional<std::pair<framed::Frame, std::string>> receive_words(const Run& run) {
    std::string in = receive(run, net::kSealPrefix);
    uint32_t bytes = 0;
    if (in.size() != net::kSealPrefix) return std::nullopt;
    std::memcpy(&bytes, in.data(), sizeof bytes);
    in += receive(run, bytes + net::kSealBytes - net::kSealPrefix);
    std::string_view head;
    if (opener_->head(in.data(), in.size(), framed::kMaxHead, head) != net::Opener::Found::kHead) {
      return std::nullopt;
    }
    const auto frame = framed::decode_header(head.substr(0, framed::kHeaderBytes));
    if (!frame.ok()) return std::nullopt;
    if (frame->type == framed::FrameType::kWrite || frame->type == framed::FrameType::kReadData) {
      receive(run, frame->bytes);
    }
    return std::pair{*frame,
                     std::string(framed::frame_text(*frame, head.substr(framed::kHeaderBytes)))};
  }
  // Up to `want` bytes, while `node` runs.
  std::string receive(TcpNode& node, size_t want) { return receive(running(node), want); }
  std::string receive(const Run& run, size_t want) {
    std::string in;
    run([&] {
      char bytes[4096];
      const ssize_t n = ::recv(fd_, bytes, std::min(want - in.size(), sizeof(bytes)), MSG_DONTWAIT);
      if (n > 0) in.append(bytes, static_cast<size_t>(n));
      return n == 0 || in.size() == want;
    });
    return in;
  }
  // Closes so that the other side hears of a reset.
  void reset() {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    if (fd_ >= 0) setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close();
  }
  // Says that nothing more comes.
  void end() const { ::shutdown(fd_, SHUT_WR); }
  // What the kernel has to tell, once.
  int error() const {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    return error;
  }
  int fd() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  static Run running(TcpNode& node) {
    return [&node](const std::function<bool()>& ready) { until({&node}, ready); };
  }
  void shake(net::Handshake::Role role, const ClusterKey& key, const HelloInfo& self,
             const Run& run) {
    net::Handshake handshake(role, key, self);
    std::string in;
    run([&] { return net::go_on(handshake, fd_, in); });
    sealer_.emplace(handshake.keys().send, handshake.keys().protection);
    opener_.emplace(handshake.keys().receive, handshake.keys().protection);
  }
  // Of the first frame, also where it is not one that a correct peer would send.
  static std::optional<std::pair<size_t, size_t>> head_and_payload(std::string_view frames) {
    if (frames.size() < framed::kHeaderBytes || frames.substr(0, 2) != "\x70\xba") return {};
    base::WireReader in(frames.substr(2));
    const auto type = static_cast<framed::FrameType>(in.number<uint8_t>());
    in.take(17);
    const size_t bytes = in.number<uint32_t>();
    const size_t pieces = in.number<uint32_t>();
    const size_t text = in.number<uint32_t>();
    const bool carries = type == framed::FrameType::kWrite || type == framed::FrameType::kReadData;
    const size_t head = framed::kHeaderBytes + pieces * framed::kPieceBytes + text;
    if (head > frames.size()) return {};
    return {{head, carries ? std::min(bytes, frames.size() - head) : 0}};
  }

  int fd_ = -1;
  std::optional<net::Sealer> sealer_;
  std::optional<net::Opener> opener_;
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

// A write of `bytes` to a region, in one frame of one piece.
inline framed::Frame write_frame(const RemoteRegion& region, uint32_t bytes) {
  return {.type = framed::FrameType::kWrite,
          .flags = framed::kLast,
          .transfer = {1, 1},
          .bytes = bytes,
          .pieces = 1,
          .region = region.index,
          .generation = region.generation,
          .key = region.key,
          .slice_bytes = bytes,
          .total_bytes = bytes};
}

}  // namespace baton::tcp
