// Short messages over an authenticated connection, each encrypted and under a tag (seal.h: they are
// heads under Protection::kEncrypt). It also says, at once, that the peer's process has gone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "transport/clock.h"
#include "transport/net/link.h"
#include "transport/net/poller.h"
#include "transport/net/seal.h"

namespace baton::net {

// For one thread, like its poller. It ends when either side closes it, when the network fails, or
// when the peer sends a message that is too long or not its own; what had come before is handed
// over first.
class MessageStream : public Watched {
 public:
  struct Options {
    size_t max_message = 64 << 10;  // bytes, in either direction
    size_t max_waiting = 1 << 20;   // bytes to a peer that does not read; with more it ends
    Time silence = std::chrono::seconds(10);  // a host that acknowledges nothing so long is lost
  };

  MessageStream(const Link& link, Poller& poller, const Options& options);
  ~MessageStream();
  MessageStream(const MessageStream&) = delete;
  MessageStream& operator=(const MessageStream&) = delete;

  // Nothing, once it has ended.
  void send(std::string_view message);
  // Bytes that the peer has not taken yet.
  size_t waiting() const { return out_.size(); }
  // The next message, if one is here; valid until the next call. Costs nothing while nothing has
  // happened.
  std::optional<std::string_view> next();

  bool open() const { return fd_ >= 0; }
  // Why it has ended. `gone()`: the peer's process closed it, is no more, or cannot be listened to;
  // otherwise the network between failed, or this side closed it.
  const absl::Status& why() const { return why_; }
  bool gone() const { return gone_; }
  void close(absl::Status why, bool gone);
  // In a forked child, whose parent goes on with the connection: sends nothing of what waits.
  void abandon();

  const std::string& peer() const { return peer_; }  // "10.0.0.1:4000"

 private:
  std::optional<std::string_view> cut();
  void garbled(const std::string& what);
  void flush();
  void ended(int error);

  int fd_;
  Poller& poller_;
  const Options options_;
  Sealer sealer_;
  Opener opener_;
  std::string peer_;
  std::string in_;
  size_t taken_ = 0;  // of in_
  std::string out_;
  int error_ = 0;  // of sending: what has come is read first
  absl::Status why_;
  bool gone_ = false;
};

}  // namespace baton::net
