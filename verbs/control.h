// The control connection of a session: an authenticated TCP connection that carries messages, each
// behind a 32-bit length. It also says, at once, that the peer's process has gone.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "transport/tcp/io_engine.h"
#include "verbs/message.h"

namespace baton::verbs {

class Control : public tcp::Watched {
 public:
  // Takes over `fd`, on which a handshake has been done.
  Control(int fd, tcp::Poller& poller);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  void send(std::string_view message);
  // Hands over what has come. A handler that returns an error closes the connection.
  bool progress(const std::function<absl::Status(const Message&)>& handler);

  bool open() const { return fd_ >= 0; }
  // Why it is closed. `gone()`: the peer's process closed it or does not exist; otherwise the
  // network between failed.
  const absl::Status& why() const { return why_; }
  bool gone() const { return gone_; }
  void close(absl::Status why, bool gone);

 private:
  static constexpr size_t kMaxWaiting = 1 << 20;
  void flush();
  void failed(int error);

  int fd_;
  tcp::Poller& poller_;
  std::string in_;
  std::string out_;
  absl::Status why_;
  bool gone_ = false;
};

}  // namespace baton::verbs
