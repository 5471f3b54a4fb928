// A rank's connection to the rendezvous, once it has proved itself: joins, waits, is answered.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "collectives/launch/rendezvous_wire.h"
#include "transport/base/unique_fd.h"
#include "transport/clock.h"
#include "transport/net/poller.h"

namespace baton::launch {

class RankConnection : public net::Watched {
 public:
  enum class Stage { kJoining, kWaiting, kAnswering, kLeaving };

  // Takes over `fd`, which the poller does not watch yet.
  RankConnection(int fd, net::Poller& poller, Time now);
  ~RankConnection();
  RankConnection(const RankConnection&) = delete;
  RankConnection& operator=(const RankConnection&) = delete;

  // Goes on as far as the socket allows. False: the connection is over.
  bool advance(Time now);
  Stage stage() const { return stage_; }
  // Valid from the moment that the rank waits.
  const Join& join() const { return join_; }
  void answer(std::shared_ptr<const std::string> frames, Time now);

  Time deadline() const { return deadline_; }  // when it is dropped
  bool hung_up() const;

 private:
  enum class Io { kDone, kLater, kBroken };
  Io read(size_t most);                // at least a byte, `most` more into in_ at most
  Io write(std::string_view& unsent);  // all of it
  Io read_join();

  const UniqueFd fd_;
  net::Poller& poller_;
  Stage stage_ = Stage::kJoining;
  Time deadline_;
  std::string in_;
  Join join_;
  std::shared_ptr<const std::string> answer_;  // shared by all ranks of a group: it is long
  std::string_view unsent_;                    // of answer_
};

}  // namespace baton::launch
