// A rank's connection to the rendezvous, once it has proved itself: joins, waits, is answered.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "collectives/launch/rendezvous_wire.h"
#include "transport/clock.h"
#include "transport/net/link.h"
#include "transport/net/message_stream.h"
#include "transport/net/poller.h"

namespace baton::launch {

class RankConnection {
 public:
  enum class Stage { kJoining, kWaiting, kAnswering, kLeaving };

  // Takes over the socket of `link`, which the poller does not watch yet.
  RankConnection(const net::Link& link, net::Poller& poller, Time now);

  // Goes on as far as the socket allows. False: the connection is over.
  bool advance(Time now);
  // The poller has seen something for advance() to do.
  bool ready() const { return stream_.ready != 0; }
  Stage stage() const { return stage_; }
  // Valid from the moment that the rank waits.
  const Join& join() const { return join_; }
  // `messages`: shared by all ranks of a group, for together they are long.
  void answer(std::shared_ptr<const std::vector<std::string>> messages, Time now);

  Time deadline() const { return deadline_; }  // when it is dropped
  // Looks at the socket, whatever the poller has seen.
  bool hung_up();
  void leave_to_parent() { stream_.abandon(); }

 private:
  bool silent();  // nothing was said, and the connection is up
  bool read_join();
  void send_answer();

  net::MessageStream stream_;
  Stage stage_ = Stage::kJoining;
  Time deadline_;
  Join join_;
  std::shared_ptr<const std::vector<std::string>> answer_;
  size_t sent_ = 0;  // messages of it
};

}  // namespace baton::launch
