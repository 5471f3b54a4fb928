// One connection to the rendezvous: proves itself, shows its card, waits, is answered.
#pragma once

#include <memory>
#include <string>

#include "collectives/rendezvous_service.h"
#include "collectives/rendezvous_wire.h"

namespace baton::collectives {

class RendezvousService::Guest {
 public:
  enum class Stage { kShaking, kJoining, kWaiting, kAnswering, kLeaving };

  Guest(Descriptor fd, const ClusterKey& key, Time now);

  // Goes on as far as the socket allows. False: the connection is over.
  bool advance(Time now);
  Stage stage() const { return stage_; }
  // Valid from the moment that the guest waits.
  const Join& join() const { return join_; }
  void answer(std::shared_ptr<const std::string> frames, Time now);

  int fd() const { return fd_.get(); }
  short events() const;                        // NOLINT(google-runtime-int): poll's type
  Time deadline() const { return deadline_; }  // when it is dropped
  bool hung_up() const;

 private:
  enum class Io { kDone, kLater, kBroken };
  Io read(size_t want);                // `want` bytes more into in_
  Io write(std::string_view& unsent);  // all of it
  Io shake();
  Io read_card();

  Descriptor fd_;
  Handshake handshake_;
  Stage stage_ = Stage::kShaking;
  Time deadline_;
  std::string in_;
  Join join_;
  std::shared_ptr<const std::string> answer_;
  std::string_view unsent_;  // of answer_
};

}  // namespace baton::collectives
