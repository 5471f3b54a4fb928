// A rank's connection: one message in, one answer out, and patience in between.
#include "collectives/launch/rank_connection.h"

#include <sys/epoll.h>

#include <utility>

namespace baton::launch {
namespace {
constexpr Time kPatience = std::chrono::seconds(5);  // with a rank that joins, or takes its answer
// Bytes that are encrypted before the rank takes them.
constexpr size_t kAhead = 128 << 10;
}  // namespace

// The join may have come already: a stream begins as one that is ready.
RankConnection::RankConnection(const net::Link& link, net::Poller& poller, Time now)
    : stream_(link, poller, rendezvous_stream()), deadline_(now + kPatience) {}

bool RankConnection::silent() { return !stream_.next().has_value() && stream_.open(); }

bool RankConnection::read_join() {
  const auto words = stream_.next();
  if (!words.has_value()) return stream_.open();
  const auto message = decode_message(*words);
  if (!message.ok() || message->type != MessageType::kJoin) return false;
  auto join = decode_join(message->body);
  if (!join.ok()) return false;
  join_ = *std::move(join);
  stage_ = Stage::kWaiting;
  deadline_ = kNever;  // the gathering's business from here
  return silent();     // a rank says one thing and then waits
}

void RankConnection::send_answer() {
  while (sent_ < answer_->size() && stream_.waiting() < kAhead) stream_.send((*answer_)[sent_++]);
  if (sent_ == answer_->size() && stream_.waiting() == 0) stage_ = Stage::kLeaving;
}

bool RankConnection::advance(Time now) {
  if (now >= deadline_) return false;
  if (stage_ == Stage::kJoining) return read_join();
  // Closing before the rank has read everything could take the answer away from it: that one hangs
  // up.
  if (!silent()) return false;
  if (stage_ == Stage::kAnswering) send_answer();
  return stream_.open();
}

void RankConnection::answer(std::shared_ptr<const std::vector<std::string>> messages, Time now) {
  answer_ = std::move(messages);
  sent_ = 0;
  stage_ = Stage::kAnswering;
  deadline_ = now + kPatience;
}

bool RankConnection::hung_up() {
  stream_.ready |= EPOLLIN;
  return !silent();
}

}  // namespace baton::launch
