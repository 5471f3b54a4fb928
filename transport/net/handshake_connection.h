// A connection that is not a rail yet: connecting, proving itself, or asking for an Address.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "transport/clock.h"
#include "transport/net/handshake.h"
#include "transport/net/poller.h"

namespace baton::net {

// Drives one Handshake over one non-blocking socket. Nothing that comes before the peer has proved
// itself has a length of the peer's choosing.
class HandshakeConnection : public Watched {
 public:
  enum class State { kUnderway, kDone, kFailed };

  // Takes over `fd`, which may still be connecting. `answer`: what a server tells to a query.
  HandshakeConnection(int fd, Poller& poller, Handshake::Role role, const ClusterKey& key,
                      HelloInfo self, const Handshake::Options& options, Time deadline,
                      const std::string* answer);
  ~HandshakeConnection();
  HandshakeConnection(const HandshakeConnection&) = delete;
  HandshakeConnection& operator=(const HandshakeConnection&) = delete;

  // A client's, before the first advance(): the handshake holds a message, in either direction,
  // that fills a packet of this connection (not where those are longer than
  // Handshake::kMostPadding, as over loopback).
  void fill_a_packet() { fills_a_packet_ = true; }

  // Goes on as far as the socket allows. kDone: a rail can be made of take_fd() (kRail), or
  // answer() is complete (client of a kQuery), or all has been said (server of a kQuery).
  State advance();
  const absl::Status& error() const { return error_; }
  // The other side ended the connection before it said anything: it is no worker's, or a worker
  // that had no room for one more caller at that moment.
  bool turned_away() const { return hung_up_ && !heard_; }

  bool connecting() const { return step_ == Step::kConnecting; }  // no peer has answered yet
  // State of the message that fills a packet: in flight, or answered by a message that does not
  // fill a packet.
  enum class FullPacket { kNotAwaited, kSent, kDue };
  FullPacket full_packet() const;
  // Now that it was awaited for long. One that has come and is not answered is no sign of that: the
  // other side is busy.
  bool full_packet_is_lost() const;
  size_t padding() const { return handshake_.padding(); }
  Time deadline() const { return deadline_; }
  bool names_our_key() const { return handshake_.names_our_key(); }
  const HelloInfo& peer() const { return handshake_.peer(); }
  Handshake::Purpose purpose() const { return handshake_.purpose(); }
  const LinkKeys& keys() const { return handshake_.keys(); }
  const std::string& answer() const { return in_; }
  int take_fd();

 private:
  enum class Step { kConnecting, kShaking, kAnswering, kLength, kAnswer, kLingering };
  static constexpr size_t kMaxAnswer = 4096;

  State fail(absl::Status why);
  void fail_by_system(int code);
  bool connected();        // false: not yet, or failed
  bool flush();            // false: the socket takes no more, or failed
  bool read(size_t want);  // into in_, up to `want` bytes; false: not there yet, or failed
  State shake();
  State query();

  int fd_;
  Poller& poller_;
  Handshake::Role role_;
  Handshake handshake_;
  Time deadline_;
  const std::string* told_;
  Step step_;
  std::string in_;
  std::string out_;
  uint32_t length_ = 0;
  bool fills_a_packet_ = false;
  bool heard_ = false;    // anything from the other side
  bool hung_up_ = false;  // the other side
  absl::Status error_;
};

}  // namespace baton::net
