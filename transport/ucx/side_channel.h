// The authenticated socket beside an endpoint: carries the introduction, and ends when either side
// does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/tcp/io_engine.h"

namespace baton::ucx {

// Short messages, each of a length and that many bytes. What ends it is found out by hear(): the
// peer hanging up, its process dying, its host falling silent, or a message that is too long.
class SideChannel : public tcp::Watched {
 public:
  static constexpr uint32_t kMaxMessage = 64 << 10;

  // Takes over a connected `fd` whose peer has proved itself.
  static absl::StatusOr<std::unique_ptr<SideChannel>> create(int fd, tcp::Poller& poller);
  ~SideChannel();
  SideChannel(const SideChannel&) = delete;
  SideChannel& operator=(const SideChannel&) = delete;

  void say(std::string_view message);
  // The next message, if one is here; an error once the channel has ended. Costs nothing while
  // nothing has happened.
  absl::StatusOr<std::optional<std::string>> hear();
  const std::string& peer() const { return peer_; }  // "10.0.0.1:4000"

 private:
  SideChannel(int fd, tcp::Poller& poller);
  absl::Status flush();
  absl::Status take();

  int fd_;
  tcp::Poller& poller_;
  std::string peer_;
  std::string in_;
  std::string out_;
};

}  // namespace baton::ucx
